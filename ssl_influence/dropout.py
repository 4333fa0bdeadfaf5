"""Dropout that is a function of a key, so that a resumed run draws what it would have drawn.

The layers of Keras, and of libraries on it such as the TensorFlow Model Garden, draw from
generators whose state no checkpoint holds. Here the generator of each is replaced.
"""

import contextlib
import functools
from collections.abc import Iterator

import tensorflow as tf
import tf_keras as keras


class KeyedDropout:
    """The dropout layers of a model, Dropout and its subclasses, drawing by a key.

    Within `drawing(key)` the n-th application of dropout draws from Philox by the key and n,
    whatever layer it is of: masks are a function of the key and of the order in which the model
    applies its layers. Outside of it layers draw as Keras has it.

    Attributes:
      layers: the layers; those with rate 0 among them.
    """

    def __init__(self, model: keras.Model):
        """Takes over the layers of a model that was built."""
        self.layers = [m for m in model.submodules if isinstance(m, keras.layers.Dropout)]
        self._key = None
        self._applied = 0
        for layer in self.layers:
            generator = layer._random_generator
            generator.dropout = functools.partial(self._apply, generator.dropout)

    @contextlib.contextmanager
    def drawing(self, key: tf.Tensor) -> Iterator[None]:
        """Within the context masks are drawn by the key, int64 [2]."""
        before = self._key, self._applied
        # What is folded into a key is not hashed itself: seeds of keys that are neighbors, as those
        # of two passes, would overlap.
        self._key = tf.random.experimental.stateless_fold_in(
            key, tf.zeros([], key.dtype), alg="philox"
        )
        self._applied = 0
        try:
            yield
        finally:
            self._key, self._applied = before

    def _apply(self, otherwise, inputs, rate, noise_shape=None):
        if self._key is None:
            return otherwise(inputs, rate, noise_shape=noise_shape)
        seed = self._key + tf.constant([0, self._applied], tf.int64)
        self._applied += 1
        # In half precision the numbers drawn are too coarse to meet the rate.
        dropped = tf.nn.experimental.stateless_dropout(
            tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs,
            rate,
            seed,
            noise_shape=noise_shape,
            rng_alg="philox",
        )
        return tf.cast(dropped, inputs.dtype)
