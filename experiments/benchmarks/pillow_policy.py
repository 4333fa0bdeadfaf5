"""The weak and strong views as one would write them with Pillow, image by image: a yardstick.

The policy is that of `ssl_influence.augment.policies`, in the form that is usual elsewhere: RGB
images and a fill color, where the library carries opacity along.
"""

import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from ssl_influence import config as config_lib

GRAY = (128, 128, 128)
LEVELS = 10


def weak(images: np.ndarray, rng: random.Random, config: config_lib.AugmentConfig) -> np.ndarray:
    """Flips half of the images uint8 [B, H, W, 3] and shifts each within its reflection."""
    _, height, width, _ = images.shape
    shift = height // 8 if config.shift is None else config.shift
    flip_rate = 0.0 if config.flip is False else 0.5
    padded = np.pad(images, [(0, 0), (shift, shift), (shift, shift), (0, 0)], mode="reflect")
    made = np.empty_like(images)
    for image, out in zip(padded, made, strict=True):
        y, x = rng.randint(0, 2 * shift), rng.randint(0, 2 * shift)
        crop = image[y : y + height, x : x + width]
        out[:] = crop[:, ::-1] if rng.random() < flip_rate else crop
    return made


def strong(images: np.ndarray, rng: random.Random, config: config_lib.AugmentConfig) -> np.ndarray:
    """RandAugment, cutout and `weak` of images uint8 [B, H, W, 3]."""
    made = np.empty_like(images)
    for image, out in zip(images, made, strict=True):
        picture = Image.fromarray(image)
        for _ in range(config.operations):
            operation = rng.choice(_OPERATIONS)
            level = rng.randint(1, LEVELS - 1)
            if rng.random() < config.probability:
                picture = operation(picture, level / LEVELS, rng)
        out[:] = _cutout(picture, int(config.cutout * picture.height), rng)
    return weak(made, rng, config)


def _cutout(picture, side, rng):
    y, x, half = rng.randrange(picture.height), rng.randrange(picture.width), side // 2
    if half:
        square = (x - half, y - half, x + half - 1, y + half - 1)
        ImageDraw.Draw(picture).rectangle(square, fill=GRAY)
    return picture


def _sign(rng):
    return rng.choice((-1, 1))


def _affine(picture, *matrix):
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=GRAY)


def _pixels(strength, side):
    return int(10 * side / 32 * strength)


_OPERATIONS = (
    lambda p, s, rng: ImageOps.invert(p),
    lambda p, s, rng: _cutout(p.copy(), int(20 * p.height / 32 * s), rng),
    lambda p, s, rng: ImageEnhance.Sharpness(p).enhance(0.1 + 1.8 * s),
    lambda p, s, rng: ImageOps.autocontrast(p),
    lambda p, s, rng: ImageOps.posterize(p, 4 - int(4 * s)),
    lambda p, s, rng: _affine(p, 1, _sign(rng) * 0.3 * s, 0, 0, 1, 0),
    lambda p, s, rng: _affine(p, 1, 0, _sign(rng) * _pixels(s, p.width), 0, 1, 0),
    lambda p, s, rng: _affine(p, 1, 0, 0, 0, 1, _sign(rng) * _pixels(s, p.height)),
    lambda p, s, rng: _affine(p, 1, 0, 0, _sign(rng) * 0.3 * s, 1, 0),
    lambda p, s, rng: p.rotate(_sign(rng) * int(30 * s), fillcolor=GRAY),
    lambda p, s, rng: ImageOps.equalize(p),
    lambda p, s, rng: ImageEnhance.Contrast(p).enhance(0.1 + 1.8 * s),
    lambda p, s, rng: ImageEnhance.Color(p).enhance(0.1 + 1.8 * s),
    lambda p, s, rng: ImageOps.solarize(p, 256 - int(256 * s)),
    lambda p, s, rng: ImageEnhance.Brightness(p).enhance(0.1 + 1.8 * s),
)
