"""CTAugment: against Pillow given the same draws, against a serial loop, and on a toy model."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ssl_influence import config as config_lib
from ssl_influence.augment import ctaugment, image_ops, per_image, policies

CONFIG = config_lib.AugmentConfig(strong="ctaugment")
SEED = (3, 14)
NAMES = [row.name for row in ctaugment.OPERATIONS]
RATES, BINS = ctaugment.SHAPE


def _images(count, height=32, width=32, seed=0):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, [count, 5, 5, 3], dtype=np.uint8)
    images = [Image.fromarray(c).resize((width, height), Image.BICUBIC) for c in coarse]
    return np.stack([np.asarray(image) for image in images])


def _slot(name, bin_, parameter=0):
    row = sum(len(row.bins) for row in ctaugment.OPERATIONS[: NAMES.index(name)]) + parameter
    return row * BINS + bin_


# --- Against Pillow -----------------------------------------------------------------------------


def _blend(operation):
    return lambda p, level: Image.blend(p, operation(p), level)


def _enhance(kind):
    return lambda p, level: kind(p).enhance(0.1 + 1.9 * level)


def _affine(matrix):
    return lambda p, level: p.transform(p.size, Image.AFFINE, matrix(p, (2 * level - 1) * 0.3))


def _rescale(p, level, method):
    kinds = ("LANCZOS", "BICUBIC", "BILINEAR", "BOX", "HAMMING", "NEAREST")
    (width, height), margin = p.size, 0.25 * level
    box = (margin * width, margin * height, width * (1 - margin), height * (1 - margin))
    return p.crop(box).resize(p.size, getattr(Image, kinds[int(method * 5.99)]))


PILLOW = {
    "autocontrast": _blend(ImageOps.autocontrast),
    "blur": _blend(lambda p: p.filter(ImageFilter.BLUR)),
    "brightness": _enhance(ImageEnhance.Brightness),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "equalize": _blend(ImageOps.equalize),
    "invert": _blend(ImageOps.invert),
    "identity": lambda p: p,
    "posterize": lambda p, level: ImageOps.posterize(p, 1 + int(level * 7.999)),
    "rescale": _rescale,
    "rotate": lambda p, level: p.rotate(int(np.round((2 * level - 1) * 45))),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": _affine(lambda p, m: (1, m, 0, 0, 1, 0)),
    "shear_y": _affine(lambda p, m: (1, 0, 0, m, 1, 0)),
    "smooth": _blend(lambda p: p.filter(ImageFilter.SMOOTH)),
    "solarize": lambda p, level: ImageOps.solarize(p, int(level * 255.999)),
    "translate_x": _affine(lambda p, m: (1, 0, m * p.size[0], 0, 1, 0)),
    "translate_y": _affine(lambda p, m: (1, 0, 0, 0, 1, m * p.size[1])),
}


def _square(image, center, side, gray):
    (y, x), half = center, side // 2
    image = image.copy()
    image[max(0, y - half) : y + half, max(0, x - half) : x + half] = gray
    return image


def _by_pillow(image, name, levels, center):
    if name == "cutout":
        side = 1 + int(levels[0] * min(image.shape[:2]) * 0.499)
        return _square(image, center, side, 127)
    count = len(ctaugment.OPERATIONS[NAMES.index(name)].bins)
    return np.asarray(PILLOW[name](Image.fromarray(image), *levels[:count].tolist()))


def _fold_in(*path):
    seed = tf.constant(SEED)
    for data in path:
        seed = per_image.fold_in(seed, data)
    return seed


@pytest.mark.parametrize("height,width", [(32, 32), (20, 44)])
def test_equals_pillow_given_the_same_draws(height, width):
    """The strong view and the probe: flip and shift, two operations; the former with a square."""
    count, rates = 600, ctaugment.initial_rates()
    images = tf.constant(_images(count, height, width))
    settings = {"flip": True, "shift": 3}
    strong = policies.strong(images, SEED, CONFIG, **settings, fill=(9, 8, 7), rates=rates)
    probe, slots = ctaugment.probe(images, SEED, CONFIG, **settings)
    before = policies.weak(images, _fold_in(1), **settings).numpy()
    operation, levels, drawn, centers = (
        part.numpy() for part in ctaugment._draw(_fold_in(0), count, 2, rates, height, width)
    )
    closing = per_image.centers([count], _fold_in(2), height, width).numpy()
    np.testing.assert_array_equal(slots, drawn.transpose(1, 0, 2).reshape(count, -1))
    seen = collections.Counter()
    for i, image in enumerate(before):
        names = [NAMES[index] for index in operation[:, i]]
        seen.update(names)
        for turn, name in enumerate(names):
            image = _by_pillow(image, name, levels[turn, i], centers[turn, i])
        np.testing.assert_array_equal(probe[i], image, err_msg=f"image {i}: {names}")
        image = _square(image, closing[i], height // 2, (9, 8, 7))
        np.testing.assert_array_equal(strong[i], image, err_msg=f"image {i}: {names}")
    assert set(seen) == set(NAMES)


def test_a_constant_seed_in_a_graph_gives_the_bits_of_an_eager_call():
    """Graphs fold constants, of which random numbers with such a seed are."""
    images, rates = tf.constant(_images(100)), ctaugment.initial_rates()

    def both():
        strong = ctaugment.strong(images, SEED, rates, CONFIG, flip=True, shift=4)
        return strong, *ctaugment.probe(images, SEED, CONFIG, flip=True, shift=4)

    for eager, graph in zip(both(), tf.function(both, autograph=False)(), strict=True):
        np.testing.assert_array_equal(eager, graph)


def test_gray_images_are_transformed_as_gray_rgb_ones():
    gray = _images(300)[..., :1]
    settings = {"flip": True, "shift": 4}
    single, slots = ctaugment.probe(tf.constant(gray), SEED, CONFIG, **settings)
    triple, same = ctaugment.probe(tf.constant(gray.repeat(3, -1)), SEED, CONFIG, **settings)
    np.testing.assert_array_equal(slots, same)
    np.testing.assert_array_equal(single[..., 0], triple[..., 0])


def test_strong_views_need_rates():
    with pytest.raises(ValueError, match="needs the rates of a CTAugment"):
        policies.views(tf.zeros([1, 8, 8, 3], tf.uint8), SEED, ("strong",), CONFIG, True)


# --- Draws --------------------------------------------------------------------------------------


def _chi_square(counts, expected):
    return np.sum((counts - expected) ** 2 / expected)


def test_a_probe_draws_operations_bins_and_levels_uniformly():
    count = 40_000
    uniform = ctaugment.initial_rates()
    operation, levels, slots, _ = (
        part.numpy() for part in ctaugment._draw(SEED, count, 2, uniform, 32, 32)
    )
    # Bounds are the 0.9999 quantiles of chi-square with 18, 16, 7 and 5 degrees of freedom.
    counts = np.bincount(operation.ravel(), minlength=len(NAMES))
    assert _chi_square(counts, 2 * count / len(NAMES)) < 49.0
    for name, parameter, bins, bound in (
        ("rotate", 0, 17, 46.0),
        ("posterize", 0, 8, 29.9),
        ("rescale", 0, 17, 46.0),
        ("rescale", 1, 6, 25.8),
    ):
        chosen = operation == NAMES.index(name)
        first = _slot(name, 0, parameter)
        drawn = slots[chosen][:, parameter] - first
        counts = np.bincount(drawn, minlength=bins)
        assert len(counts) == bins and _chi_square(counts, chosen.sum() / bins) < bound
        within = levels[chosen][:, parameter] * bins - drawn
        assert within.min() >= 0 and within.max() < 1 and abs(within.mean() - 0.5) < 0.03
    assert (slots[operation == NAMES.index("identity")] == -1).all()
    assert (slots[operation == NAMES.index("rotate")][:, 1] == -1).all()


def test_bins_are_drawn_in_proportion_to_rates_near_the_highest():
    rates = np.array(ctaugment.initial_rates())
    row = _slot("rotate", 0) // BINS
    rates[row] = 0.1
    rates[row, [3, 9, 16]] = [0.5, 0.45, 0.39]  # The last is below 0.8 of the highest.
    shares = ctaugment.bin_probabilities(tf.constant(rates), decay=0.99, threshold=0.8).numpy()
    expected = np.zeros(BINS)
    expected[[3, 9]] = [1.0, 0.46 / 0.51]
    np.testing.assert_allclose(shares[row], expected, rtol=1e-6)
    operation, _, slots, _ = ctaugment._draw(SEED, 40_000, 2, tf.constant(shares), 32, 32)
    drawn = slots.numpy()[operation.numpy() == NAMES.index("rotate")][:, 0] - _slot("rotate", 0)
    assert set(drawn) == {3, 9}
    assert abs(np.mean(drawn == 3) - 0.51 / 0.97) < 4 * 0.5 / np.sqrt(drawn.size)


def test_rates_of_zero_leave_every_bin():
    shares = ctaugment.bin_probabilities(tf.zeros(ctaugment.SHAPE), decay=0.99, threshold=0.8)
    np.testing.assert_array_equal(shares, ctaugment.initial_rates())


def test_there_are_as_many_bins_as_published():
    bins = {row.name: row.bins for row in ctaugment.OPERATIONS}
    assert bins.pop("identity") == () and bins.pop("posterize") == (8,)
    assert bins.pop("rescale") == (17, 6)
    assert len(bins) == 16 and set(bins.values()) == {(17,)}
    assert np.sum(ctaugment.initial_rates()) == 16 * 17 + 8 + 17 + 6


# --- Rates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_update_equals_probe_after_probe(decay):
    """With bins that recur within a probe and over the batch."""
    rng = np.random.default_rng(0)
    rates = rng.random(ctaugment.SHAPE).astype(np.float32)
    slots = rng.integers(-1, 7, [50, 4]).astype(np.int32)
    proximity = rng.random(50).astype(np.float32)
    expected = rates.astype(np.float64).ravel()
    for row, omega in zip(slots, proximity, strict=True):
        for slot in row[row >= 0]:
            expected[slot] = decay * expected[slot] + (1 - decay) * omega
    result = ctaugment.updated_rates(
        tf.constant(rates), tf.constant(slots), tf.constant(proximity), decay=decay
    )
    np.testing.assert_allclose(result.numpy().ravel(), expected, rtol=1e-5)
    np.testing.assert_array_equal(result.numpy().ravel()[7:], rates.ravel()[7:])


def test_proximity_is_one_for_a_sure_and_right_prediction():
    probabilities = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]
    near = ctaugment.proximity(tf.constant(probabilities), tf.constant([0, 0, 0]))
    np.testing.assert_allclose(near, [1.0, 0.0, 0.5])


def test_a_prediction_that_is_not_finite_moves_no_rate():
    augmenter = ctaugment.CTAugment(CONFIG)
    slots = tf.constant([[0, -1], [1, -1]])
    augmenter.update(slots, tf.constant([[np.nan, np.nan], [0.5, 0.5]]), tf.constant([0, 0]))
    np.testing.assert_allclose(augmenter.rates[0, :3], [1.0, 0.995, 1.0])


def test_rates_fall_where_a_model_fails_and_draws_follow():
    """A model that knows only what is rotated by little, or translated to the left by little."""
    config = config_lib.AugmentConfig(
        strong="ctaugment", ctaugment_depth=1, ctaugment_decay=0.8, shift=0
    )
    augmenter = ctaugment.CTAugment(config)
    first = {name: _slot(name, 0) for name in ("rotate", "translate_x")}
    images = tf.zeros([500, 8, 8, 3], tf.uint8)
    step = tf.function(augmenter.update)
    for k in range(60):
        _, slots = ctaugment.probe(images, (7, k), config, flip=False, shift=0)
        fails = np.zeros(500, bool)
        for name, most in (("rotate", 4), ("translate_x", 8)):
            place = slots.numpy()[:, 0] - first[name]
            fails |= (place >= 0) & (place < BINS) & (abs(place - 8) > (8 if k < 30 else most - 1))
        right = tf.constant(np.where(fails, 0.1, 0.9), tf.float32)
        step(slots, tf.stack([right, 1 - right], 1), tf.zeros([500], tf.int32))
        if k == 29:
            early = ctaugment.bin_probabilities(augmenter.rates, decay=0.8, threshold=0.8)
    assert np.all((early > 0) == (ctaugment.initial_rates() > 0))
    augmenter.take_snapshot()
    shares = ctaugment.bin_probabilities(augmenter.snapshot, decay=0.8, threshold=0.8)
    drawn = {name: np.flatnonzero(np.ravel(shares)[_slot(name, 0) :][:BINS]) for name in NAMES}
    np.testing.assert_array_equal(drawn["rotate"], np.arange(5, 12))
    np.testing.assert_array_equal(drawn["translate_x"], np.arange(1, 16))
    np.testing.assert_array_equal(drawn["shear_x"], np.arange(BINS))
    operation, levels, _, _ = ctaugment._draw(SEED, 5000, 1, shares, 32, 32)
    levels = levels.numpy()[operation.numpy() == NAMES.index("rotate")][:, 0]
    assert levels.min() >= 5 / 17 and levels.max() < 12 / 17 and levels.std() > 0.1


def test_a_checkpoint_holds_rates_and_snapshot(tmp_path):
    augmenter = ctaugment.CTAugment(CONFIG)
    augmenter.update(tf.constant([[5, 6]]), tf.constant([[0.0, 1.0]]), tf.constant([0]))
    augmenter.take_snapshot()
    augmenter.update(tf.constant([[7, -1]]), tf.constant([[0.0, 1.0]]), tf.constant([0]))
    path = tf.train.Checkpoint(augmenter=augmenter).write(str(tmp_path / "state"))
    other = ctaugment.CTAugment(CONFIG)
    tf.train.Checkpoint(augmenter=other).read(path).assert_consumed()
    np.testing.assert_allclose(other.rates[0, 4:9], [1, 0.99, 0.99, 0.99, 1])
    np.testing.assert_allclose(other.snapshot[0, 4:9], [1, 0.99, 0.99, 1, 1])


def test_the_resampling_methods_are_in_the_published_order():
    assert image_ops.RESAMPLINGS == ("lanczos", "bicubic", "bilinear", "box", "hamming", "nearest")
