"""The derivative of the validation loss by each example weight (eq. influence).

    dL_V/dlambda_r = -c_r <S, grad ell_r>,      (H + damping I) S = grad L_V

`last_layer` is the paper's method: theta is the classifier head, and H is written out, without
autodiff. It is exact for cross-entropies; SolveInfo.curvature tells whether rows of other losses
made a Gauss-Newton matrix of it. The others are for any variables: `over` for an objective,
`of_model` for a plain Keras model and loss. All take the solvers of the paper's Table A1 by the
settings of a `config.WeightConfig`, of which they read inverse_hessian with its own settings,
damping and curvature.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config, head_rows
from ssl_influence.influence import (
    all_variables,
    inverse_hvp,
    last_layer_system,
    row_curvature,
    softmax_head,
    solve_info,
)
from ssl_influence.per_example import recording, rows as per_example_rows

_LAST_LAYER = config.WeightConfig()
_ANY = config.WeightConfig(inverse_hessian="cg")

Gradient = tuple[tf.Tensor, solve_info.SolveInfo]


def last_layer(
    labeled: head_rows.HeadRows,
    labeled_coefficient: tf.Tensor,
    unlabeled: head_rows.HeadRows,
    unlabeled_coefficient: tf.Tensor,
    example_weight: tf.Tensor,
    validation_features: tf.Tensor,
    validation_logits: tf.Tensor,
    validation_label: tf.Tensor,
    *,
    l2: float | tf.Tensor = 0.0,
    l2_bias: float | tf.Tensor = 0.0,
    use_bias: bool = True,
    kernel: tf.Tensor | None = None,
    settings: config.WeightConfig = _LAST_LAYER,
    seed: tf.Tensor | Sequence[int] = (0, 0),
) -> Gradient:
    """dL_V/dlambda of every unlabeled row, where theta is the last layer alone.

    The objective is sum_l a_l ell_S(l) + sum_r coef_r lambda_r ell_U(r) + 1/2 l2 |kernel|^2 +
    1/2 l2_bias |bias|^2. In H a row's loss has the curvature that its HeadRows tell: by default
    that of a softmax cross-entropy to a fixed target. L_V is the mean cross-entropy on the
    validation batch. With (H + damping I) S = grad L_V, row r has

        dL_V/dlambda_r = -coef_r <x_r^T S, g_r>

    so that no gradient of a single example is ever formed.

    It is exact wherever H is; a row with no curvature of its own (entropy, another head) may have a
    gradient all the same.

    Args:
      labeled: HeadRows of B_l rows. Their gradient is used by outer_product and unrolled alone.
      labeled_coefficient: a_l, [B_l].
      unlabeled: HeadRows of R rows. The gradient g_r is that of the row's own loss. Logits and
        gradients [R, 1] are those of the binary head, see `softmax_head`; `brier` is that of two
        logits.
      unlabeled_coefficient: coef_r [R], what multiplies the loss beside lambda: w(t) m_r / (K B_u).
      example_weight: lambda of the row's example, [R].
      validation_features: [B_v, D].
      validation_logits: [B_v, C], or [B_v, 1].
      validation_label: class ids, integer [B_v].
      l2: coupled L2 of the kernel, a scalar or [D] (a scalar for outer_product).
      l2_bias: coupled L2 of the bias.
      use_bias: the head has a bias, which takes part.
      kernel: the head's weights [D, C], with the bias as one more row if it has one; needed by
        unrolled where l2 is not 0.
      settings: inverse_hessian (cg preconditioned; exact direct where it fits) and what belongs to
        it; damping is added to the diagonal, the bias's included.
      seed: [2] integers; with it lissa draws the same rows again.

    Returns:
      The derivative [R], in the dtype of the solve (float32, or float64 for float64 features), and
      SolveInfo. The rows of one example are to be summed (`ExampleWeights.update` does). Where the
      solve did not converge in a graph, do not use the derivative.

    Raises:
      ConfigError: unrolled, where losses are no cross-entropies to fixed targets; or as
        `last_layer_system.LastLayer` says.
      SolveError: in eager mode, if the Hessian is singular, indefinite or not finite.
    """
    features = _with_bias(tf.concat([labeled.features, unlabeled.features], axis=0), use_bias)
    dtype = tf.float64 if features.dtype == tf.float64 else tf.float32
    coefficient = tf.cast(unlabeled_coefficient, dtype)
    weight = tf.concat(
        [tf.cast(labeled_coefficient, dtype), coefficient * tf.cast(example_weight, dtype)], axis=0
    )
    validation_gradient = softmax_head.gradient(
        _with_bias(validation_features, use_bias),
        validation_logits,
        validation_label,
        1.0 / tf.cast(tf.shape(validation_logits)[0], dtype),
    )
    system = last_layer_system.LastLayer(
        features=tf.cast(features, dtype),
        logits=tf.cast(tf.concat([labeled.logits, unlabeled.logits], axis=0), dtype),
        gradient=tf.cast(tf.concat([labeled.gradient, unlabeled.gradient], axis=0), dtype),
        weight=weight,
        l2=l2,
        l2_bias=l2_bias if use_bias else None,
        kernel=kernel,
        shares=row_curvature.Shares.of(labeled, unlabeled),
    )
    direction, info = _solve(system, validation_gradient, settings, seed)
    rows = tf.cast(_with_bias(unlabeled.features, use_bias), dtype)
    alignment = tf.reduce_sum(
        tf.matmul(rows, direction) * tf.cast(unlabeled.gradient, dtype), axis=1
    )
    return -coefficient * alignment, info


def over(
    objective: all_variables.Objective,
    validation_gradient: Sequence[tf.Tensor],
    *,
    settings: config.WeightConfig = _ANY,
    seed: tf.Tensor | Sequence[int] = (0, 0),
) -> Gradient:
    """dL_V/dlambda of every unlabeled row of an objective, over the objective's variables.

    Args:
      objective: what theta minimizes.
      validation_gradient: grad L_V, one tensor a variable.
      settings: see `last_layer`; curvature is that of the objective, "gauss_newton" or "hessian".
      seed: [2] integers; with it lissa draws the same rows again.

    Returns:
      The derivative [R], in the dtype of the losses, and SolveInfo. Where the solve did not
      converge in a graph, do not use the derivative.

    Raises:
      ConfigError: "exact" is asked for more than `all_variables.EXACT_LIMIT` parameters.
      SolveError: in eager mode, if an exact Hessian is singular, indefinite or not finite.
    """
    direction, info = _solve(objective, list(validation_gradient), settings, seed)
    return objective.influence(direction), info


def of_model(
    model: Callable[..., Any],
    labeled: tuple[Any, Any],
    unlabeled: tuple[Any, Any],
    validation: tuple[Any, Any],
    loss_fn: Callable[[tf.Tensor, Any], tf.Tensor],
    *,
    example_weight: tf.Tensor | None = None,
    variables: Sequence[Any] | None = None,
    l2: float = 0.0,
    settings: config.WeightConfig = _ANY,
    seed: tf.Tensor | Sequence[int] = (0, 0),
) -> Gradient:
    """dL_V/dlambda for a plain Keras model that is trained on

        L = mean_l ell(l) + mean_u lambda_u ell(u) + l2/2 |theta|^2,      L_V = mean_v ell(v)

    Positive where more weight on u would raise the validation loss: u hurts; where it is negative
    u helps. The model is called with training=False.

    Args:
      model: a Keras model (tf_keras or Keras 3) with one output [n, ...].
      labeled: inputs and targets, any nests.
      unlabeled: inputs, and what stands for their targets, as pseudo-labels; constants.
      validation: inputs and targets.
      loss_fn: (outputs [n, ...], targets) -> ell [n].
      example_weight: lambda [B_u]; None is 1 for all.
      variables: theta; None is model.trainable_variables.
      l2: coupled L2 of theta.
      settings: see `over`. "gauss_newton" takes the curvature of `loss_fn` by autodiff.
      seed: see `over`.

    Returns:
      As `over`.

    Raises:
      ConfigError: as `over`; or losses are not [n], or parts and weights do not fit each other.
    """
    variables = list(model.trainable_variables if variables is None else variables)
    variables = [recording.as_variable(v) for v in variables]
    parts = {"labeled": labeled, "unlabeled": unlabeled, "validation": validation}
    sizes = [_rows(part, name) for name, part in parts.items()]
    if sizes[2] == 0:
        raise config.ConfigError("The validation part has no row: L_V is a mean over at least one.")
    inputs, targets = _joined(labeled, unlabeled)
    rows = [tf.shape(per_example_rows.leaves(part)[0])[0] for part in (labeled, unlabeled)]
    if example_weight is None:
        example_weight = tf.ones([rows[1]])
    example_weight = tf.convert_to_tensor(example_weight)
    if not example_weight.shape.is_compatible_with([sizes[1]]):
        raise config.ConfigError(
            f"example_weight of shape {example_weight.shape} does not fit {sizes[1]} unlabeled "
            "rows: give one number for each."
        )

    def outputs_of(inputs):
        outputs = model(inputs, training=False)
        if not tf.is_tensor(outputs):
            raise config.ConfigError(
                f"The model gives {len(tf.nest.flatten(outputs))} outputs: of_model takes one "
                "tensor [n, ...]; wrap the model, or use weight_gradients.over."
            )
        return tf.cast(outputs, tf.float32) if outputs.dtype.size < 4 else outputs

    def output_fn():
        outputs = outputs_of(inputs)
        losses = _one_each(loss_fn(outputs, targets))
        supervised, unsupervised = tf.split(losses, rows)
        return all_variables.Rows(
            supervised,
            tf.ones_like(supervised) / tf.cast(rows[0], losses.dtype),
            unsupervised,
            tf.ones_like(unsupervised) / tf.cast(rows[1], losses.dtype),
            *map(all_variables.Outputs, tf.split(outputs, rows)),
        )

    with tf.GradientTape() as tape:
        losses = _one_each(loss_fn(outputs_of(validation[0]), validation[1]))
        validation_loss = tf.reduce_mean(losses)
    gradient = tape.gradient(validation_loss, variables, unconnected_gradients="zero")
    objective = all_variables.Objective(
        output_fn,
        example_weight,
        variables,
        [l2] * len(variables),
        all_variables.loss_curvature(lambda outputs: loss_fn(outputs, targets)),
    )
    return over(objective, gradient, settings=settings, seed=seed)


def _solve(system, rhs, settings, seed):
    """S and SolveInfo. A system is a LastLayer or an Objective; both have the same methods."""
    direction, info = _solve_with(system, rhs, settings, seed)
    exact = tf.constant(system.is_exact(settings.curvature))
    return direction, info._replace(exact_curvature=exact)


def _solve_with(system, rhs, settings, seed):
    damping, curvature = settings.damping, settings.curvature
    name = settings.inverse_hessian
    if name == "exact":
        return system.exact(rhs, curvature, damping, settings.cg_tolerance)
    if name == "identity":
        return inverse_hvp.identity(rhs, damping=damping)
    if name == "outer_product":
        return system.outer_product(rhs, damping)
    if name == "cg":
        return system.conjugate_gradient(
            rhs, curvature, damping, settings.cg_tolerance, settings.cg_iterations
        )
    if name == "neumann":
        return inverse_hvp.neumann(
            system.product(curvature),
            rhs,
            terms=settings.neumann_terms,
            step=settings.neumann_step,
            damping=damping,
        )
    if name == "lissa":
        sampled = system.sampled_product(settings.lissa_rows, tf.convert_to_tensor(seed))
        scale = settings.lissa_scale
        if scale is None:
            scale = _scale_of_samples(sampled, rhs, damping)
        return inverse_hvp.lissa(
            sampled,
            rhs,
            iterations=settings.lissa_iterations,
            scale=scale,
            damping=damping,
            hvp=system.product(curvature),
        )
    # H at the points of a descent; the gradients on both sides stay those of the start.
    step = settings.unroll_step
    if step is None:
        step = 1.0 / inverse_hvp.eigenvalue_estimate(system.product(curvature), rhs, damping)
    product_at = system.descent(settings.unroll_steps, step, damping)
    return inverse_hvp.unrolled(
        lambda vector, k: product_at(vector, k, curvature),
        rhs,
        step=step,
        damping=damping,
        steps=settings.unroll_steps,
    )


def _scale_of_samples(sampled, rhs, damping, samples=4):
    """Twice the largest eigenvalue of a few samples: others of them may exceed it."""
    bounds = [
        inverse_hvp.eigenvalue_estimate(
            lambda v, j=j: sampled(v, tf.constant(-1 - j)), rhs, damping
        )
        for j in range(samples)
    ]
    return 2.0 * tf.reduce_max(bounds)


def _rows(part, name):
    """How many rows inputs and targets have, None if that is not known yet."""
    sizes = [tf.convert_to_tensor(x).shape[0] for x in per_example_rows.leaves(part)]
    known = sorted({size for size in sizes if size is not None})
    if len(known) > 1:
        raise config.ConfigError(
            f"The {name} inputs and targets have {' and '.join(map(str, known))} rows: give as "
            "many of each."
        )
    return known[0] if known else None


def _joined(*parts):
    """Inputs and targets of several parts, one after the other; None stays None."""
    joined = [tf.concat(x, 0) for x in zip(*map(per_example_rows.leaves, parts), strict=True)]
    return per_example_rows.refilled(parts[0], joined)


def _one_each(losses):
    if losses.shape.rank != 1:
        raise config.ConfigError(
            f"loss_fn gives losses of shape {losses.shape}: it must keep one for each row, [n]."
        )
    return losses


def _with_bias(features, use_bias):
    features = tf.convert_to_tensor(features)
    return tf.concat([features, tf.ones_like(features[:, :1])], axis=1) if use_bias else features
