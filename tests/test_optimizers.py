"""M-Adam against plain NumPy Adams, eager, in graph and compiled; the network's optimizers."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, optimizers

RUNNERS = {
    "eager": lambda fn: fn,
    "graph": tf.function,
    "compiled": lambda fn: tf.function(fn, jit_compile=True),
}


class ScalarAdam:
    """Adam on one number, float64, from Kingma and Ba's Algorithm 1."""

    def __init__(self, value, learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
        self.value, self.m, self.v, self.t = value, 0.0, 0.0, 0
        self.settings = learning_rate, beta_1, beta_2, epsilon

    def step(self, g):
        learning_rate, beta_1, beta_2, epsilon = self.settings
        self.t += 1
        self.m = beta_1 * self.m + (1 - beta_1) * g
        self.v = beta_2 * self.v + (1 - beta_2) * g * g
        m_hat = self.m / (1 - beta_1**self.t)
        v_hat = self.v / (1 - beta_2**self.t)
        self.value -= learning_rate * m_hat / (np.sqrt(v_hat) + epsilon)


def zeros_state(lam):
    lam = tf.constant(lam, tf.float64)
    return optimizers.MAdamState(lam, *(tf.zeros_like(lam) for _ in range(3)))


def build(initial, dtype=tf.float64, **settings):
    variable = tf.Variable(tf.constant(initial, dtype))
    optimizer = optimizers.MAdam(**settings)
    optimizer.build([variable])
    return variable, optimizer


def state_of(variable, optimizer):
    return [variable.numpy(), *(optimizer.slot(variable, s).numpy() for s in optimizer._slots)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "gradients, expected", [((1, -2, 0.5), 0.9950279419673822), ((1,) * 5, 0.95 + 5e-10)]
)
def test_pure_update_gives_the_known_values(runner, gradients, expected):
    update = RUNNERS[runner](lambda state, g: optimizers.m_adam_update(*state, g))
    state = zeros_state([1.0])
    for g in gradients:
        state = update(state, tf.constant([g], tf.float64))
    assert abs(state.lam.numpy()[0] - expected) < 1e-14
    assert state.t.numpy()[0] == len(gradients)


def test_pure_update_leaves_masked_coordinates_alone():
    rng = np.random.default_rng(0)
    old = optimizers.MAdamState(*(tf.constant(rng.random(4)) for _ in range(3)), tf.range(4))
    new = optimizers.m_adam_update(*old, tf.constant([0.0, 1.0, 0.0, -1.0], tf.float64))
    for before, after in zip(old, new, strict=True):
        np.testing.assert_array_equal(after.numpy()[[0, 2]], before.numpy()[[0, 2]])
        assert np.all(after.numpy()[[1, 3]] != before.numpy()[[1, 3]])


def test_global_bias_correction_counts_every_step():
    state = optimizers.MAdamState(*(tf.constant([x, x], tf.float64) for x in (1.0, 0, 0)), 0)
    for g in ([1.0, 0.0], [0.0, 2.0]):
        state = optimizers.m_adam_update(
            *state, tf.constant(g, tf.float64), bias_correction="global"
        )
    m_hat, v_hat = 0.1 * 2 / (1 - 0.9**2), 0.001 * 4 / (1 - 0.999**2)
    assert state.t.numpy() == 2
    np.testing.assert_allclose(
        state.lam.numpy(), [0.99, 1 - 0.01 * m_hat / np.sqrt(v_hat)], atol=1e-9
    )


@pytest.mark.parametrize("beta_1", [0.0, 0.9])
def test_float32_bias_correction_keeps_its_digits(beta_1):
    state = [tf.constant([x]) for x in (0.0, 0.0, 0.0, 0.0)]
    new = optimizers.m_adam_update(*state, tf.constant([1.0]), beta_1=beta_1)
    assert abs(new.lam.numpy()[0] + 0.01) < 2e-9


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("sparse", [True, False])
def test_equals_independent_scalar_adams(runner, sparse):
    rng = np.random.default_rng(1)
    size, rows = 12, 6
    initial = rng.random(size)
    references = [ScalarAdam(x) for x in initial]
    variable, optimizer = build(initial)

    @RUNNERS[runner]
    def apply(ids, g):
        if sparse:
            gradient = tf.IndexedSlices(g, ids)
        else:
            gradient = tf.math.unsorted_segment_sum(g, ids, size)
        optimizer.apply_gradients([(gradient, variable)])

    for _ in range(30):
        ids = rng.integers(0, size, rows)
        g = rng.normal(size=rows) * (rng.random(rows) < 0.7)
        apply(tf.constant(ids), tf.constant(g))
        for i in set(ids):
            if g[ids == i].sum() != 0:
                references[i].step(g[ids == i].sum())
    np.testing.assert_allclose(variable.numpy(), [r.value for r in references], atol=1e-9)
    np.testing.assert_array_equal(optimizer.slot(variable, "t").numpy(), [r.t for r in references])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("bias_correction", optimizers.BIAS_CORRECTIONS)
def test_untouched_rows_stay_bit_identical(runner, bias_correction):
    variable, optimizer = build([0.3, 0.7, 0.1], tf.float32, bias_correction=bias_correction)

    @RUNNERS[runner]
    def apply(ids, g):
        optimizer.apply_gradients([(tf.IndexedSlices(g, ids), variable)])

    apply(tf.constant([0, 1, 2]), tf.constant([0.3, -0.7, 0.2]))
    before = state_of(variable, optimizer)
    apply(tf.constant([1, 1, 0]), tf.constant([0.4, 0.1, 0.0]))
    for old, new in zip(before, state_of(variable, optimizer), strict=True):
        np.testing.assert_array_equal(new[[0, 2]], old[[0, 2]])
        assert new[1] != old[1]


def test_first_touch_moves_by_the_learning_rate_at_any_age_of_the_neighbors():
    variable, optimizer = build([1.0, 1.0, 1.0])
    optimizer.apply_gradients([(tf.IndexedSlices(tf.constant([2.0], tf.float64), [0]), variable)])
    for _ in range(99):
        g = tf.IndexedSlices(tf.constant([1.0], tf.float64), tf.constant([1]))
        optimizer.apply_gradients([(g, variable)])
    assert abs(variable.numpy()[0] - 0.99) < 1e-9
    g = tf.IndexedSlices(tf.constant([-5.0], tf.float64), tf.constant([2]))
    optimizer.apply_gradients([(g, variable)])
    assert abs(variable.numpy()[2] - 1.01) < 1e-9


@pytest.mark.parametrize("runner", RUNNERS)
def test_row_order_does_not_change_a_bit(runner):
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 5, 40)
    g = (rng.normal(size=40) * 10.0 ** rng.integers(-6, 6, 40)).astype(np.float32)
    results = []
    for order in [np.arange(40), *(rng.permutation(40) for _ in range(5))]:
        variable, optimizer = build(np.linspace(0, 1, 5), tf.float32)

        @RUNNERS[runner]
        def apply(ids, g, variable=variable, optimizer=optimizer):
            optimizer.apply_gradients([(tf.IndexedSlices(g, ids), variable)])

        apply(tf.constant(ids[order]), tf.constant(g[order]))
        results.append(state_of(variable, optimizer))
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("runner", RUNNERS)
def test_duplicates_are_summed_row_by_row(runner):
    rng = np.random.default_rng(3)
    ids, values = np.array([7, 2, 7, 9, 2, 7]), rng.normal(size=(6, 2, 3))
    found, totals, first = RUNNERS[runner](optimizers.sum_duplicates)(
        tf.constant(ids), tf.constant(values)
    )
    np.testing.assert_array_equal(found, np.sort(ids))
    np.testing.assert_array_equal(first, [True, False, True, False, False, True])
    for i, total in zip(found.numpy(), totals.numpy(), strict=True):
        np.testing.assert_allclose(total, values[ids == i].sum(0), atol=1e-14)


def test_no_rows_change_nothing():
    variable, optimizer = build([0.5, 0.25])
    empty = tf.IndexedSlices(tf.zeros([0], tf.float64), tf.zeros([0], tf.int64))
    optimizer.apply_gradients([(empty, variable)])
    np.testing.assert_array_equal(variable.numpy(), [0.5, 0.25])


def test_serialization_keeps_every_hyperparameter():
    settings = dict(
        learning_rate=0.03, beta_1=0.8, beta_2=0.95, epsilon=1e-6, bias_correction="global"
    )
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizers.MAdam(**settings)))
    assert isinstance(copy, optimizers.MAdam)
    assert copy.get_config() == optimizers.MAdam(**settings).get_config()
    assert copy.beta_2 == 0.95 and copy.bias_correction == "global"


def test_a_schedule_sets_the_step():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.01])
    variable, optimizer = build([1.0], learning_rate=schedule)
    for expected in (0.9, 0.89):
        optimizer.apply_gradients([(tf.ones([1], tf.float64), variable)])
        assert abs(variable.numpy()[0] - expected) < 1e-8


def test_checkpoint_restores_the_trajectory_bit_for_bit(tmp_path):
    rng = np.random.default_rng(4)
    schedule = [
        tf.IndexedSlices(
            tf.constant(rng.normal(size=3), tf.float32), tf.constant(rng.integers(0, 6, 3))
        )
        for _ in range(8)
    ]
    variable, optimizer = build([1.0] * 6, tf.float32)
    for i, g in enumerate(schedule):
        if i == 4:
            path = tf.train.Checkpoint(v=variable, o=optimizer).write(str(tmp_path / "ckpt"))
        optimizer.apply_gradients([(g, variable)])
    other, resumed = build([0.0] * 6, tf.float32)
    tf.train.Checkpoint(v=other, o=resumed).read(path).assert_consumed()
    for g in schedule[4:]:
        resumed.apply_gradients([(g, other)])
    for a, b in zip(state_of(variable, optimizer), state_of(other, resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert resumed.iterations.numpy() == optimizer.iterations.numpy() == 8


@pytest.mark.parametrize(
    "settings", [{"beta_1": 1.0}, {"beta_2": -0.1}, {"epsilon": 0.0}, {"bias_correction": "none"}]
)
def test_bad_hyperparameters_are_named(settings):
    (name,) = settings
    with pytest.raises(config.ConfigError, match=name):
        optimizers.MAdam(**settings)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("sparse", [True, False])
def test_plain_sgd_is_that_of_keras_without_its_state(runner, sparse):
    rng = np.random.default_rng(6)
    start, g = rng.normal(size=(5, 2)), rng.normal(size=(4, 2))
    ids = tf.constant([3, 0, 3, 4])
    settings = keras.optimizers.serialize(optimizers.PlainSGD(0.1))
    ends = []
    for optimizer in (keras.optimizers.deserialize(settings), keras.optimizers.SGD(0.1)):
        variable = tf.Variable(start, dtype=tf.float32)
        optimizer.build([variable])

        @RUNNERS[runner]
        def apply(g, variable=variable, optimizer=optimizer):
            gradient = (
                tf.IndexedSlices(g, ids) if sparse else tf.math.unsorted_segment_sum(g, ids, 5)
            )
            optimizer.apply_gradients([(gradient, variable)])

        apply(tf.constant(g, tf.float32))
        ends.append(variable.numpy())
    np.testing.assert_allclose(*ends, atol=1e-6)
    assert np.any(ends[0] != start.astype(np.float32))
    plain = optimizers.PlainSGD(0.1)
    plain.build([variable])
    assert all(v.shape.rank == 0 for v in plain.variables)


@pytest.mark.parametrize(
    "name, kind",
    {
        "m_adam": optimizers.MAdam,
        "adam": keras.optimizers.Adam,
        "sgd": optimizers.PlainSGD,
    }.items(),
)
def test_weight_optimizer_is_the_one_that_the_settings_name(name, kind):
    made = optimizers.make_weight_optimizer(config.WeightConfig(optimizer=name, learning_rate=0.2))
    assert type(made) is kind
    assert made.get_config()["learning_rate"] == pytest.approx(0.2)
    if name == "adam":
        assert {
            "beta_1": 0.9,
            "beta_2": 0.999,
            "epsilon": 1e-8,
        }.items() <= made.get_config().items()


def test_schedules_hit_their_published_values():
    def at(name, step, warmup=0):
        return float(optimizers.Schedule(name, 0.03, 100, warmup)(step))

    assert at("cosine", 0) == pytest.approx(0.03)
    assert at("cosine", 100) == pytest.approx(0.03 * np.cos(7 * np.pi / 16))
    assert at("half_cosine", 60, 20) == pytest.approx(0.03 * (0.004 + 0.996 / 2), rel=1e-5)
    assert at("half_cosine", 100, 20) == pytest.approx(0.03 * 0.004, rel=1e-4)
    assert at("half_cosine", 5, 20) == pytest.approx(0.03 / 4)
    assert at("constant", 77) == pytest.approx(0.03)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("sparse", [False, True])
def test_nesterov_is_that_of_keras(momentum, sparse):
    rng = np.random.RandomState(0)
    start, rate = rng.randn(6, 3).astype(np.float32), optimizers.Schedule("cosine", 0.1, 5)
    gradients = rng.randn(5, 6, 3).astype(np.float32)
    ends = []
    for make in (optimizers.Nesterov, lambda *args: keras.optimizers.SGD(*args, nesterov=True)):
        optimizer, variable = make(rate, momentum), tf.Variable(start)
        copy = type(optimizer).from_config(optimizer.get_config())
        for gradient in gradients:
            if sparse:
                gradient = tf.IndexedSlices(gradient[:2], [3, 1], [6, 3])
            copy.apply_gradients([(gradient, variable)])
        ends.append(variable.numpy())
    assert np.any(ends[0] != start)
    np.testing.assert_allclose(*ends, atol=1e-6)


@pytest.mark.parametrize("runner", ["graph", "compiled"])
@pytest.mark.parametrize("sparse", [False, True])
def test_adam_is_that_of_keras(runner, sparse):
    rng = np.random.default_rng(7)
    start, rate = rng.normal(size=(6, 3)), optimizers.Schedule("cosine", 0.1, 20, 3)
    gradients, ids = rng.normal(size=(20, 4, 3)), rng.integers(0, 6, (20, 4))
    ends = []
    for make in (optimizers.Adam, keras.optimizers.Adam):
        variable = tf.Variable(start, dtype=tf.float32)
        optimizer = make(rate, epsilon=1e-3, weight_decay=0.01, jit_compile=False)
        optimizer.build([variable])

        @RUNNERS["graph" if make is keras.optimizers.Adam else runner]
        def apply(g, ids, variable=variable, optimizer=optimizer):
            g = optimizers.total([tf.IndexedSlices(g, ids, tf.constant([6, 3]))])
            if not sparse:
                g = tf.convert_to_tensor(g)
            optimizer.apply_gradients([(g, variable)])

        for g, rows in zip(gradients, ids, strict=True):
            apply(tf.constant(g, tf.float32), tf.constant(rows, tf.int32))
        ends.append(variable.numpy())
    assert np.abs(ends[0] - start).max() > 0.1
    # In float32 1 - 0.999^t has few digits at first.
    np.testing.assert_allclose(*ends, atol=2e-5)


def test_adam_without_bias_correction_is_that_of_berts_own_code():
    """AdamWeightDecayOptimizer of google-research/bert, optimization.py, in float64."""
    rng = np.random.default_rng(8)
    names = ("kernel", "bias", "layer_norm/gamma", "embeddings")
    start = {name: rng.normal(size=(5, 2)) for name in names}
    settings = config.OptimizerConfig(
        name="adam",
        learning_rate=0.01,
        schedule="linear",
        warmup_steps=4,
        adam_epsilon=1e-6,
        adam_bias_correction=False,
        decoupled_weight_decay=0.1,
    )
    variables = {n: tf.Variable(v, dtype=tf.float32, name=n) for n, v in start.items()}
    optimizer = optimizers.make_optimizer(settings, 20)
    optimizer.exclude_from_weight_decay([variables["bias"], variables["layer_norm/gamma"]])
    optimizer.build(list(variables.values()))
    theta = dict(start)
    m, v = ({name: np.zeros((5, 2)) for name in names} for _ in range(2))
    for step in range(20):
        rate = 0.01 * (step / 4 if step < 4 else 1 - step / 20)
        of_step = {name: rng.normal(size=(5, 2)) for name in names}
        ids = rng.permutation(5)[:3]
        of_step["embeddings"][~np.isin(np.arange(5), ids)] = 0
        for name, g in of_step.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            decay = 0.1 if name in ("kernel", "embeddings") else 0.0
            update = m[name] / (np.sqrt(v[name]) + 1e-6) + decay * theta[name]
            theta[name] = theta[name] - rate * update
        given = {n: tf.constant(g, tf.float32) for n, g in of_step.items()}
        given["embeddings"] = tf.IndexedSlices(tf.gather(given["embeddings"], ids), ids, [5, 2])
        optimizer.apply_gradients([(given[n], variables[n]) for n in names])
    for name in names:
        assert np.abs(theta[name] - start[name]).max() > 0.05
        np.testing.assert_allclose(variables[name], theta[name], atol=5e-6, err_msg=name)


def test_adam_comes_back_from_its_settings():
    made = optimizers.Adam(0.03, 1e-6, False, weight_decay=0.1, beta_2=0.9)
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert type(copy) is optimizers.Adam and copy.get_config() == made.get_config()
    assert not copy.bias_correction and copy.epsilon == 1e-6 and copy.weight_decay == 0.1


def indexed(ids, values, rows=6):
    shape = tf.constant([rows, *values.shape[1:]])
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(ids), shape)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("parts", [[[3, 0, 3, 5]], [[3, 0], [0, 0, 0], [5]], [[0]], [[4, 2]]])
def test_sparse_totals_hold_each_row_once_with_static_shapes(runner, parts):
    rng = np.random.default_rng(9)
    values = [rng.normal(size=(len(ids), 2)) for ids in parts]
    dense = np.zeros((6, 2))
    for ids, of_part in zip(parts, values, strict=True):
        np.add.at(dense, ids, of_part)

    @RUNNERS[runner]
    def sums():
        found = optimizers.total([indexed(*part) for part in zip(parts, values, strict=True)])
        assert isinstance(found, tf.IndexedSlices)
        assert found.values.shape == (sum(map(len, parts)), 2)
        return tf.convert_to_tensor(found), tf.linalg.global_norm([found]), found.indices

    total, norm, ids = sums()
    np.testing.assert_allclose(total, dense, atol=1e-6)
    np.testing.assert_allclose(norm, np.linalg.norm(dense), rtol=1e-6)
    assert set(ids.numpy()) <= {0, *np.concatenate(parts)}


def test_totals_are_dense_where_a_part_is():
    rng = np.random.default_rng(10)
    dense, values = rng.normal(size=(6, 2)), rng.normal(size=(3, 2))
    both = optimizers.total([tf.constant(dense, tf.float32), indexed([1, 4, 1], values)])
    expected = dense.copy()
    np.add.at(expected, [1, 4, 1], values)
    np.testing.assert_allclose(both, expected, atol=1e-6)
    alone = tf.constant(dense)
    assert optimizers.total([alone]) is alone


@pytest.mark.parametrize("limit", [None, 0.5, 1e9])
def test_clipping_scales_all_gradients_alike(limit):
    rng = np.random.default_rng(11)
    dense, values = rng.normal(size=(4, 3)), rng.normal(size=(2, 3))
    norm = np.sqrt((dense**2).sum() + (values**2).sum())
    gradients = [tf.constant(dense, tf.float32), indexed([5, 2], values)]
    found = optimizers.clip(gradients, tf.linalg.global_norm(gradients), limit)
    scale = min(1.0, (limit or np.inf) / norm)
    np.testing.assert_allclose(found[0], scale * dense, rtol=1e-5)
    assert isinstance(found[1], tf.IndexedSlices)
    np.testing.assert_array_equal(found[1].indices, [5, 2])
    np.testing.assert_allclose(found[1].values, scale * values, rtol=1e-5)
    nothing = optimizers.clip([tf.zeros([2])], tf.zeros([]), 1.0)
    np.testing.assert_array_equal(nothing[0], [0, 0])


def test_the_linear_schedule_is_that_of_berts_own_code():
    """Falls from step 0, so that it jumps down where the warm-up ends."""
    schedule = optimizers.Schedule("linear", 2e-5, 100, 10)
    for step, share in {0: 0, 5: 0.5, 9: 0.9, 10: 0.9, 55: 0.45, 99: 0.01, 100: 0, 150: 0}.items():
        assert float(schedule(step)) == pytest.approx(2e-5 * share, rel=1e-5, abs=1e-12)
    copy = optimizers.Schedule.from_config(schedule.get_config())
    assert float(copy(7)) == float(schedule(7))
    assert float(optimizers.Schedule("linear", 2e-5, 100)(0)) == pytest.approx(2e-5)
