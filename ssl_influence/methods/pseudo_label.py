"""Pseudo-Label (Lee, 2013): the model's own most probable class as an unlabeled example's label."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence.methods import base


@dataclasses.dataclass(frozen=True)
class PseudoLabel:
    """ell_U = -log p[argmax p] on one weak view, whose current prediction is the constant label.

    Attributes:
      confidence: a row counts if max_c p is at least this; 0 lets every row count, as Lee does.
      unsupervised_weight: w.
    """

    views: ClassVar[tuple[str, ...]] = ("weak",)

    confidence: float = 0.0
    unsupervised_weight: float = 1.0

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with the view "weak", at any step."""
        del step
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        on_labeled, on_weak = base.joint_forward(forward, labeled["inputs"], unlabeled["weak"])
        supervised, labeled_head = base.sparse_cross_entropy(on_labeled, labeled["label"])
        coefficient = base.mean_coefficient(supervised)

        pseudo_label = base.predicted_class(on_weak)
        highest = tf.reduce_max(tf.nn.softmax(on_weak.logits), -1)
        mask = tf.cast(highest >= self.confidence, highest.dtype)
        unsupervised, unlabeled_head = base.sparse_cross_entropy(on_weak, pseudo_label)
        return base.MethodOutput(
            supervised=supervised,
            supervised_coefficient=coefficient,
            unsupervised=unsupervised,
            unsupervised_coefficient=base.masked_coefficient(self.unsupervised_weight, mask),
            example_id=unlabeled["example_id"],
            labeled_head=labeled_head,
            unlabeled_head=unlabeled_head,
            metrics={
                **base.labeled_metrics(on_labeled, labeled["label"]),
                **base.unlabeled_metrics(pseudo_label, unlabeled["label"], mask, unsupervised),
            },
        )
