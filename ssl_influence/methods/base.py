"""What every SSL base algorithm shares: its interface, the joint forward pass and per-row losses.

A method turns a batch into losses that keep their batch axis. With a_l, c_r and lambda_r the
coefficients of labeled rows, of unlabeled rows, and the example weights, the objective is

    L(theta) = sum_l a_l ell_S(l) + sum_r c_r lambda_id(r) ell_U(r) + 1/2 sum_v l2_v |theta_v|^2

(the paper's eq. semi, averaged over the batch). The caller multiplies by lambda and reduces, once.
Where several replicas share the batch, a method is called by each with its part of the rows, and
coefficients are those of the whole: B_l, B_u and R count the rows of all.
Losses are computed in float32 at least: half-precision outputs of a model are cast first.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from ssl_influence import head_rows, replicas

Pass = Callable[[Any], tuple[tf.Tensor, tf.Tensor]]


class Forward(NamedTuple):
    """The model in training mode, four ways of calling it; `forward(inputs)` is `train`.

    All map inputs to (features [B, D], logits [B, C]) and let BatchNorm normalize by the batch.

    Attributes:
      train: the pass that carries the gradient and updates BatchNorm's moving statistics.
      constant: a pass that leaves no trace: the caller's gradient tape does not record it, so that
        no activation of it is kept, and moving statistics stay as they are. A tape of the method's
        own does record it.
      still: carries the gradient, and leaves moving statistics as they are.
      teacher: as `constant`, by the moving average of the weights.
    """

    train: Pass
    constant: Pass
    still: Pass
    teacher: Pass

    def __call__(self, inputs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """`train`."""
        return self.train(inputs)


class MethodOutput(NamedTuple):
    """The losses of one batch, row by row. With K views of each example R = K B_u.

    Attributes:
      supervised: ell_S, [B_l].
      supervised_coefficient: a_l, [B_l].
      unsupervised: ell_U(r), [R], unmasked and without lambda.
      unsupervised_coefficient: c_r = w m_r / R, [R]: all that multiplies ell_U(r) but lambda.
      example_id: whose lambda multiplies row r, [R] int64.
      labeled_head: the labeled rows as the classifier head sees them.
      unlabeled_head: the unlabeled rows likewise, of the view that carries the gradient.
      metrics: float32 scalars, or pairs (sum, count), by name; see `labeled_metrics` and
        `unlabeled_metrics`.
      terms: ell_U by the name of the term, where the method has several: one after the other they
        are `unsupervised`.
      observation: what a `StatefulMethod` is to remember of this batch.
    """

    supervised: tf.Tensor
    supervised_coefficient: tf.Tensor
    unsupervised: tf.Tensor
    unsupervised_coefficient: tf.Tensor
    example_id: tf.Tensor
    labeled_head: head_rows.HeadRows
    unlabeled_head: head_rows.HeadRows
    metrics: dict[str, tf.Tensor]
    terms: dict[str, tf.Tensor] = {}
    observation: Any = None


class Method(Protocol):
    """An SSL base algorithm.

    `views` names the augmented views that it reads of unlabeled examples, and `labeled_view`, where
    it has one, that of labeled examples, else "weak"; see `labeled_view_of`. A method may call
    `forward` more than once; one that asks for `forward.train` alone takes any function. Calling it
    changes nothing but what the model's own pass does; see `StatefulMethod` for a state.
    """

    views: tuple[str, ...]

    def __call__(
        self, forward: Forward, batch: Mapping[str, Any], step: int | tf.Tensor
    ) -> MethodOutput:
        """The losses of a batch at a step, counted from 0."""


def labeled_view_of(method: Method) -> str:
    """The view of labeled examples that a method is trained on."""
    return getattr(method, "labeled_view", "weak")


class StatefulMethod(tf.Module):
    """A `Method` with variables: they are in the checkpoint, and trainable ones are part of theta.

    Weight steps call a method without a step of theta. What it remembers of batches therefore moves
    in `observe` alone, which is called once after each step of theta.
    """

    def observe(self, observation: Any) -> None:
        """Takes in the `observation` of the batch that theta was just moved by."""


class Term(NamedTuple):
    """Some of the unlabeled rows, those of one term of the objective.

    Attributes:
      loss: ell_U(r), [r].
      coefficient: c_r, [r].
      example_id: [r] int64.
      head: these rows as the classifier head sees them.
    """

    loss: tf.Tensor
    coefficient: tf.Tensor
    example_id: tf.Tensor
    head: head_rows.HeadRows


class HeadOutput(NamedTuple):
    """The head's input and output for some rows: features [R, D] and logits [R, C]."""

    features: tf.Tensor
    logits: tf.Tensor


class RowLoss(NamedTuple):
    """A loss [R] and the same rows as the head sees them."""

    loss: tf.Tensor
    head: head_rows.HeadRows


def joint_forward(forward: Pass, *parts: Any) -> tuple[HeadOutput, ...]:
    """One forward pass over all `parts`, concatenated, and its outputs split again.

    BatchNorm thus normalizes labeled rows and every view by statistics of all of them, as in the
    published codes of UDA and FixMatch. Parts are tensors, or nests of tensors of one structure.
    """
    sizes = [rows(tf.nest.flatten(part)[0]) for part in parts]
    inputs = tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *parts)
    features, logits = (at_least_float32(output) for output in forward(inputs))
    return tuple(map(HeadOutput, tf.split(features, sizes), tf.split(logits, sizes)))


def forward_with_target(
    forward: Forward, target_forward: str, labeled: Any, target: Any, *others: Any
) -> tuple[HeadOutput, ...]:
    """The outputs for labeled inputs, for the view that gives the target, and for other views.

    The target's are constants. How they come about is `target_forward`:

    - "joint": by `joint_forward` of all rows, as in the published codes. Through the statistics
      that BatchNorm shares between the rows, gradients then flow into the target's rows too.
    - "separate": by a pass of their own, `forward.constant`, which normalizes them by their own
      statistics and has no backward pass; all other rows share `joint_forward`. Moving statistics
      are those of the other rows alone, updated once a step: theta is trained under these, and a
      second update would square the momentum. Without BatchNorm, losses and gradients are those of
      "joint".
    """
    if target_forward == "separate":
        (on_target,) = joint_forward(forward.constant, target)
        on_labeled, *on_others = joint_forward(forward, labeled, *others)
    else:
        on_labeled, on_target, *on_others = joint_forward(forward, labeled, target, *others)
    return on_labeled, HeadOutput(*map(tf.stop_gradient, on_target)), *on_others


def forward_groups(forward: Forward, mode: str, *parts: Any) -> tuple[HeadOutput, ...]:
    """The outputs for each of the parts, all with their gradients.

    - "joint": by `joint_forward`, so that BatchNorm normalizes all rows by statistics they share,
      and its moving statistics are of them all.
    - "separate": by one pass for each part, which BatchNorm normalizes by its own statistics. The
      moving statistics are of the first part alone, as in the code of FixMatch's baselines.
    """
    if mode == "joint":
        return joint_forward(forward, *parts)
    first, *others = parts
    outputs = [joint_forward(forward, first)]
    outputs += [joint_forward(forward.still, part) for part in others]
    return tuple(output for (output,) in outputs)


def sparse_cross_entropy(output: HeadOutput, label: tf.Tensor) -> RowLoss:
    """Cross-entropy -log p[label] for labels [R] in 0..C-1, p = softmax(logits); g = p - onehot."""
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, output.logits)
    return RowLoss(loss, _rows_with_target(output, one_hot(label, output.logits)))


def cross_entropy(output: HeadOutput, target: tf.Tensor) -> RowLoss:
    """Cross-entropy -sum_c q_c log p_c to a constant q [R, C] whose rows sum to 1; g = p - q."""
    target = tf.stop_gradient(target)
    loss = -tf.reduce_sum(target * tf.nn.log_softmax(output.logits), -1)
    return RowLoss(loss, _rows_with_target(output, target))


def kl_divergence(output: HeadOutput, target: tf.Tensor) -> RowLoss:
    """Divergence KL(q || p) from a constant target q [R, C] whose rows sum to 1; g = p - q."""
    target = tf.stop_gradient(target)
    log_p = tf.nn.log_softmax(output.logits)
    loss = tf.reduce_sum(tf.math.xlogy(target, target) - target * log_p, -1)
    return RowLoss(loss, _rows_with_target(output, target))


def brier(output: HeadOutput, target: tf.Tensor) -> RowLoss:
    """The mean over classes of (p_c - q_c)^2 for a constant target q [R, C]; g = 2/C J (p - q).

    Its curvature by the logits is taken as 2/C J J, that of Gauss-Newton: what it leaves out is 0
    where p = q.
    """
    target = tf.stop_gradient(target)
    p = tf.nn.softmax(output.logits)
    error = tf.stop_gradient(p - target)
    scale = 2.0 / tf.cast(_columns(p), p.dtype)
    head = head_rows.HeadRows(
        output.features,
        output.logits,
        scale * _softmax_jacobian(tf.stop_gradient(p), error),
        cross_entropy=tf.zeros_like(p[:, 0]),
        brier=scale * tf.ones_like(p[:, 0]),
        exact=False,
    )
    return RowLoss(tf.reduce_mean((p - target) ** 2, -1), head)


def entropy(output: HeadOutput) -> RowLoss:
    """-sum_c p_c log p_c of each row; g = -J log p. It is not convex: its curvature is left out."""
    log_p = tf.nn.log_softmax(output.logits)
    p = tf.exp(log_p)
    gradient = tf.stop_gradient(-_softmax_jacobian(p, log_p))
    head = _flat_rows(output, gradient)._replace(exact=False)
    return RowLoss(-tf.reduce_sum(p * log_p, -1), head)


def of_another_head(output: HeadOutput, loss: tf.Tensor) -> RowLoss:
    """A loss [R] that the classifier's logits have no part in, as that of a second head: g = 0."""
    return RowLoss(loss, _flat_rows(output, tf.zeros_like(output.logits)))


def one_row_each(
    on_labeled: HeadOutput,
    labeled: Mapping[str, Any],
    unlabeled: Mapping[str, Any],
    of_unlabeled: RowLoss,
    *,
    weight: float | tf.Tensor,
    mask: tf.Tensor,
    prediction: tf.Tensor,
) -> MethodOutput:
    """What a method gives that has one row, and one term, for each unlabeled example.

    Args:
      on_labeled: the outputs for labeled rows, whose loss is the mean cross-entropy.
      labeled: their part of the batch.
      unlabeled: that of the unlabeled examples.
      of_unlabeled: ell_U and its rows.
      weight: w.
      mask: m_r, [B_u].
      prediction: the class that each unlabeled example was assigned, [B_u], for the metrics.
    """
    supervised, labeled_head = sparse_cross_entropy(on_labeled, labeled["label"])
    return MethodOutput(
        supervised=supervised,
        supervised_coefficient=mean_coefficient(supervised),
        unsupervised=of_unlabeled.loss,
        unsupervised_coefficient=masked_coefficient(weight, mask),
        example_id=unlabeled["example_id"],
        labeled_head=labeled_head,
        unlabeled_head=of_unlabeled.head,
        metrics={
            **labeled_metrics(on_labeled, labeled["label"]),
            **unlabeled_metrics(prediction, unlabeled["label"], mask, of_unlabeled.loss),
        },
    )


def join_terms(terms: Mapping[str, Term]) -> dict[str, Any]:
    """The terms as one, in their order: the fields of a `MethodOutput` for the unlabeled rows."""
    parts = list(terms.values())
    return {
        "unsupervised": tf.concat([part.loss for part in parts], 0),
        "unsupervised_coefficient": tf.concat([part.coefficient for part in parts], 0),
        "example_id": tf.concat([part.example_id for part in parts], 0),
        "unlabeled_head": head_rows.join(*(part.head for part in parts)),
        "terms": {name: part.loss for name, part in terms.items()},
    }


def one_hot(label: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """One-hot rows [R, C] of labels [R], with the classes and dtype of the logits `like` [R, C]."""
    return tf.one_hot(label, _columns(like), dtype=like.dtype)


def ramp_up(share: float, step: int | tf.Tensor, train_steps: int) -> tf.Tensor:
    """min(step / (share * train_steps), 1), a float32 scalar; 1 where the share is 0."""
    if not share:
        return tf.ones([])
    return tf.minimum(tf.cast(step, tf.float32) / (share * train_steps), 1.0)


def sharpen(log_p: tf.Tensor, temperature: float) -> tf.Tensor:
    """p^(1/T) along the last axis, scaled to a sum of 1; T = 1 gives p itself."""
    return tf.nn.softmax(log_p / temperature)


def safe_log(p: tf.Tensor) -> tf.Tensor:
    """The logarithm, of 0 that of the smallest normal number."""
    return tf.math.log(tf.maximum(p, np.finfo(p.dtype.as_numpy_dtype).tiny))


def step_seed(seed: int, step: int | tf.Tensor, purpose: int) -> tf.Tensor:
    """A seed [2] for the stateless ops of one purpose at one step of the run with a seed.

    Each replica has one of its own.
    """
    key = tf.constant([seed, 1], tf.int64)
    for data in (step, purpose, *([replicas.index()] if replicas.count() > 1 else ())):
        key = tf.random.experimental.stateless_fold_in(key, tf.cast(data, tf.int64), alg="philox")
    return key


def copies(kind: str, number: int) -> tuple[str, ...]:
    """The names of so many views of one kind: "weak", "weak_2", "weak_3", ..."""
    return (kind, *(f"{kind}_{k}" for k in range(2, number + 1)))


def expand(mask: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A mask [B] with as many axes as `like` [B, ...], to broadcast against it."""
    return tf.reshape(mask, [-1] + [1] * (like.shape.rank - 1))


def mean_coefficient(rows: tf.Tensor) -> tf.Tensor:
    """a_l = 1 / B_l for each of the rows [B_l]: the plain mean."""
    return tf.ones_like(rows) / _count(rows)


def masked_coefficient(weight: float | tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """c_r = w m_r / R for a mask [R]; R is K B_u where there are K views of each example."""
    return tf.stop_gradient(tf.cast(weight, mask.dtype) * mask / _count(mask))


def labeled_metrics(output: HeadOutput, label: tf.Tensor) -> dict[str, tf.Tensor]:
    """train_accuracy: share of labeled rows whose most probable class is their label."""
    correct = tf.cast(predicted_class(output) == tf.cast(label, tf.int64), tf.float32)
    return {"train_accuracy": tf.reduce_mean(correct)}


def unlabeled_metrics(
    prediction: tf.Tensor, label: tf.Tensor, mask: tf.Tensor, loss: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Metrics of the unlabeled rows, which no loss depends on.

    mask_rate: mean of the mask.
    pseudo_label_accuracy: right predictions among the rows that the mask lets count and whose truth
      is known, and the number of these rows, [2]: a mean over steps is to be one over rows, and
      there is none where there is no such row.
    loss_unsupervised_unweighted: mean of m_r ell_U(r) over all rows, without w and lambda.

    Args:
      prediction: class that each row was assigned, [R] int.
      label: the truth, [R] int, negative where unknown.
      mask: m_r, [R] float.
      loss: ell_U(r), [R].
    """
    prediction, label = tf.cast(prediction, tf.int64), tf.cast(label, tf.int64)
    judged = tf.cast(mask, tf.float32) * tf.cast(label >= 0, tf.float32)
    correct = judged * tf.cast(prediction == label, tf.float32)
    return {
        "mask_rate": tf.cast(tf.reduce_mean(mask), tf.float32),
        "pseudo_label_accuracy": tf.stack([tf.reduce_sum(correct), tf.reduce_sum(judged)]),
        "loss_unsupervised_unweighted": tf.cast(tf.reduce_mean(mask * loss), tf.float32),
    }


def predicted_class(output: HeadOutput) -> tf.Tensor:
    """The most probable class of each row, [R] int64; the lowest where several tie."""
    return tf.argmax(output.logits, -1)


def _rows_with_target(output: HeadOutput, target: tf.Tensor) -> head_rows.HeadRows:
    gradient = tf.stop_gradient(tf.nn.softmax(output.logits) - target)
    return head_rows.HeadRows(output.features, output.logits, gradient)


def _flat_rows(output: HeadOutput, gradient: tf.Tensor) -> head_rows.HeadRows:
    """Rows without curvature by the classifier's logits."""
    none = tf.zeros_like(output.logits[:, 0])
    return head_rows.HeadRows(output.features, output.logits, gradient, cross_entropy=none)


def _softmax_jacobian(p: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """J v of each row, J = diag p - p p^T."""
    return p * (vector - tf.reduce_sum(p * vector, -1, keepdims=True))


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in half precision as float32, any other as it is."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def rows(tensor: tf.Tensor) -> int | tf.Tensor:
    """The length of the first axis, as a number where it is known."""
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def _columns(tensor: tf.Tensor) -> int | tf.Tensor:
    return tf.shape(tensor)[-1] if tensor.shape[-1] is None else tensor.shape[-1]


def _count(rows: tf.Tensor) -> tf.Tensor:
    """How many rows there are on all replicas."""
    return tf.cast(tf.size(rows) * replicas.count(), rows.dtype)
