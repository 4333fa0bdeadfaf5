"""The table of example weights: look-up, updates, projection, counts, state."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, example_weights, optimizers

RUNNERS = {
    "eager": lambda fn: fn,
    "graph": tf.function,
    "compiled": lambda fn: tf.function(fn, jit_compile=True),
}


def update(weights, ids, gradients, runner="eager"):
    RUNNERS[runner](weights.update)(tf.constant(ids, tf.int64), tf.constant(gradients, tf.float32))


def moved_by(name, size, mode="per_example", **settings):
    moving = config.WeightConfig(optimizer=name, learning_rate=0.1)
    optimizer = optimizers.make_weight_optimizer(moving)
    return example_weights.ExampleWeights(size, mode=mode, optimizer=optimizer, **settings)


def random_steps(size, rows, count):
    rng = np.random.default_rng(5)
    steps = [(rng.integers(0, size, rows), rng.normal(size=rows)) for _ in range(count)]
    steps[2][1][:2] = np.nan, 0.0
    steps[3] = (steps[3][0], np.array([0.0, np.inf] * (rows // 2)))
    return steps


def reference(name, size, steps, low, high, rate=0.1):
    """Weights and counts after the steps, in float64, by the text-book formulas."""
    lam, m, v, t, counts = (np.full(size, start) for start in (1.0, 0.0, 0.0, 0, 0))
    for ids, gradients in steps:
        g = np.zeros(size)
        np.add.at(g, ids, np.where(np.isfinite(gradients), gradients, 0))
        if not g.any():
            continue
        counts += g != 0
        moved = g != 0 if name == "m_adam" else np.full(size, True)
        if name == "sgd":
            step = rate * g
        else:
            t += moved
            m = np.where(moved, 0.9 * m + 0.1 * g, m)
            v = np.where(moved, 0.999 * v + 0.001 * g * g, v)
            m_hat, v_hat = (x / (1 - b ** np.maximum(t, 1)) for x, b in ((m, 0.9), (v, 0.999)))
            step = rate * m_hat / (np.sqrt(v_hat) + 1e-8)
        lam = np.where(moved, np.clip(lam - step, low, high), lam)
    return lam, counts


def state_of(weights):
    return [v.numpy() for v in (*weights.variables, *weights.optimizer.variables)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", config.WEIGHTINGS)
def test_lookup_gives_one_weight_per_id(runner, mode):
    weights = example_weights.ExampleWeights(4, initial=0.5, mode=mode)
    found = RUNNERS[runner](weights.lookup)(tf.constant([3, 0, 3], tf.int64))
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found.numpy(), [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(weights.values(), [0.5] * 4)


@pytest.mark.parametrize("runner", RUNNERS)
def test_update_moves_named_rows_once_per_id(runner):
    weights = example_weights.ExampleWeights(5)
    update(weights, [3, 1, 3], [1.0, -2.0, 0.5], runner)
    np.testing.assert_allclose(weights.values(), [1, 1.01, 1, 0.99, 1], atol=1e-7)
    assert weights.values()[[0, 2, 4]].tolist() == [1, 1, 1]
    assert weights.update_counts().tolist() == [0, 1, 0, 1, 0]
    np.testing.assert_allclose(
        weights.optimizer.slot(weights.variable, "m").numpy(), [0, -0.2, 0, 0.15, 0], atol=1e-7
    )


@pytest.mark.parametrize("runner", RUNNERS)
def test_projects_the_rows_that_moved_and_no_others(runner):
    weights = example_weights.ExampleWeights(4, initial=[0.005, 1.995, 1, 1], maximum=2.0)
    weights.variable.scatter_nd_update([[2]], [-7.0])  # out of range, but never touched
    update(weights, [0, 1], [1.0, -1.0], runner)
    np.testing.assert_array_equal(weights.values(), [0, 2, -7, 1])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", ["per_example", "single"])
def test_non_finite_rows_are_left_out_and_counted(runner, mode):
    rows = ([0, 1, 1, 2, 3], [np.nan, 1.0, np.inf, 1e30, 0.0])
    weights = example_weights.ExampleWeights(4, mode=mode)
    update(weights, *rows, runner)
    clean = example_weights.ExampleWeights(4, mode=mode)
    update(clean, [1], [1.0])
    np.testing.assert_array_equal(weights.values(), clean.values())
    np.testing.assert_array_equal(weights.update_counts(), clean.update_counts())
    assert weights.skipped.numpy() == 3 and clean.skipped.numpy() == 0
    update(weights, *rows, runner)
    assert np.all(np.isfinite(weights.values())) and weights.skipped.numpy() == 6


def test_a_sum_that_overflows_is_left_out():
    weights = example_weights.ExampleWeights(2)
    update(weights, [0, 0, 1], [1.8e19, 1.8e19, 1.0])
    np.testing.assert_allclose(weights.values(), [1, 0.99], atol=1e-7)
    assert weights.skipped.numpy() == 1 and weights.update_counts().tolist() == [0, 1]


@pytest.mark.parametrize("runner", RUNNERS)
def test_single_mode_sums_the_batch_into_one_weight(runner):
    weights = example_weights.ExampleWeights(6, mode="single", optimizer=keras.optimizers.SGD(0.1))
    update(weights, [0, 5, 5], [1.0, 2.0, -0.5], runner)
    assert weights.variable.shape == [1]
    np.testing.assert_allclose(weights.values(), [0.75] * 6, atol=1e-7)
    assert weights.update_counts().tolist() == [1] * 6


@pytest.mark.parametrize("runner", ["graph", "compiled"])
@pytest.mark.parametrize("mode", ["per_example", "single"])
@pytest.mark.parametrize("name", config.WEIGHT_OPTIMIZERS)
def test_every_weight_optimizer_follows_its_formula(name, mode, runner):
    weights = moved_by(name, 6, mode, minimum=0.7, maximum=1.2)
    step = RUNNERS[runner](weights.update)
    steps = random_steps(6, 4, 8)
    for ids, gradients in steps:
        step(tf.constant(ids), tf.constant(gradients, tf.float32))
    if mode == "single":
        steps = [(np.zeros_like(ids), gradients) for ids, gradients in steps]
    (size,) = weights.variable.shape
    lam, counts = reference(name, size, steps, 0.7, 1.2)
    assert np.any(lam != 1) and np.any(counts > 1)
    np.testing.assert_allclose(weights.variable, lam, atol=1e-4)
    np.testing.assert_array_equal(weights.updates, counts)
    assert weights.skipped.numpy() == 3


@pytest.mark.parametrize("name", config.WEIGHT_OPTIMIZERS)
def test_an_update_without_a_gradient_moves_nothing(name):
    weights = moved_by(name, 4)
    step = tf.function(weights.update)
    ids = tf.constant([0, 0, 3])
    step(ids, tf.constant([1.0, 2.0, -1.0]))
    before = weights.values().copy(), weights.update_counts().copy()
    step(ids, tf.zeros(3))
    step(ids, tf.constant([np.nan, 0.0, np.inf]))
    step(ids, tf.constant([1.0, -1.0, 0.0]))
    np.testing.assert_array_equal(weights.values(), before[0])
    np.testing.assert_array_equal(weights.update_counts(), before[1])


def test_adam_moves_an_example_that_has_left_the_batch_and_does_not_count_it():
    moved = {}
    for name in config.WEIGHT_OPTIMIZERS:
        weights = moved_by(name, 3, maximum=1.15)
        update(weights, [0, 1], [1.0, -1.0])
        update(weights, [2], [1.0])
        moved[name] = weights.values()[0] < 0.899
        assert weights.update_counts().tolist() == [1, 1, 1]
        assert weights.values().max() <= np.float32(1.15)
    assert moved == {"m_adam": False, "adam": True, "sgd": False}


@pytest.mark.parametrize("name", ["m_adam", "sgd"])
def test_no_operation_of_a_row_update_has_the_size_of_the_table(name):
    size, rows = 1009, 5
    weights = moved_by(name, size)
    specs = tf.TensorSpec([rows], tf.int64), tf.TensorSpec([rows], tf.float32)
    for step, arguments in ((weights.update, specs), (weights.lookup, specs[:1])):
        graph = tf.function(step).get_concrete_function(*arguments).graph
        results = [result for op in graph.get_operations() for result in op.outputs]
        assert any(result.shape.as_list() == [rows] for result in results)
        for result in results:
            assert result.shape.rank is not None and size not in result.shape, result


def test_fixed_never_moves():
    weights = example_weights.ExampleWeights(3, initial=2.0, mode="fixed")
    update(weights, [0, 1, 2], [1.0, np.nan, -5.0])
    assert weights.values().tolist() == [2.0] * 3 and weights.optimizer is None
    assert weights.update_counts().tolist() == [0] * 3


@pytest.mark.parametrize("mode", ["per_example", "single"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.RMSprop(0.1),
        lambda: optimizers.MAdam(0.1, bias_correction="global"),
    ],
)
def test_any_keras_optimizer_works_and_stays_in_range(mode, optimizer):
    weights = example_weights.ExampleWeights(
        4, mode=mode, optimizer=optimizer(), minimum=0.0, maximum=1.0
    )
    step = tf.function(weights.update)
    ids = tf.constant([0, 0, 2, 3], tf.int64)
    for scale in (1.0, 1.0, 30.0, 30.0, np.nan):
        step(ids, tf.constant([1.0, 1.0, 2.0, 0.5]) * scale)
    assert np.all((weights.values() >= 0) & (weights.values() <= 1))
    assert weights.values()[0] < 1 and weights.update_counts()[0] == 4
    assert weights.skipped.numpy() == 4


def test_momentum_does_not_move_a_row_that_was_left_out():
    for mode in ("per_example", "single"):
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        weights = example_weights.ExampleWeights(2, mode=mode, optimizer=optimizer)
        update(weights, [0], [1.0])
        moved = weights.values().copy()
        update(weights, [0], [np.nan])
        np.testing.assert_array_equal(weights.values(), moved)


@pytest.mark.parametrize("name", config.WEIGHT_OPTIMIZERS)
def test_row_order_does_not_change_a_bit(name):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 60)
    gradients = rng.normal(size=60) * 10.0 ** rng.integers(-5, 5, 60)
    for mode in ("per_example", "single"):
        states = []
        for order in (np.arange(60), rng.permutation(60), rng.permutation(60)):
            weights = moved_by(name, 5, mode)
            update(weights, ids[order], gradients[order])
            states.append(state_of(weights))
        for state in states[1:]:
            for a, b in zip(states[0], state, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", config.WEIGHTINGS)
@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_table_raises_and_changes_nothing(mode, bad):
    weights = example_weights.ExampleWeights(10, mode=mode)
    ids = tf.constant([1, bad, 2], tf.int64)
    with pytest.raises(IndexError, match=f"{bad} is outside the table of size 10"):
        weights.lookup(ids)
    with pytest.raises(IndexError, match=f"{bad} is outside the table of size 10"):
        weights.update(ids, tf.ones(3))
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s)\[{bad}\].*\[10\]"):
        tf.function(weights.lookup)(ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s)\[{bad}\].*\[10\]"):
        tf.function(weights.update)(ids, tf.ones(3))
    assert weights.values().tolist() == [1.0] * 10 and weights.skipped.numpy() == 0
    with pytest.raises(IndexError, match="size 10"):
        weights.check_ids([bad])
    weights.check_ids([0, 9])


@pytest.mark.parametrize("mode", ["per_example", "single"])
@pytest.mark.parametrize("name", config.WEIGHT_OPTIMIZERS)
def test_checkpoint_resumes_bit_for_bit(tmp_path, name, mode):
    steps = random_steps(8, 6, 10)
    weights = moved_by(name, 8, mode)
    for i, rows in enumerate(steps):
        if i == 5:
            path = tf.train.Checkpoint(weights=weights).write(str(tmp_path / "ckpt"))
        update(weights, *rows)
    resumed = moved_by(name, 8, mode, initial=3.0)
    tf.train.Checkpoint(weights=resumed).read(path).assert_consumed()
    for rows in steps[5:]:
        update(resumed, *rows)
    for a, b in zip(state_of(weights), state_of(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert resumed.skipped.numpy() == 4


def test_no_rows_change_nothing():
    for mode in config.WEIGHTINGS:
        weights = example_weights.ExampleWeights(3, mode=mode)
        update(weights, [], [], "graph")
        assert weights.values().tolist() == [1.0] * 3
        assert weights.lookup(tf.zeros([0], tf.int64)).shape == [0]


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"size": 0}, "size=0"),
        ({"mode": "both"}, "both"),
        ({"initial": -1.0}, "-1.0"),
        ({"initial": np.nan}, "nan"),
        ({"initial": [1.0, 2.0]}, "shape"),
        ({"optimizer": "adam"}, "adam"),
        ({"minimum": 2.0}, "minimum=2.0"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(config.ConfigError, match=named):
        example_weights.ExampleWeights(**{"size": 3, **settings})


@pytest.mark.parametrize("mode", ["per_example", "fixed"])
def test_examples_may_start_with_weights_of_their_own(mode):
    weights = example_weights.ExampleWeights(5, mode=mode, maximum=2.0)
    weights.start_from(np.array([3, 0]), np.array([0.25, 7.0]))
    assert weights.values().tolist() == [2.0, 1.0, 1.0, 0.25, 1.0]
    assert weights.updates.numpy().tolist() == [0] * 5
    with pytest.raises(IndexError, match="id 5"):
        weights.start_from(np.array([5]), np.array([1.0]))
    with pytest.raises(config.ConfigError, match="example 4 is not finite"):
        weights.start_from(np.array([1, 4]), np.array([1.0, np.nan]))


def test_one_weight_for_all_cannot_start_from_one_each():
    with pytest.raises(config.ConfigError, match="single"):
        example_weights.ExampleWeights(5, mode="single").start_from([0], [1.0])


def test_unbounded_weights_may_go_below_zero():
    weights = example_weights.ExampleWeights(1, initial=0.0, minimum=None)
    update(weights, [0], [1.0])
    np.testing.assert_allclose(weights.values(), [-0.01], atol=1e-8)


def test_update_inside_a_strategy_scope_says_where_it_belongs():
    weights = example_weights.ExampleWeights(2)
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        pytest.raises(RuntimeError, match="outside both"),
    ):
        update(weights, [0], [1.0])
