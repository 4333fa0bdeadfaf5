"""What the exact last layer needs to know of each row of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class HeadRows(NamedTuple):
    """Rows r of a loss as the classifier head sees them.

    With p = softmax(logits_r) and J_r = diag p - p p^T, the curvature of a row's loss by its logits
    is taken as A_r = cross_entropy_r J_r + brier_r J_r J_r. The first is that of a cross-entropy or
    divergence to a constant target, exactly. The second is the Gauss-Newton curvature of the Brier
    score: 2/C J J for its mean over the classes.

    Attributes:
      features: x_r, the head's input, [R, D], of the view that carries the gradient.
      logits: [R, C], of the same view.
      gradient: g_r = d ell_r / d logits_r, [R, C], of the row's own loss: no weight, mask or
        average.
      cross_entropy: [R], the share of J_r in A_r; None is 1 in every row.
      brier: [R], the share of J_r J_r in A_r; None is 0 in every row.
      exact: whether A_r is all of the curvature: not where a Brier score or an entropy is.
    """

    features: tf.Tensor
    logits: tf.Tensor
    gradient: tf.Tensor
    cross_entropy: tf.Tensor | None = None
    brier: tf.Tensor | None = None
    exact: bool = True


def join(*rows: HeadRows) -> HeadRows:
    """Rows of several losses, one after the other."""
    tensors = zip(*(part[:3] for part in rows), strict=True)
    return HeadRows(*(tf.concat(parts, 0) for parts in tensors), *joined_shares(*rows))


def joined_shares(*rows: Any) -> tuple[tf.Tensor | None, tf.Tensor | None, bool]:
    """`cross_entropy`, `brier` and `exact` of such rows, of anything with these and `logits`."""

    def joined(name: str, default: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor | None:
        shares = [getattr(part, name) for part in rows]
        if all(share is None for share in shares):
            return None
        return tf.concat(
            [
                default(part.logits[:, 0]) if share is None else tf.cast(share, part.logits.dtype)
                for share, part in zip(shares, rows, strict=True)
            ],
            0,
        )

    exact = all(part.exact for part in rows)
    return joined("cross_entropy", tf.ones_like), joined("brier", tf.zeros_like), exact
