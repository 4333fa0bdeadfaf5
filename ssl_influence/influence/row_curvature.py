"""The curvature of the rows' losses by their logits.

With p = softmax(logits) and J = diag p - p p^T, the curvature of each loss in use is a

    A = w J + v J J

where J is that of a cross-entropy or divergence to a constant target, exactly, and (2/C) J J the
Gauss-Newton curvature of the Brier score (1/C) sum_c (p_c - q_c)^2, whose gradient is
(2/C) J (p - q). What it leaves out, (2/C) sum_c (p_c - q_c) d^2 p_c, vanishes where p = q.

Let Pi = I - p 1^T. Since Pi p = 0, J = Pi diag(p) Pi^T and J J = Pi diag(p^2) Pi^T, and hence

    A = Pi diag(a) Pi^T = diag(a) - b p^T - p b^T,      a = w p + v p^2,    b = a - p sum(a) / 2

The binary head has the one logit f, the two logits (f/2, -f/2), and p = sigmoid(f). By f the two J
become p (1 - p), and J J becomes 2 p^2 (1 - p)^2: the Brier score, still the mean over two classes,
is (p - q)^2. Both are multiples of p (1 - p), so that v is no more than a part of w there.
"""

from typing import NamedTuple

import tensorflow as tf

from ssl_influence import config, head_rows


class RowCurvature(NamedTuple):
    """A_i of rows i; without J J in fewer operations. See `of` for the binary head.

    Attributes:
      p: [n, C], or [n, 1] of the binary head.
      weight: w [n].
      squared_weight: v [n]; None is 0, as always in the binary head.
    """

    p: tf.Tensor
    weight: tf.Tensor
    squared_weight: tf.Tensor | None = None

    @classmethod
    def of(
        cls, p: tf.Tensor, weight: tf.Tensor, squared_weight: tf.Tensor | None = None
    ) -> "RowCurvature":
        """The same for v that may be given for the binary head too, where it is made part of w."""
        if squared_weight is None or p.shape[1] != 1:
            return cls(p, weight, squared_weight)
        return cls(p, weight + 2 * squared_weight * (p * (1 - p))[:, 0])

    def times(self, tangent: tf.Tensor) -> tf.Tensor:
        """A_i t_i of each row, [n, C], for t [n, C]."""
        if self.squared_weight is None:
            z = tangent * self.p
            return self.weight[:, tf.newaxis] * (z - self.p * _row_sum(z))
        z = self.spread() * (tangent - _row_sum(tangent * self.p))
        return z - self.p * _row_sum(z)

    def spread(self) -> tf.Tensor:
        """a, [n, C]."""
        weight = self.weight[:, tf.newaxis]
        if self.squared_weight is None:
            return weight * self.p
        return (weight + self.squared_weight[:, tf.newaxis] * self.p) * self.p

    def diagonal(self) -> tf.Tensor:
        """The diagonals of the A_i, [n, C]."""
        if self.squared_weight is None:
            return self.weight[:, tf.newaxis] * self.p * (1 - self.p)
        a = self.spread()
        return a * (1 - self.p) ** 2 + self.p**2 * (_row_sum(a) - a)

    def absolute(self) -> "RowCurvature":
        """The same with |w| and |v|."""
        v = None if self.squared_weight is None else tf.abs(self.squared_weight)
        return self._replace(weight=tf.abs(self.weight), squared_weight=v)

    def root(self) -> tf.Tensor:
        """B_i with B_i B_i^T = A_i, [n, C, C]; entries of a below 0 count as 0."""
        root = tf.sqrt(tf.maximum(self.spread(), 0))
        if self.p.shape[1] == 1:
            return (root * tf.sqrt(1 - self.p))[:, :, tf.newaxis]
        return tf.linalg.diag(root) - self.p[:, :, tf.newaxis] * root[:, tf.newaxis, :]

    def outer(self, features: tf.Tensor) -> tf.Tensor:
        """sum_i (x_i x_i^T) (x) (diag a_i - A_i), [D*C, D*C], for x [n, D]: one matrix product."""

        def rows(factor):
            return tf.reshape(features[:, :, tf.newaxis] * factor[:, tf.newaxis, :], [-1, size])

        size = tf.shape(features)[1] * tf.shape(self.p)[1]
        left = rows(self.p)
        if self.squared_weight is None:
            return tf.matmul(left, self.weight[:, tf.newaxis] * left, transpose_a=True)
        a = self.spread()
        half = tf.matmul(left, rows(a - self.p * _row_sum(a) / 2), transpose_a=True)
        return half + tf.transpose(half)


class Shares(NamedTuple):
    """How much of J_i and of J_i J_i is in the curvature of each row's loss, without its weight.

    Attributes:
      cross_entropy: [n]; None is 1 in every row.
      brier: [n]; None is 0 in every row.
      exact: whether that is all of the curvature.
    """

    cross_entropy: tf.Tensor | None = None
    brier: tf.Tensor | None = None
    exact: bool = True

    @classmethod
    def of(cls, *heads: head_rows.HeadRows) -> "Shares":
        """Those of the rows of several heads, one after the other."""
        return cls(*head_rows.joined_shares(*heads))

    def weights(self, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """w_i and v_i, [n] each, of rows that are weighted by `weight` [n]."""
        w = weight if self.cross_entropy is None else weight * _like(self.cross_entropy, weight)
        return w, None if self.brier is None else weight * _like(self.brier, weight)

    def require_cross_entropy(self) -> None:
        """Raises ConfigError unless the losses are cross-entropies to constant targets."""
        given = [name for name in ("cross_entropy", "brier") if getattr(self, name) is not None]
        if given or not self.exact:
            what = f"rows with {' and '.join(given)}" if given else "rows with exact=False"
            raise config.ConfigError(
                f"inverse_hessian=unrolled follows cross-entropies to constant targets, and there "
                f"are {what}: use another inverse_hessian."
            )


def _row_sum(rows):
    return tf.reduce_sum(rows, axis=1, keepdims=True)


def _like(share, weight):
    return tf.cast(share, weight.dtype)
