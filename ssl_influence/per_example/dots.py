"""<grad ell_u, v> for every row u of a batch at once, without the gradient of any single row.

The gradient sum_u s_u grad ell_u is linear in s, so its product with v has the derivative
<grad ell_u, v> by s_u: one backward pass through a backward pass ("double backprop"), whatever the
layers, at the cost of a few passes over the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config

Vector = Sequence[tf.Tensor]


def dots(
    model: Callable[..., Any],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    vectors: Vector,
    *,
    variables: Sequence[tf.Variable] | None = None,
    training: bool = False,
) -> tf.Tensor:
    """Products of each example's gradient with one vector.

    With training=True BatchNormalization makes each loss depend on all rows of the batch, and the
    result is the exact derivative of ell_u, through those statistics too. Moving statistics, and
    all other variables that are not trained, hold afterwards what they held before.

    Args:
      model: a Keras model, of any structure of outputs.
      inputs: a batch, any nest.
      targets: handed to `loss_fn`, any nest or None.
      loss_fn: (outputs, targets) -> ell [B].
      vectors: v, one tensor a variable, of its shape.
      variables: what the gradient is taken by; None is model.trainable_variables.
      training: how the model is called.

    Returns:
      [B], in the dtype of the losses.

    Raises:
      ConfigError: as `row_dots`.
    """
    variables = model.trainable_variables if variables is None else variables
    fixed = model.non_trainable_variables if training else []
    before = [tf.identity(variable) for variable in fixed]
    result = row_dots(
        lambda: loss_fn(model(inputs, training=training), targets), vectors, variables
    )
    for variable, value in zip(fixed, before, strict=True):
        variable.assign(value)
    return result


def row_dots(
    losses_fn: Callable[[], tf.Tensor], vectors: Vector, variables: Sequence[tf.Variable]
) -> tf.Tensor:
    """The derivative of each loss along `vectors`, for losses that are no plain loss of a model.

    Args:
      losses_fn: computes the losses, of any shape, from the current variables.
      vectors: one tensor a variable, of its shape.
      variables: a variable that no loss depends on contributes nothing.

    Returns:
      One number a loss, in their shape and dtype.

    Raises:
      ConfigError: the losses depend on no variable, or cannot be differentiated twice.
    """
    with tf.GradientTape() as tape:
        losses = losses_fn()
    return push_forward(tape, losses, vectors, variables)


def push_forward(
    tape: tf.GradientTape,
    outputs: tf.Tensor,
    vectors: Vector,
    variables: Sequence[tf.Variable],
) -> tf.Tensor:
    """J v, with J the Jacobian of the `outputs` that `tape` has recorded, by the variables.

    Reverse mode twice: forward mode returns None through a nested tf.function.

    Raises:
      ConfigError: as `row_dots`.
    """
    with tf.GradientTape() as linear:
        probe = tf.zeros_like(outputs)
        linear.watch(probe)
        pulled = tape.gradient(outputs, variables, output_gradients=probe)
        products = [
            tf.reduce_sum(tf.convert_to_tensor(gradient) * tf.cast(vector, gradient.dtype))
            for gradient, vector in zip(pulled, vectors, strict=True)
            if gradient is not None
        ]
        if not products:
            raise config.ConfigError(
                f"The losses depend on none of the {len(variables)} variables: name those that the "
                "model computes them with."
            )
        product = tf.add_n([tf.cast(value, outputs.dtype) for value in products])
    result = linear.gradient(product, probe)
    if result is None:
        raise config.ConfigError(
            "The model's gradient has no gradient of its own, as that of a bilinear upsampling: "
            "use a layer that can be differentiated twice."
        )
    return result
