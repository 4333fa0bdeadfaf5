"""Mean Teacher (Tarvainen & Valpola, 2017): consistency with the moving average of the weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence.methods import base


@dataclasses.dataclass(frozen=True)
class MeanTeacher:
    """ell_U = 1/C sum_c (p_c - q_c)^2, with q the teacher's prediction on another weak view.

    The teacher is the moving average of the weights that is evaluated beside them, and saved with
    them; BatchNorm normalizes its rows by their own statistics. q is constant.

    Attributes:
      train_steps: length of the run.
      unsupervised_weight: w, to which the weight of the unlabeled loss grows.
      ramp_up: over this share of the run, see `base.ramp_up`.
      forward_pass: of labeled and unlabeled rows, see `base.forward_groups`.
    """

    views: ClassVar[tuple[str, ...]] = ("weak", "weak_2")

    train_steps: int
    unsupervised_weight: float = 50.0
    ramp_up: float = 0.4
    forward_pass: str = "joint"

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with views "weak" and "weak_2" at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        (of_teacher,) = base.joint_forward(forward.teacher, unlabeled["weak"])
        on_labeled, on_weak = base.forward_groups(
            forward, self.forward_pass, labeled["inputs"], unlabeled["weak_2"]
        )
        consistency = base.brier(on_weak, tf.nn.softmax(of_teacher.logits))
        return base.one_row_each(
            on_labeled,
            labeled,
            unlabeled,
            consistency,
            weight=self.unsupervised_weight * base.ramp_up(self.ramp_up, step, self.train_steps),
            mask=tf.ones_like(consistency.loss),
            prediction=base.predicted_class(of_teacher),
        )
