"""Per-example gradients and their products, against one example at a time."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config
from ssl_influence.per_example import checking, convolution, kernels, products, rows
from tests.per_example import zoo

RUNNERS = {"eager": lambda fn: fn, "graph": tf.function}
COMPILED = {**RUNNERS, "xla": functools.partial(tf.function, jit_compile=True)}


@functools.cache
def problem(kind, library, dtype="float64"):
    """A model, a batch, each example's gradients, a vector and each example's product with it."""
    model = zoo.build(kind, library, dtype)
    inputs, labels = zoo.batch(model, dtype)
    expected = zoo.one_by_one(model, inputs, labels)
    rng = np.random.default_rng(3)
    vectors = [tf.constant(rng.normal(size=v.shape), dtype) for v in model.trainable_variables]
    dots = sum(
        (g * v.numpy()).reshape(len(g), -1).sum(1) for g, v in zip(expected, vectors, strict=True)
    )
    return model, inputs, labels, expected, vectors, dots


def assert_all_close(found, expected, atol):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1.0, np.abs(b).max(initial=0)))


@pytest.mark.parametrize(
    "library, runner", [("tf_keras", "eager"), ("tf_keras", "graph"), ("keras_3", "graph")]
)
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_kernels_equal_single_examples(kind, library, runner):
    model, inputs, labels, expected, *_ = problem(kind, library)
    fn = COMPILED[runner](lambda x, y: rows.gradients(model, x, y, zoo.cross_entropy))
    assert_all_close(fn(inputs, labels), expected, 1e-10)


@pytest.mark.parametrize("library", zoo.LIBRARIES)
@pytest.mark.parametrize("kind", ["conv2d", "norms", "attention"])
def test_kernels_in_single_precision_compiled(kind, library):
    model, inputs, labels, expected, *_ = problem(kind, library, "float32")
    fn = COMPILED["xla"](lambda x, y: rows.gradients(model, x, y, zoo.cross_entropy))
    assert_all_close(fn(inputs, labels), expected, 1e-5)


@pytest.mark.parametrize("method", products.METHODS)
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_products_equal_those_with_the_gradients(kind, method):
    assert_products("tf_keras", kind, method, "eager" if kind in ("dense", "conv1d") else "graph")


@pytest.mark.parametrize("method", products.METHODS)
@pytest.mark.parametrize("kind", ["conv2d", "norms", "attention"])
def test_products_of_a_keras_3_model(kind, method):
    assert_products("keras_3", kind, method, "eager")


def assert_products(library, kind, method, runner):
    model, inputs, labels, _, vectors, expected = problem(kind, library)
    if (kind, method) == ("attention", "forward_mode"):
        runner = "eager"  # a graph of it holds a tf.function
    found = RUNNERS[runner](
        lambda x, y: products.dots(model, x, y, zoo.cross_entropy, vectors, method=method)
    )
    np.testing.assert_allclose(found(inputs, labels), expected, atol=1e-9)


@pytest.mark.parametrize("method", rows.METHODS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_method_gives_the_same(method, runner):
    model, inputs, labels, expected, *_ = problem("shared", "tf_keras")
    fn = RUNNERS[runner](lambda x, y: rows.gradients(model, x, y, zoo.cross_entropy, method=method))
    assert_all_close(fn(inputs, labels), expected, 1e-10)


@pytest.mark.parametrize("conv_method", convolution.METHODS)
@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv3d"])
def test_every_way_of_convolution_gives_the_same(kind, conv_method):
    model, inputs, labels, expected, *_ = problem(kind, "tf_keras")
    found = rows.gradients(model, inputs, labels, zoo.cross_entropy, conv_method=conv_method)
    assert_all_close(found, expected, 1e-10)


@pytest.mark.parametrize(
    "library, runner, conv_method",
    [
        *(("tf_keras", "graph", conv_method) for conv_method in convolution.METHODS),
        ("tf_keras", "xla", "shifted_matmul"),
        ("keras_3", "graph", "im2col"),
        ("keras_3", "xla", "vectorized_map"),
    ],
)
def test_grouped_convolution(library, runner, conv_method):
    layers = zoo.LIBRARIES[library].layers
    model = zoo.LIBRARIES[library].Sequential(
        [
            zoo.LIBRARIES[library].Input([6, 7, 4], dtype="float32"),
            layers.Conv2D(6, 3, 2, "same", groups=2, activation="relu", dtype="float32"),
            layers.Flatten(),
            layers.Dense(zoo.CLASSES, dtype="float32"),
        ]
    )
    inputs, labels = zoo.batch(model, "float32")
    expected = zoo.one_by_one(model, inputs, labels)
    fn = COMPILED[runner](
        lambda: rows.gradients(model, inputs, labels, zoo.cross_entropy, conv_method=conv_method)
    )
    assert_all_close(fn(), expected, 1e-5)
    vectors = [tf.ones(v.shape) for v in model.trainable_variables]
    forward = RUNNERS["graph"](
        lambda: products.dots(
            model, inputs, labels, zoo.cross_entropy, vectors, method="forward_mode"
        )
    )
    with pytest.raises(config.ConfigError, match="does not go through a tf.function"):
        forward()


@pytest.mark.parametrize("seed", range(6))
def test_convolutions_of_random_shapes(seed):
    rng = np.random.default_rng(seed)
    size, strides, dilation = (tuple(rng.integers(1, n, size=2)) for n in (4, 4, 3))
    if max(strides) > 1:
        dilation = (1, 1)  # TensorFlow has no convolution with both
    padding = rng.choice(["same", "valid"])
    x = tf.constant(rng.normal(size=[3, *rng.integers(6, 11, size=2), 2]))
    kernel = tf.constant(rng.normal(size=[*size, 2, 3]))

    def output(x, kernel):
        return tf.nn.convolution(x, kernel, strides, padding.upper(), dilations=dilation)

    g = tf.constant(rng.normal(size=output(x, kernel).shape))
    expected = []
    for u in range(3):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = output(x[u : u + 1], kernel)
        expected.append(tape.gradient(y, kernel, output_gradients=g[u : u + 1]))
    shape = convolution.Shape(size, strides, dilation, str(padding))
    for method in ("shifted_matmul", "im2col"):
        found = convolution.kernel_gradients(x, g, shape, method, None)
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("runner", RUNNERS)
def test_neither_chunks_nor_other_rows_matter(runner):
    model, inputs, labels, expected, *_ = problem("norms", "tf_keras")
    take = functools.partial(rows.gradients, model, loss_fn=zoo.cross_entropy)
    for chunk_size in (1, 2, 5, 8):
        fn = RUNNERS[runner](lambda c=chunk_size: take(inputs, labels, chunk_size=c))
        assert_all_close(fn(), expected, 1e-12)
    order = np.random.default_rng(0).permutation(zoo.ROWS)
    found = take(tf.gather(inputs, order), tf.gather(labels, order))
    assert_all_close(found, [g[order] for g in expected], 1e-12)
    assert_all_close(take(inputs[1:3], labels[1:3]), [g[1:3] for g in expected], 1e-12)
    vectors = [tf.ones_like(v) for v in model.trainable_variables]
    fn = RUNNERS[runner](
        lambda: products.dots(
            model, inputs, labels, zoo.cross_entropy, vectors, method="materialize", chunk_size=2
        )
    )
    whole = sum(g.reshape(zoo.ROWS, -1).sum(1) for g in expected)
    np.testing.assert_allclose(fn(), whole, atol=1e-12)


@pytest.mark.parametrize("runner", RUNNERS)
def test_batch_statistics_are_attributed_by_layer_output(runner):
    model, inputs, labels, _, vectors, _ = problem("norms", "tf_keras")
    before = [v.numpy() for v in model.variables]
    found = RUNNERS[runner](
        lambda: rows.gradients(model, inputs, labels, zoo.cross_entropy, training=True)
    )()
    by_method = {
        method: RUNNERS[runner](
            lambda method=method: products.dots(
                model, inputs, labels, zoo.cross_entropy, vectors, training=True, method=method
            )
        )().numpy()
        for method in products.METHODS
    }
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable, value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(zoo.cross_entropy(model(inputs, training=True), labels))
    for value, variable in zip(before, model.variables, strict=True):
        variable.assign(value)
    total = tape.gradient(loss, model.trainable_variables)
    assert_all_close([tf.reduce_sum(g, 0) for g in found], [g.numpy() for g in total], 1e-10)
    np.testing.assert_allclose(by_method["ghost"], by_method["materialize"], atol=1e-10)
    np.testing.assert_allclose(by_method["double_backprop"], by_method["forward_mode"], atol=1e-10)
    apart = np.abs(by_method["ghost"] - by_method["double_backprop"]).max()
    assert apart > 1e-3  # the exact derivative of one loss is something else
    product = sum(tf.reduce_sum(g * v) for g, v in zip(total, vectors, strict=True))
    for dots in by_method.values():
        np.testing.assert_allclose(dots.sum(), product, atol=1e-10)


def test_half_precision_is_summed_in_single():
    keras.backend.set_floatx("float32")
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input([64, 64, 1]),
            keras.layers.Conv2D(2, 1),
            keras.layers.GlobalAveragePooling2D(dtype="float32"),
        ]
    )
    inputs = tf.ones([2, 64, 64, 1])

    def loss(outputs, targets):
        return 4096.0 * outputs[:, 0]

    variables = model.trainable_variables
    kernel, bias = rows.gradients(model, inputs, None, loss)
    # 4096 positions of gradient 1: bfloat16 would have stopped adding at 256.
    np.testing.assert_array_equal(bias, [[4096, 0]] * 2)
    np.testing.assert_array_equal(kernel, [[[[[4096, 0]]]]] * 2)
    assert kernel.dtype == bias.dtype == tf.float32
    ones = [tf.ones_like(v) for v in variables]
    for method in ("ghost", "materialize"):
        found = products.dots(model, inputs, None, loss, ones, method=method)
        np.testing.assert_array_equal(found, [8192, 8192])


class Scale(keras.layers.Layer):
    """One factor for each channel."""

    def build(self, shape):
        self.factor = self.add_weight("factor", [shape[-1]], initializer="ones")

    def call(self, inputs):
        return inputs * self.factor


def scaled_model():
    return keras.Sequential(
        [keras.Input([6, 4]), Scale(), keras.layers.Flatten(), keras.layers.Dense(zoo.CLASSES)]
    )


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(kernels, "_registered", {})


@pytest.mark.parametrize("linear", [False, True])
def test_a_kernel_of_ones_own(registry, linear):
    model = scaled_model()
    inputs, labels = zoo.batch(model)
    with pytest.raises(config.ConfigError, match="'scale.*' of class Scale .*register_kernel"):
        rows.gradients(model, inputs, labels, zoo.cross_entropy)

    @kernels.register_kernel(Scale, linear=linear)
    def scale_gradients(layer, inputs, output_gradient):
        return [(layer.factor, tf.reduce_sum(inputs * output_gradient, axis=1))]

    expected = zoo.one_by_one(model, inputs, labels)
    assert_all_close(rows.gradients(model, inputs, labels, zoo.cross_entropy), expected, 1e-12)
    assert checking.check(model, inputs, labels, zoo.cross_entropy) < 1e-12
    assert checking.check(model, inputs, labels, zoo.cross_entropy, method="ghost") < 1e-12


def test_a_wrong_kernel_is_told(registry):
    kernels.register_kernel(Scale)(
        lambda layer, inputs, g: [(layer.factor, tf.reduce_sum(g, axis=1))]
    )
    model = scaled_model()
    inputs, labels = zoo.batch(model)
    with pytest.raises(config.ConfigError, match="factor.* differ from those of single examples"):
        checking.check(model, inputs, labels, zoo.cross_entropy)
    with pytest.raises(config.ConfigError, match="the products of the batch differ"):
        checking.check(model, inputs, labels, zoo.cross_entropy, method="materialize")


def test_a_subclass_with_a_call_of_its_own_has_no_kernel():
    class Doubled(keras.layers.Dense):
        def call(self, inputs):
            return 2.0 * super().call(inputs)

    model = keras.Sequential([keras.Input([3]), Doubled(zoo.CLASSES)])
    with pytest.raises(config.ConfigError, match="Doubled"):
        rows.gradients(model, *zoo.batch(model), zoo.cross_entropy)


def test_what_no_kernel_sees_is_refused():
    embedding = keras.layers.Embedding(zoo.CLASSES, 4)

    class Tied(keras.Model):
        def call(self, inputs):
            return tf.reduce_mean(embedding(inputs), 1) @ tf.transpose(embedding.embeddings)

    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(zoo.CLASSES)

        @tf.function
        def call(self, inputs):
            return self.dense(tf.cast(inputs, tf.float64))

    labels = tf.constant([0, 1])
    tokens = tf.constant([[0, 1, 2, 0, 1], [2, 2, 2, 1, 1]])
    tied, nested = Tied(), Nested()
    tied.embedding = embedding
    for model in (tied, nested):
        model(tokens)
    with pytest.raises(config.ConfigError, match="embeddings.*read outside of that layer"):
        rows.gradients(tied, tokens, labels, zoo.cross_entropy)
    for runner in RUNNERS.values():
        with pytest.raises(config.ConfigError, match="tf.function of the model's own"):
            runner(lambda: rows.gradients(nested, tokens, labels, zoo.cross_entropy))()


def test_recurrent_layers_have_no_kernel_but_their_products_are_right():
    model = keras.Sequential([keras.Input([4, 3]), keras.layers.LSTM(zoo.CLASSES)])
    inputs, labels = zoo.batch(model)
    with pytest.raises(config.ConfigError, match="LSTMCell"):
        rows.gradients(model, inputs, labels, zoo.cross_entropy)
    assert checking.check(model, inputs, labels, zoo.cross_entropy, method="double_backprop") < 1e-9


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"method": "fast"}, "method='fast' is not one of kernels"),
        ({"conv_method": "fft"}, "conv_method='fft' is not one of"),
        ({"chunk_size": 0}, "chunk_size=0 is out of range"),
        ({"chunk_size": 2, "training": True}, "chunk_size=2 with training=True"),
        ({"method": "loop", "training": True}, "method='loop' with training=True"),
        ({"memory_limit": 1000}, "5 gradients by .* parameters would need .*e-05 GB, and 1e-06 GB"),
        ({"variables": [tf.Variable(1.0, name="mine")]}, "'mine:0' belongs to no layer"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    model, inputs, labels, *_ = problem("norms", "tf_keras")
    with pytest.raises(config.ConfigError, match=message):
        rows.gradients(model, inputs, labels, zoo.cross_entropy, **settings)


def test_losses_must_keep_the_examples():
    model, inputs, labels, *_ = problem("dense", "tf_keras")
    with pytest.raises(config.ConfigError, match="must keep one for each example"):
        rows.gradients(model, inputs, labels, lambda o, y: tf.reduce_mean(zoo.cross_entropy(o, y)))


def test_a_model_is_left_as_it_was():
    model, inputs, labels, *_ = problem("conv2d", "tf_keras")
    held = [dict(vars(layer)) for layer in model.layers]
    rows.gradients(model, inputs, labels, zoo.cross_entropy)
    with pytest.raises(ZeroDivisionError):
        rows.gradients(model, inputs, labels, lambda o, y: 1 / 0)
    for before, layer in zip(held, model.layers, strict=True):
        assert all(
            vars(layer)[name] is value
            for name, value in before.items()
            if name in ("call", "activation", "kernel")
        )
        assert ("call" in before) == ("call" in vars(layer))


def test_the_memory_to_spare_is_the_least_that_anyone_tells(tmp_path):
    assert rows.free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert rows.free_memory(tmp_path) == 512_000
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    for name, text in (("max", "max\n"), ("current", "300000\n"), ("stat", "anon 1\nfile 7000\n")):
        (group / f"memory.{name}").write_text(text)
    assert rows.free_memory(tmp_path) == 512_000
    (group / "memory.max").write_text("400000\n")
    assert rows.free_memory(tmp_path) == 107_000


def test_state_is_put_back_by_every_method():
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight("calls", [], initializer="zeros", trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1.0)
            return inputs

    model = keras.Sequential([keras.Input([4]), Counting(), keras.layers.Dense(zoo.CLASSES)])
    inputs, labels = zoo.batch(model)
    expected = zoo.one_by_one(model, inputs, labels)
    before = model.layers[0].calls.numpy()
    for method in ("kernels", "loop"):
        found = rows.gradients(
            model, inputs, labels, zoo.cross_entropy, training=True, method=method
        )
        assert_all_close(found, expected, 1e-12)
        assert model.layers[0].calls.numpy() == before


def test_a_weight_that_another_layer_reads_is_refused(registry):
    embedding = keras.layers.Embedding(zoo.TOKENS, 4)

    class Unembedding(keras.layers.Layer):
        def build(self, shape):
            self.shift = self.add_weight("shift", [zoo.TOKENS])

        def call(self, inputs):
            return inputs @ tf.transpose(embedding.embeddings) + self.shift

    kernels.register_kernel(Unembedding)(lambda layer, x, g: [(layer.shift, g)])
    tokens = keras.Input([3], dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(embedding(tokens))
    model = keras.Model(tokens, Unembedding()(pooled))
    with pytest.raises(config.ConfigError, match="embeddings.*read outside of that layer"):
        rows.gradients(model, *zoo.batch(model), zoo.cross_entropy)


@pytest.mark.parametrize("library", zoo.LIBRARIES)
def test_a_subclass_that_changes_nothing_keeps_its_kernel(library):
    layers = zoo.LIBRARIES[library].layers

    class Named(layers.Dense):
        pass

    class Standardized(layers.Conv2D):
        def convolution_op(self, inputs, kernel):
            return super().convolution_op(inputs, 2.0 * kernel)

    model = zoo._chain(
        zoo.LIBRARIES[library],
        [5],
        Named(4, activation="tanh", dtype="float64"),
        layers.Dense(zoo.CLASSES, dtype="float64"),
        dtype="float64",
    )
    inputs, labels = zoo.batch(model)
    for method in ("kernels", "ghost"):
        checking.check(model, inputs, labels, zoo.cross_entropy, method=method, tolerance=1e-9)
    model = zoo._chain(
        zoo.LIBRARIES[library],
        [5, 5, 2],
        Standardized(3, 3, dtype="float64"),
        layers.GlobalAveragePooling2D(dtype="float64"),
        dtype="float64",
    )
    with pytest.raises(config.ConfigError, match="of class Standardized"):
        rows.gradients(model, *zoo.batch(model), zoo.cross_entropy)


@pytest.mark.parametrize("library", zoo.LIBRARIES)
def test_products_with_variables_that_are_frozen(library):
    model, inputs, labels, expected, vectors, _ = problem("norms", library)
    layer = next(part for part in model.layers if "batch_norm" in part.name)
    layer.trainable = False
    try:
        found = products.dots(
            model,
            inputs,
            labels,
            zoo.cross_entropy,
            [vectors[2]],
            variables=[layer.gamma],
            method="ghost",
        )
    finally:
        layer.trainable = True
    np.testing.assert_allclose(found, expected[2] @ vectors[2].numpy(), atol=1e-10)


def test_rows_that_are_no_examples_are_refused():
    dense = keras.layers.Dense(zoo.CLASSES)
    inputs = keras.Input([4])
    views = dense(tf.concat([inputs, inputs**2], 0))
    model = keras.Model(inputs, sum(tf.split(views, 2)))
    for runner in RUNNERS.values():
        with pytest.raises(config.ConfigError, match="sees 10 rows for 5 examples"):
            runner(lambda: rows.gradients(model, *zoo.batch(model), zoo.cross_entropy))()


def test_tied_weights_are_seen_where_they_are_frozen():
    keras_3 = zoo.LIBRARIES["keras_3"]
    embedding = keras_3.layers.Embedding(zoo.CLASSES, 4, trainable=False, dtype="float64")

    class Tied(keras_3.Model):
        def call(self, inputs):
            return tf.reduce_mean(embedding(inputs), 1) @ tf.transpose(embedding.embeddings)

    model = Tied()
    model.embedding = embedding
    tokens, labels = tf.constant([[0, 1, 2], [2, 2, 1]]), tf.constant([0, 1])
    model(tokens)
    variables = [embedding.embeddings]
    with pytest.raises(config.ConfigError, match="read outside of that layer"):
        rows.gradients(model, tokens, labels, zoo.cross_entropy, variables=variables)
    assert not embedding.embeddings.trainable


@pytest.mark.parametrize("method", [*rows.METHODS, *products.METHODS])
def test_there_may_be_no_targets(method):
    model, inputs, *_ = problem("dense", "tf_keras")
    worst = checking.check(model, inputs, None, lambda o, _: tf.reduce_sum(o**2, 1), method=method)
    assert worst < 1e-9


def test_no_rows_give_no_gradients():
    model, inputs, labels, *_ = problem("dense", "tf_keras")
    for method in rows.METHODS:
        found = rows.gradients(model, inputs[:0], labels[:0], zoo.cross_entropy, method=method)
        assert [tuple(g.shape) for g in found] == [(0, *v.shape) for v in model.trainable_variables]
    with pytest.raises(config.ConfigError, match="no example"):
        checking.check(model, inputs[:0], labels[:0], zoo.cross_entropy)


@pytest.mark.parametrize("method", ["kernels", "double_backprop"])
def test_statistics_are_put_back_after_an_error(method):
    model, inputs, labels, _, vectors, _ = problem("norms", "tf_keras")
    before = [v.numpy() for v in model.variables]

    def broken(outputs, labels):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        if method == "kernels":
            rows.gradients(model, inputs, labels, broken, training=True)
        else:
            products.dots(model, inputs, labels, broken, vectors, training=True)
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_model_that_is_being_recorded_is_refused_and_left_whole():
    model, inputs, labels, expected, *_ = problem("dense", "tf_keras")

    def within(outputs, labels):
        rows.gradients(model, inputs, labels, zoo.cross_entropy)

    with pytest.raises(config.ConfigError, match="one thread at a time"):
        rows.gradients(model, inputs, labels, within)
    assert_all_close(rows.gradients(model, inputs, labels, zoo.cross_entropy), expected, 1e-10)


def test_vectors_of_other_shapes_are_refused():
    model, inputs, labels, _, vectors, _ = problem("dense", "tf_keras")
    for wrong in (vectors[:-1], [tf.transpose(vectors[0]), *vectors[1:]]):
        for method in products.METHODS:
            with pytest.raises(config.ConfigError, match="are no vector of the variables"):
                products.dots(model, inputs, labels, zoo.cross_entropy, wrong, method=method)


def test_what_is_not_finite_is_called_so():
    model, inputs, labels, *_ = problem("dense", "tf_keras")
    with pytest.raises(config.ConfigError, match="not finite"):
        checking.check(model, inputs * np.nan, labels, zoo.cross_entropy)


def test_a_kernel_that_leaves_a_variable_out_is_refused(registry):
    model = scaled_model()
    inputs, labels = zoo.batch(model)
    for wrong, message in (
        (lambda layer, x, g: [], "gives no gradient for 'scale"),
        (lambda layer, x, g: [(layer.factor, tf.reduce_sum(g, 2))], "gives one of shape"),
    ):
        kernels.register_kernel(Scale)(wrong)
        with pytest.raises(config.ConfigError, match=message):
            rows.gradients(model, inputs, labels, zoo.cross_entropy)


def test_a_linear_kernel_needs_its_variables_as_attributes(registry):
    class Listed(keras.layers.Layer):
        def build(self, shape):
            self.factors = [self.add_weight("factor", [shape[-1]], initializer="ones")]

        def call(self, inputs):
            return inputs * self.factors[0]

    kernels.register_kernel(Listed, linear=True)(
        lambda layer, x, g: [(layer.factors[0], tf.reduce_sum(x * g, axis=1))]
    )
    model = keras.Sequential(
        [keras.Input([6, 4]), Listed(), keras.layers.Flatten(), keras.layers.Dense(zoo.CLASSES)]
    )
    ones = [tf.ones_like(v) for v in model.trainable_variables]
    with pytest.raises(config.ConfigError, match="is no attribute of layer"):
        products.dots(model, *zoo.batch(model), zoo.cross_entropy, ones, method="ghost")
