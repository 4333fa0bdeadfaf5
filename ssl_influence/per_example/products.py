"""<grad ell_u, v> for every row u of a batch at once, without the gradient of any single row.

Two ways lead there at about the cost of a plain gradient. The gradient sum_u s_u grad ell_u is
linear in s, so its product with v has the derivative <grad ell_u, v> by s_u: one backward pass
through a backward pass ("double backprop"), whatever the layers. And since a layer's output is
linear in its own weights, the share of u is the layer applied with v for weights, times the
gradient by that output ("ghost").
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config
from ssl_influence.per_example import kernels, recording, rows

Vector = Sequence[tf.Tensor]

METHODS = ("double_backprop", "ghost", "forward_mode", "materialize")


def dots(
    model: Callable[..., Any],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    vectors: Vector,
    *,
    variables: Sequence[Any] | None = None,
    training: bool = False,
    method: str = "double_backprop",
    chunk_size: int | None = None,
) -> tf.Tensor:
    """Products of each example's gradient with one vector.

    With training=True BatchNormalization makes each loss depend on all rows of the batch.
    "double_backprop" and "forward_mode" give the exact derivative of ell_u, through those
    statistics too. "ghost" and "materialize" attribute by layer output, as `rows.gradients` says.
    Both add up to the product with the batch gradient. Moving statistics, and all other variables
    that are not trained, hold afterwards what they held before.

    TensorFlow itself is wrong by about a tenth, and does not say so, in both derivatives of
    MaxPool2D under `jit_compile=True` that "double_backprop" and "forward_mode" take; "ghost" is
    not. `checking.check` tells of such.

    Args:
      model: a Keras model, of any structure of outputs; for "double_backprop" and "forward_mode"
        any callable with `trainable_variables` and an argument `training`.
      inputs: a batch, any nest.
      targets: handed to `loss_fn`, any nest or None.
      loss_fn: (outputs, targets) -> ell [B].
      vectors: v, one tensor a variable, of its shape.
      variables: what the gradient is taken by; None is model.trainable_variables.
      training: how the model is called.
      method: "double_backprop"; "ghost": needs layers that `kernels` knows; "forward_mode": not
        through a tf.function within a graph; "materialize": from `rows.gradients`, the reference.
      chunk_size: examples at a time in "materialize", to bound its memory.

    Returns:
      [B], in the dtype of the losses.

    Raises:
      ConfigError: TensorFlow has no such derivative of the model, the losses depend on no variable,
        or as `rows.gradients`.
    """
    rows.check_choice("method", method, METHODS)
    variables = list(model.trainable_variables if variables is None else variables)
    if chunk_size is not None and method != "materialize":
        raise config.ConfigError(
            f"chunk_size={chunk_size} has no effect with method={method!r}, which forms no "
            "gradient of an example: leave it out."
        )
    vectors = _checked(vectors, variables)
    if method == "materialize":
        return _materialized(
            model, inputs, targets, loss_fn, vectors, variables, training, chunk_size
        )

    def losses_fn():
        return rows.losses_of(model, inputs, targets, loss_fn, training)

    with rows.keeping_state(model, training):
        if method == "ghost":
            return _ghost(model, inputs, targets, loss_fn, vectors, variables, training)
        take = row_dots if method == "double_backprop" else _forward
        return take(losses_fn, vectors, [recording.as_variable(v) for v in variables])


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
            raise _depends_on_none(variables)
        product = tf.add_n([tf.cast(value, outputs.dtype) for value in products])
    result = linear.gradient(product, probe)
    if result is None:
        raise config.ConfigError(
            "The model's gradient has no gradient of its own, as that of a bilinear upsampling: "
            "use a layer that can be differentiated twice."
        )
    return result


def _checked(vectors, variables):
    vectors = [tf.convert_to_tensor(vector) for vector in vectors]
    shapes = [tuple(vector.shape) for vector in vectors]
    if shapes != [tuple(variable.shape) for variable in variables]:
        raise config.ConfigError(
            f"vectors of the shapes {shapes} are no vector of the variables: give one tensor for "
            f"each of the {len(variables)}, of its shape."
        )
    return vectors


def _ghost(model, inputs, targets, loss_fn, vectors, variables, training):
    losses, uses = rows.recorded(model, inputs, targets, loss_fn, variables, training)
    by_variable = {recording.key(v): x for v, x in zip(variables, vectors, strict=True)}
    if not uses:
        raise _depends_on_none(variables)
    return tf.add_n([tf.cast(kernels.dots(use, g, by_variable), losses.dtype) for use, g in uses])


def _forward(losses_fn, vectors, variables):
    before = _calls()
    tangents = [tf.cast(x, v.dtype) for x, v in zip(vectors, variables, strict=True)]
    with tf.autodiff.ForwardAccumulator(variables, tangents) as accumulator:
        losses = losses_fn()
    if _calls() > before:
        raise config.ConfigError(
            "In a graph, TensorFlow's forward mode does not go through a tf.function, and there is "
            'one in this model (grouped convolutions are): use method="double_backprop" or '
            '"ghost".'
        )
    result = accumulator.jvp(losses)
    if result is None:
        raise config.ConfigError(
            f"TensorFlow's forward mode gives no derivative of the losses by these "
            f'{len(variables)} variables: use method="double_backprop" or "ghost".'
        )
    return result


def _calls():
    """How many calls of a tf.function the graph that is being built holds, but forward mode's."""
    if tf.executing_eagerly():
        return 0
    called = [
        operation.get_attr("f").name
        for operation in tf.compat.v1.get_default_graph().get_operations()
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall")
    ]
    return sum(not name.startswith("__inference__jvp_") for name in called)


def _materialized(model, inputs, targets, loss_fn, vectors, variables, training, chunk_size):
    take = functools.partial(
        rows.gradients, model, loss_fn=loss_fn, variables=variables, training=training
    )

    def of_chunk(inputs, targets):
        products = [
            tf.tensordot(g, tf.cast(v, g.dtype), v.shape.rank)
            for g, v in zip(take(inputs, targets), vectors, strict=True)
        ]
        return [tf.add_n([tf.cast(product, dtype) for product in products])]

    dtype = tf.float64 if any(v.dtype == tf.float64 for v in variables) else tf.float32
    (result,) = rows.chunked(of_chunk, (inputs, targets), chunk_size, [tf.TensorSpec([], dtype)])
    return result


def _depends_on_none(variables):
    return config.ConfigError(
        f"The losses depend on none of the {len(variables)} variables: name those that the model "
        "computes them with."
    )
