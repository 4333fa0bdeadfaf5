"""Unsupervised Data Augmentation (Xie et al., 2020): consistency of a weak and a strong view."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence import replicas
from ssl_influence.methods import base

TSA_SCALE = 5.0


def tsa_threshold(
    schedule: str, step: int | tf.Tensor, train_steps: int, num_classes: int
) -> tf.Tensor:
    """eta_t = alpha_t + (1 - alpha_t) / C, the threshold of annealing (UDA section 2.4).

    With progress s = step / train_steps, held at 1 beyond the end, alpha_t is s ("linear"),
    1 - exp(-5 s) ("log", from 0 to 0.993) or exp(5 (s - 1)) ("exp", from 0.007 to 1).

    Returns:
      A float32 scalar.

    Raises:
      ValueError: for a schedule of another name.
    """
    progress = tf.minimum(tf.cast(step, tf.float32) / train_steps, 1.0)
    if schedule == "linear":
        alpha = progress
    elif schedule == "log":
        alpha = 1.0 - tf.exp(-TSA_SCALE * progress)
    elif schedule == "exp":
        alpha = tf.exp(TSA_SCALE * (progress - 1.0))
    else:
        raise ValueError(f"tsa={schedule!r} has no threshold: use linear, log or exp.")
    return alpha + (1.0 - alpha) / num_classes


def tsa_keep(logits: tf.Tensor, label: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """0 for a labeled row whose true class is more probable than the threshold, else 1, [B_l].

    Args:
      logits: [B_l, C].
      label: [B_l] int.
      threshold: eta_t, a scalar.
    """
    probability = tf.nn.softmax(tf.stop_gradient(logits))
    of_truth = tf.reduce_sum(base.one_hot(label, logits) * probability, -1)
    return tf.cast(of_truth <= tf.cast(threshold, logits.dtype), logits.dtype)


@dataclasses.dataclass(frozen=True)
class UDA:
    """ell_U = KL(q || p_strong), with q the sharpened prediction on the weak view, held constant.

    A row counts once the unsharpened prediction on its weak view is above `confidence`, strictly. T
    tempers the target alone: neither the mask nor p_strong.

    Attributes:
      num_classes: C, the start 1/C of training signal annealing.
      train_steps: length of that schedule.
      confidence: the mask's threshold on max_c p_weak.
      temperature: T.
      unsupervised_weight: w.
      tsa: "none", "linear", "log" or "exp": training signal annealing. With it a_l is
        kept_l / max(sum kept, 1), and the metric "tsa_kept_rate" is the share of labeled rows kept.
      target_forward: "joint" or "separate", see `base.forward_with_target`.
    """

    views: ClassVar[tuple[str, ...]] = ("weak", "strong")

    num_classes: int
    train_steps: int
    confidence: float = 0.8
    temperature: float = 0.4
    unsupervised_weight: float = 1.0
    tsa: str = "none"
    target_forward: str = "joint"

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with views "weak" and "strong" at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        on_labeled, on_weak, on_strong = base.forward_with_target(
            forward, self.target_forward, labeled["inputs"], unlabeled["weak"], unlabeled["strong"]
        )
        highest = tf.reduce_max(tf.nn.softmax(on_weak.logits), -1)
        target = tf.nn.log_softmax(on_weak.logits)
        output = base.one_row_each(
            on_labeled,
            labeled,
            unlabeled,
            base.kl_divergence(on_strong, base.sharpen(target, self.temperature)),
            weight=self.unsupervised_weight,
            mask=tf.cast(highest > self.confidence, highest.dtype),
            prediction=base.predicted_class(on_weak),
        )
        if self.tsa == "none":
            return output
        threshold = tsa_threshold(self.tsa, step, self.train_steps, self.num_classes)
        kept = tsa_keep(on_labeled.logits, labeled["label"], threshold)
        return output._replace(
            supervised_coefficient=kept
            / tf.maximum(replicas.total(tf.reduce_sum(kept)), tf.ones([], kept.dtype)),
            metrics={
                **output.metrics,
                "tsa_kept_rate": tf.cast(tf.reduce_mean(kept), tf.float32),
            },
        )
