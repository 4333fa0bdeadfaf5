"""Elementary image operations against Pillow, exactly, on digits and on smooth random pictures."""

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ssl_influence.augment import image_ops


def _digits(count=12, size=32):
    images = sklearn.datasets.load_digits().images[:count] * (255 / 16)
    return np.stack(
        [
            np.asarray(Image.fromarray(image.astype(np.uint8)).resize((size, size)))[..., None]
            for image in images
        ]
    )


def _pictures(count=12, height=32, width=32, seed=0):
    """Smooth RGB pictures; some low in contrast, one of a single color, one of two levels."""
    rng = np.random.default_rng(seed)
    pictures = []
    for i in range(count):
        coarse = rng.integers(0, 256, [5, 4, 3], dtype=np.uint8)
        picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC))
        pictures.append(picture // 3 + 60 if i % 3 == 1 else picture)
    pictures[-1] = np.full_like(pictures[-1], 77)
    pictures[-2] = np.where(pictures[-2] > 100, 200, 30).astype(np.uint8)
    return np.stack(pictures)


IMAGES = {
    "digits": _digits(),
    "pictures": _pictures(),
    "wide": _pictures(6, 19, 45, seed=1),
    "tiny": _pictures(6, 8, 8, seed=2),
    "noise": np.random.default_rng(3).integers(0, 256, [6, 24, 24, 3], dtype=np.uint8),
    "large": _pictures(3, 96, 80, seed=4),
}


def _pillow(images, function, magnitudes):
    results = []
    for image, magnitude in zip(images, magnitudes, strict=True):
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        results.append(np.asarray(function(picture, magnitude)).reshape(image.shape))
    return np.stack(results)


def _affine(matrix):
    return lambda image, m: image.transform(image.size, Image.AFFINE, matrix(m))


# name -> (Pillow's version, magnitudes that span its range, the magnitude that changes nothing)
REFERENCES = {
    "shear_x": (_affine(lambda m: (1, m, 0, 0, 1, 0)), np.linspace(-0.3, 0.3, 21), 0.0),
    "shear_y": (_affine(lambda m: (1, 0, 0, m, 1, 0)), np.linspace(-0.3, 0.3, 21), 0.0),
    "translate_x": (_affine(lambda m: (1, 0, m, 0, 1, 0)), np.arange(-10.0, 11.0), 0.0),
    "translate_y": (_affine(lambda m: (1, 0, 0, 0, 1, m)), np.arange(-10.0, 11.0), 0.0),
    "rotate": (lambda image, m: image.rotate(m), np.linspace(-30, 30, 21), 0.0),
    "posterize": (ImageOps.posterize, np.arange(1, 9), 8),
    "solarize": (ImageOps.solarize, np.arange(0, 257, 16), 256),
    "brightness": (
        lambda image, m: ImageEnhance.Brightness(image).enhance(m),
        np.linspace(0, 1.9, 20),
        1.0,
    ),
    "contrast": (
        lambda image, m: ImageEnhance.Contrast(image).enhance(m),
        np.linspace(0, 1.9, 20),
        1.0,
    ),
    "color": (
        lambda image, m: ImageEnhance.Color(image).enhance(m),
        np.linspace(0, 1.9, 20),
        1.0,
    ),
    "sharpness": (
        lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
        np.linspace(0, 1.9, 20),
        1.0,
    ),
}
WITHOUT_MAGNITUDE = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "smooth": lambda image: image.filter(ImageFilter.SMOOTH),
    "blur": lambda image: image.filter(ImageFilter.BLUR),
}
RESAMPLINGS = {
    "lanczos": Image.LANCZOS,
    "bicubic": Image.BICUBIC,
    "bilinear": Image.BILINEAR,
    "box": Image.BOX,
    "hamming": Image.HAMMING,
    "nearest": Image.NEAREST,
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", REFERENCES)
def test_equals_pillow_over_the_magnitude_range(name, kind):
    reference, magnitudes, _ = REFERENCES[name]
    images = IMAGES[kind]
    of_image = np.arange(len(images)).repeat(len(magnitudes))
    per_image = np.tile(magnitudes, len(images))
    expected = _pillow(images[of_image], reference, [m.item() for m in per_image])
    operation = getattr(image_ops, name)
    batch = tf.constant(images[of_image])
    np.testing.assert_array_equal(operation(batch, tf.constant(per_image)), expected)
    np.testing.assert_array_equal(tf.function(operation)(batch, tf.constant(per_image)), expected)


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", WITHOUT_MAGNITUDE)
def test_equals_pillow_without_magnitude(name, kind):
    images = IMAGES[kind]
    reference = WITHOUT_MAGNITUDE[name]
    expected = _pillow(images, lambda image, _: reference(image), range(len(images)))
    operation = getattr(image_ops, name)
    np.testing.assert_array_equal(operation(tf.constant(images)), expected)
    np.testing.assert_array_equal(tf.function(operation)(tf.constant(images)), expected)


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", WITHOUT_MAGNITUDE)
def test_blend_of_two_images_equals_pillow(name, kind):
    reference, operation = WITHOUT_MAGNITUDE[name], getattr(image_ops, name)
    amounts = np.linspace(0, 1, 17)
    images = IMAGES[kind].repeat(len(amounts), 0)
    per_image = np.tile(amounts, len(IMAGES[kind]))
    expected = _pillow(images, lambda p, m: Image.blend(p, reference(p), m), per_image.tolist())
    batch = tf.constant(images)
    result = image_ops.blend(batch, operation(batch), tf.constant(per_image))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("method", RESAMPLINGS)
def test_rescale_equals_pillow_bit_for_bit(method, kind):
    """Also with a method and a margin of its own for each image of the batch."""

    def reference(picture, margin):
        width, height = picture.size
        x, y = margin * width, margin * height
        box = (x, y, width * (1 - margin), height * (1 - margin))
        return picture.crop(box).resize(picture.size, RESAMPLINGS[method])

    margins = np.linspace(0, 0.25, 18)
    images = IMAGES[kind].repeat(len(margins), 0)
    per_image = np.tile(margins, len(IMAGES[kind]))
    expected = _pillow(images, reference, per_image.tolist())
    index = image_ops.RESAMPLINGS.index(method)
    result = image_ops.rescale(tf.constant(images), tf.constant(per_image), index)
    np.testing.assert_array_equal(result, expected)
    mixed = image_ops.rescale(
        tf.constant(images[::5]), tf.constant(per_image[::5]), tf.range(len(images[::5])) % 6
    )
    np.testing.assert_array_equal(mixed[index::6], result[::5][index::6])


def test_rescale_accepts_an_empty_batch_and_any_small_size():
    for size in range(1, 8):
        assert image_ops.rescale(tf.zeros([0, size, size, 3], tf.uint8), [], []).shape[0] == 0
        images = tf.fill([6, size, size, 1], tf.constant(9, tf.uint8))
        np.testing.assert_array_equal(image_ops.rescale(images, 0.25, tf.range(6)), images)


@pytest.mark.parametrize("degrees", [90.0, 180.0, 270.0, -90.0, 45.0, 360.0])
def test_rotates_by_right_angles_as_pillow(degrees):
    images = IMAGES["pictures"]
    expected = _pillow(images, lambda image, m: image.rotate(m), [degrees] * len(images))
    np.testing.assert_array_equal(image_ops.rotate(tf.constant(images), degrees), expected)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_equals_pillow_on_ranges_that_round_differently(name):
    rng = np.random.default_rng(5)
    low = rng.integers(0, 250, 400)
    high = np.minimum(255, low + rng.integers(1, 200, 400))
    images = rng.integers(low, high + 1, [16, 20, 1, 400]).transpose(3, 0, 1, 2).astype(np.uint8)
    reference = WITHOUT_MAGNITUDE[name]
    expected = _pillow(images, lambda image, _: reference(image), range(len(images)))
    np.testing.assert_array_equal(getattr(image_ops, name)(tf.constant(images)), expected)


@pytest.mark.parametrize("kind", ["digits", "pictures", "wide"])
@pytest.mark.parametrize("name", REFERENCES)
def test_identity_magnitude_changes_nothing(name, kind):
    images = tf.constant(IMAGES[kind])
    result = getattr(image_ops, name)(images, REFERENCES[name][2])
    assert result.dtype == tf.uint8
    np.testing.assert_array_equal(result, images)


@pytest.mark.parametrize("name", REFERENCES)
def test_an_image_does_not_depend_on_its_batch(name):
    images = tf.constant(IMAGES["pictures"])
    magnitudes = tf.constant(np.resize(REFERENCES[name][1], len(images)))
    operation = getattr(image_ops, name)
    whole = operation(images, magnitudes)
    parts = [operation(images[i : i + 5], magnitudes[i : i + 5]) for i in range(0, 12, 5)]
    np.testing.assert_array_equal(whole, tf.concat(parts, 0))


@pytest.mark.parametrize("name", [*REFERENCES, *WITHOUT_MAGNITUDE])
def test_accepts_an_empty_batch(name):
    images = tf.zeros([0, 16, 16, 3], tf.uint8)
    arguments = [] if name in WITHOUT_MAGNITUDE else [tf.zeros([0])]
    assert getattr(image_ops, name)(images, *arguments).shape == (0, 16, 16, 3)


def test_color_is_the_identity_for_one_channel():
    images = tf.constant(IMAGES["digits"])
    np.testing.assert_array_equal(image_ops.color(images, 0.1), images)


def test_affine_fills_what_lies_outside():
    images = tf.fill([1, 8, 8, 3], tf.constant(200, tf.uint8))
    moved = image_ops.translate_x(images, 3, fill=9).numpy()
    assert (moved[:, :, :5] == 200).all() and (moved[:, :, 5:] == 9).all()


def test_posterize_to_no_bits_is_black():
    assert not image_ops.posterize(tf.constant(IMAGES["pictures"]), 0).numpy().any()


@pytest.mark.parametrize("kind", ["digits", "wide"])
def test_flip_and_shift_equals_a_crop_of_the_reflected_image(kind):
    images = IMAGES[kind]
    count, height, width, _ = images.shape
    rng = np.random.default_rng(0)
    flip = rng.integers(0, 2, count).astype(bool)
    offset = rng.integers(-7, 8, [count, 2])
    offset[:2] = [[height - 1, -(width - 1)], [0, 0]]
    result = image_ops.flip_and_shift(
        tf.constant(images), tf.constant(flip), tf.constant(offset, tf.int32)
    )
    for i, image in enumerate(images):
        image = image[:, ::-1] if flip[i] else image
        padded = np.pad(image, [[height - 1] * 2, [width - 1] * 2, [0, 0]], mode="reflect")
        y, x = offset[i] + [height - 1, width - 1]
        np.testing.assert_array_equal(result[i], padded[y : y + height, x : x + width])


def test_cutout_paints_a_clipped_square():
    images = tf.constant(IMAGES["pictures"][:4])
    centers = tf.constant([[10, 20], [0, 0], [31, 16], [5, 5]])
    sizes = tf.constant([6, 8, 5, 0])
    result = image_ops.cutout(images, centers, sizes, fill=(1, 2, 3)).numpy()
    expected = images.numpy()
    expected[0, 7:13, 17:23] = [1, 2, 3]
    expected[1, :4, :4] = [1, 2, 3]
    expected[2, 29:, 14:18] = [1, 2, 3]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", ["digits", "pictures"])
def test_packed_pixels_move_as_images_do_and_carry_opacity(kind):
    images = tf.constant(IMAGES[kind])
    channels = images.shape[-1]
    words = image_ops.pack(images)
    assert words.dtype == tf.int32 and (words.numpy() < 0).all()
    np.testing.assert_array_equal(image_ops.unpack(words, channels), images)
    matrix = tf.tile([[0.9, 0.2, -5.0, 0.1, 1.1, 3.0]], [len(images), 1])
    moved = image_ops.affine(words, matrix)
    np.testing.assert_array_equal(
        image_ops.unpack(moved, channels), image_ops.affine(images, matrix)
    )
    outside = image_ops.affine(tf.ones_like(images), matrix).numpy()[..., 0] == 0
    assert outside.any() and not outside.all()
    np.testing.assert_array_equal(moved.numpy() >= 0, outside)


def test_pack_refuses_other_numbers_of_channels():
    with pytest.raises(ValueError, match="images have 4 channels: pass 1 or 3"):
        image_ops.pack(tf.zeros([1, 8, 8, 4], tf.uint8))


@pytest.mark.parametrize(
    "images", [tf.zeros([2, 8, 8, 3]), tf.zeros([8, 8, 3], tf.uint8)], ids=["float", "unbatched"]
)
def test_names_the_dtype_and_shape_of_what_is_no_image_batch(images):
    with pytest.raises(ValueError, match=r"pass uint8 of shape \[B, H, W, C\]"):
        image_ops.rotate(images, 10.0)
