"""FixMatch (Sohn et al., 2020): the pseudo-label of a weak view, learned on a strong one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence.methods import base


@dataclasses.dataclass(frozen=True)
class FixMatch:
    """ell_U = -log p_strong[argmax p_weak], with p_weak held constant.

    What makes strong views, RandAugment or CTAugment, is a matter of `config.AugmentConfig`.

    Attributes:
      confidence: a row counts if max_c p_weak is at least this.
      unsupervised_weight: w.
      target_forward: "joint" or "separate", see `base.forward_with_target`.
    """

    views: ClassVar[tuple[str, ...]] = ("weak", "strong")

    confidence: float = 0.95
    unsupervised_weight: float = 1.0
    target_forward: str = "joint"

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with views "weak" and "strong", at any step."""
        del step
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        on_labeled, on_weak, on_strong = base.forward_with_target(
            forward, self.target_forward, labeled["inputs"], unlabeled["weak"], unlabeled["strong"]
        )
        pseudo_label = base.predicted_class(on_weak)
        highest = tf.reduce_max(tf.nn.softmax(on_weak.logits), -1)
        return base.one_row_each(
            on_labeled,
            labeled,
            unlabeled,
            base.sparse_cross_entropy(on_strong, pseudo_label),
            weight=self.unsupervised_weight,
            mask=tf.cast(highest >= self.confidence, highest.dtype),
            prediction=pseudo_label,
        )
