"""The networks: sizes, shapes, initial values and structure."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config
from ssl_influence.models import mlp, registry, seeds, wide_resnet

SMALL = config.ModelConfig(depth=10, width=1, filters=4)


def images(*shape):
    return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


def wide_resnet_sizes(depth, width, filters, channels, classes):
    """Trainable parameters and moving statistics, from the architecture by hand."""

    def conv(size, before, after):
        return size * size * before * after + after

    trainable, norms, before = conv(3, channels, filters), 0, filters
    for after in (filters * width, 2 * filters * width, 4 * filters * width):
        for _ in range((depth - 4) // 6):
            trainable += conv(3, before, after) + conv(3, after, after)
            norms += before + after
            if before != after:
                trainable += conv(1, before, after)
            before = after
    norms += before
    return trainable + 2 * norms + (before + 1) * classes, 2 * norms


@pytest.mark.parametrize(
    "depth,width,filters,shape,classes",
    [(28, 2, 16, (32, 32, 3), 10), (10, 1, 4, (8, 8, 1), 10), (16, 3, 2, (9, 13, 5), 3)],
)
def test_wide_resnet_parameter_count_matches_the_formula(depth, width, filters, shape, classes):
    model_config = config.ModelConfig(depth=depth, width=width, filters=filters)
    model = registry.build(model_config, shape, classes, 0)
    trainable, moving = wide_resnet_sizes(depth, width, filters, shape[-1], classes)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == trainable
    assert sum(int(np.prod(v.shape)) for v in model.non_trainable_variables) == moving


def test_wrn_28_2_has_the_papers_1_5_million_parameters():
    model = registry.build(config.ModelConfig(), (32, 32, 3), 10, 0)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == 1_469_642
    assert model.count_params() == 1_473_258


def test_mlp_has_two_hidden_layers_of_100():
    model = registry.build(config.ModelConfig(name="mlp"), (2,), 2, 0)
    assert model.count_params() == (2 * 100 + 100) + (100 * 100 + 100) + (100 * 2 + 2)


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (7, 11, 2), (1, 1, 1)])
def test_wide_resnet_takes_images_of_any_size(shape):
    model = registry.build(SMALL, shape, 5, 0)
    features, logits = model(images(3, *shape), training=True)
    assert features.shape == (3, 16) and logits.shape == (3, 5)
    assert np.all(np.isfinite(features)) and np.all(np.isfinite(logits))
    assert min(min(layer.output_shape[1:3]) for layer in convolutions(model)) >= 1


def convolutions(model):
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


@pytest.mark.parametrize("shape", [(2,), (8, 8, 1)])
def test_mlp_takes_vectors_and_flattens_images(shape):
    model = registry.build(config.ModelConfig(name="mlp", hidden_units=(7, 6)), shape, 3, 0)
    x = images(4, *shape)
    features, logits = model(x)
    h = x.numpy().reshape(4, -1)
    for name in ("hidden_0", "hidden_1"):
        kernel, bias = model.get_layer(name).get_weights()
        h = np.maximum(h @ kernel + bias, 0)
    np.testing.assert_allclose(features, h, rtol=1e-5, atol=1e-6)
    kernel, bias = model.get_layer("head").get_weights()
    np.testing.assert_allclose(logits, h @ kernel + bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_config", [SMALL, config.ModelConfig(name="mlp")])
def test_logits_are_the_named_head_applied_to_the_features(model_config):
    model = registry.build(model_config, (8, 8, 1), 4, 0)
    features, logits = model(images(3, 8, 8, 1))
    head = model.get_layer("head")
    assert isinstance(head, keras.layers.Dense) and head.use_bias
    np.testing.assert_allclose(logits, features @ head.kernel + head.bias, atol=1e-6)


def reference_wide_resnet(model, x):
    """Inference of a WRN-10 written with elementary operations on the weights by layer name."""

    def norm_relu(x, name):
        gamma, beta, mean, variance = model.get_layer(f"{name}_norm").get_weights()
        x = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
        return tf.where(x > 0, x, 0.1 * x)

    def conv(x, name, stride=1):
        kernel, bias = model.get_layer(name).get_weights()
        return tf.nn.conv2d(x, kernel, stride, "SAME") + bias

    x = conv(x, "stem")
    for stage, stride in enumerate((1, 2, 2)):
        name = f"stage{stage}_block0"
        activated = norm_relu(x, f"{name}_0")
        branch = conv(activated, f"{name}_0_conv", stride)
        branch = conv(norm_relu(branch, f"{name}_1"), f"{name}_1_conv")
        x = conv(activated if stage == 0 else x, f"{name}_shortcut", stride) + branch
    return tf.reduce_mean(norm_relu(x, "final"), [1, 2])


def test_wide_resnet_computes_the_published_blocks():
    model = registry.build(config.ModelConfig(depth=10, width=2, filters=3), (9, 8, 2), 4, 0)
    rng = np.random.default_rng(1)
    model.set_weights(
        [rng.uniform(0.1, 0.6, w.shape) - 0.2 * (w.ndim > 1) for w in model.get_weights()]
    )
    x = images(3, 9, 8, 2)
    expected = reference_wide_resnet(model, x)
    np.testing.assert_allclose(model(x, training=False)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_block_without_change_of_channels_has_no_shortcut_convolution():
    model = registry.build(config.ModelConfig(depth=16, width=2, filters=2), (8, 8, 1), 3, 0)
    shortcuts = [layer.name for layer in model.layers if layer.name.endswith("_shortcut")]
    assert shortcuts == [f"stage{stage}_block0_shortcut" for stage in range(3)]


def test_wide_resnet_starts_from_the_published_distribution():
    model = registry.build(config.ModelConfig(depth=10, width=4), (32, 32, 3), 10, 3)
    for layer in convolutions(model):
        kernel, bias = layer.get_weights()
        expected = 1 / np.sqrt(0.5 * kernel.shape[0] ** 2 * kernel.shape[-1])
        assert kernel.std() == pytest.approx(expected, rel=4 / np.sqrt(2 * kernel.size)), layer.name
        assert not bias.any()
        if kernel.size > 10_000:
            assert np.abs(kernel).max() > 2.5 * expected, "truncated"
    kernel, bias = model.get_layer("head").get_weights()
    assert kernel.std() == pytest.approx(np.sqrt(2 / sum(kernel.shape)), rel=0.1)
    assert not bias.any()


def test_batch_norm_has_the_published_constants():
    model = registry.build(config.ModelConfig(depth=10, batch_norm_momentum=0.99), (8, 8, 1), 3, 0)
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert len(norms) == 7
    assert all(norm.momentum == 0.99 and norm.epsilon == 1e-3 for norm in norms)


@pytest.mark.parametrize("model_config", [SMALL, config.ModelConfig(name="mlp")])
def test_weights_depend_on_the_seed_alone(model_config):
    def weights(seed):
        return registry.build(model_config, (8, 8, 1), 3, seed).get_weights()

    tf.random.set_seed(1)
    first = weights(5)
    tf.random.set_seed(2)
    tf.random.normal([3])
    for a, b in zip(first, weights(5), strict=True):
        assert a.tobytes() == b.tobytes()
    kernels = [(a, b) for a, b in zip(first, weights(6), strict=True) if a.ndim > 1]
    assert all(np.all(a != b) for a, b in kernels)


def test_layers_of_one_shape_start_differently():
    model = registry.build(config.ModelConfig(depth=22, width=1, filters=4), (8, 8, 1), 3, 0)
    kernels = [layer.get_weights()[0].tobytes() for layer in convolutions(model)]
    assert len(set(kernels)) == len(kernels)


def test_initializer_seeds_are_fixed_for_ever():
    stream, other = seeds.initializer_seeds(1), seeds.initializer_seeds(2)
    values = [next(stream) for _ in range(100)]
    assert values[:3] == [917752063, 594516694, 798405205]
    assert len(set(values)) == 100 and not set(values) & {next(other) for _ in range(100)}


def test_inference_leaves_moving_statistics_alone_and_training_moves_them():
    model = registry.build(SMALL, (8, 8, 1), 3, 0)
    before = [v.numpy() for v in model.non_trainable_variables]
    model(images(4, 8, 8, 1), training=False)
    for old, variable in zip(before, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable)
    model(images(4, 8, 8, 1), training=True)
    for old, variable in zip(before, model.non_trainable_variables, strict=True):
        assert np.any(old != variable.numpy()), variable.name


@pytest.mark.parametrize("model_config", [SMALL, config.ModelConfig(name="mlp")])
@pytest.mark.parametrize(
    "policy,inside,outside",
    [("mixed_bfloat16", "bfloat16", tf.float32), ("float64", "float64", tf.float64)],
)
def test_features_and_logits_have_the_precision_of_the_variables(
    model_config, policy, inside, outside
):
    previous = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = registry.build(model_config, (8, 8, 1), 3, 0)
    finally:
        keras.mixed_precision.set_global_policy(previous)
    assert [output.dtype for output in model(images(2, 8, 8, 1))] == [outside, outside]
    assert model.layers[2].compute_dtype == inside
    assert all(variable.dtype == outside for variable in model.variables)


@pytest.mark.parametrize("model_config", [SMALL, config.ModelConfig(name="mlp")])
def test_eager_and_graph_agree(model_config):
    model = registry.build(model_config, (8, 8, 1), 3, 0)
    x = images(4, 8, 8, 1)
    outputs = model(x, training=False), tf.function(model)(x, training=False)
    for eager, graph in zip(*outputs, strict=True):
        np.testing.assert_allclose(eager, graph, rtol=1e-5, atol=1e-6)


def test_settings_that_make_no_network_are_refused():
    with pytest.raises(config.ConfigError, match="depth=27"):
        wide_resnet.build((8, 8, 1), 3, 0, depth=27)
    with pytest.raises(config.ConfigError, match="depth=4"):
        wide_resnet.build((8, 8, 1), 3, 0, depth=4)
    with pytest.raises(config.ConfigError, match=r"\(2,\).*mlp"):
        registry.build(config.ModelConfig(), (2,), 3, 0)
    with pytest.raises(config.ConfigError, match="num_classes=1"):
        registry.build(config.ModelConfig(), (8, 8, 1), 1, 0)
    with pytest.raises(config.ConfigError, match="input_shape"):
        registry.build(config.ModelConfig(name="mlp"), (None,), 3, 0)
    with pytest.raises(config.ConfigError, match="input_shape"):
        registry.build(config.ModelConfig(name="mlp"), (), 3, 0)


BINARY = [
    config.ModelConfig(depth=10, width=1, filters=4, head="binary"),
    config.ModelConfig(name="mlp", head="binary"),
]


@pytest.mark.parametrize("model_config", BINARY)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_binary_head_gives_half_of_f_with_both_signs(model_config, policy):
    previous = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = registry.build(model_config, (8, 8, 1), 2, 0)
    finally:
        keras.mixed_precision.set_global_policy(previous)
    features, logits = model(images(3, 8, 8, 1))
    head = model.get_layer("head")
    f = features @ head.kernel + head.bias
    assert f.shape == (3, 1) and features.dtype == logits.dtype == tf.float32
    np.testing.assert_allclose(logits, np.hstack([f / 2, -f / 2]), rtol=1e-6)


@pytest.mark.parametrize("model_config", BINARY)
def test_binary_head_has_half_the_parameters_of_the_layer(model_config):
    def count(head):
        of_head = dataclasses.replace(model_config, head=head)
        model = registry.build(of_head, (8, 8, 1), 2, 0)
        return model.count_params(), model.get_layer("head").count_params()

    (two, two_layer), (one, one_layer) = count("softmax"), count("binary")
    assert two_layer == 2 * one_layer and two - one == one_layer


def test_wrn_28_2_parameters_of_two_classes():
    for head, parameters in (("softmax", 1_468_610), ("binary", 1_468_481)):
        model = registry.build(config.ModelConfig(head=head), (32, 32, 3), 2, 0)
        assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == parameters


@pytest.mark.parametrize("form", ["keras", "SavedModel"])
def test_a_saved_binary_model_needs_none_of_this_library(form, tmp_path):
    model = registry.build(BINARY[1], (2,), 2, 0)
    x = images(3, 2)
    if form == "keras":
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    else:
        tf.saved_model.save(model, str(tmp_path / "model"))
        loaded = tf.saved_model.load(str(tmp_path / "model"))
    for found, expected in zip(loaded(x), model(x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_binary_head_is_for_two_classes():
    for model_config in BINARY:
        with pytest.raises(config.ConfigError, match="head=binary.*num_classes=3"):
            registry.build(model_config, (8, 8, 1), 3, 0)
    with pytest.raises(config.ConfigError, match="head='linear'"):
        mlp.build((2,), 2, 0, head="linear")


def names(variables):
    return [variable.name.split("/")[0] for variable in variables]


@pytest.mark.parametrize("head", config.HEADS)
def test_last_block_of_an_mlp_is_its_last_hidden_layer_and_the_head(head):
    model_config = config.ModelConfig(name="mlp", hidden_units=(3,) * 11, head=head)
    model = registry.build(model_config, (2,), 2, 0)
    assert names(registry.last_block(model)) == ["hidden_10"] * 2 + ["head"] * 2


@pytest.mark.parametrize("depth, has_shortcut", [(10, True), (16, False)])
def test_last_block_of_a_wide_resnet_is_what_follows_the_block_before(depth, has_shortcut):
    model_config = config.ModelConfig(depth=depth, width=1, filters=4)
    model = registry.build(model_config, (8, 8, 1), 3, 0)
    block = f"stage2_block{(depth - 10) // 6}"
    parts = [f"{block}_{part}" for part in ("0_norm", "0_conv", "1_norm", "1_conv")]
    expected = {*parts, "final_norm", "head"} | ({f"{block}_shortcut"} if has_shortcut else set())
    found = registry.last_block(model)
    assert set(names(found)) == expected and len(found) == 2 * len(expected)
    inputs = [layer for layer in model.layers if layer.name.endswith("_add")][-2].output
    tail = keras.Model(inputs, model.outputs)
    assert {id(v) for v in tail.trainable_variables} == {id(v) for v in found}


def test_last_block_of_an_unknown_model_is_refused():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs), name="mine")
    with pytest.raises(config.ConfigError, match="'mine'.*influence_params=last_layer or all"):
        registry.last_block(model)


def test_mlp_builds_without_a_registry():
    features, logits = mlp.build((2,), 2, 0, hidden_units=(5,))(images(3, 2))
    assert features.shape == (3, 5) and logits.shape == (3, 2)
