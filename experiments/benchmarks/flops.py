r"""Floating-point operations of the steps, which no machine's speed wavers with.

    python -m experiments.benchmark --suite=flops \
        --flagfile=experiments/flagfiles/paper/uda_cifar10_250.flags
    python -m experiments.benchmark --suite=flops \
        --flagfile=experiments/flagfiles/paper/uda_imdb_20.flags

Steps are traced, not run. Of the flags, those of model, method, optimizer, weights and batch sizes
count; nothing is read but the sizes of the encoder, and not even these if it is one of Google's by
its name (uncased_L-12_H-768_A-12 is BERT-base, in a folder or not).

- plain: a step of UDA on images as one writes it by hand (see the suite train_step); without it
  for other methods, annealing and texts. fixed: a step without example weights; theta: with Lambda,
  held; fused: with a weight step in it; weight: a weight step alone; validation_forward: the
  forward pass of a validation batch, which the weight step needs.
- run_every_N: the mean step of a run with a weight step in every N, by --weight_batch fused or
  fresh. weight_overhead is what one weight step adds to a theta step, relative to it,
  weight_overhead_beside_forward what it adds beside that forward pass, and weight_overhead_every_N
  what it adds to the mean step of such a run.

Loops and branches depend on the data, in the solve of the last layer: GFLOP takes each loop once
and the cheaper branch, "at most" each loop as often as it may run, and the dearer branch. The JSON
file has the operations by type of op too. What `count` does not know is printed.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

CASES = ("steps",)

INTERVALS = (5, 20, 100)

_QUANTITIES = ("float_operations", "most_float_operations")

RATIOS = {
    name: ratio._replace(quantities=_QUANTITIES)
    for name, ratio in {
        "fixed_over_plain": timing.Ratio("fixed", "plain"),
        "theta_over_fixed": timing.Ratio("theta", "fixed"),
        "fused_over_theta": timing.Ratio("fused", "theta"),
        "weight_over_theta": timing.Ratio("weight", "theta"),
        "weight_overhead": timing.Ratio("fused", "theta", ("theta",)),
        "weight_overhead_beside_forward": timing.Ratio(
            "fused", "theta", ("theta", "validation_forward")
        ),
        **{
            f"weight_overhead_every_{every}": timing.Ratio(
                f"run_every_{every}", "theta", ("theta",)
            )
            for every in INTERVALS
        },
    }.items()
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError without weight steps."""
    if config.weights.weighting == "fixed":
        raise config_lib.ConfigError(
            "weighting=fixed has no weight steps to count: use per_example or single."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows; repeats are of no use. Says what was not counted."""
    del case, repeats
    from experiments.benchmarks import flop_steps

    rows = {}
    for row, function in flop_steps.traced(config):
        counted = count(function)
        rows[row] = {
            "float_operations": counted.total,
            "most_float_operations": counted.most,
            **counted.by_op,
        }
        for name, times in sorted(counted.unknown.items()):
            print(f"Not counted in {row}: {times} of {name}.", flush=True)
    fused = ("fused",) if config.weights.batch == "fused" else ("theta", "weight")
    for every in INTERVALS:
        rows[f"run_every_{every}"] = {
            quantity: (
                (every - 1) * rows["theta"][quantity] + sum(rows[row][quantity] for row in fused)
            )
            / every
            for quantity in _QUANTITIES
        }
    return rows


class Flops(NamedTuple):
    """Floating-point operations of a function.

    Attributes:
      total: with each loop taken once, and of each conditional the cheapest branch.
      most: with each loop as often as its maximum_iterations allow, and the dearest branches.
      by_op: type of op -> its part of the total.
      unknown: type of op -> how many there are that are in neither, in whatever branch: of a type
        that `count` has no rule for, of a size that is not known, or loops without a maximum
        (taken once in `most` too).
    """

    total: float
    most: float
    by_op: dict[str, float]
    unknown: dict[str, int]


def count(function: Any) -> Flops:
    """Counts the operations that the outputs and side effects of a concrete function take.

    A multiplication and an addition are two. What TensorFlow's optimizer of graphs may save, as by
    common subexpressions, is not looked at. Elementwise functions are one operation an element,
    whatever they take, and where TensorFlow's profiler has another rule that one; comparisons
    count, and operations on integers do not. In factorizations the leading terms count (Golub and
    Van Loan, Matrix Computations, 2013).

    Args:
      function: a concrete function of a tf.function. Functions that it calls are looked into.
    """
    return _of_graph(function.graph)


def _of_graph(graph):
    return _sum(_of_op(op) for op in _needed(graph))


def _of_op(op) -> Flops:
    if op.type in _CALLS:
        return _of_graph(_function(op, "f"))
    if op.type in _CONDITIONALS:
        return _of_branches([_of_graph(graph) for graph in _branches(op)])
    if op.type in _LOOPS:
        once = _sum(_of_graph(_function(op, name)) for name in ("cond", "body"))
        times = _most_iterations(op)
        if times is None:
            return _sum([once, _unknown(f"{op.type} without maximum_iterations")])
        return once._replace(most=once.most * times)
    if op.type in _FREE or not _is_floating(op):
        return _sum([])
    if op.type not in _RULES:
        return _unknown(op.type)
    try:
        number = float(_RULES[op.type](op))
    except _SizeError:
        return _unknown(f"{op.type} of unknown size")
    return Flops(number, number, {op.type: number}, {})


def _sum(parts: Iterable[Flops]) -> Flops:
    most, by_op, unknown = 0.0, collections.Counter(), collections.Counter()
    for part in parts:
        most += part.most
        by_op.update(part.by_op)
        unknown.update(part.unknown)
    return Flops(math.fsum(by_op.values()), most, dict(by_op), dict(unknown))


def _of_branches(branches: list[Flops]) -> Flops:
    cheapest = min(branches, key=lambda branch: branch.total)
    most = max(branch.most for branch in branches)
    return cheapest._replace(most=most, unknown=_sum(branches).unknown)


def _unknown(name: str) -> Flops:
    return Flops(0.0, 0.0, {}, {name: 1})


def _needed(graph) -> Iterator[Any]:
    """The ops that outputs and side effects depend on: no others run."""
    waiting = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    found = set()
    while waiting:
        op = waiting.pop()
        if op in found:
            continue
        found.add(op)
        yield op
        waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def _function(op, attribute):
    return _graph_of(op, op.get_attr(attribute))


def _branches(op):
    if "Case" in op.type:
        return [_graph_of(op, function) for function in op.get_attr("branches")]
    return [_function(op, name) for name in ("then_branch", "else_branch")]


def _graph_of(op, function):
    # TensorFlow has no public way from the op to the graph that was traced, with its shapes.
    return op.graph._get_function(function.name).graph


def _most_iterations(op) -> int | None:
    """Of a tf.while_loop, whose first two values are a counter and maximum_iterations, or -1."""
    import tensorflow as tf

    limit = tf.get_static_value(op.inputs[1]) if len(op.inputs) > 1 else None
    scalar = limit is not None and limit.ndim == 0 and limit.dtype.kind == "i"
    return int(limit) if scalar and limit >= 0 else None


def _is_floating(op):
    return any(tensor.dtype.is_floating for tensor in (*op.inputs, *op.outputs))


class _SizeError(Exception):
    """A shape is not known."""


def _shape(tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise _SizeError
    return tensor.shape.as_list()


def _size(tensor) -> int:
    return math.prod(_shape(tensor))


def _per_output(operations: int = 1) -> Callable:
    return lambda op: operations * _size(op.outputs[0])


def _per_input(operations: int = 1, which: int = 0) -> Callable:
    return lambda op: operations * _size(op.inputs[which])


def _reduction(op):
    return _size(op.inputs[0]) - _size(op.outputs[0])


def _matrix_product(transposed: str) -> Callable:
    def rule(op):
        inner = _shape(op.inputs[0])[-2 if op.get_attr(transposed) else -1]
        return 2 * inner * _size(op.outputs[0])

    return rule


def _einsum(op):
    """2 for each combination of all indices; 1 where nothing is summed up, or multiplied."""
    left, output = op.get_attr("equation").decode().split("->")
    sizes = {}
    for labels, tensor in zip(left.split(","), op.inputs, strict=True):
        shape = _shape(tensor)
        if "..." in labels:
            # Named from the last on, as they are broadcast.
            hidden = len(shape) - len(labels) + 3
            before, after = labels.split("...")
            labels = [*before, *(f"...{i}" for i in reversed(range(hidden))), *after]
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    summed = any(label not in output and "..." not in label for label in sizes)
    return (summed + (len(op.inputs) > 1)) * math.prod(sizes.values())


def _convolution(kernel: Callable, output: Callable) -> Callable:
    """Of kernels [..., channels of a group, filters], and their gradients alike."""

    def rule(op):
        return 2 * _size(output(op)) * math.prod(_shape(kernel(op))[:-1])

    return rule


def _depthwise(kernel: Callable, output: Callable) -> Callable:
    """Of kernels [height, width, channels, multiplier], and their gradients alike."""

    def rule(op):
        return 2 * _size(output(op)) * math.prod(_shape(kernel(op))[:2])

    return rule


def _batch_norm(training: int, inference: int) -> Callable:
    return lambda op: (training if op.get_attr("is_training") else inference) * _size(op.inputs[0])


def _of_matrices(rule: Callable[[int, int], float]) -> Callable:
    """A rule of the sizes of each matrix [..., m, n] of the first input."""

    def of_op(op):
        *batch, m, n = _shape(op.inputs[0])
        return math.prod(batch) * rule(m, n)

    return of_op


def _triangular_solve(op):
    return _shape(op.inputs[0])[-1] * _size(op.outputs[0])


def _eigenvectors(op):
    return _of_matrices(lambda n, _: (9 if op.get_attr("compute_v") else 4 / 3) * n**3)(op)


def _qr(m: int, n: int) -> float:
    """R by Householder's reflections, and as much again for as many columns of Q."""
    m, n = max(m, n), min(m, n)
    return 2 * (2 * m * n**2 - 2 / 3 * n**3)


def _update(operations: Callable[[Any], int] | int) -> Callable:
    """A step of an optimizer on a variable, by the largest input: its gradient."""

    def rule(op):
        each = operations(op) if callable(operations) else operations
        return each * max(_size(t) for t in op.inputs if t.dtype.is_floating)

    return rule


_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_CONDITIONALS = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}

_ELEMENTWISE = (
    *("Add", "AddV2", "Sub", "Mul", "MulNoNan", "RealDiv", "DivNoNan", "FloorDiv", "FloorMod"),
    *("Maximum", "Minimum", "Pow", "Xlogy", "Xlog1py", "Xdivy", "ClipByValue"),
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "IsFinite", "IsNan"),
    *("Neg", "Abs", "Sign", "Square", "Sqrt", "Reciprocal", "Inv", "Exp", "Expm1", "Log", "Log1p"),
    *("Cos", "Sin", "Tanh", "Sigmoid", "Erf", "Erfc", "Erfinv", "Ndtri", "Softplus", "Round"),
    *("Floor", "Ceil", "Relu", "Relu6", "LeakyRelu", "Elu", "ReluGrad", "LeakyReluGrad"),
    *("BiasAdd", "Cumsum", "StatelessRandomUniformV2", "StatelessRandomNormalV2"),
)
_KERAS_MOMENTUM = _update(lambda op: 7 if op.get_attr("use_nesterov") else 4)
_CONV_OUTPUTS = {
    "": (lambda op: op.inputs[1], lambda op: op.outputs[0]),
    "BackpropInput": (lambda op: op.inputs[1], lambda op: op.inputs[2]),
    "BackpropFilter": (lambda op: op.outputs[0], lambda op: op.inputs[2]),
}

# type of op -> its operations
_RULES = {
    **dict.fromkeys(_ELEMENTWISE, _per_output()),
    **dict.fromkeys(("Rsqrt", "SquaredDifference"), _per_output(2)),
    **dict.fromkeys(("TanhGrad", "SigmoidGrad", "SqrtGrad"), _per_output(3)),
    "RsqrtGrad": _per_output(4),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _per_output(5)),
    # The largest, shifted logits, exponentials, their sum; the loss; and its gradient.
    "SparseSoftmaxCrossEntropyWithLogits": _per_input(6),
    "SoftmaxCrossEntropyWithLogits": _per_input(8),
    **dict.fromkeys(("Sum", "Prod", "Max", "Min", "ArgMax", "ArgMin", "BiasAddGrad"), _reduction),
    "Mean": _per_input(),
    "L2Loss": _per_input(2),
    "AddN": lambda op: (len(op.inputs) - 1) * _size(op.outputs[0]),
    **dict.fromkeys(("UnsortedSegmentSum", "UnsortedSegmentMax", "SegmentSumV2"), _per_input()),
    **dict.fromkeys(("AssignAddVariableOp", "AssignSubVariableOp"), _per_input(which=1)),
    **dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub"), _per_input(which=2)),
    "MatMul": _matrix_product("transpose_a"),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrix_product("adj_x")),
    "Einsum": _einsum,
    **{f"Conv2D{part}": _convolution(*of) for part, of in _CONV_OUTPUTS.items()},
    **{f"DepthwiseConv2dNative{part}": _depthwise(*of) for part, of in _CONV_OUTPUTS.items()},
    # Mean, variance, and what makes the output of them; sums, and a gradient by the input.
    "FusedBatchNormV3": _batch_norm(training=7, inference=3),
    "FusedBatchNormGradV3": _batch_norm(training=9, inference=5),
    "Cholesky": _of_matrices(lambda n, _: n**3 / 3),
    "MatrixTriangularSolve": _triangular_solve,
    "MatrixInverse": _of_matrices(lambda n, _: 2 * n**3),
    "SelfAdjointEigV2": _eigenvectors,
    "Qr": _of_matrices(_qr),
    "ResourceApplyKerasMomentum": _KERAS_MOMENTUM,
    "ResourceApplyGradientDescent": _update(2),
    "ResourceApplyAdam": _update(12),
}

# What moves numbers, makes them, or says what to do with them.
_FREE = {
    *("Const", "Placeholder", "PlaceholderWithDefault", "NoOp", "Identity", "IdentityN"),
    *("StopGradient", "PreventGradient", "EnsureShape", "CheckNumerics", "Assert", "Cast"),
    *("ReadVariableOp", "AssignVariableOp", "ResourceGather", "ResourceScatterUpdate"),
    *("VarHandleOp", "Reshape", "ExpandDims", "Squeeze", "Transpose", "ConcatV2", "Split"),
    *("SplitV", "Pack", "Unpack", "Slice", "StridedSlice", "StridedSliceGrad", "Tile", "Pad"),
    *("PadV2", "MirrorPad", "ReverseV2", "BroadcastTo", "Fill", "ZerosLike", "OnesLike", "Range"),
    *("OneHot", "GatherV2", "GatherNd", "ScatterNd", "TensorScatterUpdate", "Select", "SelectV2"),
    *("Shape", "ShapeN", "Size", "Rank", "Where", "InvertPermutation"),
    *("MatrixDiagV3", "MatrixDiagPartV3", "MatrixSetDiagV3", "MatrixBandPart"),
    # Sorting and searching.
    *("TopKV2", "Unique", "UniqueV2", "LowerBound", "UpperBound"),
    # Of lists, which hold what loops made.
    *("TensorListReserve", "TensorListSetItem", "TensorListGetItem", "TensorListStack"),
    *("TensorListFromTensor", "EmptyTensorList", "TensorListPushBack", "TensorListPopBack"),
}
