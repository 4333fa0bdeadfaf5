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
      train_steps: length of the run.
      confidence: a row counts if max_c p is above this; 0 lets every row count, as Lee does.
      unsupervised_weight: w, to which the weight of the unlabeled loss grows.
      ramp_up: over this share of the run, see `base.ramp_up`.
      forward_pass: of labeled and unlabeled rows, see `base.forward_groups`.
    """

    views: ClassVar[tuple[str, ...]] = ("weak",)

    train_steps: int
    confidence: float = 0.95
    unsupervised_weight: float = 1.0
    ramp_up: float = 0.4
    forward_pass: str = "joint"

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with the view "weak" at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        on_labeled, on_weak = base.forward_groups(
            forward, self.forward_pass, labeled["inputs"], unlabeled["weak"]
        )
        pseudo_label = base.predicted_class(on_weak)
        highest = tf.reduce_max(tf.nn.softmax(on_weak.logits), -1)
        return base.one_row_each(
            on_labeled,
            labeled,
            unlabeled,
            base.sparse_cross_entropy(on_weak, pseudo_label),
            weight=self.unsupervised_weight * base.ramp_up(self.ramp_up, step, self.train_steps),
            mask=tf.cast(highest > self.confidence, highest.dtype),
            prediction=pseudo_label,
        )
