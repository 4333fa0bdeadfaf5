"""BERT: its outputs against a pass in NumPy, its weights, and derivatives through it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, training
from ssl_influence.data import tokens
from ssl_influence.influence import all_variables
from ssl_influence.methods import uda
from ssl_influence.models import bert, registry
from tests.models import reference_bert
from third_party.bert import names, pretrained

pytest.importorskip("official.nlp.modeling.networks")

SIZES = bert.Sizes(
    vocab_size=23,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    inner_size=24,
    max_positions=12,
    type_vocab_size=2,
)
LENGTH, CLASSES = 10, 3
CONFIG = config_lib.ModelConfig(name="bert", encoder="unread", dropout=0.0)


def random_weights(sizes=SIZES, scale=0.4, seed=0):
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in names.shapes(dataclasses.asdict(sizes)).items():
        value = rng.normal(size=shape, scale=scale) + name.endswith("gamma")
        weights[name] = value.astype(np.float32)
    return weights


def token_ids(rows=4, seed=0):
    """Texts of several lengths, the first without padding, and how many tokens each has."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, SIZES.vocab_size, (rows, LENGTH), dtype=np.int32)
    lengths = np.r_[LENGTH, rng.integers(1, LENGTH, rows - 1)]
    ids[np.arange(LENGTH) >= lengths[:, np.newaxis]] = 0
    return ids


def build(sizes=SIZES, seed=0, **settings):
    settings = {"sequence_length": LENGTH, "dropout": 0.0, **settings}
    return bert.build(sizes, CLASSES, seed, **settings)


def expected_features(weights, sizes, ids, pooling):
    mask = ids != 0
    last, pooled = reference_bert.encode(weights, dataclasses.asdict(sizes), ids, mask)
    return {
        "pooler": pooled,
        "first": last[:, 0],
        "mean": (last * mask[..., np.newaxis]).sum(1) / mask.sum(1)[:, np.newaxis],
    }[pooling]


@pytest.mark.parametrize(
    "pooling, gelu", [("pooler", "erf"), ("first", "erf"), ("mean", "erf"), ("pooler", "tanh")]
)
def test_outputs_are_those_of_a_pass_in_numpy(pooling, gelu):
    sizes = dataclasses.replace(SIZES, gelu=gelu)
    model, weights, ids = build(sizes, pooling=pooling), random_weights(), token_ids()
    assert bert.load(model, weights) == []
    features, logits = model(ids)
    expected = expected_features(weights, sizes, ids, pooling)
    np.testing.assert_allclose(features, expected, atol=1e-5)
    kernel, bias = model.get_layer("head").get_weights()
    np.testing.assert_allclose(logits, expected @ kernel + bias, atol=1e-4)
    assert model.name == "bert" and features.dtype == logits.dtype == tf.float32
    other = dataclasses.replace(SIZES, gelu="tanh" if gelu == "erf" else "erf")
    assert np.abs(expected - expected_features(weights, other, ids, pooling)).max() > 5e-5
    trained = {variable.name for variable in model.trainable_variables}
    assert any("pooler" in name for name in trained) == (pooling == "pooler")


@pytest.mark.parametrize("pooling", config_lib.POOLINGS)
def test_a_text_without_any_token_stays_finite(pooling):
    model = build(pooling=pooling)
    bert.load(model, random_weights())
    ids = token_ids()
    ids[1] = 0
    with tf.GradientTape() as tape:
        outputs = model(ids, training=True)
        loss = tf.reduce_sum(outputs[1] ** 2)
    for value in (*outputs, *tape.gradient(loss, model.trainable_variables)):
        assert np.all(np.isfinite(tf.convert_to_tensor(value)))


@pytest.mark.parametrize("place", ["bert_tiny", "minilm"])
def test_the_installed_encoders_give_what_numpy_makes_of_sentences(place):
    pytest.importorskip("tensorflow_text")
    try:
        found = pretrained.read(place)
    except pretrained.PretrainedError as error:
        pytest.skip(str(error))
    sizes = bert.Sizes(**found.sizes)
    spec = tokens.TokenizerSpec(tuple(found.vocabulary), found.lower_case, 12, "right")
    texts = ["A film about nothing, really.", "Superb!", "It is what it is - and it's too long."]
    ids = tokens.Tokenizer(spec).encode(tf.constant(texts)).numpy()
    assert spec.token_id("[PAD]") == 0 and np.any(ids == 0)
    pooling = "pooler" if "pooler/kernel" in found.weights else "mean"
    model = build(sizes, sequence_length=12, pooling=pooling)
    bert.load(model, found.weights)
    features = model(ids)[0]
    expected = expected_features(found.weights, sizes, ids, pooling)
    np.testing.assert_allclose(features, expected, atol=1e-4)


def values(model):
    return [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w.pop("layer_1/norm/beta"), "missing are layer_1/norm/beta; left over are none"),
        (lambda w: w.pop("pooler/bias") is w.pop("embeddings/type"), "missing are embeddings/type"),
        (lambda w: w.update(extra=w["pooler/bias"]), "missing are none; left over are extra"),
        (
            lambda w: w.update({"layer_0/output/bias": np.zeros(9, np.float32)}),
            r"layer_0/output/bias is \(9,\), and the network needs \(16,\)",
        ),
        (
            # As many numbers, but the other way around.
            lambda w: w.update({"layer_0/output/kernel": w["layer_0/output/kernel"].T}),
            r"layer_0/output/kernel is \(16, 24\), and the network needs \(24, 16\)",
        ),
        (
            lambda w: w.update({"layer_1/attention/query/kernel": np.zeros([8, 32], np.float32)}),
            r"layer_1/attention/query/kernel is \(8, 32\), and the network needs \(16, 16\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_a_line_and_change_nothing(change, says, built):
    before, weights = values(built), random_weights(seed=5)
    change(weights)
    with pytest.raises(config_lib.ConfigError, match=says) as caught:
        bert.load(built, weights)
    assert "\n" not in str(caught.value)
    for a, b in zip(values(built), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def built():
    return build()


def test_a_missing_pooler_keeps_its_new_weights_and_is_named():
    model, weights = build(), random_weights()
    pooler = bert.encoder_of(model).pooler_layer
    before = pooler.get_weights()
    without = {name: v for name, v in weights.items() if not name.startswith("pooler/")}
    assert sorted(bert.load(model, without)) == ["pooler/bias", "pooler/kernel"]
    for a, b in zip(pooler.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert before[0].std() == pytest.approx(0.0176, rel=0.15)  # Of 0.02, cut at two deviations.


def test_the_seed_alone_determines_the_weights(built):
    keras.utils.set_random_seed(77)
    same, other = build(), build(seed=1)
    for a, b, c in zip(values(built), values(same), values(other), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.ptp(a) == 0 or np.all(a != c)
    drawn = [v.flat[0] for v in values(built) if np.ptp(v) > 0]
    assert len(set(drawn)) == len(drawn) == 3 + 6 * SIZES.num_layers + 2


def test_a_binary_head_has_one_unit():
    model = bert.build(SIZES, 2, 0, sequence_length=LENGTH, dropout=0.0, head="binary")
    features, logits = model(token_ids())
    kernel, bias = model.get_layer("head").get_weights()
    assert kernel.shape == (16, 1)
    half = (features.numpy() @ kernel + bias) / 2
    np.testing.assert_allclose(logits, np.hstack([half, -half]), atol=1e-6)


@pytest.mark.parametrize("pooling", ["pooler", "mean"])
def test_the_last_block_ends_with_the_head(pooling):
    model = build(pooling=pooling)
    chosen = registry.last_block(model)
    encoder = bert.encoder_of(model)
    expected = {id(v) for v in encoder.transformer_layers[1].trainable_variables}
    expected |= {id(v) for v in model.get_layer("head").variables}
    if pooling == "pooler":
        expected |= {id(v) for v in encoder.pooler_layer.variables}
    assert {id(v) for v in chosen} == expected
    assert len(chosen) == 16 + 2 + 2 * (pooling == "pooler")


def test_what_cannot_be_built_is_refused_in_a_line():
    for settings, says in (
        ({"sequence_length": 13}, "sequence_length=13 is more than the 12 positions"),
        ({"pooling": "max"}, "pooling='max' is not one of"),
        ({"head": "binary"}, "head=binary is for two classes"),
    ):
        with pytest.raises(config_lib.ConfigError, match=says):
            build(**settings)
    for change, says in (({"gelu": "relu"}, "gelu='relu'"), ({"num_heads": 3}, "num_heads=3")):
        with pytest.raises(config_lib.ConfigError, match=says):
            dataclasses.replace(SIZES, **change)


def test_bfloat16_gives_float32_outputs_near_those_of_float32():
    before, ids, outputs = keras.mixed_precision.global_policy().name, token_ids(), []
    for precision in ("none", "bfloat16"):
        settings = dataclasses.replace(CONFIG, mixed_precision=precision)
        model = registry.build(settings, [LENGTH], CLASSES, 0, encoder=SIZES)
        assert keras.mixed_precision.global_policy().name == before
        assert {variable.dtype for variable in model.variables} == {tf.float32}
        bert.load(model, random_weights(scale=0.2))
        outputs.append(model(ids))
    for full, half in zip(*outputs, strict=True):
        assert half.dtype == tf.float32
        assert 0 < np.abs(full - half).max() < 0.05
    settings = dataclasses.replace(CONFIG, mixed_precision="bfloat16")
    with pytest.raises(config_lib.ConfigError):
        registry.build(settings, [LENGTH + 3], CLASSES, 0, encoder=SIZES)
    assert keras.mixed_precision.global_policy().name == before


def test_features_are_what_the_head_multiplies_after_dropout():
    model = build(dropout=0.5)
    features, logits = model(token_ids(), training=True)
    np.testing.assert_allclose(model.get_layer("head")(features), logits, atol=1e-6)
    assert 0.2 < np.mean(features.numpy() == 0) < 0.8


def test_the_gradient_of_the_words_is_of_those_that_occur(built):
    ids = token_ids()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(built(ids, training=True)[1] ** 2)
    table = bert.encoder_of(built)._embedding_layer.embeddings
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert set(gradient.indices.numpy()) == set(ids.flat)


# Influence over variables other than the last layer's: BERT is differentiated twice.

SMALL = bert.Sizes(8, 4, 2, 2, 6, 6, 1)


def small_batches():
    rng = np.random.RandomState(1)

    def ids(rows):
        return tf.constant(rng.randint(8, size=(rows, 5)), tf.int32)

    def labels(rows):
        return tf.constant(rng.randint(CLASSES, size=rows), tf.int32)

    unlabeled = {"weak": ids(6), "strong": ids(6), "label": labels(6)}
    unlabeled["example_id"] = tf.range(6, dtype=tf.int64)
    batch = {"labeled": {"inputs": ids(4), "label": labels(4)}, "unlabeled": unlabeled}
    return batch, {"inputs": ids(7), "label": labels(7)}


def small_trainer(params, solver, **settings):
    config = config_lib.Config().replace(
        optimizer={"schedule": "constant", "weight_decay": 0.05},
        weights={
            "influence_params": params,
            "inverse_hessian": solver,
            "damping": 0.1,
            "optimizer": "sgd",
            "learning_rate": 1.0,
            **settings,
        },
    )
    model = bert.build(SMALL, CLASSES, 0, sequence_length=5, dropout=0.0)
    bert.load(model, random_weights(SMALL))
    method = uda.UDA(CLASSES, 10, confidence=0.0, temperature=1.0)
    return training.BilevelTrainer(
        model, method, training.make_example_weights(config.weights, 6), config
    )


def weight_gradient(trainer):
    """What the step of the example weights, SGD with rate 1, took for dL_V/dlambda."""
    reported = trainer.bilevel_step(*small_batches())
    assert np.isfinite(reported["weights/validation_loss"])
    assert trainer.skipped_weight_steps == 0 and trainer.step == 1
    return 1 - trainer.example_weights.values()


def test_weight_gradients_through_berts_last_block_agree_between_solvers():
    exact = weight_gradient(small_trainer("last_block", "exact"))
    iterated = weight_gradient(small_trainer("last_block", "cg", cg_tolerance=1e-6))
    assert np.abs(exact).min() > 1e-6
    np.testing.assert_allclose(iterated, exact, atol=2e-3 * np.abs(exact).max())


def test_over_all_variables_derivatives_are_those_of_differences():
    trainer = small_trainer("all", "identity")
    batch, _ = small_batches()
    variables = trainer.trainable
    # Without unlabeled rows: their targets, constants to the Hessian, move in the differences.
    objective = all_variables.Objective(
        lambda: trainer._rows_of(batch, trainer.step),
        tf.zeros([6]),
        variables,
        [0.05] * len(variables),
    )
    rng = np.random.default_rng(3)
    vector = [tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables]
    found = objective.product("hessian")(vector)

    def slopes(step):
        for variable, part in zip(variables, vector, strict=True):
            variable.assign_add(step * part)
        with tf.GradientTape() as tape:
            value = objective.value()
        gradients = tape.gradient(value, variables)
        for variable, part in zip(variables, vector, strict=True):
            variable.assign_sub(step * part)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    step = 2e-4
    pairs = zip(slopes(step), slopes(-step), strict=True)
    expected = [(above - below) / (2 * step) for above, below in pairs]
    scale = max(np.abs(part).max() for part in expected)
    assert scale > 0.1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3 * scale)
