"""Numbers in the precision of a solve."""

import numpy as np
import tensorflow as tf


def cast(value: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The value in `dtype`; a Python number exactly, which tf.cast takes through float32."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def epsilon(dtype: tf.DType) -> float:
    """The distance from 1 to the next number of a floating dtype."""
    return float(np.finfo(dtype.as_numpy_dtype).eps)
