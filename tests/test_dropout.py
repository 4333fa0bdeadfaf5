"""Dropout by a key: what is drawn, and that a step of training is a function of its state."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, dropout, training
from ssl_influence.methods import base, uda

SIZE, LENGTH, DIM, CLASSES = 20, 6, 4, 3
layers = keras.layers


def key(*numbers):
    return tf.constant(numbers, tf.int64)


def make_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input([LENGTH, DIM])
    x = layers.SpatialDropout1D(0.2)(inputs)
    x = layers.MultiHeadAttention(2, 3, dropout=0.3)(x, x)
    x = layers.Dense(8, activation="tanh")(layers.Flatten()(x))
    x = layers.Dropout(0.4)(x)
    return keras.Model(inputs, [x, layers.Dense(CLASSES, name="head")(x)])


def two_masks(rate=0.3, **arguments):
    """A model that gives its inputs under two dropouts, one after the other in its order."""
    inputs = keras.Input([50])
    outputs = [layers.Dropout(rate, **arguments)(inputs) for _ in range(2)]
    return keras.Model(inputs, outputs)


def test_masks_are_a_function_of_the_key_and_the_place():
    model = two_masks()
    keyed, ones = dropout.KeyedDropout(model), tf.ones([40, 50])

    def draw(drawn_by):
        with keyed.drawing(drawn_by):
            return model(ones, training=True)

    drawn = [tf.function(draw)(key(3, 1)), draw(key(3, 1)), draw(key(3, 1))]
    for other in drawn[1:]:
        for a, b in zip(drawn[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    masks = [mask.numpy() != 0 for k in (key(3, 1), key(4, 1), key(3, 9)) for mask in draw(k)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            # Independent ones agree at a share of 0.7^2 + 0.3^2.
            assert abs(np.mean(mask == other) - 0.58) < 4 * np.sqrt(0.58 * 0.42 / mask.size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_as_many_units_are_kept_as_the_rate_says_and_scaled_up(rate):
    model = two_masks(rate)
    with dropout.KeyedDropout(model).drawing(key(1, 2)):
        for drawn in model(tf.ones([800, 50]), training=True):
            kept = drawn.numpy()[drawn.numpy() != 0]
            error = kept.size / 40_000 - (1 - rate)
            assert abs(error) < 4 * np.sqrt(rate * (1 - rate) / 40_000)
            np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-6)


def test_a_rate_of_0_and_inference_drop_nothing():
    x = tf.random.stateless_normal([4, 50], [1, 2])
    for model, is_training in ((two_masks(0.0), True), (two_masks(0.5), False)):
        with dropout.KeyedDropout(model).drawing(key(1, 2)):
            for drawn in model(x, training=is_training):
                np.testing.assert_array_equal(drawn, x)


def test_outside_of_a_key_layers_draw_as_keras_has_it():
    ones, drawn = tf.ones([4, 50]), []
    for take_over in (dropout.KeyedDropout, lambda model: None):
        model = two_masks()
        keyed = take_over(model)
        if keyed:
            with keyed.drawing(key(1, 2)):
                by_key = model(ones, training=True)
        keras.utils.set_random_seed(0)
        drawn.append([model(ones, training=True)[0] for _ in range(2)])
    for a, b in zip(*drawn, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(by_key[0] != drawn[0][0]) and np.any(drawn[0][0] != drawn[0][1])


def test_a_key_within_a_key_and_an_error_within_leave_the_outer_one():
    model, ones = two_masks(), tf.ones([4, 50])
    keyed = dropout.KeyedDropout(model)
    with keyed.drawing(key(1, 2)):
        expected = model(ones, training=True)[0]
    with keyed.drawing(key(1, 2)):
        with pytest.raises(ZeroDivisionError), keyed.drawing(key(7, 7)):
            model(ones, training=True)
            raise ZeroDivisionError
        np.testing.assert_array_equal(model(ones, training=True)[0], expected)


def test_a_spatial_mask_keeps_its_shape():
    model = keras.Sequential([layers.SpatialDropout1D(0.5)])
    model.build([None, 6, 30])
    with dropout.KeyedDropout(model).drawing(key(1, 2)):
        kept = model(tf.ones([5, 6, 30]), training=True).numpy() != 0
    assert 0 < kept.mean() < 1
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:, :1], kept.shape))


def test_layers_within_layers_are_found():
    assert sorted(layer.rate for layer in dropout.KeyedDropout(make_model()).layers) == [
        0.2,
        0.3,
        0.4,
    ]


def test_those_of_the_model_gardens_blocks_are_found():
    pytest.importorskip("official.nlp.modeling.networks")
    from ssl_influence.models import bert

    model = bert.build(bert.Sizes(9, 8, 2, 2, 12, 7, 2), 3, 0, sequence_length=5, dropout=0.25)
    keyed = dropout.KeyedDropout(model)
    # Of the embeddings and of the features; in each block of attention, after it, after the rest,
    # and within the rest, where BERT has none.
    rates = sorted(layer.rate for layer in keyed.layers)
    assert rates == [0.0] * 2 + [0.25] * (2 + 2 * 3)
    ids = tf.constant([[2, 5, 6, 3, 0]] * 4)
    with keyed.drawing(key(1, 2)):
        model(ids, training=True)
        assert keyed._applied >= 8, "a layer drew by itself"


def batches(seed):
    random = np.random.RandomState(seed)

    def rows(count):
        return tf.constant(random.randn(count, LENGTH, DIM), tf.float32)

    def labels(count):
        return tf.constant(random.randint(CLASSES, size=count), tf.int32)

    batch = {
        "labeled": {"inputs": rows(4), "label": labels(4)},
        "unlabeled": {
            "weak": rows(5),
            "strong": rows(5),
            "label": labels(5),
            "example_id": tf.constant(random.choice(SIZE, 5, replace=False), tf.int64),
        },
    }
    return batch, {"inputs": rows(6), "label": labels(6)}


def make_trainer(seed=0):
    config = config_lib.Config().replace(
        optimizer={"learning_rate": 0.1, "schedule": "constant"},
        weights={"damping": 0.1, "inverse_hessian": "identity"},
        train={"train_steps": 9, "seed": seed},
    )
    return training.BilevelTrainer(
        make_model(),
        uda.UDA(CLASSES, 9, confidence=0.0, target_forward="separate"),
        training.make_example_weights(config.weights, SIZE),
        config,
    )


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_step_is_a_function_of_the_state_whatever_ran_before(tmp_path):
    whole = make_trainer()
    whole.theta_step(batches(0)[0])
    whole.bilevel_step(*batches(1))
    saved = tf.train.Checkpoint(**whole.state()).write(str(tmp_path / "state"))
    expected = [whole.theta_step(batches(2)[0]), whole.bilevel_step(*batches(3))]
    fresh, used = make_trainer(), make_trainer()
    # Traces the other step first, and draws by Keras' own generators too.
    used.bilevel_step(*batches(7))
    used.model(batches(6)[1]["inputs"], training=True)
    for trainer in (fresh, used):
        tf.train.Checkpoint(**trainer.state()).read(saved).assert_consumed()
        assert trainer.step == 2
        found = [trainer.theta_step(batches(2)[0]), trainer.bilevel_step(*batches(3))]
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)
        for a, b in zip(trainer.model.variables, whole.model.variables, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(
            trainer.example_weights.values(), whole.example_weights.values()
        )


def test_other_seeds_and_steps_draw_other_masks():
    drawn, x = [], batches(0)[1]["inputs"]
    for seed, step in ((0, 0), (1, 0), (0, 1), (0, 0)):
        trainer = make_trainer(seed)
        trainer.step.assign(step)
        drawn.append(trainer._passes(trainer.step).train(x)[0].numpy())
    np.testing.assert_array_equal(drawn[0], drawn[3])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.any(drawn[a] != drawn[b])


def test_each_pass_of_a_step_draws_masks_of_its_own():
    trainer, x = make_trainer(), batches(0)[1]["inputs"]
    passes = trainer._passes(trainer.step)
    drawn = [one(x)[0].numpy() for one in (passes.train, passes.constant, passes.still)]
    again = trainer._passes(trainer.step)
    np.testing.assert_array_equal(again.train(x)[0], drawn[0])
    for i, other in enumerate(drawn):
        assert all(np.any(other != before) for before in drawn[:i])


def test_validation_is_without_dropout():
    trainer, x = make_trainer(), batches(0)[1]["inputs"]
    for found, expected in zip(
        trainer._on_validation(x, trainer.step), trainer.model(x), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_no_mask_is_drawn_twice_in_the_passes_and_parts_of_some_steps(monkeypatch):
    seeds = []

    def note(inputs, rate, seed, **keywords):
        seeds.append(tuple(seed.numpy()))
        return inputs

    monkeypatch.setattr(tf.nn.experimental, "stateless_dropout", note)
    inputs = keras.Input([4])
    x = inputs
    for _ in range(3):
        x = keras.layers.Dropout(0.5)(x)
    model = keras.Model(inputs, x)
    keyed = dropout.KeyedDropout(model)
    for step in range(3):
        for one_pass in range(1, 4):
            of_pass = base.step_seed(7, step, -one_pass)
            for part in (None, 0, 1, 2):
                of_part = of_pass
                if part is not None:
                    of_part = tf.random.experimental.stateless_fold_in(
                        of_pass, tf.constant(part, tf.int64), alg="philox"
                    )
                with keyed.drawing(of_part):
                    model(tf.ones([2, 4]), training=True)
    assert len(set(seeds)) == len(seeds) == 3 * 3 * 4 * 3
