"""What the exact last layer needs to know of each row of a batch."""

from typing import NamedTuple

import tensorflow as tf


class HeadRows(NamedTuple):
    """Rows r of a loss as the classifier head sees them.

    Attributes:
      features: x_r, the head's input, [R, D], of the view that carries the gradient.
      logits: [R, C], of the same view.
      gradient: g_r = d ell_r / d logits_r, [R, C], of the row's own loss: no weight, mask or
      average.
    """

    features: tf.Tensor
    logits: tf.Tensor
    gradient: tf.Tensor
