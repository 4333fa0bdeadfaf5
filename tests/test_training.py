"""The bilevel step against a computation by hand, and the loop's promises."""

import csv
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, metrics, outer_loop, training
from ssl_influence.data import inputs
from ssl_influence.influence import weight_gradients
from ssl_influence.methods import pseudo_label, supervised, uda

SIZE, DIM, CLASSES = 60, 4, 3


def make_model(batch_norm=False, dtype=None):
    keras.utils.set_random_seed(0)
    inputs = keras.Input([DIM], dtype=dtype)
    x = keras.layers.Dense(5, activation="tanh")(inputs)
    if batch_norm:
        x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, [x, keras.layers.Dense(CLASSES, name="head")(x)])


def make_config(**concerns):
    base = config_lib.Config().replace(
        optimizer={"learning_rate": 0.1, "schedule": "constant", "weight_decay": 0.01},
        weights={"inner_steps": 2, "damping": 0.1, "learning_rate": 0.05},
        train={
            "train_steps": 12,
            "log_every": 4,
            "eval_every": 4,
            "checkpoint_every": 4,
        },
    )
    return base.replace(**concerns)


def make_trainer(config=None, model=None, method=None):
    config = config or make_config()
    return training.BilevelTrainer(
        model or make_model(),
        method or pseudo_label.PseudoLabel(12, confidence=0.0, ramp_up=0.0),
        training.make_example_weights(config.weights, SIZE),
        config,
    )


class ToyPipeline:
    """Random vectors; a batch is a function of the step, as the real pipeline's is."""

    unlabeled_batch_size = 8
    spec = inputs.InputSpec("vector", (DIM,), tuple("abcdefgh"[:CLASSES]))

    def __init__(self, seed=0, poison=None):
        self._seed, self._poison = seed, poison

    def train_batch(self, step, stream=0):
        random = np.random.RandomState(self._seed * 1000 + 2 * step + stream)
        weak = random.randn(8, DIM).astype(np.float32)
        if step == 6 and self._poison:
            weak[3, 1] = self._poison
        return {
            "labeled": {
                "inputs": tf.constant(random.randn(6, DIM), tf.float32),
                "label": tf.constant(random.randint(CLASSES, size=6), tf.int32),
                "example_id": tf.constant(random.randint(SIZE, size=6), tf.int64),
            },
            "unlabeled": {
                "weak": tf.constant(weak),
                "strong": tf.constant(weak + 0.1),
                "label": tf.constant(random.randint(CLASSES, size=8), tf.int32),
                "example_id": tf.constant(random.choice(SIZE, 8, replace=False), tf.int64),
            },
        }

    def fresh_batch(self, step):
        return self.train_batch(step, stream=1)

    def validation_batch(self, step):
        random = np.random.RandomState(7)
        return {
            "inputs": tf.constant(random.randn(9, DIM), tf.float32),
            "label": tf.constant(random.randint(CLASSES, size=9), tf.int32),
        }

    def train_dataset(self, start, stop):
        return (self.train_batch(step) for step in range(start, stop))

    def evaluation_batches(self, role, batch_size):
        return [{**self.validation_batch(0), "mask": tf.ones([9], tf.bool)}]


def values(variables):
    return [v.numpy() for v in variables]


def expected_gradient(trainer, batch, validation):
    """The weight gradient from a forward pass of its own."""

    def forward(inputs):
        return trainer.model(inputs, training=False)

    output = trainer.method(forward, batch, 0)
    features, logits = forward(validation["inputs"])
    gradient, _ = weight_gradients.last_layer(
        output.labeled_head,
        output.supervised_coefficient,
        output.unlabeled_head,
        output.unsupervised_coefficient,
        trainer.example_weights.lookup(output.example_id),
        features,
        logits,
        validation["label"],
        l2=0.01,
        l2_bias=0.0,
        settings=config_lib.WeightConfig(damping=0.1),
    )
    return output.example_id.numpy(), gradient.numpy()


def test_theta_step_descends_the_written_objective():
    config = make_config(optimizer={"momentum": 0.0})
    trainer, batch = make_trainer(config), ToyPipeline().train_batch(3)
    lam = np.random.RandomState(1).uniform(0, 2, SIZE).astype(np.float32)
    trainer.example_weights.variable.assign(lam)
    variables = trainer.model.trainable_variables
    before = values(variables)
    with tf.GradientTape() as tape:
        _, labeled = trainer.model(batch["labeled"]["inputs"])
        _, unlabeled = trainer.model(batch["unlabeled"]["weak"])
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        loss = tf.reduce_mean(entropy(batch["labeled"]["label"], labeled))
        weight = tf.gather(lam, batch["unlabeled"]["example_id"])
        loss += tf.reduce_mean(weight * entropy(tf.argmax(unlabeled, 1), unlabeled))
        kernels = [v for v in variables if "kernel" in v.name]
        loss += 0.01 * sum(tf.nn.l2_loss(v) for v in kernels)
    gradients = tape.gradient(loss, variables)
    reported = trainer.theta_step(batch)
    for new, old, gradient in zip(values(variables), before, gradients, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * gradient, atol=1e-6)
    terms = ("supervised", "unsupervised", "l2")
    total = sum(float(reported[f"train/loss_{term}"]) for term in terms)
    assert total == pytest.approx(float(loss), rel=1e-5)
    assert float(reported["train/gradient_norm"]) == pytest.approx(
        float(tf.linalg.global_norm(gradients)), rel=1e-5
    )


def test_bilevel_step_moves_the_batch_weights_first_and_theta_with_them():
    pipeline = ToyPipeline()
    batch, validation = pipeline.train_batch(0), pipeline.validation_batch(0)
    fused, by_hand = make_trainer(), make_trainer()
    ids, gradient = expected_gradient(by_hand, batch, validation)
    assert np.all(gradient != 0)
    fused.bilevel_step(batch, validation)
    lam = np.ones(SIZE, np.float32)
    lam[ids] -= 0.05 * np.sign(gradient)  # the first step of an Adam has size eta
    np.testing.assert_allclose(fused.example_weights.values(), lam, atol=1e-4)
    by_hand.example_weights.variable.assign(fused.example_weights.values())
    by_hand.theta_step(batch)
    for a, b in zip(values(fused.model.variables), values(by_hand.model.variables), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_weight_step_alone_leaves_theta_and_statistics():
    pipeline = ToyPipeline()
    for mode in ("inference", "batch"):
        config = make_config(weights={"validation_batch_norm": mode})
        trainer = make_trainer(config, make_model(batch_norm=True))
        before = values(trainer.model.variables)
        trainer.weight_step(pipeline.fresh_batch(0), pipeline.validation_batch(0))
        for new, old in zip(values(trainer.model.variables), before, strict=True):
            np.testing.assert_array_equal(new, old)
        assert np.count_nonzero(trainer.example_weights.values() != 1) == 8
        assert int(trainer.step) == 0


def test_validation_batch_norm_changes_what_the_weights_see():
    pipeline, gradients = ToyPipeline(), []
    for mode in ("inference", "batch"):
        config = make_config(weights={"validation_batch_norm": mode})
        trainer = make_trainer(config, make_model(batch_norm=True))
        reported = trainer.weight_step(pipeline.fresh_batch(0), pipeline.validation_batch(0))
        gradients.append(float(reported["weights/validation_loss"]))
    assert gradients[0] != gradients[1]


@pytest.mark.parametrize(
    "warmup, inner, expected", [(0, 3, [3, 6, 9]), (4, 2, [6, 8, 10]), (2, 100, [])]
)
def test_weight_steps_come_every_inner_steps_after_the_warmup(warmup, inner, expected):
    config = config_lib.WeightConfig(warmup_steps=warmup, inner_steps=inner)
    assert [k for k in range(12) if outer_loop.weight_step_due(k, config)] == expected
    fixed = config_lib.WeightConfig(weighting="fixed", inner_steps=1)
    assert not any(outer_loop.weight_step_due(k, fixed) for k in range(12))


@pytest.mark.parametrize("batch", ["fused", "fresh"])
@pytest.mark.parametrize("weighting", ["per_example", "single", "fixed"])
def test_loop_trains_with_each_weighting(tmp_path, weighting, batch):
    config = make_config(weights={"weighting": weighting, "batch": batch})
    trainer = make_trainer(config)
    assert outer_loop.train(trainer, ToyPipeline(), tmp_path, config.train) == 12
    weights = trainer.example_weights.values()
    distinct = {"fixed": 1, "single": 1}.get(weighting)
    assert len(np.unique(weights)) == distinct if distinct else len(np.unique(weights)) > 5
    assert (weighting == "fixed") == (weights[0] == 1.0 and len(np.unique(weights)) == 1)
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert ("weights/validation_loss" in rows[-1]) == (weighting != "fixed")
    with (tmp_path / "weights" / "weights-12.csv").open() as file:
        table = list(csv.DictReader(file))
    np.testing.assert_array_equal([np.float32(row["weight"]) for row in table], weights)
    assert [int(row["example_id"]) for row in table] == list(range(SIZE))


@pytest.mark.parametrize("make", [make_trainer, lambda config: uda_trainer("separate", config)])
def test_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, make):
    config = make_config()
    whole, asked = make(config), []
    outer_loop.train(whole, ToyPipeline(), tmp_path / "whole", config.train)
    step = outer_loop.train(
        make(config),
        ToyPipeline(),
        tmp_path / "parts",
        config.train,
        should_stop=lambda: asked.append(0) or len(asked) == 7,
    )
    assert step == 7
    resumed = make(config)
    assert outer_loop.train(resumed, ToyPipeline(), tmp_path / "parts", config.train) == 12
    for name, part in whole.state().items():
        a, b = (s[name] for s in (whole.state(), resumed.state()))
        if isinstance(part, tf.Variable):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
            continue
        held = [values(x.variables() if callable(x.variables) else x.variables) for x in (a, b)]
        for x, y in zip(*held, strict=True):
            np.testing.assert_array_equal(x, y)
    rows = [metrics.read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "parts")]
    timings = {"wall_s", "time/examples_per_second", "time/input_wait", "time/window_s"}
    for a, b in zip(*rows, strict=True):
        assert {n: a[n] for n in a if n not in timings} == {n: b[n] for n in b if n not in timings}


@pytest.mark.parametrize(
    "poison, term",
    # tanh hides an infinite input from the loss, not from the gradient
    [(np.nan, "loss_unsupervised"), (np.inf, "gradient_norm")],
)
@pytest.mark.parametrize("log_every", [1, 4])
def test_non_finite_term_stops_and_keeps_the_last_checkpoint(tmp_path, poison, term, log_every):
    config = make_config(train={"log_every": log_every})
    with pytest.raises(metrics.NonFiniteError, match=f"train/{term} is nan at step 7:"):
        outer_loop.train(make_trainer(config), ToyPipeline(poison=poison), tmp_path, config.train)
    assert tf.train.latest_checkpoint(str(tmp_path / "checkpoints")).endswith("ckpt-4")
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints"))
    for name, shape in reader.get_variable_to_shape_map().items():
        tensor = reader.get_tensor(name)
        if getattr(tensor, "dtype", None) == np.float32 and shape:
            assert np.all(np.isfinite(tensor)), name


def test_singular_system_skips_the_weight_step_and_counts_it(tmp_path, caplog):
    config = make_config(
        weights={"damping": 0.0}, optimizer={"weight_decay": 0.0}, train={"train_steps": 4}
    )
    model = make_model()
    # Features that are all zero leave the system singular beyond the common shift of the classes.
    model.layers[1].set_weights([np.zeros([DIM, 5]), np.zeros([5])])
    model.layers[1].trainable = False
    trainer = make_trainer(config, model)
    with caplog.at_level("WARNING", logger="ssl_influence"):
        outer_loop.train(trainer, ToyPipeline(), tmp_path, config.train)
    assert int(trainer.skipped_weight_steps) == 1
    assert np.all(trainer.example_weights.values() == 1)
    assert "1 weight steps were skipped" in caplog.text
    assert metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]["weights/skipped_steps"] == 1


def test_model_whose_logits_are_not_head_of_features_is_refused():
    inputs = keras.Input([DIM])
    x = keras.layers.Dense(5)(inputs)
    head = keras.layers.Dense(CLASSES, name="head")
    wrong = keras.Model(inputs, [x, head(2 * x + 1)])
    with pytest.raises(config_lib.ConfigError, match="'head' applied to its features"):
        make_trainer(model=wrong).theta_step(ToyPipeline().train_batch(0))
    no_dense = keras.Model(inputs, [inputs, keras.layers.Activation("relu")(inputs)])
    with pytest.raises(config_lib.ConfigError, match="no Dense layer"):
        make_trainer(model=no_dense)


def uda_trainer(target_forward, config=None, batch_norm=True):
    method = uda.UDA(
        num_classes=CLASSES, train_steps=12, confidence=0.3, target_forward=target_forward
    )
    return make_trainer(config or make_config(), make_model(batch_norm), method)


def test_target_pass_of_its_own_changes_nothing_without_batch_norm():
    pipeline, results = ToyPipeline(), []
    for mode in config_lib.TARGET_FORWARDS:
        trainer = uda_trainer(mode, batch_norm=False)
        reported = [
            trainer.bilevel_step(pipeline.train_batch(step), pipeline.validation_batch(step))
            for step in range(3)
        ]
        held = values(trainer.model.variables) + [trainer.example_weights.values()]
        results.append(tf.nest.flatten(reported) + held)
    assert np.count_nonzero(results[0][-1] != 1) > 5
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_moving_statistics_are_updated_once_by_the_rows_that_carry_the_gradient():
    trainer, batch = uda_trainer("separate"), ToyPipeline().train_batch(0)
    hidden, norm = trainer.model.layers[1:3]
    rows = tf.concat([batch["labeled"]["inputs"], batch["unlabeled"]["strong"]], 0)
    mean, variance = tf.nn.moments(hidden(rows), [0])
    expected = 0.99 * 0 + 0.01 * mean, 0.99 * 1 + 0.01 * variance
    trainer.theta_step(batch)
    np.testing.assert_allclose(norm.moving_mean, expected[0], atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, expected[1], atol=1e-6)


def test_constant_pass_normalizes_by_its_own_rows_and_leaves_no_trace():
    batch, trainers = ToyPipeline().train_batch(0), []

    def with_constant_pass(forward, batch, step):
        output = supervised.Supervised()(forward, batch, step)
        features, logits = forward.constant(batch["unlabeled"]["weak"])
        loss = output.supervised + tf.reduce_sum(logits**2)
        return output._replace(supervised=loss, metrics={"features": features})

    for method in (supervised.Supervised(), with_constant_pass):
        trainers.append(make_trainer(model=make_model(batch_norm=True), method=method))
        reported = trainers[-1].theta_step(batch)
    plain, other = (values(trainer.model.variables) for trainer in trainers)
    for a, b in zip(plain, other, strict=True):
        np.testing.assert_array_equal(a, b)
    hidden, norm = make_model(batch_norm=True).layers[1:3]
    x = hidden(batch["unlabeled"]["weak"])
    mean, variance = tf.nn.moments(x, [0])
    expected = (x - mean) / tf.sqrt(variance + norm.epsilon)
    np.testing.assert_allclose(reported["train/features"], expected, atol=1e-5)


def test_compiled_steps_agree_with_plain_ones():
    pipeline, results = ToyPipeline(), []
    for compiled in (False, True):
        config = make_config(train={"jit_compile": compiled})
        method = uda.UDA(num_classes=CLASSES, train_steps=12, confidence=0.3)
        trainer = make_trainer(config, make_model(batch_norm=True), method)
        for step in range(3):
            trainer.bilevel_step(pipeline.train_batch(step), pipeline.validation_batch(step))
        results.append(values(trainer.model.variables) + [trainer.example_weights.values()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_resuming_writes_the_weights_that_a_kill_kept_back(tmp_path):
    config = make_config()
    outer_loop.train(make_trainer(config), ToyPipeline(), tmp_path, config.train)
    newest = tmp_path / "weights" / "weights-12.csv"
    before = newest.read_text()
    newest.unlink()
    outer_loop.train(make_trainer(config), ToyPipeline(), tmp_path, config.train)
    assert newest.read_text() == before


def test_what_a_trainer_cannot_work_with_is_refused(caplog):
    inputs = keras.Input([DIM])
    softmax = keras.layers.Dense(CLASSES, activation="softmax", name="head")
    with pytest.raises(config_lib.ConfigError, match="'head' has an activation"):
        make_trainer(model=keras.Model(inputs, [inputs, softmax(inputs)]))
    compiled = make_trainer(make_config(train={"jit_compile": True}))
    batch = ToyPipeline().train_batch(0)
    batch["unlabeled"]["example_id"] = tf.constant([0, 1, 2, 3, 4, 5, 6, SIZE], tf.int64)
    outside = rf"(?s)\[{SIZE}\].*outside the table of size.*\[{SIZE}\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=outside):
        compiled.theta_step(batch)
    for layer in (keras.layers.Dropout(0.1), keras.layers.GaussianNoise(0.1)):
        assert not caplog.records
        disturbed = layer(inputs)
        outputs = [disturbed, keras.layers.Dense(CLASSES)(disturbed)]
        make_trainer(model=keras.Model(inputs, outputs))
    (warning,) = caplog.messages
    assert "(GaussianNoise), whose random state no checkpoint holds" in warning


def test_a_variable_that_no_loss_depends_on_stays_as_it_is():
    class WithSpare(keras.Model):
        def __init__(self):
            super().__init__()
            self.spare, self.head = keras.layers.Dense(2), keras.layers.Dense(CLASSES)
            self.spare.build([None, DIM])

        def call(self, inputs):
            return inputs, self.head(inputs)

    model = WithSpare()
    model(tf.zeros([1, DIM]))
    trainer = make_trainer(make_config(optimizer={"weight_decay": 0.0}), model)
    before = values(model.spare.variables + model.head.variables)
    trainer.theta_step(ToyPipeline().train_batch(0))
    after = values(model.spare.variables + model.head.variables)
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [True, True, False, False]


def test_weights_that_can_never_move_are_said_to(tmp_path, caplog):
    config = make_config(weights={"warmup_steps": 11})
    outer_loop.train(make_trainer(config), ToyPipeline(), tmp_path, config.train)
    assert "No example weight will move" in caplog.text


def test_average_follows_what_the_settings_name():
    trainable = make_trainer(model=make_model(batch_norm=True))
    everything = make_trainer(
        make_config(optimizer={"ema_variables": "all"}), make_model(batch_norm=True)
    )
    assert len(trainable.ema.shadow) == len(trainable.model.trainable_variables)
    assert len(everything.ema.shadow) == len(everything.model.variables)
    kernel = trainable.model.trainable_variables[0]
    before = kernel.numpy()
    trainable.theta_step(ToyPipeline().train_batch(0))
    expected = 0.999 * before + 0.001 * kernel.numpy()
    np.testing.assert_allclose(trainable.ema.shadow[0], expected, atol=1e-6)
    now = kernel.numpy()
    with trainable.ema.swapped():
        np.testing.assert_array_equal(kernel, trainable.ema.shadow[0])
    np.testing.assert_array_equal(kernel, now)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("decayed", config_lib.DECAYED_VARIABLES)
def test_decoupled_weight_decay_shrinks_what_is_decayed_beside_the_step(name, decayed):
    def after_a_step(decay):
        config = make_config(
            optimizer={
                "name": name,
                "schedule": "constant",
                "learning_rate": 0.1,
                "decayed_variables": decayed,
                "decoupled_weight_decay": decay,
            }
        )
        trainer = make_trainer(config)
        for variable in trainer.trainable:
            variable.assign(tf.random.stateless_normal(variable.shape, [1, 2]))
        before = [v.numpy() for v in trainer.trainable]
        trainer.theta_step(ToyPipeline().train_batch(0))
        return trainer.trainable, before

    variables, before = after_a_step(0.5)
    without, _ = after_a_step(0.0)
    for shrunk, plain, start in zip(variables, without, before, strict=True):
        share = 0.1 * 0.5 if decayed == "all" or "kernel" in plain.name else 0.0
        np.testing.assert_allclose(shrunk, plain - share * start, atol=1e-6)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"weights": {"inner_steps": 40}}, "No example weight will move: .* after step 40 of 40"),
        ({"weights": {"inner_steps": 20}}, "hardly move: about 0.2 times by 0.1 each"),
        ({"optimizer": {"ema_decay": 0.99}}, "67% of the moving average will still be initial"),
    ],
)
def test_what_a_run_is_too_short_for_is_said(settings, says):
    moving = {"inner_steps": 1, "learning_rate": 0.1}
    fine = config_lib.Config().replace(weights=moving, optimizer={"ema_decay": 0.9})
    assert list(outer_loop._short_run_warnings(fine, 40, 0.1)) == []
    (message,) = outer_loop._short_run_warnings(fine.replace(**settings), 40, 0.1)
    assert re.search(says, message)


def half_precision_trainer():
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(0)
        inputs = keras.Input([DIM])
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
        features = keras.layers.Activation("linear", dtype="float32")(hidden)
        logits = keras.layers.Dense(CLASSES, name="head", dtype="float32")(features)
    finally:
        keras.mixed_precision.set_global_policy(before)
    config = make_config(model={"mixed_precision": "float16"}, optimizer={"clip_norm": 3.0})
    return make_trainer(config, keras.Model(inputs, [features, logits]))


def test_float16_takes_the_steps_of_float32_and_leaves_out_those_that_overflow(tmp_path):
    half, full = half_precision_trainer(), make_trainer(make_config(optimizer={"clip_norm": 3.0}))
    pipeline = ToyPipeline()
    for step in range(4):
        batch, validation = pipeline.train_batch(step), pipeline.validation_batch(0)
        for trainer in (half, full):
            reported = trainer.bilevel_step(batch, validation)
        for a, b in zip(half.model.variables, full.model.variables, strict=True):
            assert a.dtype == tf.float32
            np.testing.assert_allclose(a, b, atol=2e-3)
    assert reported["train/gradient_norm"].shape == []
    np.testing.assert_allclose(
        half.example_weights.values(), full.example_weights.values(), atol=2e-3
    )
    scale = half.optimizer.loss_scale
    state = [*half.model.trainable_variables, *half.optimizer.inner_optimizer.momentums]
    before, too_large = values(state), 2.0**40
    half.optimizer._loss_scale._current_loss_scale.assign(too_large)
    reported = half.theta_step(pipeline.train_batch(9))
    for old, new in zip(before, values(state), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(half.optimizer.loss_scale) == too_large / 2 > float(scale)
    assert reported["train/gradient_norm"].numpy().tolist() == [0, 0] and half.step == 5
    assert np.isfinite(reported["train/loss_supervised"])
    # Within a run, whose window takes no mean over steps that were left out.
    outer_loop.train(half, pipeline, tmp_path, half.config.train)
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert all(np.isfinite(row.get("train/gradient_norm", 0)) for row in rows)
