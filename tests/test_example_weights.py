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
    fn = "graph" if runner == "compiled" else runner
    update(weights, [0, 5, 5], [1.0, 2.0, -0.5], fn)
    assert weights.variable.shape == [1]
    np.testing.assert_allclose(weights.values(), [0.75] * 6, atol=1e-7)
    assert weights.update_counts().tolist() == [1] * 6


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


def test_row_order_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 60)
    gradients = rng.normal(size=60) * 10.0 ** rng.integers(-5, 5, 60)
    for mode in ("per_example", "single"):
        states = []
        for order in (np.arange(60), rng.permutation(60), rng.permutation(60)):
            weights = example_weights.ExampleWeights(5, mode=mode)
            update(weights, ids[order], gradients[order], "graph")
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
def test_checkpoint_resumes_bit_for_bit(tmp_path, mode):
    rng = np.random.default_rng(1)
    schedule = [(rng.integers(0, 8, 5), rng.normal(size=5)) for _ in range(10)]
    schedule[2][1][0] = np.nan
    weights = example_weights.ExampleWeights(8, mode=mode)
    for i, rows in enumerate(schedule):
        if i == 5:
            path = tf.train.Checkpoint(weights=weights).write(str(tmp_path / "ckpt"))
        update(weights, *rows)
    resumed = example_weights.ExampleWeights(8, mode=mode, initial=3.0)
    tf.train.Checkpoint(weights=resumed).read(path).assert_consumed()
    for rows in schedule[5:]:
        update(resumed, *rows)
    for a, b in zip(state_of(weights), state_of(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert resumed.skipped.numpy() == 1


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
