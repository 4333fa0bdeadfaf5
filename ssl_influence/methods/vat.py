"""Virtual adversarial training (Miyato et al., 2018), with entropy minimization."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from ssl_influence import config
from ssl_influence.methods import base


@dataclasses.dataclass(frozen=True)
class VAT:
    """Consistency under the perturbation that changes the prediction most.

    On a weak view x, with p the prediction there, held constant:

        r = radius * d / |d|,   d the leading eigenvector of the Hessian of KL(p || p_{x + d}) at 0
        ell_U = KL(p || p_{x + r}),   and as rows of their own   ell_U = -sum_c p_c log p_c

    d is sought by power iteration from a random direction: each turn replaces d, of length 1, by
    the gradient of the divergence at `probe` * d, which is the Hessian times that to first order,
    as the gradient at 0 vanishes. BatchNorm normalizes these passes by the unlabeled rows' own
    statistics. r is constant.

    An example has two rows, both multiplied by its weight; the second is left out if entropy_weight
    is 0.

    Attributes:
      train_steps: length of the run.
      seed: of the directions that the power iteration starts with.
      unsupervised_weight: w, to which the weight of the divergence grows.
      ramp_up: over this share of the run, see `base.ramp_up`.
      radius: |r| of each example, in the units of the model's inputs.
      probe: xi, the length of the step that the gradient is taken at; 0.01 is for float32, and far
        below what half precision resolves.
      iterations: of the power iteration.
      entropy_weight: of the entropy, from the start.
      forward_pass: of labeled, unlabeled and perturbed rows, see `base.forward_groups`.
    """

    views: ClassVar[tuple[str, ...]] = ("weak",)

    train_steps: int
    seed: int = 0
    unsupervised_weight: float = 0.3
    ramp_up: float = 0.4
    radius: float = 6.0
    probe: float = 1e-2
    iterations: int = 1
    entropy_weight: float = 0.06
    forward_pass: str = "joint"

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with the view "weak" at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        weak = unlabeled["weak"]
        if not (tf.is_tensor(weak) and weak.dtype.is_floating):
            raise config.ConfigError(
                "method=vat perturbs inputs of a single floating tensor, and these are "
                f"{tf.nest.map_structure(lambda t: t.dtype.name, weak)}: use another method."
            )
        start = tf.random.stateless_normal(
            tf.shape(weak), base.step_seed(self.seed, step, 0), dtype=weak.dtype, alg="philox"
        )
        direction = adversarial_direction(
            forward.constant, weak, start, probe=self.probe, iterations=self.iterations
        )
        on_labeled, on_weak, on_perturbed = base.forward_groups(
            forward,
            self.forward_pass,
            labeled["inputs"],
            weak,
            weak + self.radius * direction,
        )
        supervised, labeled_head = base.sparse_cross_entropy(on_labeled, labeled["label"])
        weight = self.unsupervised_weight * base.ramp_up(self.ramp_up, step, self.train_steps)
        divergence, head = base.kl_divergence(on_perturbed, tf.nn.softmax(on_weak.logits))
        mask = tf.ones_like(divergence)
        ids = unlabeled["example_id"]
        terms = {"vat": base.Term(divergence, base.masked_coefficient(weight, mask), ids, head)}
        if self.entropy_weight:
            entropy, head = base.entropy(on_weak)
            coefficient = base.masked_coefficient(self.entropy_weight, mask)
            terms["entropy"] = base.Term(entropy, coefficient, ids, head)
        return base.MethodOutput(
            supervised=supervised,
            supervised_coefficient=base.mean_coefficient(supervised),
            **base.join_terms(terms),
            labeled_head=labeled_head,
            metrics={
                **base.labeled_metrics(on_labeled, labeled["label"]),
                **base.unlabeled_metrics(
                    base.predicted_class(on_weak), unlabeled["label"], mask, divergence
                ),
            },
        )


def adversarial_direction(
    forward: base.Pass, inputs: tf.Tensor, start: tf.Tensor, *, probe: float, iterations: int
) -> tf.Tensor:
    """Unit vectors d along which KL(p_x || p_{x + d}) grows fastest, by power iteration.

    Args:
      forward: a pass that changes nothing, as `Forward.constant`.
      inputs: x [B, ...], floating.
      start: the directions to begin with, of the inputs' shape.
      probe: xi, the length of the step that the gradient is taken at.
      iterations: how often.

    Returns:
      [B, ...], constant; 0 for an example whose prediction does not change along its direction.
    """
    (at_inputs,) = base.joint_forward(forward, inputs)
    p = tf.stop_gradient(tf.nn.softmax(at_inputs.logits))
    direction = unit(start)
    for _ in range(iterations):
        with tf.GradientTape() as tape:
            tape.watch(direction)
            (moved,) = base.joint_forward(forward, inputs + probe * direction)
            divergence = tf.reduce_sum(base.kl_divergence(moved, p).loss)
        direction = unit(tape.gradient(divergence, direction))
    return tf.stop_gradient(direction)


def unit(vector: tf.Tensor) -> tf.Tensor:
    """Each example of a batch [B, ...] divided by its Euclidean length; 0 stays 0."""
    axes = list(range(1, vector.shape.rank))
    # In units of the largest entry: the square of a small one may underflow.
    largest = tf.reduce_max(tf.abs(vector), axes, keepdims=True)
    vector = tf.math.divide_no_nan(vector, largest)
    return tf.math.divide_no_nan(vector, tf.sqrt(tf.reduce_sum(vector**2, axes, keepdims=True)))
