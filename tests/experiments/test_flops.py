"""Counted operations, beside closed forms and TensorFlow's profiler; and the suite of the steps."""

import json

import pytest
import tensorflow as tf

from experiments.benchmarks import flop_steps, flops, timing
from ssl_influence import config as config_lib
from tests.experiments.processes import run, succeeded


def counted(function, *shapes, dtype=tf.float32):
    specs = [tf.TensorSpec(shape, dtype) for shape in shapes]
    return flops.count(tf.function(function).get_concrete_function(*specs))


def gradients(function, *values):
    with tf.GradientTape() as tape:
        tape.watch(values)
        result = function(*values)
    return tape.gradient(result, values, output_gradients=tf.ones_like(result))


def convolution(stride):
    return lambda x, kernel: tf.nn.conv2d(x, kernel, stride, "SAME")


def depthwise(x, kernel):
    return tf.nn.depthwise_conv2d(x, kernel, [1, 2, 2, 1], "SAME")


# Of x [2, 8, 6, 4] with stride 2: outputs [2, 4, 3, filters].
CONVOLUTION = 2 * (2 * 4 * 3 * 5) * (3 * 3 * 4)
GROUPED = 2 * (2 * 4 * 3 * 6) * (3 * 3 * 2)
DEPTHWISE = 2 * (2 * 4 * 3 * 4 * 3) * (3 * 3)

CLOSED_FORMS = {
    "dense": (lambda x, w, b: tf.nn.bias_add(x @ w, b), ([3, 4], [4, 5], [5]), 2 * 60 + 15),
    "transposed": (lambda x, w: tf.matmul(x, w, transpose_a=True), ([4, 3], [4, 5]), 2 * 60),
    "batched": (lambda x, w: tf.matmul(x, w, adjoint_a=True), ([7, 4, 3], [7, 4, 5]), 7 * 2 * 60),
    "broadcast": (tf.matmul, ([7, 3, 4], [1, 4, 5]), 7 * 2 * 60),
    "convolution": (convolution(2), ([2, 8, 6, 4], [3, 3, 4, 5]), CONVOLUTION),
    "grouped": (convolution(2), ([2, 8, 6, 4], [3, 3, 2, 6]), GROUPED),
    "its gradients": (
        lambda *values: gradients(convolution(2), *values),
        ([2, 8, 6, 4], [3, 3, 2, 6]),
        2 * GROUPED,
    ),
    "depthwise": (depthwise, ([2, 8, 6, 4], [3, 3, 4, 3]), DEPTHWISE),
    "einsum": (
        lambda q, k: tf.einsum("bqhd,bkhd->bhqk", q, k),
        ([2, 5, 3, 4], [2, 6, 3, 4]),
        2 * (2 * 3 * 5 * 6 * 4),
    ),
    "einsum of any rank": (
        lambda x, w: tf.einsum("...d,df->...f", x, w),
        ([2, 7, 3], [3, 5]),
        2 * (2 * 7 * 3 * 5),
    ),
    "outer product": (lambda a, b: tf.einsum("i,j->ij", a, b), ([3], [4]), 12),
    "einsum that sums": (lambda a: tf.einsum("ij->i", a), ([3, 4],), 12),
    "cholesky": (tf.linalg.cholesky, ([2, 6, 6],), 2 * 6**3 / 3),
    "triangular": (tf.linalg.triangular_solve, ([6, 6], [6, 4]), 6 * 6 * 4),
    "inverse": (tf.linalg.inv, ([6, 6],), 2 * 6**3),
    "qr": (tf.linalg.qr, ([7, 3],), 2 * (2 * 7 * 3**2 - 2 * 3**3 / 3)),
    "eigenvectors": (tf.linalg.eigh, ([6, 6],), 9 * 6**3),
    "eigenvalues": (tf.linalg.eigvalsh, ([6, 6],), 4 / 3 * 6**3),
    "elementwise": (lambda a, b: tf.exp(a + b), ([3, 1], [4]), 12 + 12),
    "sum": (lambda a: tf.reduce_sum(a, 0), ([3, 4],), 8),
    "mean": (lambda a: tf.reduce_mean(a, 0), ([3, 4],), 12),
    "moved": (lambda a: tf.gather(tf.transpose(a), [0, 2])[:, :1], ([3, 4],), 0),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name):
    function, shapes, expected = CLOSED_FORMS[name]
    found = counted(function, *shapes)
    assert found.total == found.most == pytest.approx(expected)
    assert not found.unknown


def test_integers_cost_nothing():
    assert counted(lambda a, b: a + b, [3], [3], dtype=tf.int32).total == 0


@pytest.mark.parametrize(("training", "each"), [(True, 7), (False, 3)])
def test_batch_norm_takes_more_in_training(training, each):
    def normalize(x, statistics):
        mean = variance = [] if training else statistics
        return tf.compat.v1.nn.fused_batch_norm(
            x, statistics, statistics, mean, variance, is_training=training
        )[0]

    found = counted(normalize, [2, 5, 5, 3], [3])
    assert found.by_op == {"FusedBatchNormV3": each * 2 * 5 * 5 * 3}


def profiled(traced):
    """What TensorFlow's own profiler counts of a graph without calls."""
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    return tf.compat.v1.profiler.profile(traced.graph, cmd="scope", options=options).total_float_ops


def test_profiler_of_tensorflow_counts_the_same_of_what_it_knows():
    def network(x, kernel, bias, dense):
        hidden = tf.nn.bias_add(convolution(2)(x, kernel), bias)
        return tf.nn.softmax(tf.reshape(hidden * hidden, [2, -1]) @ dense)

    def step(*values):
        return gradients(network, *values)

    shapes = [2, 8, 6, 3], [3, 3, 3, 5], [5], [4 * 3 * 5, 7]
    traced = tf.function(step).get_concrete_function(*map(tf.TensorSpec, shapes))
    found = flops.count(traced)
    convolutions = {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}
    others = {"MatMul", "BiasAdd", "BiasAddGrad", "Softmax", "Mul", "Sub", "Sum", "AddN"}
    assert found.by_op.keys() == convolutions | others
    assert found.total == profiled(traced)


def test_functions_are_looked_into_at_every_call_and_what_nobody_needs_is_left_out():
    inner = tf.function(lambda x: tf.matmul(x, x))

    def outer(x):
        tf.exp(x)
        return inner(inner(x))

    found = counted(outer, [3, 3])
    assert found.by_op == {"MatMul": 2 * 2 * 27}


def test_side_effects_are_needed():
    variable = tf.Variable(tf.zeros([3, 3]))

    def add(x):
        variable.assign_add(x @ x)

    found = counted(add, [3, 3])
    assert found.by_op == {"MatMul": 2 * 27, "AssignAddVariableOp": 9}


def test_loops_count_once_or_as_often_as_they_may():
    def loop(x, **settings):
        return tf.while_loop(lambda x: tf.reduce_sum(x) > 0, lambda x: [x @ x], [x], **settings)

    found = counted(lambda x: loop(x, maximum_iterations=10), [3, 3])
    once = 54 + 8 + 1  # The product, the sum and the comparison.
    assert (found.total, found.most, found.unknown) == (once, 10 * once, {})
    found = counted(loop, [3, 3])
    assert (found.total, found.most) == (once, once)
    assert found.unknown == {"StatelessWhile without maximum_iterations": 1}


def test_of_branches_the_cheapest_counts_or_the_dearest():
    def branch(x):
        return tf.cond(x[0, 0] > 0, lambda: tf.matmul(x, x @ x), lambda: x @ x)

    found = counted(branch, [3, 3])
    assert found.by_op == {"Greater": 1, "MatMul": 54}
    assert (found.total, found.most) == (55, 1 + 2 * 54)

    def switch(x):
        return tf.switch_case(
            tf.cast(x[0], tf.int32), [lambda: x, lambda: tf.exp(x), lambda: tf.exp(tf.exp(x))]
        )

    found = counted(switch, [3])
    assert (found.total, found.most) == (0, 6)


def test_what_is_not_known_is_told():
    found = counted(lambda x: tf.math.lgamma(x) + tf.math.lgamma(2 * x), [3])
    assert found.unknown == {"Lgamma": 2} and found.total == 6
    found = counted(lambda x: tf.exp(x), [None])
    assert found.unknown == {"Exp of unknown size": 1} and found.total == 0


SMALL = {"labeled_batch_size": 8, "unlabeled_batch_size": 16, "validation_batch_size": 10}


def test_suite_counts_the_steps_as_a_process(tmp_path):
    path = tmp_path / "flops.json"
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    arguments = ["--suite=flops", "--model=mlp", "--hidden_units=4", *sizes, f"--json={path}"]
    table = succeeded(run("benchmark", *arguments)).stdout
    result = json.loads(path.read_text())
    rows, ratios = result["rows"], result["ratios"]
    assert "Not counted" not in table and "weight_overhead_every_100" in table
    first, head = 2 * 32 * 32 * 3 * 4, 2 * 4 * 10
    # Joint pass, gradients by both kernels and by the head's input; the plain step alike.
    for row in ("plain", "fixed", "theta"):
        assert rows[row]["MatMul"] == (8 + 2 * 16) * (2 * first + 3 * head)
    assert rows["validation_forward"]["MatMul"] == 10 * (first + head)
    assert rows["fused"]["MatMul"] > rows["theta"]["MatMul"] + 10 * (first + head)
    assert rows["weight"]["MatMul"] > (8 + 2 * 16 + 10) * (first + head)
    for quantity in ("float_operations", "most_float_operations"):
        theta, fused = rows["theta"][quantity], rows["fused"][quantity]
        assert ratios["weight_overhead"][quantity] == (fused - theta) / theta
        for every in flops.INTERVALS:
            assert ratios[f"weight_overhead_every_{every}"][quantity] == pytest.approx(
                (fused - theta) / theta / every
            )
        assert rows["fixed"][quantity] <= theta < fused
    assert ratios.keys() == flops.RATIOS.keys()


def test_encoder_of_a_known_name_is_counted_without_its_files():
    pytest.importorskip("official.nlp")
    config = config_lib.Config().replace(
        model={"name": "bert", "encoder": "uncased_L-1_H-8_A-2", "sequence_length": 6},
        method={"confidence": 0.0, "tsa": "linear"},
        optimizer={"name": "adam"},
        data=SMALL,
    )
    found = {}
    for row, function in flop_steps.traced(config):
        found[row] = flops.count(function)
        if row == "theta":
            break
    assert list(found) == ["fixed", "theta"]
    tokens, h, inner = (8 + 2 * 16) * 6, 8, 32
    attention = 2 * (2 * tokens * 6 * h)  # Scores, and the mean of the values.
    forward = 2 * tokens * (4 * h * h + 2 * h * inner) + attention
    assert found["theta"].by_op["Einsum"] == 3 * forward
    assert set(found["theta"].unknown) <= {"UnsortedSegmentSum of unknown size"}


def test_fresh_batches_take_a_weight_step_alone(monkeypatch):
    functions = {
        row: tf.function(tf.exp).get_concrete_function(tf.TensorSpec([size]))
        for row, size in {"theta": 10, "fused": 14, "weight": 9}.items()
    }
    monkeypatch.setattr(flop_steps, "traced", lambda config: functions.items())
    for batch, mean in {"fused": (4 * 10 + 14) / 5, "fresh": (5 * 10 + 9) / 5}.items():
        rows = flops.measure("steps", config_lib.Config().replace(weights={"batch": batch}), 1)
        assert rows["run_every_5"]["float_operations"] == mean
        overhead = timing.ratios(flops.RATIOS, rows)["weight_overhead_every_5"]
        assert overhead["float_operations"] == pytest.approx(mean / 10 - 1)


def test_weights_that_are_fixed_have_no_steps_to_count():
    with pytest.raises(config_lib.ConfigError, match="use per_example or single"):
        flops.check(config_lib.Config().replace(weights={"weighting": "fixed"}))
