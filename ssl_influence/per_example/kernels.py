"""Per-example gradients of one layer, from its inputs and the gradient by its outputs.

A kernel takes a `recording.Use` and g = d ell / d output, and gives for each example the gradient
by the layer's variables. Built in, for tf_keras and Keras 3: Dense, EinsumDense, Conv1D, Conv2D,
Conv3D (strided, dilated, grouped, causal), DepthwiseConv1D, DepthwiseConv2D, Embedding,
BatchNormalization, LayerNormalization and GroupNormalization. `register_kernel` adds others. Layers
made of layers, as MultiHeadAttention, need none of their own.

Sums run in float32 at least, whatever the layer computes in.
"""

import string
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from ssl_influence import config
from ssl_influence.per_example import convolution, pfor, recording

Gradients = Iterable[tuple[Any, tf.Tensor]]


class Kernel(NamedTuple):
    """How a layer's per-example gradients are computed.

    Attributes:
      gradients: (use, g, conv_method) -> pairs (variable, gradient [B, *variable.shape]) for the
        layer's own trainable variables.
      linear: the layer's output before its activation is affine in its own variables.
    """

    gradients: Callable[[recording.Use, tf.Tensor, str], Gradients]
    linear: bool


_registered: dict[type, Kernel] = {}


def register_kernel(layer_class: type, *, linear: bool = False) -> Callable[[Callable], Callable]:
    """Decorates the kernel of a layer class of one's own, or of one that has none built in.

        @per_example.register_kernel(Scale)
        def scale_gradients(layer, inputs, output_gradient):
            axes = range(1, inputs.shape.rank - 1)
            return [(layer.factor, tf.reduce_sum(inputs * output_gradient, axis=list(axes)))]

    The function gets the layer, the first argument of its `call` and the gradient by what the call
    returned, both with the batch as first axis, and gives pairs (variable, gradient [B,
    *variable.shape]) for the layer's own variables. It must not mix examples. It replaces a kernel
    that was there, and holds for subclasses that keep the class's `call`.

    Args:
      layer_class: a Keras layer class.
      linear: what `call` returns is affine in the layer's own variables, which are attributes of
        the layer and read as such: products can then be had without per-example gradients.
    """

    def register(function: Callable) -> Callable:
        def gradients(use, g, conv_method):
            del conv_method
            return function(use.layer, use.inputs, g)

        _registered[layer_class] = Kernel(gradients, linear)
        return function

    return register


def find(layer: Any) -> Kernel:
    """The kernel for a layer.

    Raises:
      ConfigError: there is none; the layer, its class and the remedy are named.
    """
    cls = type(layer)
    if getattr(layer, "lora_enabled", False):
        raise config.ConfigError(
            f"Layer {layer.name!r} computes with LoRA, which no per-example kernel knows: use "
            'method="vectorized_map" ("double_backprop" for products).'
        )
    for base in cls.__mro__:
        kernel = _registered.get(base)
        if kernel is None and recording.of_keras(base):
            kernel = _BUILT_IN.get(base.__name__)
        if kernel is not None:
            if cls.call is base.call and not _changes(cls, base):
                return kernel
            break
    raise config.ConfigError(
        f"Layer {layer.name!r} of class {cls.__name__} has variables but no per-example kernel: "
        "add one with per_example.register_kernel, leave its variables out, or use "
        'method="vectorized_map" or "loop" ("double_backprop" for products).'
    )


def _changes(cls: type, base: type) -> bool:
    """A subclass overrides what the base's call may use, or the layer computes in another way."""
    harmless = {"build", "get_config", "from_config", "compute_mask", "compute_output_shape"}
    return any(
        not name.startswith("__") and name not in harmless and hasattr(base, name)
        for part in cls.__mro__[: cls.__mro__.index(base)]
        for name in vars(part)
    )


def gradients(use: recording.Use, g: tf.Tensor, conv_method: str = "auto") -> Gradients:
    """Pairs (variable, gradient [B, *variable.shape]) of one use of a layer.

    Args:
      use: the layer and what went in and out.
      g: the gradient by use.output.
      conv_method: see `convolution.kernel_gradients`.
    """
    pairs = list(find(use.layer).gradients(use, g, conv_method))
    found = {recording.key(variable): gradient for variable, gradient in pairs}
    for variable in recording.own_variables(use.layer):
        gradient = found.get(recording.key(variable))
        if gradient is None or not gradient.shape[1:].is_compatible_with(variable.shape):
            shape = "no gradient" if gradient is None else f"one of shape {gradient.shape}"
            raise config.ConfigError(
                f"The kernel of layer {use.layer.name!r} gives {shape} for {variable.name!r}: it "
                f"must give [B, *{tuple(variable.shape)}]."
            )
    return pairs


def dots(use: recording.Use, g: tf.Tensor, vectors: dict[int, tf.Tensor]) -> tf.Tensor:
    """<gradient of example b by the layer's own variables, vectors>, [B].

    A linear layer is applied with the vectors for weights, times g; no gradient is formed. Others
    form theirs.

    Args:
      use: the layer and what went in and out.
      g: the gradient by use.output.
      vectors: recording.key(variable) -> a tensor of its shape, for some of the variables.
    """
    kernel = find(use.layer)
    if kernel.linear:
        tangent = applied(use, vectors)
        return _over_examples(_wide(tangent) * _wide(g))
    return tf.add_n(
        [
            _over_examples(_wide(gradient) * _wide(vectors[recording.key(variable)]))
            for variable, gradient in gradients(use, g)
            if recording.key(variable) in vectors
        ]
    )


def applied(use: recording.Use, vectors: dict[int, tf.Tensor]) -> tf.Tensor:
    """The layer's output before its activation, with `vectors` for its own variables, others 0."""
    own = recording.own_variables(use.layer)
    values = {}
    for variable in own:
        given = vectors.get(recording.key(variable))
        values[recording.key(variable)] = tf.zeros(variable.shape) if given is None else given
    return _called(use, own, values)


def _called(use, variables, values):
    layer = use.layer
    attributes = {"activation": _linear} if recording.has_activation(layer) else {}
    if recording.is_keras_3(layer):
        with (
            recording.substituted(layer, **attributes),
            recording.keras_3_values([(v, values[recording.key(v)]) for v in variables]),
        ):
            return layer.call(**use.arguments)
    compute = tf.as_dtype(layer.compute_dtype)
    for variable in variables:
        names = [name for name, held in vars(layer).items() if held is variable]
        if not names:
            raise config.ConfigError(
                f"The variable {variable.name!r} is no attribute of layer {layer.name!r}, so its "
                'kernel cannot be linear=True: register it without, or use "double_backprop".'
            )
        for name in names:
            attributes[name] = tf.cast(values[recording.key(variable)], compute)
    with recording.substituted(layer, **attributes):
        return layer.call(**use.arguments)


def _linear(x):
    return x


def _dense(use, g, conv_method):
    del conv_method
    layer = use.layer
    x, g = _wide(use.inputs), _wide(g)
    if x.shape.rank == 2:
        yield layer.kernel, x[:, :, tf.newaxis] * g[:, tf.newaxis, :]
    else:
        yield layer.kernel, tf.matmul(_rows(x), _rows(g), transpose_a=True)
    if layer.use_bias:
        yield layer.bias, _summed_to_last(g)


def _einsum_dense(use, g, conv_method):
    del conv_method
    layer = use.layer
    x, g = _wide(use.inputs), _wide(g)
    left, output = layer.equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    if "..." in left:
        free = [c for c in string.ascii_letters if c not in layer.equation]
        inputs, output = (
            labels.replace("...", "".join(free[: tensor.shape.rank - len(labels) + 3]))
            for labels, tensor in ((inputs, x), (output, g))
        )
    batch = inputs[0]
    if output[0] != batch or batch in kernel:
        raise config.ConfigError(
            f"Layer {layer.name!r} has the equation {layer.equation!r}, which does not keep the "
            'first axis for the examples: use method="vectorized_map".'
        )
    yield layer.kernel, tf.einsum(f"{inputs},{output}->{batch}{kernel}", x, g)
    if layer.bias is not None:
        # The bias broadcasts against the last axes of the output.
        shape = layer.bias.shape
        leading = g.shape.rank - len(shape)
        axes = [a for a in range(1, g.shape.rank) if a < leading or shape[a - leading] == 1]
        axes = [a for a in axes if a < leading or g.shape[a] != 1]
        total = tf.reduce_sum(g, axis=axes)
        yield layer.bias, tf.reshape(total, [-1, *shape])


def _conv(use, g, conv_method):
    layer = use.layer
    kernel = layer.kernel
    x, g, shape = _channels_last(use, g)
    convolution.check_method(conv_method)

    def loop(x, g):
        return _looped(x, g, kernel, shape)

    yield kernel, convolution.kernel_gradients(x, g, shape, conv_method, loop)
    if layer.use_bias:
        yield layer.bias, _summed_to_last(g)


def _looped(x, g, kernel, shape):
    """The paper's way: each example's own convolution, differentiated, in tf.vectorized_map."""
    kernel = tf.zeros(kernel.shape, x.dtype)
    if shape.padding == "causal":
        ((extent,),) = ([(k - 1) * d for k, d in zip(shape.size, shape.dilation, strict=True)],)
        x = tf.pad(x, [[0, 0], [extent, 0], [0, 0]])

    def one(rows):
        x, g = rows
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            parts = [
                tf.nn.convolution(
                    inputs,
                    weights,
                    strides=shape.strides,
                    padding="SAME" if shape.padding == "same" else "VALID",
                    dilations=shape.dilation,
                )
                for inputs, weights in zip(
                    tf.split(x[tf.newaxis], shape.groups, -1),
                    tf.split(kernel, shape.groups, -1),
                    strict=True,
                )
            ]
            output = parts[0] if shape.groups == 1 else tf.concat(parts, -1)
        return tape.gradient(output, kernel, output_gradients=g[tf.newaxis])

    return pfor.vectorized_map(one, (x, g))


def _depthwise(use, g, conv_method):
    del conv_method
    layer = use.layer
    kernel = layer.depthwise_kernel if hasattr(layer, "depthwise_kernel") else layer.kernel
    x, g, shape = _channels_last(use, g)
    yield kernel, convolution.depthwise_gradients(x, g, shape, layer.depth_multiplier)
    if layer.use_bias:
        yield layer.bias, _summed_to_last(g)


def _channels_last(use, g):
    layer = use.layer
    rank = layer.rank
    x, g = _wide(use.inputs), _wide(g)
    if x.shape.rank != rank + 2:
        raise config.ConfigError(
            f"Layer {layer.name!r} is applied to inputs of rank {x.shape.rank}, with more than one "
            'batch axis: use method="vectorized_map".'
        )
    if layer.data_format == "channels_first":
        order = [0, *range(2, rank + 2), 1]
        x, g = tf.transpose(x, order), tf.transpose(g, order)
    shape = convolution.Shape(
        *(_per_axis(n, rank) for n in (layer.kernel_size, layer.strides, layer.dilation_rate)),
        layer.padding,
        getattr(layer, "groups", None) or 1,
    )
    return x, g, shape


def _per_axis(value, rank):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank


def _embedding(use, g, conv_method):
    del conv_method
    variable = use.layer.embeddings
    rows, width = variable.shape
    ids = tf.cast(use.inputs, tf.int32)
    batch = tf.shape(ids)[0]
    ids = tf.reshape(ids, [batch, -1]) + rows * tf.range(batch)[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(
        tf.reshape(_wide(g), [-1, width]), tf.reshape(ids, [-1]), batch * rows
    )
    yield variable, tf.reshape(total, [batch, rows, width])


def _batch_norm(use, g, conv_method):
    """Each example's share by the layer's output; the statistics are taken as given."""
    del conv_method
    layer = use.layer
    _no_mask(use)
    _refuse(layer, "renorm", "virtual_batch_size")
    x, g = _wide(use.inputs), _wide(g)
    axes = [a % x.shape.rank for a in _as_list(layer.axis)]
    if use.arguments.get("training") and layer.trainable:
        mean, variance = tf.nn.moments(x, [a for a in range(x.shape.rank) if a not in axes])
    else:
        mean, variance = layer.moving_mean, layer.moving_variance
    mean, variance = (tf.cast(v, x.dtype) for v in (mean, variance))
    shape = [x.shape[a] if a in axes else 1 for a in range(x.shape.rank)]
    # 1 / sqrt(variance) is the same all over a sum: it is left to the end.
    centered = x - tf.reshape(mean, shape)
    scale = tf.reshape(tf.math.rsqrt(variance + tf.constant(layer.epsilon, x.dtype)), [-1])
    for variable, gradient in _scale_and_shift(layer, centered, g, axes):
        by_scale = variable is layer.gamma
        yield variable, gradient * tf.reshape(scale, variable.shape) if by_scale else gradient


def _layer_norm(use, g, conv_method):
    del conv_method
    layer = use.layer
    _no_mask(use)
    x, g = _wide(use.inputs), _wide(g)
    axes = [a % x.shape.rank for a in _as_list(layer.axis)]
    _refuse(layer, "rms_scaling")
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    normal = (x - mean) * tf.math.rsqrt(variance + tf.constant(layer.epsilon, x.dtype))
    yield from _scale_and_shift(layer, normal, g, axes)


def _group_norm(use, g, conv_method):
    del conv_method
    layer = use.layer
    _no_mask(use)
    x, g = _wide(use.inputs), _wide(g)
    axis = layer.axis % x.shape.rank
    channels = x.shape[axis]
    groups = channels if layer.groups == -1 else layer.groups
    sizes = [tf.shape(x)[a] if n is None else n for a, n in enumerate(x.shape)]
    split = tf.reshape(x, [*sizes[:axis], groups, channels // groups, *sizes[axis + 1 :]])
    axes = [a for a in range(1, split.shape.rank) if a != axis]
    mean, variance = tf.nn.moments(split, axes, keepdims=True)
    normal = (split - mean) * tf.math.rsqrt(variance + tf.constant(layer.epsilon, x.dtype))
    yield from _scale_and_shift(layer, tf.reshape(normal, sizes), g, [axis])


def _scale_and_shift(layer, normal, g, axes):
    """Gradients by gamma and beta of gamma * normal + beta, which have the sizes of `axes`."""
    rest = [a for a in range(1, g.shape.rank) if a not in axes]
    for variable, value in ((layer.gamma, normal * g), (layer.beta, g)):
        if variable is not None:
            total = tf.reduce_sum(value, axis=rest)
            yield variable, tf.reshape(total, [-1, *variable.shape])


def _no_mask(use):
    if use.arguments.get("mask") is not None:
        raise config.ConfigError(
            f"Layer {use.layer.name!r} is called with a mask, which its per-example kernel does "
            'not know: use method="vectorized_map".'
        )


def _refuse(layer, *settings):
    for name in settings:
        if getattr(layer, name, None):
            raise config.ConfigError(
                f"Layer {layer.name!r} has {name}={getattr(layer, name)}, which its per-example "
                'kernel does not know: use method="vectorized_map".'
            )


def _as_list(value):
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _rows(x):
    """[B, ..., C] as [B, T, C]."""
    return tf.reshape(x, [tf.shape(x)[0], -1, x.shape[-1]])


def _summed_to_last(g):
    return tf.reduce_sum(g, axis=list(range(1, g.shape.rank - 1)))


def _over_examples(x):
    return tf.reduce_sum(x, axis=list(range(1, x.shape.rank)))


def _wide(x):
    """In float32 at least."""
    x = tf.convert_to_tensor(x)
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


_BUILT_IN = {
    "Dense": Kernel(_dense, True),
    "EinsumDense": Kernel(_einsum_dense, True),
    "Conv1D": Kernel(_conv, True),
    "Conv2D": Kernel(_conv, True),
    "Conv3D": Kernel(_conv, True),
    "DepthwiseConv1D": Kernel(_depthwise, True),
    "DepthwiseConv2D": Kernel(_depthwise, True),
    "Embedding": Kernel(_embedding, True),
    "BatchNormalization": Kernel(_batch_norm, True),
    "LayerNormalization": Kernel(_layer_norm, True),
    "GroupNormalization": Kernel(_group_norm, True),
}
