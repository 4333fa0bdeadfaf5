"""The weight step over any variables, by every solver, and with a binary head."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, training
from ssl_influence.methods import uda
from ssl_influence.models import mlp, registry

SIZE, DIM, CLASSES = 40, 4, 3
SOLVERS = {
    "exact": {},
    "cg": {"cg_tolerance": 1e-5},
    "identity": {},
    "neumann": {"neumann_terms": 5, "neumann_step": 0.4},
    "lissa": {"lissa_iterations": 5, "lissa_scale": 9.0, "lissa_rows": 6},
    "outer_product": {},
    "unrolled": {"unroll_steps": 4, "unroll_step": 0.3},
}


def make_model(classes=CLASSES, batch_norm=True):
    keras.utils.set_random_seed(0)
    inputs = keras.Input([DIM])
    x = keras.layers.Dense(5, activation="tanh")(inputs)
    if batch_norm:
        x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, [x, keras.layers.Dense(classes, name="head")(x)])


def batches(classes=CLASSES, seed=1):
    random = np.random.RandomState(seed)

    def inputs(rows):
        return tf.constant(random.randn(rows, DIM), tf.float32)

    def labels(rows):
        return tf.constant(random.randint(classes, size=rows), tf.int32)

    batch = {
        "labeled": {"inputs": inputs(6), "label": labels(6)},
        "unlabeled": {
            "weak": inputs(8),
            "strong": inputs(8),
            "label": labels(8),
            "example_id": tf.constant(random.choice(SIZE, 8, replace=False), tf.int64),
        },
    }
    return batch, {"inputs": inputs(9), "label": labels(9)}


def make_trainer(model=None, last_block=None, weight_decay=0.05, confidence=0.0, **weights):
    """SGD with rate 1 moves each weight by minus its gradient, which can thus be read off."""
    config = config_lib.Config().replace(
        optimizer={"schedule": "constant", "weight_decay": weight_decay},
        weights={"damping": 0.1, "optimizer": "sgd", "learning_rate": 1.0, **weights},
    )
    method = uda.UDA(CLASSES, 10, confidence=confidence, temperature=1.0)
    example_weights = training.make_example_weights(config.weights, SIZE)
    model = make_model() if model is None else model
    return training.BilevelTrainer(
        model, method, example_weights, config, last_block=last_block and last_block(model)
    )


def gradient(trainer, batch, validation):
    """What the weight step took for dL_V/dlambda of the batch's examples."""
    before = trainer.example_weights.values().copy()
    reported = trainer.weight_step(batch, validation)
    assert np.isfinite(reported["weights/validation_loss"])
    assert trainer.skipped_weight_steps == 0
    moved = trainer.example_weights.values() - before
    return -moved[batch["unlabeled"]["example_id"].numpy()]


def head_of(model):
    return model.get_layer("head").trainable_variables


@pytest.mark.parametrize("name", ["neumann", "lissa", "outer_product", "unrolled"])
def test_a_block_of_the_last_layer_alone_gives_what_its_closed_form_does(name):
    settings = {"inverse_hessian": name, **SOLVERS[name]}
    closed = gradient(make_trainer(**settings), *batches())
    found = gradient(
        make_trainer(influence_params="last_block", last_block=head_of, **settings), *batches()
    )
    assert np.abs(closed).max() > 1e-5
    np.testing.assert_allclose(found, closed, atol=2e-3 * np.abs(closed).max())


def test_over_all_variables_in_the_mode_that_trains():
    """The identity approximation by a tape: batch statistics and all."""
    trainer = make_trainer(influence_params="all", inverse_hessian="identity")
    batch, validation = batches()
    found = gradient(trainer, batch, validation)
    model, variables = trainer.model, trainer.model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        inputs = [batch["labeled"]["inputs"], *(batch["unlabeled"][v] for v in ("weak", "strong"))]
        _, logits = model(tf.concat(inputs, 0), training=True)
        target = tf.nn.softmax(tf.stop_gradient(logits[6:14]))
        losses = tf.nn.softmax_cross_entropy_with_logits(target, logits[14:])
        each = tf.unstack(losses)
    del logits
    fresh = make_trainer(influence_params="all", inverse_hessian="identity").model
    with tf.GradientTape() as outer:
        _, logits = fresh(validation["inputs"], training=False)
        validation_loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(validation["label"], logits)
        )
    slope = outer.gradient(validation_loss, fresh.trainable_variables)
    expected = [
        -sum(
            float(tf.reduce_sum(a * b))
            for a, b in zip(tape.gradient(loss, variables), slope, strict=True)
        )
        / (8 * 1.1)
        for loss in each
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["lissa", "unrolled"])
def test_a_weight_step_leaves_the_network_alone(name):
    trainer = make_trainer(influence_params="all", inverse_hessian=name, **SOLVERS[name])
    before = [v.numpy() for v in trainer.model.variables]
    assert np.abs(gradient(trainer, *batches())).max() > 0
    for variable, value in zip(trainer.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_fused_step_takes_the_gradient_before_it_moves_the_network():
    settings = {"influence_params": "all", "inverse_hessian": "cg", **SOLVERS["cg"]}
    # With BatchNorm its moving statistics move between the two, and L_V with them.
    alone = gradient(make_trainer(make_model(batch_norm=False), **settings), *batches())
    trainer = make_trainer(make_model(batch_norm=False), **settings)
    batch, validation = batches()
    trainer.bilevel_step(batch, validation)
    moved = 1 - trainer.example_weights.values()[batch["unlabeled"]["example_id"].numpy()]
    np.testing.assert_allclose(moved, alone, atol=1e-4 * np.abs(alone).max())
    assert trainer.step == 1


def test_rows_below_the_threshold_have_no_influence_over_any_variables():
    trainer = make_trainer(influence_params="all", inverse_hessian="cg", confidence=0.6)
    batch, validation = batches()
    _, logits = make_model()(
        tf.concat(
            [batch["labeled"]["inputs"], batch["unlabeled"]["weak"], batch["unlabeled"]["strong"]],
            0,
        ),
        training=True,
    )
    counts = tf.reduce_max(tf.nn.softmax(logits[6:14]), 1).numpy() > 0.6
    assert 0 < counts.sum() < 8
    np.testing.assert_array_equal(gradient(trainer, batch, validation) != 0, counts)


@pytest.mark.parametrize("name", ["exact", "unrolled", "outer_product"])
def test_the_binary_head_gives_what_two_logits_do(name):
    """With half the L2 and damping, and theta' = theta_1 - theta_2."""
    batch, validation = batches(classes=2)
    one = mlp.build([DIM], 2, 0, hidden_units=(5,), head="binary")
    two = mlp.build([DIM], 2, 0, hidden_units=(5,))
    kernel, bias = (v.numpy() for v in head_of(one))
    one.get_layer("head").bias.assign(bias + 0.3)
    two.get_layer("hidden_0").set_weights(one.get_layer("hidden_0").get_weights())
    two.get_layer("head").set_weights([np.hstack([kernel, -kernel]) / 2, np.array([0.15, -0.15])])
    settings = {"inverse_hessian": name, **SOLVERS[name]}
    doubled = {**settings, "unroll_step": 0.6} if name == "unrolled" else settings
    found = gradient(
        make_trainer(one, weight_decay=0.01, damping=0.05, **doubled), batch, validation
    )
    expected = gradient(
        make_trainer(two, weight_decay=0.02, damping=0.1, **settings), batch, validation
    )
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


def test_the_last_block_of_a_network_of_ours_is_known():
    model = registry.build(config_lib.ModelConfig(name="mlp", hidden_units=(6, 5)), [DIM], 3, 0)
    trainer = make_trainer(model, influence_params="last_block", inverse_hessian="cg")
    names = {v.name.split("/")[0] for v in trainer._influence_variables}
    assert names == {"hidden_1", "head"}


def test_a_hundred_classes_train_in_the_loop():
    """D * C = 12,900: no tensor may have a hundredth of the Hessian's 166 million entries."""
    classes, width = 100, 128
    keras.utils.set_random_seed(0)
    inputs = keras.Input([DIM])
    x = keras.layers.Dense(width, activation="tanh")(inputs)
    model = keras.Model(inputs, [x, keras.layers.Dense(classes, name="head")(x)])
    trainer = make_trainer(model)
    trainer.method = uda.UDA(classes, 10, confidence=0.0, temperature=1.0)
    batch, validation = batches(classes)
    before = trainer.example_weights.values().copy()
    for _ in range(2):
        reported = trainer.bilevel_step(batch, validation)
    assert trainer.skipped_weight_steps == 0 and reported["weights/solver_iterations"] < 200
    assert (trainer.example_weights.values() != before).sum() == 8
    graph = trainer.concrete_step("bilevel_step", batch, validation).graph
    sizes = [
        tensor.shape.num_elements() or 0
        for one in (graph, *graph._functions.values())
        for operation in getattr(one, "get_operations", list)()
        for tensor in operation.outputs
        if tensor.shape.rank is not None
    ]
    assert sizes and max(sizes) < (classes * width) ** 2 / 100


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"influence_params": "last_block"}, "The last block of model .* is not known"),
        ({"influence_params": "all"}, "would form a Hessian of 10,403 x 10,403 numbers"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(settings, message):
    model = make_model()
    if settings["influence_params"] == "all":
        inputs = keras.Input([DIM])
        x = keras.layers.Dense(1300)(inputs)
        model = keras.Model(inputs, [x, keras.layers.Dense(CLASSES, name="head")(x)])
    with pytest.raises(config_lib.ConfigError, match=message):
        make_trainer(model, inverse_hessian="exact", **settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"neumann_terms": 5}, "neumann_terms=5 has no effect with inverse_hessian=exact"),
        ({"inverse_hessian": "lissa", "cg_tolerance": 1.0}, "cg_tolerance=1.0 has no effect"),
        ({"curvature": "hessian"}, "no effect with influence_params=last_layer"),
        (
            {"influence_params": "all", "inverse_hessian": "lissa", "curvature": "hessian"},
            "does not go with inverse_hessian=lissa",
        ),
        ({"inverse_hessian": "neumann", "neumann_step": 0.0}, "neumann_step=0.0 is out of range"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(settings, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        config_lib.Config().replace(weights=settings)
