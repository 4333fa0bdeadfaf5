"""Passes in parts against passes over all rows: what is trained is the same."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, parts, training
from ssl_influence.methods import fixmatch, mean_teacher, pseudo_label, supervised, uda

SIZE, LENGTH, VOCABULARY, CLASSES = 20, 4, 30, 3
layers = keras.layers
METHODS = {
    "uda": uda.UDA(CLASSES, 9, confidence=0.34, tsa="linear"),
    "uda_separate": uda.UDA(CLASSES, 9, confidence=0.34, tsa="linear", target_forward="separate"),
    "fixmatch": fixmatch.FixMatch(confidence=0.34),
    "pseudo_label": pseudo_label.PseudoLabel(
        9, confidence=0.0, ramp_up=0.0, forward_pass="separate"
    ),
    "mean_teacher": mean_teacher.MeanTeacher(9, ramp_up=0.0),
    "supervised": supervised.Supervised(),
}


def make_model(dropout=0.0, seen=None):
    """Of token ids; `seen` takes in how many rows each of its passes in training mode has."""

    def watched(x, training):
        if training and seen is not None:
            seen.append(x.shape[0])
        return x

    keras.utils.set_random_seed(0)
    inputs = keras.Input([LENGTH], dtype=tf.int32)
    x = layers.Lambda(watched)(layers.Embedding(VOCABULARY, 6, name="table")(inputs))
    x = layers.Dropout(dropout)(layers.Flatten()(x))
    x = layers.Dropout(dropout)(layers.Dense(5, activation="tanh")(x))
    return keras.Model(inputs, [x, layers.Dense(CLASSES, name="head")(x)])


def batches(seed):
    random = np.random.RandomState(seed)

    def rows(count):
        return tf.constant(random.randint(VOCABULARY, size=(count, LENGTH)), tf.int32)

    def labels(count):
        return tf.constant(random.randint(CLASSES, size=count), tf.int32)

    batch = {
        "labeled": {"inputs": rows(5), "label": labels(5)},
        "unlabeled": {
            "label": labels(7),
            "example_id": tf.constant(random.choice(SIZE, 7, replace=False), tf.int64),
            **{view: rows(7) for view in ("weak", "weak_2", "strong")},
        },
    }
    return batch, {"inputs": rows(6), "label": labels(6)}


def make_trainer(rows_per_pass, method=METHODS["uda"], model=None, seed=0, **optimizer):
    config = config_lib.Config().replace(
        optimizer={
            "learning_rate": 0.5,
            "schedule": "constant",
            "weight_decay": 0.0,
            "momentum": 0.0,
            **optimizer,
        },
        weights={"inverse_hessian": "identity", "learning_rate": 0.5, "optimizer": "sgd"},
        train={"train_steps": 9, "rows_per_pass": rows_per_pass, "seed": seed},
    )
    return training.BilevelTrainer(
        model or make_model(), method, training.make_example_weights(config.weights, SIZE), config
    )


def after(*steps):
    """What steps report, each a function without arguments, as numbers."""
    return [{name: value.numpy() for name, value in step().items()} for step in steps]


def two_steps(trainer):
    """What is reported, and all that moves, after two weight and theta steps."""
    reported = after(*(lambda seed=s: trainer.bilevel_step(*batches(seed)) for s in range(2)))
    held = [v.numpy() for v in (*trainer.model.variables, *trainer.ema.shadow)]
    return reported, [*held, trainer.example_weights.values()]


def assert_alike(found, expected):
    for of_step, expected_of_step in zip(found[0], expected[0], strict=True):
        assert of_step.keys() == expected_of_step.keys()
        for name, value in expected_of_step.items():
            np.testing.assert_allclose(of_step[name], value, atol=2e-6, rtol=2e-6, err_msg=name)
    for value, expected_value in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(value, expected_value, atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_in_parts_is_the_run_over_all_rows(name):
    seen, start = [], [v.numpy() for v in make_model().trainable_variables]
    whole = two_steps(make_trainer(None, METHODS[name]))
    found = two_steps(make_trainer(3, METHODS[name], make_model(seen=seen)))
    assert_alike(found, whole)  # 3 cuts passes of 5, 12 and 19 rows into uneven parts
    moved = [np.abs(a - b).max() for a, b in zip(whole[1][: len(start)], start, strict=True)]
    assert min(moved) > 1e-3
    assert (np.ptp(whole[1][-1]) > 1e-3) == (name != "supervised")
    assert 0 < max(seen) <= 3


def test_any_number_of_rows_will_do():
    settings = {"weight_decay": 0.02, "decayed_variables": "all", "clip_norm": 0.1}

    def step(rows):
        trainer = make_trainer(rows, **settings)
        return after(lambda: trainer.theta_step(batches(0)[0])), [
            v.numpy() for v in trainer.trainable
        ]

    whole = step(None)
    for rows in (1, 19, 50):
        assert_alike(step(rows), whole)


def test_a_table_keeps_sparse_gradients_unless_it_is_decayed():
    def kinds(trainer):
        found = []
        take = trainer.optimizer.apply_gradients

        def spy(pairs, **keywords):
            pairs = list(pairs)
            found.extend(isinstance(gradient, tf.IndexedSlices) for gradient, _ in pairs)
            return take(pairs, **keywords)

        trainer.optimizer.apply_gradients = spy
        trainer.theta_step(batches(0)[0])
        return found

    assert kinds(make_trainer(4)) == [True, False, False, False, False]
    decayed = make_trainer(4, weight_decay=0.1, decayed_variables="all")
    assert kinds(decayed) == [False] * 5


def test_a_part_begins_when_the_one_before_has_ended():
    trainer = make_trainer(5)
    graph = trainer.concrete_step("theta_step", batches(0)[0]).graph
    calls = [
        operation
        for operation in graph.get_operations()
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall")
    ]
    # Four parts of the 19 rows, each with its gradient.
    assert len(calls) == 8
    for before, after in itertools.pairwise(calls):
        assert before in ancestors(after), (before.name, after.name)


def ancestors(operation):
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        for other in (*(tensor.op for tensor in one.inputs), *one.control_inputs):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def test_a_graph_holds_the_model_few_times_however_many_parts_there_are():
    seen = []
    make_trainer(1, model=make_model(seen=seen)).theta_step(batches(0)[0])
    assert len(seen) <= 4


def test_dropout_in_parts_is_a_function_of_the_seed_and_the_step():
    def loss(seed, step):
        trainer = make_trainer(4, model=make_model(dropout=0.5), seed=seed)
        trainer.step.assign(step)
        return float(trainer.theta_step(batches(0)[0])["train/loss_supervised"])

    losses = [loss(0, 0), loss(0, 0), loss(1, 0), loss(0, 1)]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_gradients_are_of_the_masks_of_their_own_forward_pass():
    """A part is run twice, and each part draws masks of its own."""
    model = make_model(dropout=0.5)
    trainer = make_trainer(3, model=model)
    ids, key = batches(0)[1]["inputs"], tf.constant([1, 2], tf.int64)
    recorded = parts.Recorded()
    features, logits = trainer._in_parts.forward(ids, key, recorded)
    ones = [(tf.zeros_like(features), tf.ones_like(logits))]
    (head,) = trainer._in_parts.gradients(recorded, ones)[3]  # dense: the parts are summed
    # Of sum logits, by the head's kernel: the sum of the features, in every column.
    np.testing.assert_allclose(
        head, np.repeat(features.numpy().sum(0)[:, None], CLASSES, 1), atol=1e-6
    )
    assert np.any((features[:3].numpy() == 0) != (features[3:].numpy() == 0))
    equal = tf.tile(ids[:1], [6, 1])
    features, _ = trainer._in_parts.forward(equal, key)
    assert len(np.unique(features, axis=0)) == 6


def test_batch_norm_in_parts_is_refused_in_a_line():
    inputs = keras.Input([LENGTH])
    x = layers.BatchNormalization(name="norm")(inputs)
    model = keras.Model(inputs, [x, layers.Dense(CLASSES)(x)])
    with pytest.raises(config_lib.ConfigError, match="rows_per_pass=4: .*'norm'") as caught:
        make_trainer(4, model=model)
    assert "\n" not in str(caught.value)
