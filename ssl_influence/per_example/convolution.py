"""Per-example gradients of convolution kernels.

With x [B, *spatial, C_in] the input and g [B, *out, C_out] the gradient by the output, example b
has

    G_b[o, ci, co] = sum_p x_pad[b, stride p + dilation o, ci] g[b, p, co]

for each offset o of the kernel. The methods differ in how they sum; `auto` times them once for each
shape.
"""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ssl_influence import config

METHODS = ("vectorized_map", "shifted_matmul", "im2col", "auto")

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
      method: "shifted_matmul": a batched matrix product for each offset; "im2col": one product with
        all patches laid out; "vectorized_map": `loop`; "auto": the fastest for the shape on this
        machine, measured at its first use ("shifted_matmul" where the shape is not known).
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
    rows, channels = _grouped(g, shape.groups)
    parts = [
        tf.matmul(_grouped(part, shape.groups)[0], rows, transpose_a=True)
        for part in _shifts(x, g, shape)
    ]
    stacked = parts[0][:, tf.newaxis] if len(parts) == 1 else tf.stack(parts, axis=1)
    return _ungrouped(stacked, x, channels, shape)


def _im2col(x, g, shape):
    rows, channels = _grouped(g, shape.groups)
    patches = tf.stack([_grouped(part, shape.groups)[0] for part in _shifts(x, g, shape)], axis=-2)
    *lead, positions, offsets, inputs = _sizes(patches)
    patches = tf.reshape(patches, [*lead, positions, offsets * inputs])
    product = tf.matmul(patches, rows, transpose_a=True)
    product = tf.reshape(product, [*lead, offsets, inputs, channels // shape.groups])
    if shape.groups > 1:
        product = tf.transpose(product, [0, 2, 1, 3, 4])
    return _ungrouped(product, x, channels, shape)


def _grouped(rows, groups):
    """[B, *spatial, C] as [B, P, C], or [B, groups, P, C / groups]; and C."""
    sizes = _sizes(rows)
    channels = sizes[-1]
    positions = _product(sizes[1:-1])
    if groups == 1:
        return tf.reshape(rows, [sizes[0], positions, channels]), channels
    rows = tf.reshape(rows, [sizes[0], positions, groups, channels // groups])
    return tf.transpose(rows, [0, 2, 1, 3]), channels


def _ungrouped(stacked, x, channels, shape):
    """[B, offsets, (groups,) C_in / groups, C_out / groups] as the kernel's shape."""
    if shape.groups > 1:
        stacked = tf.transpose(stacked, [0, 1, 3, 2, 4])
    inputs = x.shape[-1] // shape.groups
    return tf.reshape(stacked, [_sizes(x)[0], *shape.size, inputs, channels])


def _shifts(x, g, shape):
    """For each offset of the kernel, in its order, the input that each output position saw there.

    Strides are taken by splitting each axis in its phases once: slices with a step are slow.
    """
    rank = len(shape.size)
    out = _sizes(g)[1 : 1 + rank]
    spatial = _sizes(x)[1:-1]
    reach = [(n - 1) * s for n, s in zip(out, shape.strides, strict=True)]
    paddings, phased = [[0, 0]], []
    for n, k, d, s, span, outs in zip(
        spatial, shape.size, shape.dilation, shape.strides, reach, out, strict=True
    ):
        extent = (k - 1) * d
        before = {
            "valid": 0,
            "same": _at_least_0(span + extent + 1 - n) // 2,
            "causal": extent,
        }[shape.padding]
        # As long as the slices below need: whole strides, from phase 0 of the first position on.
        blocks = outs + extent // s
        length = blocks * s if s > 1 else span + extent + 1
        if s > 1 or shape.padding != "valid":
            after = length - n - before
            paddings.append([before, _at_least_0(after)])
        else:
            paddings.append([0, 0])
        phased.append((s, blocks, length))
    paddings.append([0, 0])
    x = tf.pad(x, paddings)
    x = x[(slice(None), *(slice(0, length) for _, _, length in phased))]
    batch, channels = _sizes(x)[0], _sizes(x)[-1]
    if any(s > 1 for s in shape.strides):
        split = [
            batch,
            *itertools.chain(
                *((blocks, s) if s > 1 else (length, 1) for s, blocks, length in phased)
            ),
            channels,
        ]
        x = tf.reshape(x, split)
        phases = [2 + 2 * axis for axis in range(rank)]
        places = [1 + 2 * axis for axis in range(rank)]
        x = tf.transpose(x, [*phases, 0, *places, 1 + 2 * rank])
    else:
        x = tf.reshape(x, [*([1] * rank), batch, *_sizes(x)[1:-1], channels])
    for offset in itertools.product(*map(range, shape.size)):
        places = [o * d for o, d in zip(offset, shape.dilation, strict=True)]
        phase = tuple(p % s for p, s in zip(places, shape.strides, strict=True))
        starts = [p // s for p, s in zip(places, shape.strides, strict=True)]
        yield x[phase][(slice(None), *(slice(a, a + n) for a, n in zip(starts, out, strict=True)))]


def _auto(x, g, shape, methods):
    if not (x.shape.is_fully_defined() and g.shape.is_fully_defined()):
        return "shifted_matmul"
    signature = (tuple(x.shape), tuple(g.shape), x.dtype.name, shape, x.device)
    if signature not in _fastest:
        with tf.init_scope():  # really compute, also where a graph is being built
            x, g = tf.ones(x.shape, x.dtype), tf.ones(g.shape, g.dtype)
            seconds = {name: _seconds(tf.function(f), x, g) for name, f in methods.items()}
        _fastest[signature] = min(seconds, key=seconds.get)
        _log.debug("Convolution %s on %s: %s.", shape, x.shape, seconds)
    return _fastest[signature]


def _seconds(function, x, g, repeats=3):
    """Median over repeats, after the call that traces."""
    np.asarray(function(x, g))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.asarray(function(x, g))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


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


def _product(sizes):
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else tf.reduce_prod(sizes)


def _at_least_0(value):
    return max(value, 0) if isinstance(value, int) else tf.maximum(value, 0)
