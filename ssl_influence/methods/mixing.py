"""What MixMatch and ReMixMatch share: MixUp, and forward passes over mixed groups of rows.

The weight of a mixed row. With beta' = max(beta, 1 - beta), beta ~ Beta(alpha, alpha), row r is

    x~_r = beta' x_r + (1 - beta') x_s,      q~_r = beta' q_r + (1 - beta') q_s

with a partner s drawn from all rows, labeled ones and every view of unlabeled ones. As beta' is at
least 1/2, x_r dominates: the loss of the mixed row counts to the example of x_r, by whose
lambda it is multiplied and whose influence it makes up, whatever the partner is. A row that a
labeled example dominates is a labeled row and carries no lambda, also if its partner is unlabeled.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ssl_influence import config
from ssl_influence.methods import base

_PARTNERS, _RATIOS = range(2)
_BISECTIONS = 24  # to the precision of float32


class Mixed(NamedTuple):
    """Rows after MixUp: inputs (a nest of [n, ...]) and targets [n, C], group by group."""

    inputs: list[Any]
    targets: list[tf.Tensor]


class Draw(NamedTuple):
    """Of n rows: the partner of each, int32 [n], a permutation; and beta', float32 [n]."""

    partner: tf.Tensor
    ratio: tf.Tensor


def draw(n: int | tf.Tensor, alpha: float, seed: int, step: int | tf.Tensor) -> Draw:
    """Partners and mixing ratios of n rows, a function of the run's seed and the step.

    Args:
      n: how many rows.
      alpha: ratios are max(beta, 1 - beta) with beta from Beta(alpha, alpha).
      seed: of the run.
      step: counted from 0.
    """
    order = tf.random.stateless_uniform(
        [n], base.step_seed(seed, step, _PARTNERS), None, None, tf.int32, alg="philox"
    )
    uniform = tf.random.stateless_uniform([n], base.step_seed(seed, step, _RATIOS), alg="philox")
    return Draw(tf.argsort(order, stable=True), mixing_ratio(uniform, alpha))


def mixing_ratio(uniform: tf.Tensor, alpha: float) -> tf.Tensor:
    """max(beta, 1 - beta), beta ~ Beta(alpha, alpha), of numbers [n] uniform on 0 to 1.

    1 - beta' is at most t with probability 2 I_t(alpha, alpha), the regularized incomplete beta
    function, which is inverted by bisection: TensorFlow's gamma variates do not compile with XLA.
    """
    low, half_width = tf.zeros_like(uniform), 0.25
    for _ in range(_BISECTIONS):
        middle = low + half_width
        below = 2.0 * tf.math.betainc(float(alpha), float(alpha), middle) < uniform
        low, half_width = tf.where(below, middle, low), half_width / 2
    return 1.0 - low


def mix(
    inputs: Sequence[Any],
    targets: Sequence[tf.Tensor],
    alpha: float,
    seed: int,
    step: int | tf.Tensor,
) -> Mixed:
    """MixUp of all rows with a random permutation of them.

    Args:
      inputs: groups of rows, each a nest of floating [n_g, ...].
      targets: distributions [n_g, C] of each group, constant.
      alpha: see `draw`.
      seed: see `draw`.
      step: see `draw`.

    Returns:
      The groups, each row mixed as the module describes.

    Raises:
      ConfigError: inputs are not floating.
    """
    sizes = [base.rows(target) for target in targets]
    joined = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *inputs)
    for tensor in tf.nest.flatten(joined):
        if not tensor.dtype.is_floating:
            raise config.ConfigError(
                f"Inputs of dtype {tensor.dtype.name} cannot be mixed: use a method without MixUp."
            )
    drawn = draw(sum(sizes), alpha, seed, step)

    def groups_of(tensor):
        return tf.split(mix_up(tensor, drawn), sizes)

    mixed = [groups_of(tensor) for tensor in tf.nest.flatten(joined)]
    groups = [
        tf.nest.pack_sequence_as(joined, [parts[g] for parts in mixed]) for g in range(len(sizes))
    ]
    return Mixed(groups, groups_of(tf.concat(list(targets), 0)))


def mix_up(x: tf.Tensor, drawn: Draw) -> tf.Tensor:
    """Each row r of x [n, ...] with its partner s: beta' x_r + (1 - beta') x_s."""
    other = tf.gather(x, drawn.partner)
    return other + tf.cast(base.expand(drawn.ratio, x), x.dtype) * (x - other)


def forward_mixed(
    forward: base.Forward, mode: str, mixed: Sequence[Any], *others: Any
) -> tuple[base.HeadOutput, ...]:
    """The outputs of mixed groups, the labeled one first, and of other parts, with gradients.

    - "joint": one pass over all of it, see `base.forward_groups`.
    - "separate": one pass a group after `interleave`, of which the first updates BatchNorm's moving
      statistics, then one for each other part, as in the published code.

    Raises:
      ConfigError: "separate" with groups of different sizes.
    """
    if mode == "joint":
        return base.forward_groups(forward, mode, *mixed, *others)
    outputs = base.forward_groups(forward, mode, *interleave(mixed), *others)
    back = interleave(outputs[: len(mixed)])
    return (*back, *outputs[len(mixed) :])


def interleave(groups: Sequence[Any]) -> list[Any]:
    """Exchanges row r of the first group with that of group r mod G, for G groups of one size.

    The first group then holds as many rows of each of them (as far as G divides their size), and
    all others some of the first. Applied again, it puts every row back.

    Raises:
      ConfigError: the groups have different sizes.
    """
    flat = [tf.nest.flatten(group) for group in groups]
    sizes = [parts[0].shape[0] for parts in flat]
    if len(set(sizes)) > 1:
        raise config.ConfigError(
            f"forward_pass=separate interleaves batches of one size, and these are of {sizes}: use "
            "the same labeled_batch_size and unlabeled_batch_size, or forward_pass=joint."
        )
    count = len(groups)
    row = tf.range(tf.shape(flat[0][0])[0])
    group = row % count

    def exchange(*tensors):
        first = tf.gather(tf.stack(tensors, 1), group, batch_dims=1)
        rest = [
            tf.where(base.expand(group == g, tensor), tensors[0], tensor)
            for g, tensor in enumerate(tensors[1:], 1)
        ]
        return [first, *rest]

    exchanged = [exchange(*tensors) for tensors in zip(*flat, strict=True)]
    return [
        tf.nest.pack_sequence_as(groups[0], [parts[g] for parts in exchanged]) for g in range(count)
    ]
