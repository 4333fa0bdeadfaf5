"""MixMatch (Berthelot et al., 2019): guessed labels, sharpened, and MixUp of all rows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ssl_influence.methods import base, mixing


@dataclasses.dataclass(frozen=True)
class MixMatch:
    """ell_S = -sum_c q~_c log p_c and ell_U = 1/C sum_c (p_c - q~_c)^2, on rows mixed by MixUp.

    The target q of an unlabeled example is the mean prediction on its K weak views, sharpened by T
    and constant; that of a labeled one is its label. See `mixing` for the mixed rows and whose
    weight they carry. The K views are passed together, for a mean that no gradient flows through.

    Attributes:
      train_steps: length of the run.
      seed: of partners and mixing ratios.
      unsupervised_weight: w, to which the weight of the unlabeled loss grows.
      ramp_up: over this share of the run, see `base.ramp_up`.
      temperature: T.
      augmentations: K.
      mixup_alpha: of the Beta distribution.
      forward_pass: of the mixed rows, see `mixing.forward_mixed`.
    """

    train_steps: int
    seed: int = 0
    unsupervised_weight: float = 100.0
    ramp_up: float = 1 / 64
    temperature: float = 0.5
    augmentations: int = 2
    mixup_alpha: float = 0.5
    forward_pass: str = "joint"

    @property
    def views(self) -> tuple[str, ...]:
        """The K weak views."""
        return base.copies("weak", self.augmentations)

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with K weak views at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        views = [unlabeled[name] for name in self.views]
        on_views = base.joint_forward(forward.constant, *views)
        predictions = [tf.nn.softmax(output.logits) for output in on_views]
        guess = tf.stop_gradient(
            base.sharpen(base.safe_log(tf.add_n(predictions) / len(predictions)), self.temperature)
        )
        label = base.one_hot(labeled["label"], guess)
        mixed = mixing.mix(
            [labeled["inputs"], *views],
            [label] + [guess] * len(views),
            self.mixup_alpha,
            self.seed,
            step,
        )
        on_labeled, *on_unlabeled = mixing.forward_mixed(forward, self.forward_pass, mixed.inputs)
        supervised, labeled_head = base.cross_entropy(on_labeled, mixed.targets[0])
        unsupervised, unlabeled_head = base.brier(
            base.HeadOutput(*(tf.concat(parts, 0) for parts in zip(*on_unlabeled, strict=True))),
            tf.concat(mixed.targets[1:], 0),
        )
        weight = self.unsupervised_weight * base.ramp_up(self.ramp_up, step, self.train_steps)
        mask = tf.ones_like(unsupervised)
        return base.MethodOutput(
            supervised=supervised,
            supervised_coefficient=base.mean_coefficient(supervised),
            unsupervised=unsupervised,
            unsupervised_coefficient=base.masked_coefficient(weight, mask),
            example_id=tf.tile(unlabeled["example_id"], [len(views)]),
            labeled_head=labeled_head,
            unlabeled_head=unlabeled_head,
            metrics={
                **base.labeled_metrics(on_labeled, labeled["label"]),
                **base.unlabeled_metrics(
                    tf.tile(tf.argmax(guess, -1), [len(views)]),
                    tf.tile(unlabeled["label"], [len(views)]),
                    mask,
                    unsupervised,
                ),
            },
        )
