"""Weak and strong views: against Pillow given the same draws, and the distribution of the draws."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from ssl_influence import config as config_lib
from ssl_influence.augment import auto_augment, per_image, policies

CONFIG = config_lib.AugmentConfig()
SEED = (3, 14)


def _images(count=60, height=32, width=32, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, [count, 5, 5, 3], dtype=np.uint8)
    images = [Image.fromarray(c).resize((width, height), Image.BICUBIC) for c in coarse]
    return np.stack([np.asarray(image) for image in images])[..., :channels]


def _coordinates(count, height=32, width=32):
    """Images whose pixel at (y, x) is (y, x, 255)."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([y, x, np.full_like(x, 255)], -1).astype(np.uint8)
    return tf.constant(np.repeat(image[None], count, 0))


def _seed(seed, *path):
    for data in path:
        seed = tf.random.experimental.stateless_fold_in(seed, data, alg="philox")
    return seed


def _affine(image, *matrix):
    return image.transform(image.size, Image.AFFINE, matrix)


def _without_opacity(operation):
    return lambda image, m: operation(image.convert("RGB"), m).convert("RGBA")


PILLOW = {
    "Invert": _without_opacity(lambda image, _: ImageOps.invert(image)),
    "AutoContrast": _without_opacity(lambda image, _: ImageOps.autocontrast(image)),
    "Equalize": _without_opacity(lambda image, _: ImageOps.equalize(image)),
    "Posterize": _without_opacity(lambda image, m: ImageOps.posterize(image, int(m))),
    "Solarize": _without_opacity(ImageOps.solarize),
    "Sharpness": lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
    "Contrast": lambda image, m: ImageEnhance.Contrast(image).enhance(m),
    "Color": lambda image, m: ImageEnhance.Color(image).enhance(m),
    "Brightness": lambda image, m: ImageEnhance.Brightness(image).enhance(m),
    "ShearX": lambda image, m: _affine(image, 1, m, 0, 0, 1, 0),
    "ShearY": lambda image, m: _affine(image, 1, 0, 0, m, 1, 0),
    "TranslateX": lambda image, m: _affine(image, 1, 0, m, 0, 1, 0),
    "TranslateY": lambda image, m: _affine(image, 1, 0, 0, 0, 1, m),
    "Rotate": lambda image, m: image.rotate(m),
}


def _clipped_square(center, side, height, width):
    y, x, half = *center, side // 2
    return (
        slice(max(0, y - half), min(height, y + half)),
        slice(max(0, x - half), min(width, x + half)),
    )


def _pillow_rand_augment(image, names, magnitudes, centers, cutout_center, cutout_side, fill):
    """The published policy on one RGB image, by Pillow in RGBA."""
    height, width, _ = image.shape
    picture = Image.fromarray(image).convert("RGBA")
    for name, magnitude, center in zip(names, magnitudes, centers, strict=True):
        if name == "Cutout":
            pixels = np.array(picture)
            pixels[_clipped_square(center, int(magnitude), height, width)] = (125, 122, 113, 0)
            picture = Image.fromarray(pixels)
        elif name is not None:
            picture = PILLOW[name](picture, magnitude)
    pixels = np.array(picture)
    result = pixels[..., :3]
    result[pixels[..., 3] == 0] = fill
    result[_clipped_square(cutout_center, cutout_side, height, width)] = fill
    return result


@pytest.mark.parametrize("height,width,operations", [(32, 32, 2), (20, 44, 3)])
def test_rand_augment_equals_pillow_given_the_same_draws(height, width, operations):
    images = _images(300, height, width)
    fill = (125, 123, 114)
    result = policies.rand_augment(
        tf.constant(images), SEED, operations=operations, probability=0.9, cutout=0.4, fill=fill
    )
    operation, magnitude, center = (
        part.numpy() for part in policies._draw(_seed(SEED, 0), 300, operations, 0.9, height, width)
    )
    cutout_center = per_image.centers([300], _seed(SEED, 1), height, width).numpy()
    names = [row.name for row in policies.OPERATIONS]
    seen = collections.Counter()
    for i, image in enumerate(images):
        applied = [None if index < 0 else names[index] for index in operation[:, i]]
        seen.update(applied)
        expected = _pillow_rand_augment(
            image,
            applied,
            magnitude[:, i].tolist(),
            center[:, i],
            cutout_center[i],
            int(0.4 * height),
            fill,
        )
        np.testing.assert_array_equal(result[i], expected, err_msg=f"image {i}: {applied}")
    assert set(seen) == {None, *names}


def test_gray_images_are_transformed_as_gray_rgb_ones():
    gray = _images(200, channels=1)
    color = np.repeat(gray, 3, -1)
    single = policies.rand_augment(tf.constant(gray), SEED, operations=3)
    triple = policies.rand_augment(tf.constant(color), SEED, operations=3)
    assert single.shape == gray.shape
    np.testing.assert_array_equal(single[..., 0], triple[..., 0])


def test_magnitudes_are_those_published_for_32_pixels():
    at_1_5_9 = {row.name: row.magnitudes(32, 32)[[1, 5, 9]].tolist() for row in policies.OPERATIONS}
    enhance = pytest.approx([0.28, 1.0, 1.72])
    assert at_1_5_9 == {
        "Invert": [0, 0, 0],
        "Cutout": [2, 10, 18],
        "Sharpness": enhance,
        "AutoContrast": [0, 0, 0],
        "Posterize": [4, 2, 1],
        "ShearX": pytest.approx([0.03, 0.15, 0.27]),
        "TranslateX": [1, 5, 9],
        "TranslateY": [1, 5, 9],
        "ShearY": pytest.approx([0.03, 0.15, 0.27]),
        "Rotate": [3, 15, 27],
        "Equalize": [0, 0, 0],
        "Contrast": enhance,
        "Color": enhance,
        "Solarize": [231, 128, 26],
        "Brightness": enhance,
    }


def test_whole_magnitudes_truncate_as_integer_arithmetic_does():
    """Level l of a range m is int(l m / 10), which float noise below an integer must not lower."""
    for row in policies.OPERATIONS:
        if row.whole:
            expected = [row.start + int(row.span * level / 10) for level in range(11)]
            assert row.magnitudes(32, 32).tolist() == expected


def test_translations_and_cutout_grow_with_the_image():
    table = {row.name: row.magnitudes(64, 96)[5] for row in policies.OPERATIONS}
    assert (table["TranslateX"], table["TranslateY"], table["Cutout"]) == (15, 10, 20)
    assert (table["Rotate"], table["Solarize"], table["Posterize"]) == (15, 128, 2)


def _chi_square(counts):
    expected = np.sum(counts) / len(counts)
    return np.sum((counts - expected) ** 2 / expected)


def test_operations_and_levels_are_drawn_uniformly():
    operation, magnitude, center = (
        part.numpy() for part in policies._draw(SEED, 30_000, 2, 1.0, 32, 32)
    )
    # Bounds are the 0.9999 quantiles of chi-square with 14, 8 and 31 degrees of freedom.
    assert _chi_square(np.bincount(operation.ravel(), minlength=15)) < 42.6
    assert operation.min() == 0 and operation.max() == 14
    translate_x = [row.name for row in policies.OPERATIONS].index("TranslateX")
    pixels = magnitude[operation == translate_x]
    assert set(np.abs(pixels)) == set(range(1, 10))
    assert _chi_square(np.bincount(np.abs(pixels).astype(int))[1:]) < 31.8
    assert abs(np.mean(pixels > 0) - 0.5) < 4 * 0.5 / np.sqrt(pixels.size)
    assert _chi_square(np.bincount(center[..., 0].ravel(), minlength=32)) < 68.0
    assert _chi_square(np.bincount(center[..., 1].ravel(), minlength=32)) < 68.0
    pairs = operation[0] * 15 + operation[1]
    assert _chi_square(np.bincount(pairs, minlength=225)) < 311.0


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_a_drawn_operation_is_applied_with_the_given_probability(probability):
    operation, _, _ = policies._draw(SEED, 10_000, 2, probability, 32, 32)
    share = np.mean(operation.numpy() >= 0)
    assert abs(share - probability) <= 4 * np.sqrt(probability * (1 - probability) / 20_000)


def _weak(images, seed, flip, shift):
    return policies.weak(images, seed, flip=flip, shift=shift)


def test_half_of_the_images_are_flipped():
    images = _coordinates(4000)
    result = _weak(images, SEED, flip=True, shift=0).numpy()
    flipped = result[:, 0, 0, 1] == 31
    assert abs(flipped.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)
    np.testing.assert_array_equal(
        result[flipped], images[:1].numpy().repeat(flipped.sum(), 0)[:, :, ::-1]
    )
    np.testing.assert_array_equal(result[~flipped], images[:1].numpy().repeat((~flipped).sum(), 0))


def test_shifts_reach_their_range_and_no_further():
    """The center pixel tells the shift: it is far from the border."""
    result = _weak(_coordinates(4000), SEED, flip=False, shift=4).numpy()
    for axis in (0, 1):
        moved = result[:, 16, 16, axis].astype(int) - 16
        assert set(moved) == set(range(-4, 5))
        assert _chi_square(np.bincount(moved + 4)) < 31.8
    dy, dx = (result[:, 16, 16, axis].astype(int) - 16 for axis in (0, 1))
    assert abs(np.corrcoef(dy, dx)[0, 1]) < 4 / np.sqrt(4000)


def test_weak_without_flip_and_shift_changes_nothing():
    images = tf.constant(_images(5))
    np.testing.assert_array_equal(_weak(images, SEED, flip=False, shift=0), images)


@pytest.mark.parametrize("shift", [-1, 8, 40])
def test_a_shift_as_large_as_the_image_is_refused(shift):
    with pytest.raises(config_lib.ConfigError, match=f"shift={shift} does not fit .* use 0 to 7"):
        _weak(tf.zeros([2, 8, 10, 3], tf.uint8), SEED, flip=True, shift=shift)


def test_cutout_covers_at_most_its_square_and_never_nothing():
    images = tf.fill([2000, 32, 32, 3], tf.constant(7, tf.uint8))
    result = policies.rand_augment(images, SEED, operations=0, cutout=0.5, fill=200).numpy()
    covered = (result == 200).all(-1)
    assert ((result == 7) | (result == 200)).all()
    area = covered.sum((1, 2))
    assert area.max() == 16 * 16 and area.min() >= 8 * 8
    assert covered.any(0).all()  # Every pixel is covered in some image.


def test_no_operations_and_no_cutout_change_nothing():
    images = tf.constant(_images(20))
    same = policies.rand_augment(images, SEED, operations=0, cutout=0.0)
    np.testing.assert_array_equal(same, images)
    same = policies.rand_augment(images, SEED, operations=2, probability=0.0, cutout=0.0)
    np.testing.assert_array_equal(same, images)


def _all_views(images, seed):
    return policies.views(images, seed, ("weak", "strong"), CONFIG, default_flip=True)


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (24, 40, 3)])
def test_same_seed_same_bits_in_eager_and_graph_with_any_batch_size(shape):
    images = tf.constant(_images(30, *shape))
    spec = [tf.TensorSpec([None, *shape], tf.uint8), tf.TensorSpec([2], tf.int32)]
    in_graph = tf.function(_all_views, input_signature=spec)
    for batch in (images, images[:3]):
        eager = _all_views(batch, tf.constant(SEED))
        graph = in_graph(batch, tf.constant(SEED))
        for name in ("weak", "strong"):
            assert eager[name].dtype == tf.uint8 and eager[name].shape == batch.shape
            np.testing.assert_array_equal(eager[name], graph[name])
    assert in_graph.get_concrete_function().structured_outputs["strong"].shape[1:] == shape


def test_same_seed_same_bits_in_a_pipeline():
    images = tf.constant(_images(30))
    seeds = tf.data.Dataset.from_tensors(tf.constant(SEED, tf.int64))
    data = seeds.map(lambda seed: _all_views(images, seed))
    views = next(iter(data))
    assert data.element_spec["strong"].shape == images.shape
    for name, expected in _all_views(images, tf.constant(SEED, tf.int64)).items():
        np.testing.assert_array_equal(views[name], expected)


def test_another_seed_and_another_position_draw_otherwise():
    images = tf.constant(_images(1).repeat(40, 0))
    first = _all_views(images, tf.constant([1, 2]))
    for seed in ([1, 3], [2, 2]):
        other = _all_views(images, tf.constant(seed))
        for name in ("weak", "strong"):
            differs = (first[name].numpy() != other[name].numpy()).any((1, 2, 3))
            assert differs.mean() > 0.9
    for name in ("weak", "strong"):
        distinct = {image.tobytes() for image in first[name].numpy()}
        assert len(distinct) > 20


def test_a_view_does_not_depend_on_which_others_are_asked_for():
    images = tf.constant(_images(20))
    both = _all_views(images, tf.constant(SEED))
    assert set(both) == {"weak", "strong"}
    for name in both:
        alone = policies.views(images, tf.constant(SEED), (name,), CONFIG, default_flip=True)
        assert set(alone) == {name}
        np.testing.assert_array_equal(alone[name], both[name])


def test_views_draw_independently():
    """Without operations and cutout both views are weak ones, with flips of their own."""
    config = config_lib.AugmentConfig(operations=0, cutout=0.0, shift=0)
    views = policies.views(_coordinates(2000), SEED, ("weak", "strong"), config, default_flip=True)
    flips = [views[name][:, 0, 0, 1].numpy() == 31 for name in ("weak", "strong")]
    assert abs(np.mean(flips[0] == flips[1]) - 0.5) < 4 * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize(
    "setting,default,flips",
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_the_flip_setting_overrides_the_dataset(setting, default, flips):
    config = config_lib.AugmentConfig(flip=setting, shift=0)
    views = policies.views(_coordinates(50), SEED, ("weak",), config, default_flip=default)
    assert (views["weak"][:, 0, 0, 1].numpy() == 31).any() == flips


def test_the_default_shift_is_an_eighth_of_the_height():
    config = config_lib.AugmentConfig(flip=False)
    images = _coordinates(1000, 24, 48)
    weak = policies.views(images, SEED, ("weak",), config, default_flip=False)["weak"].numpy()
    assert np.abs(weak[:, 12, 24, 1].astype(int) - 24).max() == 3


def test_strong_is_rand_augment_then_weak():
    images = tf.constant(_images(40))
    strong = policies.strong(images, SEED, CONFIG, flip=True, shift=4, fill=(9, 8, 7))
    augmented = policies.rand_augment(images, _seed(SEED, 0), fill=(9, 8, 7))
    expected = _weak(augmented, _seed(SEED, 1), flip=True, shift=4)
    np.testing.assert_array_equal(strong, expected)


def test_copies_of_a_view_have_draws_of_their_own_and_places_that_never_change():
    names = ("weak", "strong", "weak_2", "strong_2", "weak_3", "strong_3", "weak_12")
    assert [policies.view_index(name) for name in names] == [0, 1, 2, 3, 4, 5, 22]
    images = tf.constant(_images(40))
    views = policies.views(images, SEED, names, CONFIG, default_flip=True)
    assert len({view.numpy().tobytes() for view in views.values()}) == len(names)
    again = policies.weak(images, _seed(SEED, 2), flip=True, shift=4)
    np.testing.assert_array_equal(views["weak_2"], again)


@pytest.mark.parametrize("name", ["medium", "weak_1", "weak_02", "strong_", "Weak", "strong_2_3"])
def test_an_unknown_view_is_named(name):
    with pytest.raises(config_lib.ConfigError, match=f"view='{name}' is not one of weak, strong"):
        policies.views(tf.zeros([1, 8, 8, 3], tf.uint8), SEED, (name,), CONFIG, True)


def _by_pillow(images, drawn, fill):
    """Operations that `policies` drew, on a batch of images."""
    names = [row.name for row in policies.OPERATIONS]
    made = []
    for i, image in enumerate(images):
        operation, magnitude, center = (part[:, i].numpy() for part in drawn)
        applied = [None if index < 0 else names[index] for index in operation]
        made.append(
            _pillow_rand_augment(image, applied, magnitude.tolist(), center, (0, 0), 0, fill)
        )
    return np.stack(made)


def _with_squares(images, centers, side, fill):
    images = images.copy()
    for image, center in zip(images, centers, strict=True):
        image[_clipped_square(center, side, *image.shape[:2])] = fill
    return images


@pytest.mark.parametrize(
    "name", ["rand_augment_fixmatch", "auto_augment_cifar10", "auto_augment_svhn"]
)
def test_other_policies_equal_pillow_in_their_published_order_given_the_same_draws(name):
    count, fill, key = 200, (125, 123, 114), _seed(SEED, 0)
    images, config = _images(count), config_lib.AugmentConfig(strong=name)
    result = policies.strong(tf.constant(images), SEED, config, flip=True, shift=4, fill=fill)

    def weak(images):
        return _weak(tf.constant(images), _seed(SEED, 1), flip=True, shift=4).numpy()

    if name == "rand_augment_fixmatch":
        fourteen = policies.FIXMATCH_OPERATIONS
        drawn = policies._draw(_seed(key, 0), count, 2, 0.5, 32, 32, fourteen)
        expected = _by_pillow(weak(images), drawn, fill)
    else:
        policy = {"auto_augment_svhn": auto_augment.SVHN}.get(name, auto_augment.CIFAR10)
        drawn = policies._draw_policy(_seed(key, 0), count, policy, 32, 32)
        expected = weak(_by_pillow(images, drawn, fill))
    centers = per_image.centers([count], _seed(key, 1), 32, 32).numpy()
    np.testing.assert_array_equal(result, _with_squares(expected, centers, 16, fill))


def test_fixmatch_draws_its_fourteen_operations_uniformly():
    names = policies.FIXMATCH_OPERATIONS
    assert len(set(names)) == 14 and not {"Invert", "Cutout"} & set(names)
    operation, _, _ = policies._draw(SEED, 30_000, 2, 1.0, 32, 32, names)
    counts = collections.Counter(operation.numpy().ravel().tolist())
    assert set(counts) == {-1} | {
        i for i, row in enumerate(policies.OPERATIONS) if row.name in names
    }
    assert _chi_square(np.array(list(counts.values()))) < 40.9  # The 0.9999 quantile, 13 degrees.


@pytest.mark.parametrize("policy", [auto_augment.CIFAR10, auto_augment.SVHN])
def test_auto_augment_draws_sub_policies_uniformly_and_applies_with_their_probabilities(policy):
    assert len(policy) == 25
    names = [row.name for row in policies.OPERATIONS]
    count = 50_000
    operation, magnitude, _ = policies._draw_policy(SEED, count, policy, 32, 32)
    for turn in range(2):
        expected = collections.Counter()
        for row in policy:
            expected[row[turn][0]] += row[turn][1] / 25
        for index, name in enumerate(names):
            share = np.mean(operation[turn] == index)
            bound = 4 * np.sqrt(max(expected[name], 1e-4) / count)
            assert abs(share - expected[name]) < bound, (turn, name)
    table = {row.name: row.magnitudes(32, 32) for row in policies.OPERATIONS}
    possible = {
        (names.index(name), abs(float(table[name][level])))
        for row in policy
        for name, probability, level in row
        if probability
    }
    applied = operation.numpy() >= 0
    drawn = zip(operation.numpy()[applied], np.abs(magnitude.numpy()[applied]), strict=True)
    assert {(int(index), float(strength)) for index, strength in drawn} == possible


@pytest.mark.parametrize("name", ["weak", "strong"])
def test_images_without_a_static_size_are_refused(name):
    def trace(images):
        return policies.views(images, SEED, (name,), CONFIG, False)

    spec = tf.TensorSpec([4, None, None, 3], tf.uint8)
    with pytest.raises(ValueError, match="set a static height, width and channels"):
        tf.function(trace, autograph=False).get_concrete_function(spec)


@pytest.mark.parametrize("transform", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_normalize_scales_or_standardizes(transform):
    images = _images(4)
    normalize = transform(policies.normalize)
    scaled = normalize(tf.constant(images), CONFIG)
    assert scaled.dtype == tf.float32
    np.testing.assert_allclose(scaled, images / 127.5 - 1, atol=2e-7)
    assert policies.normalize(tf.constant([0, 255], tf.uint8), CONFIG).numpy().tolist() == [-1, 1]
    mean, std = np.array([120.0, 100.0, 90.0]), np.array([60.0, 50.0, 70.0])
    config = config_lib.AugmentConfig(normalization="standardize")
    standardized = policies.normalize(tf.constant(images), config, mean, std)
    np.testing.assert_allclose(standardized, (images - mean) / std, atol=1e-6)


@pytest.mark.parametrize("mean,std", [(None, None), (1.0, None), ([1.0], [0.0])])
def test_standardizing_needs_a_mean_and_a_positive_deviation(mean, std):
    config = config_lib.AugmentConfig(normalization="standardize")
    with pytest.raises(config_lib.ConfigError, match="pass the training mean and a std above 0"):
        policies.normalize(tf.zeros([1, 8, 8, 1], tf.uint8), config, mean, std)
