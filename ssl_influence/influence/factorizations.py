"""Factorizations of symmetric matrices that say when they failed, in a graph too."""

import tensorflow as tf

from ssl_influence.influence import numerics


def cholesky(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The lower factor of a positive matrix, and whether it is one.

    On CPU TensorFlow gives NaN or anything at all for another matrix, without an error.

    Args:
      matrix: symmetric, [P, P].

    Returns:
      The factor [P, P], or the identity where there is none; and a scalar bool, False where the
      matrix is indefinite, not finite, or singular to within rounding.
    """
    factor = tf.linalg.cholesky(matrix)
    vector = probe(matrix)
    expected = tf.matmul(matrix, vector)
    found = tf.matmul(factor, tf.matmul(factor, vector, transpose_a=True))
    pivots = tf.linalg.diag_part(factor) ** 2 / tf.linalg.diag_part(matrix)
    done = (
        tf.reduce_all(tf.math.is_finite(factor))
        & (tf.norm(found - expected) <= 1e-3 * tf.norm(expected))
        & tf.reduce_all(pivots > 30 * numerics.epsilon(matrix.dtype))
    )
    return tf.where(done, factor, identity_like(matrix)), done


def eigh(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Eigenvalues [P], ascending, and vectors [P, P]; those of I where the matrix is not finite."""
    # The decomposition raises on such a matrix, in a graph too; the residual tells of it.
    finite = tf.reduce_all(tf.math.is_finite(matrix))
    return tf.linalg.eigh(tf.where(finite, matrix, identity_like(matrix)))


def probe(matrix: tf.Tensor) -> tf.Tensor:
    """A fixed vector [P, 1] with a share of whatever an eigenvector may be."""
    vector = tf.cos(tf.range(tf.shape(matrix)[0], dtype=tf.float32))
    return tf.cast(vector, matrix.dtype)[:, tf.newaxis]


def identity_like(matrix: tf.Tensor) -> tf.Tensor:
    """I of the matrix's size and dtype."""
    return tf.eye(tf.shape(matrix)[0], dtype=matrix.dtype)
