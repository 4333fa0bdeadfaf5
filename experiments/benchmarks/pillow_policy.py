"""The weak and strong views as one would write them with Pillow, image by image: a yardstick.

The policies are those of `ssl_influence.augment`, in the form that is usual elsewhere: RGB images
and a fill color, where the library carries opacity along.
"""

import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

from ssl_influence import config as config_lib
from ssl_influence.augment import auto_augment, ctaugment

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
    """The strong view that `config.strong` names, of images uint8 [B, H, W, 3].

    CTAugment draws from all bins, as it does at first.
    """
    transform, order = _POLICIES[config.strong]
    steps = {
        "policy": lambda made: _each(made, lambda picture: transform(picture, rng, config)),
        "weak": lambda made: weak(made, rng, config),
        "cutout": lambda made: _each(
            made, lambda picture: _cutout(picture, int(config.cutout * picture.height), rng)
        ),
        "policy_cutout": lambda made: _each(
            made,
            lambda picture: _cutout(
                transform(picture, rng, config), int(config.cutout * picture.height), rng
            ),
        ),
    }
    for step in order:
        images = steps[step](images)
    return images


def _each(images, function):
    made = np.empty_like(images)
    for image, out in zip(images, made, strict=True):
        out[:] = function(Image.fromarray(image))
    return made


def _rand_augment(operations):
    def transform(picture, rng, config):
        for _ in range(config.operations):
            operation = rng.choice(operations)
            level = rng.randint(1, LEVELS - 1)
            if rng.random() < config.probability:
                picture = operation(picture, level / LEVELS, rng)
        return picture

    return transform


def _auto_augment(policy):
    def transform(picture, rng, config):
        del config
        for name, probability, level in rng.choice(policy):
            if rng.random() < probability:
                picture = _OPERATIONS[name](picture, level / LEVELS, rng)
        return picture

    return transform


def _ctaugment(picture, rng, config):
    for _ in range(config.ctaugment_depth):
        row = rng.choice(ctaugment.OPERATIONS)
        levels = []
        for bins in row.bins:
            drawn = rng.choices(range(bins), [1.0] * bins)[0]
            levels.append((drawn + rng.random()) / bins)
        picture = _CTA_OPERATIONS[row.name](picture, rng, *levels)
    return picture


def _cutout(picture, side, rng, fill=GRAY):
    y, x, half = rng.randrange(picture.height), rng.randrange(picture.width), side // 2
    if half:
        square = (x - half, y - half, x + half - 1, y + half - 1)
        ImageDraw.Draw(picture).rectangle(square, fill=fill)
    return picture


def _sign(rng):
    return rng.choice((-1, 1))


def _affine(picture, *matrix, fill=GRAY):
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


def _pixels(strength, side):
    return int(10 * side / 32 * strength)


# name -> (picture, strength in 0..1, rng) -> picture
_OPERATIONS = {
    "Invert": lambda p, s, rng: ImageOps.invert(p),
    "Cutout": lambda p, s, rng: _cutout(p.copy(), int(20 * p.height / 32 * s), rng),
    "Sharpness": lambda p, s, rng: ImageEnhance.Sharpness(p).enhance(0.1 + 1.8 * s),
    "AutoContrast": lambda p, s, rng: ImageOps.autocontrast(p),
    "Posterize": lambda p, s, rng: ImageOps.posterize(p, 4 - int(4 * s)),
    "ShearX": lambda p, s, rng: _affine(p, 1, _sign(rng) * 0.3 * s, 0, 0, 1, 0),
    "TranslateX": lambda p, s, rng: _affine(p, 1, 0, _sign(rng) * _pixels(s, p.width), 0, 1, 0),
    "TranslateY": lambda p, s, rng: _affine(p, 1, 0, 0, 0, 1, _sign(rng) * _pixels(s, p.height)),
    "ShearY": lambda p, s, rng: _affine(p, 1, 0, 0, _sign(rng) * 0.3 * s, 1, 0),
    "Rotate": lambda p, s, rng: p.rotate(_sign(rng) * int(30 * s), fillcolor=GRAY),
    "Equalize": lambda p, s, rng: ImageOps.equalize(p),
    "Contrast": lambda p, s, rng: ImageEnhance.Contrast(p).enhance(0.1 + 1.8 * s),
    "Color": lambda p, s, rng: ImageEnhance.Color(p).enhance(0.1 + 1.8 * s),
    "Solarize": lambda p, s, rng: ImageOps.solarize(p, 256 - int(256 * s)),
    "Brightness": lambda p, s, rng: ImageEnhance.Brightness(p).enhance(0.1 + 1.8 * s),
}
_FIXMATCH = (
    *(run for name, run in _OPERATIONS.items() if name not in ("Invert", "Cutout")),
    lambda p, s, rng: p,
)


def _blended(operation):
    return lambda p, rng, level: Image.blend(p, operation(p), level)


def _enhanced(kind):
    return lambda p, rng, level: kind(p).enhance(0.1 + 1.9 * level)


def _centered(level, most):
    return (2 * level - 1) * most


def _rescale(picture, rng, level, method):
    del rng
    (width, height), margin = picture.size, 0.25 * level
    box = (margin * width, margin * height, width * (1 - margin), height * (1 - margin))
    return picture.crop(box).resize(picture.size, _RESAMPLINGS[int(5.99 * method)])


_RESAMPLINGS = (
    Image.Resampling.LANCZOS,
    Image.Resampling.BICUBIC,
    Image.Resampling.BILINEAR,
    Image.Resampling.BOX,
    Image.Resampling.HAMMING,
    Image.Resampling.NEAREST,
)
# name -> (picture, rng, *levels in 0..1) -> picture
_CTA_OPERATIONS = {
    "autocontrast": _blended(ImageOps.autocontrast),
    "blur": _blended(lambda p: p.filter(ImageFilter.BLUR)),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "cutout": lambda p, rng, level: _cutout(
        p.copy(), 1 + int(level * min(p.size) * 0.499), rng, (127, 127, 127)
    ),
    "equalize": _blended(ImageOps.equalize),
    "invert": _blended(ImageOps.invert),
    "identity": lambda p, rng: p,
    "posterize": lambda p, rng, level: ImageOps.posterize(p, 1 + int(level * 7.999)),
    "rescale": _rescale,
    "rotate": lambda p, rng, level: p.rotate(round(_centered(level, 45))),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "shear_x": lambda p, rng, level: _affine(p, 1, _centered(level, 0.3), 0, 0, 1, 0, fill=0),
    "shear_y": lambda p, rng, level: _affine(p, 1, 0, 0, _centered(level, 0.3), 1, 0, fill=0),
    "smooth": _blended(lambda p: p.filter(ImageFilter.SMOOTH)),
    "solarize": lambda p, rng, level: ImageOps.solarize(p, int(level * 255.999)),
    "translate_x": lambda p, rng, level: _affine(
        p, 1, 0, _centered(level, 0.3) * p.width, 0, 1, 0, fill=0
    ),
    "translate_y": lambda p, rng, level: _affine(
        p, 1, 0, 0, 0, 1, _centered(level, 0.3) * p.height, fill=0
    ),
}

# How each policy transforms a picture, and in which order it does what.
_POLICIES = {
    "rand_augment": (
        _rand_augment(tuple(_OPERATIONS.values())),
        ("policy_cutout", "weak"),
    ),
    "rand_augment_fixmatch": (_rand_augment(_FIXMATCH), ("weak", "policy_cutout")),
    "auto_augment_cifar10": (_auto_augment(auto_augment.CIFAR10), ("policy", "weak", "cutout")),
    "auto_augment_svhn": (_auto_augment(auto_augment.SVHN), ("policy", "weak", "cutout")),
    "ctaugment": (_ctaugment, ("weak", "policy_cutout")),
}
