import dataclasses

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import examples, names, sources, synthetic


def test_a_full_name_is_parsed_into_its_parts_and_printed_back():
    name = sources.parse_name("cifar10.1@250-1024")
    assert name == names.DatasetName("cifar10", 1, 250, 1024)
    assert str(name) == "cifar10.1@250-1024"


@pytest.mark.parametrize(
    "source", ["/data/v1.2/my.images", "a.7@3-4", "corpus@home", "folder with space/x-1"]
)
def test_a_name_is_parsed_from_the_right_so_that_sources_may_hold_any_character(source):
    assert sources.parse_name(source + ".3@40-0") == names.DatasetName(source, 3, 40, 0)


@pytest.mark.parametrize(
    "bare, full",
    [
        ("digits", "digits.1@60-200"),
        ("two_moons", "two_moons.1@10-30"),
        ("circles", "circles.1@10-30"),
        ("linear", "linear.1@10-30"),
        ("cifar10", "cifar10.1@250-1024"),
        ("svhn_cropped", "svhn_cropped.1@250-1024"),
    ],
)
def test_a_bare_source_takes_its_default_ending(bare, full):
    assert str(sources.parse_name(bare)) == full


@pytest.mark.parametrize(
    "text", ["", "cifar", "cifar10@250-1024", "cifar10.1@250", "cifar10.a@1-1", ".1@10-30"]
)
def test_a_malformed_name_is_refused_with_the_form_and_the_known_sources(text):
    with pytest.raises(config.ConfigError, match="source.seed@labels-validation.*digits"):
        sources.parse_name(text)


@pytest.mark.parametrize("text, value", [("digits.1@0-10", "0"), ("digits.2147483648@9-1", "2147")])
def test_numbers_that_cannot_work_are_named(text, value):
    with pytest.raises(config.ConfigError, match=value):
        sources.parse_name(text)


def test_an_unknown_source_is_refused_with_the_known_ones():
    with pytest.raises(config.ConfigError, match="'cifar11'.*cifar10.*two_moons"):
        sources.load(sources.parse_name("cifar11.1@250-1024"))


def test_digits_are_all_there_scaled_to_bytes_and_split_the_same_for_every_seed():
    from sklearn import datasets

    a = sources.load(sources.parse_name("digits.1@60-200"))
    b = sources.load(sources.parse_name("digits.5@100-100"))
    raw = datasets.load_digits()
    assert a.inputs.dtype == np.uint8 and a.inputs.shape[1:] == (8, 8, 1) and a.is_image
    assert not a.flip and a.num_classes == 10
    np.testing.assert_array_equal(a.inputs, b.inputs)
    np.testing.assert_array_equal(a.test_labels, b.test_labels)
    both = np.concatenate([a.inputs, a.test_inputs])
    assert len(both) == 1797 and both.max() == 255
    expected = np.sort(np.floor(raw.images * 255 / 16 + 0.5).astype(int).reshape(1797, -1).sum(1))
    np.testing.assert_array_equal(np.sort(both.reshape(1797, -1).sum(1)), expected)
    per_class = np.bincount(raw.target)
    np.testing.assert_array_equal(np.bincount(a.test_labels), per_class // 4)


def test_known_classes_are_renumbered_and_the_others_become_strangers():
    whole = sources.load(sources.parse_name("digits"))
    part = sources.restrict(whole, (5, 0, 3))
    assert part.class_names == ["5", "0", "3"] and part.num_classes == 3
    for new, old in enumerate((5, 0, 3)):
        np.testing.assert_array_equal(part.labels == new, whole.labels == old)
    np.testing.assert_array_equal(part.strangers, ~np.isin(whole.labels, (5, 0, 3)))
    np.testing.assert_array_equal(part.labels == -1, part.strangers)
    np.testing.assert_array_equal(part.inputs, whole.inputs)
    known = np.isin(whole.test_labels, (5, 0, 3))
    np.testing.assert_array_equal(part.test_inputs, whole.test_inputs[known])
    with pytest.raises(config.ConfigError, match="no class 10, only 0 to 9"):
        sources.restrict(whole, (0, 10))
    unknown = dataclasses.replace(whole, labels=np.full_like(whole.labels, -1))
    assert not sources.restrict(unknown, (0, 1)).strangers.any()


@pytest.mark.parametrize("source", ["two_moons", "circles", "linear"])
def test_synthetic_points_leave_exactly_1000_unlabeled_and_follow_the_seed(source):
    data = sources.load(sources.parse_name(f"{source}.3@10-30"))
    assert data.inputs.shape == (1040, 2) and data.test_inputs.shape == (1000, 2)
    assert data.inputs.dtype == np.float32 and data.labels.dtype == np.int32
    assert not data.is_image and data.num_classes == 2
    np.testing.assert_array_equal(np.bincount(data.labels), [520, 520])
    again = sources.load(sources.parse_name(f"{source}.3@10-30"))
    other = sources.load(sources.parse_name(f"{source}.4@10-30"))
    np.testing.assert_array_equal(data.inputs, again.inputs)
    assert not np.array_equal(data.inputs, other.inputs)
    assert not np.array_equal(data.inputs[:1000], data.test_inputs)
    assert sources.load(sources.parse_name(f"{source}.3@20-50")).inputs.shape == (1070, 2)


@pytest.mark.parametrize("source, wrong", [("two_moons", 0.002), ("circles", 0.02), ("linear", 0)])
def test_the_true_side_of_synthetic_points_is_their_label_but_for_the_noise(source, wrong):
    data = sources.load(sources.parse_name(source))
    side = synthetic.SHAPES[source].side(data.inputs)
    assert np.mean((side > 0) != data.labels) <= wrong


def test_linear_is_separated_by_its_line_with_the_margin():
    data = sources.load(sources.parse_name("linear"))
    distance = (data.inputs.astype(np.float64) @ [1, 1] / np.sqrt(2)) * (2 * data.labels - 1)
    assert distance.min() >= synthetic.LINEAR_MARGIN - 1e-6


def test_circles_are_separated_by_radius_but_for_the_noise():
    data = sources.load(sources.parse_name("circles"))
    inner = np.linalg.norm(data.inputs, axis=1) < (1 + synthetic.CIRCLES_FACTOR) / 2
    assert np.mean(inner == data.labels) > 0.97


@pytest.mark.parametrize("source, flip", [("cifar10", True), ("svhn_cropped", False)])
def test_tfds_images_come_in_a_fixed_order_with_labels_beside_them(source, flip, tmp_path):
    import tensorflow_datasets as tfds

    name = sources.parse_name(source)
    with tfds.testing.mock_data(num_examples=200):
        data = sources.load(name, config.DataConfig(data_dir=str(tmp_path)))
        expected = [
            (example["image"], example["label"])
            for example in tfds.as_numpy(tfds.load(source, split="train", data_dir=str(tmp_path)))
        ]
    assert data.inputs.shape == data.test_inputs.shape == (200, 32, 32, 3)
    assert data.inputs.dtype == np.uint8 and data.labels.dtype == np.int32
    assert data.flip is flip and data.num_classes == 10
    np.testing.assert_array_equal(data.inputs, np.stack([image for image, _ in expected]))
    np.testing.assert_array_equal(data.labels, [label for _, label in expected])


@pytest.mark.parametrize(
    "error, says",
    [
        (
            OSError("no route to host\nsecond line"),
            "OSError: no route to host.*toronto.edu.*tfds build",
        ),
        (ImportError("No module", name="wanted"), "'wanted'.*pip"),
    ],
)
def test_a_failed_download_is_one_line_with_the_folder_and_the_remedy(
    error, says, tmp_path, monkeypatch
):
    import tensorflow_datasets as tfds

    def fail(self, **_):
        raise error

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(config.ConfigError, match=says) as caught:
        sources.load(sources.parse_name("cifar10"), config.DataConfig(data_dir=str(tmp_path)))
    assert "\n" not in str(caught.value) and "cifar10.1@250-1024" in str(caught.value)
    if isinstance(error, OSError):
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"inputs": np.zeros((3, 2), np.float64)}, "float64"),
        ({"labels": np.zeros(2, np.int32)}, r"\(2,\) beside 3"),
        ({"labels": np.array([0, 1, 2], np.int32)}, "0 to 2"),
        ({"test_inputs": np.zeros((1, 3), np.float32)}, r"\(3,\)"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change, says):
    fields = {
        "name": "mine",
        "inputs": np.zeros((3, 2), np.float32),
        "labels": np.array([0, 1, -1], np.int32),
        "test_inputs": np.zeros((1, 2), np.float32),
        "test_labels": np.zeros(1, np.int32),
        "class_names": ["a", "b"],
        "flip": False,
    }
    assert examples.Source(**fields).num_classes == 2
    with pytest.raises(config.ConfigError, match=says):
        examples.Source(**{**fields, **change})


@pytest.mark.parametrize(
    "dataset, says",
    [
        ("birds:/data.1@9-9", "'birds:/data' is not known.*your own data: folder:PLACE, npz:PLACE"),
        ("folder:.1@9-9", "names no place after folder:"),
        ("digits:/data.1@9-9", "'digits:/data' is not known"),
    ],
)
def test_a_kind_of_data_that_there_is_not_is_refused_with_those_there_are(dataset, says):
    with pytest.raises(config.ConfigError, match=says):
        sources.load(sources.parse_name(dataset))


def _save(path, labels, value, **more):
    images = np.full([len(labels), 4, 4], value, np.uint8)
    np.savez(path, images=images, labels=np.array(labels), **more)
    return f"npz:{path}"


def test_data_from_several_places_become_one_source(tmp_path, monkeypatch):
    own = _save(tmp_path / "v1.own.npz", [0, 1, 1], 1, class_names=np.array(["cat", "dog"]))
    pool = _save(tmp_path / "pool.npz", [1, 0, 2], 2, class_names=np.array(["ox", "dog", "cat"]))
    judge = _save(tmp_path / "judge.npz", [1, 0], 3, class_names=np.array(["dog", "cat"]))
    settings = config.DataConfig(unlabeled_data=pool, validation_data=judge, test_data=judge)
    source = sources.load(sources.parse_name(own + ".1@2-2"), settings)
    assert source.name == own and source.class_names == ["cat", "dog"]
    assert source.inputs[:, 0, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert source.labels.tolist() == [0, 1, 1, 1, -1, 0, 0, 1]
    assert source.strangers.tolist() == [False] * 4 + [True] + [False] * 3
    assert source.parts.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert source.test_labels.tolist() == [0, 1]

    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = sources.load(sources.parse_name("npz:~/v1.own.npz.1@2-0"))
    np.testing.assert_array_equal(at_home.inputs, source.inputs[:3])


def test_images_are_held_in_memory_up_to_the_bound(tmp_path):
    from PIL import Image

    for c in ("a", "b"):
        (tmp_path / c).mkdir()
        for k in range(4):
            Image.fromarray(np.full([16, 16, 3], k, np.uint8)).save(tmp_path / c / f"{k}.png")
    name = sources.parse_name(f"folder:{tmp_path}.1@2-2")
    size = 8 * 16 * 16 * 3 / 2**30
    held, lazy = (
        sources.load(name, config.DataConfig(max_memory_gb=bound)) for bound in (size, size * 0.99)
    )
    assert isinstance(held.inputs, np.ndarray) and not isinstance(lazy.inputs, np.ndarray)
    np.testing.assert_array_equal(held.inputs, lazy.inputs.read(np.arange(8)))


def test_a_restricted_source_keeps_the_names_of_its_test_examples():
    whole = sources.load(sources.parse_name("digits"))
    named = dataclasses.replace(whole, test_names=[f"t{i}" for i in range(len(whole.test_labels))])
    part = sources.restrict(named, (3, 8))
    rows = np.flatnonzero(np.isin(whole.test_labels, (3, 8)))
    assert list(part.test_names) == [f"t{i}" for i in rows]
    again = sources.restrict(part, (1, 0))
    np.testing.assert_array_equal(again.strangers, part.strangers)
    assert sources.of_classes(whole, ()) is None
    np.testing.assert_array_equal(sources.of_classes(whole, (3,)), whole.labels == 3)
    with pytest.raises(config.ConfigError, match="unlabeled_classes=3,10.*no class 10"):
        sources.of_classes(whole, (3, 10))


def _pictures(folder, *classes):
    from PIL import Image

    for c in classes:
        (folder / c).mkdir(parents=True)
        Image.fromarray(np.zeros([4, 4], np.uint8)).save(folder / c / "1.png")
    return f"folder:{folder}"


def test_folders_that_are_no_classes_are_of_unknown_class_where_they_are_joined(tmp_path, caplog):
    own = sources.parse_name(_pictures(tmp_path / "own", "cat", "dog") + ".1@2-0")
    batches = _pictures(tmp_path / "pool", "batch 1", "batch 2")
    source = sources.load(own, config.DataConfig(unlabeled_data=batches))
    assert source.labels.tolist() == [0, 1, -1, -1] and source.strangers is None
    assert "none of its classes is one of cat, dog" in caplog.text
    assert source.row_name(2) == f"{batches}: batch 1/1.png"
    mixed = _pictures(tmp_path / "mixed", "cat", "ox")
    strangers = sources.load(own, config.DataConfig(unlabeled_data=mixed)).strangers
    assert strangers.tolist() == [False, False, False, True]
    with pytest.raises(config.ConfigError, match="parts unlabeled and no test part"):
        sources.load(own, config.DataConfig(test_data=f"{batches}/batch 1"))
