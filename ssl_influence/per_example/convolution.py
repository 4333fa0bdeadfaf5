"""Per-example gradients of convolution kernels.

With x [B, *spatial, C_in] the input, g [B, *out, C_out] the gradient by the output, example b has

    G_b[o, ci, co] = sum_p x_pad[b, stride p + dilation o, ci] g[b, p, co]

for each offset o of the kernel. The methods differ in how they sum; `auto` times them once for each
shape.
"""

import concurrent.futures
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ssl_influence import config

METHODS = ("vectorized_map", "shifted_matmul", "im2col", "auto")

# What the loop inside vectorized_map costs more in a model's graph than alone: on 2 CPU cores all
# layers of WRN-28-2 took 1.4 times as long by it as by im2col, and single ones 0.8 to 1.5 times.
_LOOP_IN_A_GRAPH = 1.5

Method = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_log = logging.getLogger("ssl_influence")
_fastest: dict[Any, str] = {}


class Shape(NamedTuple):
    """What a convolution does, without channels: one number per spatial axis in each tuple.

    Attributes:
      size: of the kernel.
      strides: of the output positions.
      dilation: between the elements of the kernel.
      padding: "valid", "same" or "causal".
      groups: of channels; each sees its own share of the input.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str
    groups: int = 1


def kernel_gradients(
    x: tf.Tensor, g: tf.Tensor, shape: Shape, method: str, loop: Method
) -> tf.Tensor:
    """One gradient of the kernel for each example.

    Args:
      x: inputs [B, *spatial, C_in], float32 or float64.
      g: gradient by the outputs, [B, *out, C_out].
      shape: of the convolution.
      method: "shifted_matmul": a batched matrix product for each offset. "im2col": one product with
        all patches laid out, which takes as much more memory as the kernel has offsets.
        "vectorized_map": `loop`. "auto": the fastest for the shape on this machine, measured at its
        first use ("shifted_matmul" where the shape is not known).
      loop: (x, g) -> the same by tf.vectorized_map.

    Returns:
      [B, *size, C_in / groups, C_out].
    """
    methods = {
        "shifted_matmul": lambda x, g: _shifted_matmul(x, g, shape),
        "im2col": lambda x, g: _im2col(x, g, shape),
        "vectorized_map": loop,
    }
    return methods[_auto(x, g, shape, methods) if method == "auto" else method](x, g)


def depthwise_gradients(x: tf.Tensor, g: tf.Tensor, shape: Shape, multiplier: int) -> tf.Tensor:
    """One gradient of a depthwise kernel for each example.

    Args:
      x: inputs [B, *spatial, C].
      g: gradient by the outputs, [B, *out, C * multiplier].
      shape: of the convolution, without groups.
      multiplier: outputs for each channel.

    Returns:
      [B, *size, C, multiplier].
    """
    channels = x.shape[-1]
    g = tf.reshape(g, [*_sizes(g)[:-1], channels, multiplier])
    axes = list(range(1, 1 + len(shape.size)))
    parts = [tf.reduce_sum(part[..., tf.newaxis] * g, axis=axes) for part in _shifts(x, g, shape)]
    return tf.reshape(tf.stack(parts, axis=1), [_sizes(x)[0], *shape.size, channels, multiplier])


def check_method(method: str) -> None:
    """Raises ConfigError for a method that is not one of METHODS."""
    if method not in METHODS:
        raise config.ConfigError(f"conv_method={method!r} is not one of {', '.join(METHODS)}.")


def _shifted_matmul(x, g, shape):
    rows = _grouped(g, shape)
    parts = [
        tf.matmul(_grouped(part, shape), rows, transpose_a=True) for part in _shifts(x, g, shape)
    ]
    stacked = parts[0][:, tf.newaxis] if len(parts) == 1 else tf.stack(parts, axis=1)
    return _as_kernel(stacked, shape)


def _im2col(x, g, shape):
    """Gathers all patches, a row of channels at a time and by offsets, as the kernel wants them."""
    lengths = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in _axes(g, shape)]
    x = _padded(x, shape, lengths, lengths)
    batch, channels = _sizes(x)[0], x.shape[-1]
    index = tf.zeros([], tf.int32)
    for axis, (n, k, s, d) in enumerate(_axes(g, shape)):
        place = d * tf.range(k, dtype=tf.int32)[:, tf.newaxis] + s * tf.range(
            n, dtype=tf.int32
        )  # [k, n]
        ahead = len(shape.size) - axis - 1  # [k, ..., n, ...] from all axes together
        index = index * lengths[axis] + tf.reshape(
            place, [*([1] * axis), k, *([1] * ahead), *([1] * axis), n, *([1] * ahead)]
        )
    index = tf.reshape(index, [math.prod(shape.size), -1])
    patches = tf.gather(tf.reshape(x, [batch, -1, channels]), index, axis=1)
    if shape.groups > 1:
        *lead, channels = _sizes(patches)
        patches = tf.reshape(patches, [*lead, shape.groups, channels // shape.groups])
        patches = tf.transpose(patches, [0, 1, 3, 2, 4])
    rows = _grouped(g, shape)[:, tf.newaxis]
    return _as_kernel(tf.matmul(patches, rows, transpose_a=True), shape)


def _grouped(rows, shape):
    """[B, *spatial, C] as [B, P, C], or [B, groups, P, C / groups]."""
    batch, channels = _sizes(rows)[0], rows.shape[-1]
    if shape.groups == 1:
        return tf.reshape(rows, [batch, -1, channels])
    rows = tf.reshape(rows, [batch, -1, shape.groups, channels // shape.groups])
    return tf.transpose(rows, [0, 2, 1, 3])


def _as_kernel(products, shape):
    """[B, offsets, (groups,) C_in / groups, C_out / groups] in the kernel's shape."""
    if shape.groups > 1:
        products = tf.transpose(products, [0, 1, 3, 2, 4])
    batch, inputs = _sizes(products)[0], products.shape[2]
    outputs = products.shape[-1] * shape.groups
    return tf.reshape(products, [batch, *shape.size, inputs, outputs])


def _shifts(x, g, shape):
    """For each offset of the kernel, in its order, the input that each output position saw there.

    Strides are taken by splitting each axis in its phases once: slices with a step are slow.
    """
    rank = len(shape.size)
    axes = list(_axes(g, shape))
    blocks = [n + (k - 1) * d // s for n, k, s, d in axes]
    lengths = [b * s for b, (_, _, s, _) in zip(blocks, axes, strict=True)]
    x = _padded(x, shape, [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in axes], lengths)
    batch, channels = _sizes(x)[0], x.shape[-1]
    split = itertools.chain(*zip(blocks, shape.strides, strict=True))
    x = tf.reshape(x, [batch, *split, channels])
    if max(shape.strides) > 1:
        x = tf.transpose(x, [*range(2, 2 + 2 * rank, 2), 0, *range(1, 2 * rank, 2), 1 + 2 * rank])
    else:
        x = tf.reshape(x, [*shape.strides, batch, *blocks, channels])
    for offset in itertools.product(*map(range, shape.size)):
        places = [o * d for o, d in zip(offset, shape.dilation, strict=True)]
        phase = tuple(p % s for p, s in zip(places, shape.strides, strict=True))
        window = (slice(p // s, p // s + n) for p, (n, _, s, _) in zip(places, axes, strict=True))
        yield x[phase][(slice(None), *window)]


def _axes(g, shape):
    """For each axis: number of outputs, size of the kernel, stride, dilation."""
    outputs = _sizes(g)[1 : 1 + len(shape.size)]
    return zip(outputs, shape.size, shape.strides, shape.dilation, strict=True)


def _padded(x, shape, reach, lengths):
    """The input as the convolution pads it, cut or filled up with zeros to `lengths`.

    Args:
      x: [B, *spatial, C].
      shape: of the convolution.
      reach: how much of each padded axis the convolution reads.
      lengths: at least that.
    """
    paddings = [[0, 0]]
    for n, k, d, read, length in zip(
        _sizes(x)[1:-1], shape.size, shape.dilation, reach, lengths, strict=True
    ):
        before = {
            "valid": lambda: 0,
            "same": lambda read=read, n=n: _at_least_0(read - n) // 2,
            "causal": lambda k=k, d=d: (k - 1) * d,
        }[shape.padding]()
        paddings.append([before, _at_least_0(length - n - before)])
    padded = tf.pad(x, [*paddings, [0, 0]])
    return padded[(slice(None), *(slice(0, length) for length in lengths))]


def _auto(x, g, shape, methods):
    if not (x.shape.is_fully_defined() and g.shape.is_fully_defined()):
        return "shifted_matmul"
    signature = (tuple(x.shape), tuple(g.shape), x.dtype.name, shape, x.device)
    if signature not in _fastest:
        # In a thread of its own TensorFlow is in eager mode and differentiates, whatever graph or
        # tape this one is in; tf.init_scope would only do the first.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            seconds = thread.submit(_all_seconds, methods, x.shape, g.shape, x.dtype).result()
        seconds["vectorized_map"] *= _LOOP_IN_A_GRAPH
        _fastest[signature] = min(seconds, key=seconds.get)
        _log.debug("Convolution %s on %s: %s.", shape, x.shape, seconds)
    return _fastest[signature]


def _all_seconds(methods, x_shape, g_shape, dtype):
    x, g = tf.ones(x_shape, dtype), tf.ones(g_shape, dtype)
    functions = {name: tf.function(f, autograph=False) for name, f in methods.items()}
    return {name: _seconds(function, x, g) for name, function in functions.items()}


def _seconds(function, x, g, repeats=4):
    """The least of some calls, after the one that traces."""
    function(x, g).numpy()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(x, g).numpy()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _sizes(tensor):
    """Static sizes where known, else scalars of the graph."""
    dynamic = None
    sizes = []
    for axis, size in enumerate(tensor.shape):
        if size is None:
            dynamic = tf.shape(tensor) if dynamic is None else dynamic
            size = dynamic[axis]
        sizes.append(size)
    return sizes


def _at_least_0(value):
    return max(value, 0) if isinstance(value, int) else tf.maximum(value, 0)
