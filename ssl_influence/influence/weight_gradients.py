"""The derivative of the validation loss by each example weight (eq. influence)."""

import tensorflow as tf

from ssl_influence import head_rows
from ssl_influence.influence import softmax_head, solve_info


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
    damping: float | tf.Tensor = 0.0,
    method: str = "auto",
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
) -> tuple[tf.Tensor, solve_info.SolveInfo]:
    """dL_V/dlambda of every unlabeled row, where theta is the last layer alone.

    The objective is sum_l a_l ell_S(l) + sum_r coef_r lambda_r ell_U(r) + 1/2 l2 |kernel|^2 +
    1/2 l2_bias |bias|^2, with a softmax cross-entropy to a fixed target in every row. L_V is the
    mean cross-entropy on the validation batch. With (H + damping I) S = grad L_V, row r has

        dL_V/dlambda_r = -coef_r <x_r^T S, g_r>

    so that no gradient of a single example is ever formed.

    Args:
      labeled: HeadRows of B_l rows. Their gradient is not used.
      labeled_coefficient: a_l, [B_l].
      unlabeled: HeadRows of R rows. The gradient g_r is that of the row's own loss.
      unlabeled_coefficient: coef_r [R], what multiplies the loss beside lambda: w(t) m_r / (K B_u).
      example_weight: lambda of the row's example, [R].
      validation_features: [B_v, D].
      validation_logits: [B_v, C].
      validation_label: class ids, integer [B_v].
      l2: coupled L2 of the kernel, a scalar or [D].
      l2_bias: coupled L2 of the bias.
      use_bias: the head has a bias, which takes part.
      damping: added to the diagonal of H, the bias included.
      method: see `softmax_head.solve`, as are tolerance and max_iterations.
      tolerance: relative residual of conjugate gradients.
      max_iterations: of conjugate gradients.

    Returns:
      The derivative [R], in the dtype of the solve (float32, or float64 for float64 features), and
      SolveInfo. The rows of one example are to be summed (`ExampleWeights.update` does). Where the
      solve did not converge in a graph, do not use the derivative.

    Raises:
      SolveError: in eager mode, if the Hessian is singular, indefinite or not finite.
    """
    features = _with_bias(tf.concat([labeled.features, unlabeled.features], axis=0), use_bias)
    logits = tf.concat([labeled.logits, unlabeled.logits], axis=0)
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
    direction, info = softmax_head.solve(
        features,
        logits,
        weight,
        validation_gradient,
        l2=_row_l2(l2, l2_bias, use_bias, tf.shape(labeled.features)[1], dtype),
        damping=damping,
        method=method,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    rows = tf.cast(_with_bias(unlabeled.features, use_bias), dtype)
    alignment = tf.reduce_sum(
        tf.matmul(rows, direction) * tf.cast(unlabeled.gradient, dtype), axis=1
    )
    return -coefficient * alignment, info


def _with_bias(features, use_bias):
    features = tf.convert_to_tensor(features)
    return tf.concat([features, tf.ones_like(features[:, :1])], axis=1) if use_bias else features


def _row_l2(l2, l2_bias, use_bias, d, dtype):
    l2, l2_bias = (
        tf.cast(v, dtype) if tf.is_tensor(v) else tf.convert_to_tensor(v, dtype)
        for v in (l2, l2_bias)
    )
    rows = tf.broadcast_to(l2, [d])
    return tf.concat([rows, l2_bias[tf.newaxis]], axis=0) if use_bias else rows
