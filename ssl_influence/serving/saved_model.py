"""A trained classifier as a TensorFlow SavedModel, which needs nothing of this library to run."""

import contextlib
import os
import shutil
from collections.abc import Iterator

import tensorflow as tf

from ssl_influence import config, files
from ssl_influence.data import inputs as inputs_lib
from ssl_influence.serving import classifier as classifier_lib

CLASS_NAMES = "class_names.txt"


def write(classifier: classifier_lib.Classifier, folder: str | os.PathLike) -> None:
    """Writes a SavedModel, complete or not at all, whose batches may have any size.

    The signature `serving_default` takes `inputs`, uint8 images [B, H, W, C] or float32 vectors [B,
    d] that are not normalized, or texts, string [B] in UTF-8, and gives `probabilities` float32 [B,
    C], `class` int32 [B] and `class_name` string [B]. A process that loads a model of texts must
    have imported tensorflow_text, and needs nothing else. Of gray and colored images there is also
    the signature `encoded`, whose `inputs` are the bytes of PNG or JPEG files, string [B]; see
    `decode`. Class names, UTF-8, also lie in class_names.txt, one a line, and all that the model
    takes in inputs.json.

    Args:
      classifier: what is written, with the weights it has now.
      folder: has to be new, or empty.

    Raises:
      ConfigError: it is neither, or cannot be written.
    """
    folder = files.path(folder)
    spec = classifier.spec
    served = _Served(classifier)
    signatures = {"serving_default": served.predict}
    if served.predict_encoded is not None:
        signatures["encoded"] = served.predict_encoded
    with _new_folder(folder) as unfinished:
        tf.saved_model.save(served, str(unfinished), signatures=signatures)
        lines = b"".join(_encode(name) + b"\n" for name in spec.class_names)
        (unfinished / CLASS_NAMES).write_bytes(lines)
        inputs_lib.write(spec, unfinished / "inputs.json")


def decode(encoded: tf.Tensor, shape: tuple[int, int, int]) -> tf.Tensor:
    """The image in the bytes of a PNG or JPEG file, as a graph makes it.

    As `ssl_influence.data.images.decode` with that image_size and image_channels, which is how
    examples of folders are read, but for this: the orientation that Exif notes is ignored, and
    images that have to be scaled, and 16-bit ones, may differ by one gray level.

    Args:
      encoded: string scalar.
      shape: (H, W, C) of the result; C is 1 or 3.

    Returns:
      uint8 [H, W, C].
    """
    height, width, channels = shape
    image = tf.cond(
        tf.io.is_jpeg(encoded),
        # The default is a faster transform with errors of some gray levels.
        lambda: tf.io.decode_jpeg(encoded, 3, dct_method="INTEGER_ACCURATE"),
        lambda: tf.io.decode_image(encoded, 3, expand_animations=False),
    )
    image.set_shape([None, None, 3])
    if channels == 1:  # Rec. 601 in fixed point, as Pillow has it; gray images stay as they are
        luma = tf.tensordot(tf.cast(image, tf.int32), tf.constant([19595, 38470, 7471]), 1)
        image = tf.bitwise.right_shift(luma + 2**15, 16)[..., tf.newaxis]
    target = tf.constant([height, width])
    size = tf.shape(image)[:2]
    scale = tf.reduce_max(tf.cast(target / size, tf.float32))
    hidden = scale * tf.cast(size, tf.float32) - tf.cast(target, tf.float32)
    # tf.image.resize cannot cut off a part of a pixel.
    scaled = tf.raw_ops.ScaleAndTranslate(
        images=tf.cast(image, tf.float32)[tf.newaxis],
        size=target,
        scale=tf.stack([scale, scale]),
        translation=-hidden / 2,
        kernel_type="triangle",
        antialias=True,
    )[0]
    return tf.saturate_cast(tf.round(scaled), tf.uint8)


class _Served(tf.Module):
    """The functions of a SavedModel and the variables they read.

    The Keras model itself is no attribute: each of its layers would be written, with code.
    """

    def __init__(self, classifier: classifier_lib.Classifier):
        super().__init__(name="classifier")
        self._variables = list(classifier.model.variables)
        spec = classifier.spec
        names = [_encode(name) for name in spec.class_names]

        def predict(inputs):
            probabilities, best = classifier.predict(inputs)
            return {
                "probabilities": probabilities,
                "class": best,
                "class_name": tf.gather(tf.constant(names), best),
            }

        def predict_encoded(inputs):
            images = tf.map_fn(
                lambda encoded: decode(encoded, spec.shape),
                inputs,
                fn_output_signature=tf.TensorSpec(spec.shape, tf.uint8),
            )
            return predict(images)

        self.predict = tf.function(predict, [classifier.inputs], autograph=False)
        self.predict_encoded = None
        if spec.kind == "image" and spec.shape[-1] in (1, 3):
            encoded = tf.TensorSpec([None], tf.string, name="inputs")
            self.predict_encoded = tf.function(predict_encoded, [encoded], autograph=False)


def _encode(name: str) -> bytes:
    """UTF-8; of names of files that are not, the bytes that they have."""
    return name.encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def _new_folder(folder: files.AnyPath) -> Iterator[files.AnyPath]:
    """Gives a folder to fill, which then becomes `folder`; where filling fails, nothing remains.

    In a bucket, where folders do not move at once, it is `folder` itself.
    """
    is_local = files.is_local(folder)
    if is_local:
        folder = folder.resolve()
    try:
        with files.os_errors(folder):
            is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise _not_written(folder, error.strerror) from error
    if not is_free:
        raise config.ConfigError(
            f"{folder} is there already and not an empty folder: remove it, or name another."
        )
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp") if is_local else folder
    complete = False
    try:
        unfinished.mkdir(parents=True, exist_ok=not is_local)
        yield unfinished
        if is_local:
            os.replace(unfinished, folder)
        complete = True
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise _not_written(folder, reason) from error
    finally:
        if is_local:
            shutil.rmtree(unfinished, ignore_errors=True)
        elif not complete:
            with contextlib.suppress(OSError, tf.errors.OpError):
                unfinished.rmtree()


def _not_written(folder: files.AnyPath, reason: str) -> config.ConfigError:
    return config.ConfigError(f"{folder} cannot be written ({reason}): name another.")
