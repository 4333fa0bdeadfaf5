"""Training on the labeled examples alone, the baseline beside every SSL algorithm."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence import head_rows
from ssl_influence.methods import base


@dataclasses.dataclass(frozen=True)
class Supervised:
    """Mean cross-entropy of the labeled examples; no unlabeled rows (R = 0), nor metrics of any."""

    views: ClassVar[tuple[str, ...]] = ()

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of `batch["labeled"]`, at any step; nothing else of the batch is read."""
        del step
        labeled = batch["labeled"]
        (on_labeled,) = base.joint_forward(forward, labeled["inputs"])
        supervised, labeled_head = base.sparse_cross_entropy(on_labeled, labeled["label"])
        coefficient = base.mean_coefficient(supervised)
        return base.MethodOutput(
            supervised=supervised,
            supervised_coefficient=coefficient,
            unsupervised=supervised[:0],
            unsupervised_coefficient=coefficient[:0],
            example_id=tf.zeros([0], tf.int64),
            labeled_head=labeled_head,
            unlabeled_head=head_rows.HeadRows(*(tensor[:0] for tensor in labeled_head[:3])),
            metrics=base.labeled_metrics(on_labeled, labeled["label"]),
        )
