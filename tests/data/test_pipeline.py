import dataclasses
import logging
import threading
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config
from ssl_influence.augment import ctaugment
from ssl_influence.data import examples, inputs, pipeline, rows, sources, splits

SIZES = config.DataConfig(labeled_batch_size=4, unlabeled_batch_size=7, validation_batch_size=5)


def _images(n=60, channels=3, size=8, classes=3):
    random = np.random.default_rng(0)
    images, test_images = (
        random.integers(0, 256, (count, size, size, channels), np.uint8) for count in (n, 23)
    )
    labels, test_labels = (np.arange(n) % classes, np.arange(1, 24) % classes)
    return examples.Source(
        "mine",
        images,
        labels.astype(np.int32),
        test_images,
        test_labels.astype(np.int32),
        [str(c) for c in range(classes)],
        False,
    )


def _build(source=None, labeled=6, validation=11, seed=3, views=("weak", "strong"), **settings):
    source = source or sources.load(sources.parse_name("two_moons.1@6-11"))
    split = splits.make(
        source.labels, source.num_classes, labeled=labeled, validation=validation, seed=1
    )
    sizes = dataclasses.replace(SIZES, **settings.pop("sizes", {}))
    others = {
        name: settings.pop(name) for name in ("augmenter", "labeled_view") if name in settings
    }
    few = {} if settings.get("strong") == "ctaugment" else {"operations": 1}
    augment = config.AugmentConfig(**few | settings)
    built = pipeline.Pipeline(source, split, sizes, augment, seed=seed, views=views, **others)
    return built, source, split


def _same(a, b):
    tf.nest.map_structure(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


def _differ(a, b):
    return not np.array_equal(a["unlabeled"]["example_id"], b["unlabeled"]["example_id"])


@pytest.mark.parametrize("size", [1, 2, 7, 16, 97, 100])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_every_epoch_visits_each_place_exactly_once(size, batch_size):
    seed = tf.constant([5, 2**40], tf.int64)
    draw = tf.function(lambda step: pipeline.shuffled_places(size, batch_size, seed, step))
    steps = -(-3 * size // batch_size)
    places = np.concatenate([draw(tf.constant(k, tf.int64)) for k in range(steps)])
    assert places.dtype == np.int64
    for epoch in range(3):
        np.testing.assert_array_equal(
            np.sort(places[epoch * size : (epoch + 1) * size]), np.arange(size)
        )


def test_epochs_do_not_come_round_again():
    seed = tf.constant([5, 7], tf.int64)
    draw = tf.function(lambda step: pipeline.shuffled_places(97, 97, seed, step))
    epochs = np.stack([draw(tf.constant(k, tf.int64)) for k in range(600)])
    assert len(np.unique(epochs, axis=0)) == 600
    # Each index as often at each place: chi squared over its degrees of freedom is 1 +- 0.015.
    counts = np.stack([np.bincount(column, minlength=97) for column in epochs.T])
    assert np.sum((counts - 600 / 97) ** 2 / (600 / 97)) / 96**2 == pytest.approx(1, abs=0.1)


def test_steps_beyond_32_bits_are_places_too():
    step = tf.constant(2**50, tf.int64)
    places = pipeline.shuffled_places(10, 10, tf.constant([1, 2], tf.int64), step)
    np.testing.assert_array_equal(np.sort(places), np.arange(10))


@pytest.mark.parametrize("source", [None, _images()], ids=["vectors", "images"])
def test_a_dataset_started_at_k_gives_the_batches_of_step_k_bit_for_bit(source):
    built, _, _ = _build(source)
    whole = list(built.train_dataset(0, 6))
    late = list(built.train_dataset(4, 6))
    assert len(whole) == 6 and len(late) == 2
    for a, b in zip(whole[4:], late, strict=True):
        _same(a, b)
    for k, batch in enumerate(whole):
        _same(batch, built.train_batch(k))
    again, _, _ = _build(source, views=("weak",))
    del whole[5]["unlabeled"]["strong"]
    _same(whole[5], again.train_batch(5))


@pytest.mark.parametrize(
    "method, views",
    [("train_batch", ("weak", "strong")), ("fresh_batch", ("weak",)), ("validation_batch", ())],
)
def test_eager_equals_graph(method, views):
    built, _, _ = _build(_images(), views=views)
    graph = tf.function(getattr(built, method))(tf.constant(3, tf.int64))
    tf.config.run_functions_eagerly(True)
    try:
        eager = getattr(built, method)(3)
    finally:
        tf.config.run_functions_eagerly(False)
    _same(graph, eager)


@pytest.mark.parametrize("source", [None, _images()], ids=["vectors", "images"])
def test_batches_have_the_promised_keys_types_and_static_shapes(source):
    built, source, _ = _build(source)
    shape = source.inputs.shape[1:]
    spec = built.train_dataset(0, 1).element_spec
    assert {role: set(part) for role, part in spec.items()} == {
        "labeled": {"inputs", "label", "example_id"},
        "unlabeled": {"weak", "strong", "label", "example_id"},
    }
    for role, view, count in (("labeled", "inputs", 4), ("unlabeled", "strong", 7)):
        assert spec[role][view] == tf.TensorSpec([count, *shape], tf.float32)
        assert spec[role]["label"] == tf.TensorSpec([count], tf.int32)
        assert spec[role]["example_id"] == tf.TensorSpec([count], tf.int64)
    validation = built.validation_batch(0)
    assert validation["inputs"].shape == (5, *shape)
    assert validation["example_id"].dtype == tf.int64


def test_labels_and_inputs_belong_to_the_ids_and_the_ids_to_their_role():
    built, source, split = _build()
    for step in range(5):
        for batch in (built.train_batch(step), built.fresh_batch(step)):
            for role, view in (("labeled", "inputs"), ("unlabeled", "weak")):
                ids = batch[role]["example_id"].numpy()
                assert np.isin(ids, getattr(split, role)).all()
                np.testing.assert_array_equal(batch[role]["label"], source.labels[ids])
                np.testing.assert_array_equal(batch[role][view], source.inputs[ids])
        rows = built.validation_batch(step)
        assert np.isin(rows["example_id"], split.validation).all()
        np.testing.assert_array_equal(rows["inputs"], source.inputs[rows["example_id"].numpy()])


def test_another_seed_another_step_and_the_fresh_stream_all_differ():
    built, _, _ = _build(_images(), views=("weak",))
    other, _, _ = _build(_images(), seed=4, views=("weak",))
    batch = built.train_batch(2)
    assert _differ(batch, other.train_batch(2))
    assert _differ(batch, built.train_batch(3))
    assert _differ(batch, built.fresh_batch(2))
    _same(built.fresh_batch(2), built.fresh_batch(2))


def test_an_image_is_augmented_anew_in_every_epoch():
    built, _, _ = _build(_images(n=20), labeled=6, validation=7, views=("weak",))
    assert built.unlabeled_batch_size == 7
    views = [built.train_batch(k)["unlabeled"] for k in range(6)]
    shown = [v["weak"].numpy()[np.argsort(v["example_id"])] for v in views]
    assert len({x.tobytes() for x in shown}) == 6


def test_a_role_smaller_than_its_batch(caplog):
    with caplog.at_level(logging.INFO, logger=pipeline.__name__):
        built, _, split = _build(
            _images(n=20),
            labeled=3,
            validation=7,
            views=("weak",),
            sizes={"unlabeled_batch_size": 64, "validation_batch_size": 9, "labeled_batch_size": 8},
        )
    assert len(caplog.records) == 2
    assert "7 validation examples" in caplog.text and "10 unlabeled examples" in caplog.text
    for step in range(3):
        batch = built.train_batch(step)
        np.testing.assert_array_equal(np.sort(batch["unlabeled"]["example_id"]), split.unlabeled)
        np.testing.assert_array_equal(
            np.sort(built.validation_batch(step)["example_id"]), split.validation
        )
        counts = np.bincount(np.searchsorted(split.labeled, batch["labeled"]["example_id"]))
        assert counts.sum() == 8 and set(counts) <= {2, 3, 4}


def test_without_views_the_unlabeled_part_has_no_inputs_and_may_be_empty():
    built, _, _ = _build(_images(n=20), labeled=6, validation=14, views=())
    batch = built.train_batch(0)
    assert set(batch["unlabeled"]) == {"label", "example_id"}
    assert batch["unlabeled"]["example_id"].shape == (0,)
    with pytest.raises(
        config.ConfigError, match="no unlabeled example left beside 6 labeled and 14"
    ):
        _build(_images(n=20), labeled=6, validation=14)


def test_without_validation_examples_a_validation_batch_is_refused():
    built, _, _ = _build(_images(), validation=0)
    with pytest.raises(config.ConfigError, match="without validation"):
        built.validation_batch(0)
    assert list(built.evaluation_batches("validation", 4)) == []


@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
@pytest.mark.parametrize("role", ["validation", "test"])
def test_evaluation_counts_every_example_once_and_pads_with_zeros(role, batch_size):
    built, source, split = _build(_images())
    batches = list(built.evaluation_batches(role, batch_size))
    size = min(batch_size, len(split.validation) if role == "validation" else 23)
    assert all(batch["inputs"].shape == (size, 8, 8, 3) for batch in batches)
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    mask = rows.pop("mask")
    ids = split.validation if role == "validation" else np.arange(23)
    inputs, labels = (
        (source.inputs, source.labels)
        if role == "validation"
        else (source.test_inputs, source.test_labels)
    )
    np.testing.assert_array_equal(rows["example_id"][mask], ids)
    np.testing.assert_array_equal(rows["label"][mask], labels[ids])
    expected = inputs[ids].astype(np.float64) / 127.5 - 1
    np.testing.assert_allclose(rows["inputs"][mask], expected, atol=1e-6)
    assert mask.sum() == len(ids) and len(mask) < len(ids) + batch_size
    assert not any(value[~mask].any() for value in rows.values())


def test_standardized_inputs_have_zero_mean_and_unit_deviation_in_each_channel():
    built, source, _ = _build(_images(), normalization="standardize")
    mean, std = inputs.channel_moments(source.inputs)
    np.testing.assert_allclose(mean, source.inputs.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, source.inputs.std(axis=(0, 1, 2)), rtol=1e-12)
    rows = built.validation_batch(0)
    expected = (source.inputs[rows["example_id"].numpy()] - mean) / std
    np.testing.assert_allclose(rows["inputs"], expected, atol=1e-5)


def test_labeled_images_get_the_weak_view_and_validation_images_none():
    built, source, _ = _build(_images(), shift=0, flip=False, views=())
    batch = built.train_batch(0)["labeled"]
    expected = source.inputs[batch["example_id"].numpy()] / 127.5 - 1
    np.testing.assert_allclose(batch["inputs"], expected, atol=1e-6)
    flipped, source, _ = _build(
        _images(), shift=0, flip=True, views=(), sizes={"labeled_batch_size": 64}
    )
    batch = flipped.train_batch(0)["labeled"]
    original = source.inputs[batch["example_id"].numpy()] / 127.5 - 1
    as_is = np.isclose(batch["inputs"], original, atol=1e-6).all(axis=(1, 2, 3))
    mirrored = np.isclose(batch["inputs"], original[:, :, ::-1], atol=1e-6).all(axis=(1, 2, 3))
    assert np.all(as_is ^ mirrored) and 10 < mirrored.sum() < 54


def test_no_graph_holds_a_copy_of_the_data():
    built, source, _ = _build(_images(n=400), views=("weak",))
    graph = built._train.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    assert graph.as_graph_def().ByteSize() < source.inputs.nbytes + 1_000_000
    largest = max(
        (len(node.attr["value"].tensor.tensor_content) for node in graph.as_graph_def().node),
        default=0,
    )
    assert largest < source.inputs.nbytes // 10


def test_an_unknown_evaluation_role_is_refused():
    with pytest.raises(ValueError, match="'train'"):
        _build()[0].evaluation_batches("train", 4)


INTERVAL = 3


@pytest.fixture(scope="module")
def adapting():
    """(pipeline, augmenter) of a run with CTAugment."""
    settings = {"strong": "ctaugment", "ctaugment_depth": 1, "ctaugment_interval": INTERVAL}
    augmenter = ctaugment.CTAugment(config.AugmentConfig(**settings, ctaugment_decay=0.5))
    built, _, _ = _build(_images(), augmenter=augmenter, **settings)
    return built, augmenter


def _start_anew(augmenter):
    augmenter.rates.assign(ctaugment.initial_rates())
    augmenter.take_snapshot()


def _learn(augmenter, step, batch):
    """A theta step's part in CTAugment: the model fails at half of the probes."""
    probe = batch["probe"]
    right = (tf.range(4) + step) % 2
    probabilities = tf.one_hot((probe["label"] + right) % 3, 3)
    augmenter.update(probe["slots"], probabilities, probe["label"])


def test_probes_are_the_labeled_images_and_name_their_bins(adapting):
    built, augmenter = adapting
    _start_anew(augmenter)
    batch = built.train_batch(1)
    probe = batch["probe"]
    assert set(probe) == {"inputs", "label", "slots"} and "probe" not in built.fresh_batch(1)
    assert probe["inputs"].shape == (4, 8, 8, 3) and probe["inputs"].dtype == tf.float32
    assert np.abs(probe["inputs"]).max() <= 1
    assert probe["slots"].shape == (4, ctaugment.PARAMETERS) and probe["slots"].dtype == tf.int32
    np.testing.assert_array_equal(probe["label"], batch["labeled"]["label"])
    uniform, _, _ = _build(_images(), views=("weak",))
    plain = uniform.train_batch(1)
    _same(plain["labeled"], batch["labeled"])
    np.testing.assert_array_equal(plain["unlabeled"]["weak"], batch["unlabeled"]["weak"])


def test_strong_views_follow_the_snapshot_and_nothing_else_does(adapting):
    built, augmenter = adapting
    _start_anew(augmenter)
    before, fresh = built.train_batch(4), built.fresh_batch(4)
    augmenter.rates.assign(tf.random.stateless_uniform(ctaugment.SHAPE, [1, 2]))
    _same(before, built.train_batch(4))
    augmenter.take_snapshot()
    after = built.train_batch(4)
    assert not np.array_equal(before["unlabeled"]["strong"], after["unlabeled"]["strong"])
    assert not np.array_equal(
        fresh["unlabeled"]["strong"], built.fresh_batch(4)["unlabeled"]["strong"]
    )
    del before["unlabeled"]["strong"], after["unlabeled"]["strong"]
    _same(before, after)


def test_adapting_batches_are_those_of_a_run_that_makes_none_ahead(adapting):
    built, augmenter = adapting
    _start_anew(augmenter)
    expected, states = [], []
    for step in range(8):
        states.append((augmenter.rates.numpy(), augmenter.snapshot.numpy()))
        if step % INTERVAL == 0:
            augmenter.take_snapshot()
        expected.append(built.train_batch(step))
        _learn(augmenter, step, expected[-1])
    # A run from the start, one resumed within an interval, and one resumed where one begins.
    for start in (0, 4, 6):
        augmenter.rates.assign(states[start][0])
        augmenter.snapshot.assign(states[start][1])
        steps = range(start, 8)
        for step, batch in zip(steps, built.train_dataset(start, 8), strict=True):
            _same(expected[step], batch)
            _learn(augmenter, step, batch)
    assert built._train.experimental_get_tracing_count() == 1


def test_an_iterator_that_is_left_early_ends_its_threads(adapting):
    built, _ = adapting
    before = threading.active_count()
    batches = iter(built.train_dataset(0, 100))
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_what_fails_in_a_thread_is_raised_in_its_turn():
    def make(step):
        if step == 2:
            raise ValueError("step 2")
        return step

    with futures.ThreadPoolExecutor(2) as pool:
        batches = pipeline._made_ahead(pool, make, range(9))
        assert [next(batches).numpy(), next(batches).numpy()] == [0, 1]
        with pytest.raises(ValueError, match="step 2"):
            next(batches)


def test_ctaugment_needs_its_state_where_it_is_used():
    with pytest.raises(ValueError, match="pass augmenter"):
        _build(_images(), strong="ctaugment")
    augmenter = ctaugment.CTAugment(config.AugmentConfig())
    for source, views in ((_images(), ("weak", "weak_2")), (None, ("weak", "strong"))):
        built, _, _ = _build(source, views=views, strong="ctaugment", augmenter=augmenter)
        assert set(built.train_batch(0)) == {"labeled", "unlabeled"}


def test_vectors_are_the_same_in_every_view_and_unknown_views_are_refused():
    built, _, _ = _build(views=("weak", "strong_2", "weak_3"))
    rows = built.train_batch(0)["unlabeled"]
    np.testing.assert_array_equal(rows["weak"], rows["strong_2"])
    np.testing.assert_array_equal(rows["weak"], rows["weak_3"])
    with pytest.raises(config.ConfigError, match="view='strong_1'"):
        _build(views=("strong_1",))


def test_labeled_examples_have_the_view_they_are_asked_for_and_nothing_else_changes():
    source = _images(64)
    weak, strong = (
        _build(source, labeled_view=view, operations=2)[0].train_batch(3)
        for view in ("weak", "strong")
    )
    _same(weak["unlabeled"], strong["unlabeled"])
    _same(weak["labeled"]["example_id"], strong["labeled"]["example_id"])
    painted = [np.mean(np.abs(batch["labeled"]["inputs"]) < 0.004) for batch in (weak, strong)]
    assert painted[1] > painted[0] + 0.05


def _lazily(source, parts=("inputs", "test_inputs")):
    lazy = {}
    for part in parts:
        held = getattr(source, part)
        lazy[part] = rows.LazyImages(len(held), held.shape[1:], held.__getitem__, part)
    return dataclasses.replace(source, **lazy)


@pytest.mark.parametrize("strong", ["rand_augment", "ctaugment"])
def test_images_that_are_read_when_needed_give_the_batches_of_those_in_memory(strong):
    built = []
    for source in (_images(), _lazily(_images())):
        augmenter = ctaugment.CTAugment(config.AugmentConfig(strong="ctaugment"))
        given = {"augmenter": augmenter} if strong == "ctaugment" else {}
        built.append(_build(source, strong=strong, normalization="standardize", **given)[0])
    held, lazy = built
    assert held.spec == lazy.spec
    _same(held.fresh_batch(4), lazy.fresh_batch(4))
    _same(held.validation_batch(2), lazy.validation_batch(2))
    for a, b in zip(held.train_dataset(5, 8), lazy.train_dataset(5, 8), strict=True):
        _same(a, b)
        assert a["labeled"]["inputs"].shape == b["labeled"]["inputs"].shape
    for role in ("validation", "unlabeled", "test"):
        batches = (list(each.evaluation_batches(role, 9)) for each in built)
        for a, b in zip(*batches, strict=True):
            _same(a, b)


@pytest.mark.parametrize("part", ["inputs", "test_inputs"])
def test_one_part_may_be_read_when_needed_and_the_other_be_in_memory(part):
    held, mixed = (
        _build(source, views=("weak",))[0] for source in (_images(), _lazily(_images(), (part,)))
    )
    _same(held.train_batch(1), mixed.train_batch(1))
    _same(held.validation_batch(1), mixed.validation_batch(1))
    for role in ("validation", "test"):
        batches = (list(each.evaluation_batches(role, 9)) for each in (held, mixed))
        for a, b in zip(*batches, strict=True):
            _same(a, b)


def test_an_image_that_cannot_be_read_ends_the_batches_with_its_error():
    source, damaged = _images(), []

    def read(row, images=source.inputs):
        if row in damaged:
            raise config.ConfigError("cats/30.png is damaged.")
        return images[row]

    source = dataclasses.replace(source, inputs=rows.LazyImages(60, (8, 8, 3), read, ""))
    built, _, split = _build(source)
    damaged.append(split.unlabeled[-1])
    for batches in (built.train_dataset(0, 10), built.evaluation_batches("unlabeled", 9)):
        with pytest.raises(config.ConfigError, match="cats/30.png is damaged."):
            list(batches)


def test_what_a_model_takes_comes_back_from_the_disk_bit_for_bit(tmp_path):
    built, source, _ = _build(_images(), normalization="standardize")
    inputs.write(built.spec, tmp_path / "inputs.json")
    again = inputs.read(tmp_path / "inputs.json")
    assert again == built.spec
    assert (again.kind, again.shape, again.class_names) == ("image", (8, 8, 3), ("0", "1", "2"))
    normal = again.normalize(tf.constant(source.inputs)).numpy()
    np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(normal.std((0, 1, 2)), 1, atol=1e-5)
    vectors, _, _ = _build()
    inputs.write(vectors.spec, tmp_path / "inputs.json")
    assert inputs.read(tmp_path / "inputs.json") == vectors.spec


def test_the_zero_level_is_the_gray_level_that_the_model_sees_nearest_to_0():
    scale, zero = np.array([0.01, 0.02, 0.004]), np.array([12.3, 99.7, 200.6])
    spec = inputs.InputSpec("image", (256, 1, 3), ("a",), tuple(scale), tuple(-scale * zero))
    levels = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, np.newaxis, np.newaxis], spec.shape)
    seen = np.abs(spec.normalize(tf.constant(levels[np.newaxis]))[0, :, 0])
    assert spec.zero_level == tuple(np.argmin(seen, axis=0)) == (12, 100, 201)


@pytest.mark.parametrize("text", ["", "[1]", '{"kind": "image"}'])
def test_a_damaged_account_of_inputs_is_refused(tmp_path, text):
    (tmp_path / "inputs.json").write_text(text)
    with pytest.raises(config.ConfigError, match="inputs.json is damaged"):
        inputs.read(tmp_path / "inputs.json")
    with pytest.raises(config.ConfigError, match="There is no .*elsewhere"):
        inputs.read(tmp_path / "elsewhere")
