"""ReMixMatch (Berthelot et al., 2020): MixMatch with distribution alignment and augmentation
anchoring, and a second head that tells by which angle an image was turned.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config
from ssl_influence.methods import base, mixing

HISTORY = 128  # Batches that class frequencies are averaged over, as published of predictions.
ROTATIONS = 4
_FLOOR = 1e-6


class Observation(NamedTuple):
    """Class frequencies of a batch, [C] each: of its labels, and of predictions on weak views."""

    labels: tf.Tensor
    predictions: tf.Tensor


class ReMixMatch(base.StatefulMethod):
    """Cross-entropies of mixed rows, of one strong view as it is, and of telling rotations.

    The target of an unlabeled example is its prediction p on the weak view, aligned and sharpened:

        q = (a / sum a)^(1/T) / Z,      a = p * f_labels / f_predictions

    with f the mean class frequencies of the last 128 batches. It is constant, and anchors the weak
    view and K strong ones alike. The rows, each multiplied by the weight of its example:

        mixed     K + 1 views after MixUp (see `mixing`), -sum_c q~_c log p_c, of weight w
        unmixed   the first strong view, -sum_c q_c log p_c, of weight `unmixed_weight`
        rotation  that view turned by a multiple of 90 degrees (by place in the batch), the
                  cross-entropy of a second head on the model's features, of `rotation_weight`

    w and the weight of unmixed grow over `ramp_up`. In the paper "unmixed" is the pre-mixup loss.
    Labeled examples are mixed as strong views too.

    Args:
      num_classes: C.
      feature_size: D, of the second head's input.
      train_steps: length of the run.
      seed: of partners, mixing ratios and the second head.
      unsupervised_weight: w.
      ramp_up: a share of the run, see `base.ramp_up`.
      temperature: T.
      augmentations: K.
      mixup_alpha: of the Beta distribution.
      distribution_alignment: whether to align.
      unmixed_weight: 0 leaves these rows out.
      rotation_weight: 0 leaves these rows out.
      forward_pass: of all rows with a gradient, see `mixing.forward_mixed`.
    """

    labeled_view = "strong"

    def __init__(
        self,
        num_classes: int,
        feature_size: int,
        train_steps: int,
        seed: int = 0,
        *,
        unsupervised_weight: float = 1.5,
        ramp_up: float = 1 / 64,
        temperature: float = 0.5,
        augmentations: int = 8,
        mixup_alpha: float = 0.75,
        distribution_alignment: bool = True,
        unmixed_weight: float = 0.5,
        rotation_weight: float = 0.5,
        forward_pass: str = "joint",
    ):
        super().__init__(name="remixmatch")
        self.views = ("weak", *base.copies("strong", augmentations))
        self._train_steps = train_steps
        self._seed = seed
        self._weight = unsupervised_weight
        self._ramp_up = ramp_up
        self._temperature = temperature
        self._alpha = mixup_alpha
        self._unmixed_weight = unmixed_weight
        self._rotation_weight = rotation_weight
        self._forward_pass = forward_pass
        self._frequencies = None
        if distribution_alignment:
            even = tf.fill([HISTORY, num_classes], 1.0 / num_classes)
            self._frequencies = Observation(
                *(tf.Variable(even, trainable=False, name=name) for name in Observation._fields)
            )
            self._place = tf.Variable(0, trainable=False, dtype=tf.int64, name="place")
        self.rotation_head = None
        if rotation_weight:
            initializer = keras.initializers.GlorotNormal(seed=seed)
            self.rotation_head = keras.layers.Dense(
                ROTATIONS,
                kernel_initializer=initializer,
                dtype=keras.mixed_precision.global_policy().variable_dtype,
                name="rotation_head",
            )
            self.rotation_head.build([None, feature_size])

    def __call__(
        self, forward: base.Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> base.MethodOutput:
        """The losses of a batch with a weak and K strong views at a step, counted from 0."""
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        views = [unlabeled[name] for name in self.views]
        (on_weak,) = base.joint_forward(forward.constant, views[0])
        prediction = tf.stop_gradient(tf.nn.softmax(on_weak.logits))
        guess = tf.stop_gradient(
            base.sharpen(base.safe_log(self._align(prediction)), self._temperature)
        )
        label = base.one_hot(labeled["label"], guess)
        mixed = mixing.mix(
            [labeled["inputs"], *views],
            [label] + [guess] * len(views),
            self._alpha,
            self._seed,
            step,
        )
        others = {}
        if self._unmixed_weight:
            others["unmixed"] = views[1]
        if self.rotation_head is not None:
            others["rotation"], angle = rotate(views[1])
        outputs = mixing.forward_mixed(forward, self._forward_pass, mixed.inputs, *others.values())
        on_labeled, *on_mixed = outputs[: len(mixed.inputs)]
        on_others = dict(zip(others, outputs[len(mixed.inputs) :], strict=True))

        ids, ramp = unlabeled["example_id"], base.ramp_up(self._ramp_up, step, self._train_steps)

        def term(row_loss, weight, copies=1):
            coefficient = base.masked_coefficient(weight, tf.ones_like(row_loss.loss))
            return base.Term(row_loss.loss, coefficient, tf.tile(ids, [copies]), row_loss.head)

        all_mixed = base.HeadOutput(*(tf.concat(p, 0) for p in zip(*on_mixed, strict=True)))
        of_mixed = base.cross_entropy(all_mixed, tf.concat(mixed.targets[1:], 0))
        terms = {"mixed": term(of_mixed, self._weight * ramp, len(views))}
        if "unmixed" in on_others:
            of_unmixed = base.cross_entropy(on_others["unmixed"], guess)
            terms["unmixed"] = term(of_unmixed, self._unmixed_weight * ramp)
        if "rotation" in on_others:
            of_rotation = base.of_another_head(
                on_others["rotation"], self._rotation_loss(on_others["rotation"].features, angle)
            )
            terms["rotation"] = term(of_rotation, self._rotation_weight)

        supervised, labeled_head = base.cross_entropy(on_labeled, mixed.targets[0])
        mask = tf.ones_like(prediction[:, 0])
        return base.MethodOutput(
            supervised=supervised,
            supervised_coefficient=base.mean_coefficient(supervised),
            **base.join_terms(terms),
            labeled_head=labeled_head,
            metrics={
                **base.labeled_metrics(on_labeled, labeled["label"]),
                **base.unlabeled_metrics(
                    tf.argmax(guess, -1),
                    unlabeled["label"],
                    mask,
                    tf.reduce_mean(tf.reshape(of_mixed.loss, [len(views), -1]), 0),
                ),
            },
            observation=Observation(
                tf.cast(tf.reduce_mean(label, 0), tf.float32),
                tf.cast(tf.reduce_mean(prediction, 0), tf.float32),
            ),
        )

    def observe(self, observation: Observation) -> None:
        """Puts the class frequencies of a batch in the place of those 128 batches older."""
        if self._frequencies is None:
            return
        for history, frequency in zip(self._frequencies, observation, strict=True):
            # Not in place, which variables of several replicas do not know.
            place = tf.identity(self._place)[tf.newaxis, tf.newaxis]
            history.assign(
                tf.tensor_scatter_nd_update(tf.identity(history), place, frequency[tf.newaxis])
            )
        self._place.assign((self._place + 1) % HISTORY)

    def _align(self, p: tf.Tensor) -> tf.Tensor:
        if self._frequencies is None:
            return p
        labels, predictions = (tf.reduce_mean(history, 0) for history in self._frequencies)
        ratio = (_FLOOR + labels) / (_FLOOR + predictions)
        aligned = p * tf.cast(ratio, p.dtype)
        return aligned / tf.reduce_sum(aligned, -1, keepdims=True)

    def _rotation_loss(self, features: tf.Tensor, angle: tf.Tensor) -> tf.Tensor:
        logits = self.rotation_head(features)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(angle, logits)


def rotate(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Turns image r counterclockwise by r mod 4 right angles.

    Args:
      images: [B, H, H, channels].

    Returns:
      The images, and r mod 4, int32 [B].

    Raises:
      ConfigError: inputs are not square images.
    """
    if not tf.is_tensor(images):
        raise config.ConfigError(
            "Inputs of several tensors cannot be turned by right angles: use rotation_weight=0."
        )
    shape: Sequence[int | None] = images.shape
    if images.shape.rank != 4 or shape[1] != shape[2]:
        raise config.ConfigError(
            f"Inputs of shape {tuple(shape[1:])} cannot be turned by right angles, as they are no "
            "square images: use rotation_weight=0."
        )
    angle = tf.range(tf.shape(images)[0]) % ROTATIONS
    across = tf.transpose(images, [0, 2, 1, 3])
    turned = [images, across[:, ::-1], images[:, ::-1, ::-1], across[:, :, ::-1]]
    return tf.gather(tf.stack(turned, 1), angle, batch_dims=1), angle
