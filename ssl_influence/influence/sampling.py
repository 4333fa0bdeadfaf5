"""Rows drawn for the stochastic products of LiSSA."""

import tensorflow as tf


def counts(
    row_weight: tf.Tensor, rows: int, seed: tf.Tensor, iteration: int | tf.Tensor
) -> tf.Tensor:
    """How often each row is drawn, scaled to a mean of 1.

    Args:
      row_weight: a tensor [n], for its length and dtype.
      rows: draws, with replacement, all rows alike.
      seed: [2] integers; with the iteration it determines the draws.
      iteration: of the solver.

    Returns:
      [n], so that a sum over rows weighted by it has the whole sum for its mean.
    """
    n = tf.shape(row_weight)[0]
    # The generator is named, as what is chosen otherwise is another one under XLA.
    seed = tf.random.experimental.stateless_fold_in(
        tf.cast(seed, tf.int32), tf.cast(iteration, tf.int32), alg="philox"
    )
    drawn = tf.random.stateless_uniform([rows], seed, 0, n, tf.int32, alg="philox")
    found = tf.reduce_sum(tf.one_hot(drawn, n, dtype=row_weight.dtype), axis=0)
    return found * tf.cast(n, row_weight.dtype) / tf.cast(rows, row_weight.dtype)
