import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import examples, images, names, sources
from ssl_influence.data.readers import npz

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def read(tmp_path, compress=False, settings=None, **arrays):
    path = tmp_path / "data.npz"
    (np.savez_compressed if compress else np.savez)(path, **arrays)
    name = names.DatasetName("npz", 1, 1, 1)
    return npz.read(name, str(path), settings or config.DataConfig())


@pytest.mark.parametrize(
    "arrays",
    [
        {"x_train": "train", "y_train": "train", "x_test": "test", "y_test": "test"},
        {
            "train_images": "train",
            "train_labels": "train",
            "val_images": "validation",
            "val_labels": "validation",
            "test_images": "test",
            "test_labels": "test",
        },
        {"images": "train", "labels": "train"},
        {"inputs": "train", "labels": "train", "x_val": "validation", "y_val": "validation"},
        {"x_train": "train", "y_train": "train", "x_unlabeled": "unlabeled"},
        {"x_train": "train", "y_train": "train", "unlabeled": "unlabeled"},
        {
            "images": "train",
            "labels": "train",
            "unlabeled_images": "unlabeled",
            "unlabeled_labels": "unlabeled",
        },
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_arrays_are_found_by_their_usual_names(tmp_path, arrays, compress):
    rows = {"train": 6, "unlabeled": 4, "validation": 3, "test": 2}
    given = {
        array: (LABELS if array.startswith("y_") or "labels" in array else IMAGES)[: rows[part]]
        for array, part in arrays.items()
    }
    found = read(tmp_path, compress, **given)
    assert set(found.parts) == set(arrays.values())
    for part, of_part in found.parts.items():
        np.testing.assert_array_equal(of_part.inputs, IMAGES[: rows[part]])
        known = part != "unlabeled" or "unlabeled_labels" in arrays
        np.testing.assert_array_equal(of_part.labels, LABELS[: rows[part]] if known else -1)
        assert of_part.labels.dtype == np.int32
    assert found.class_names == ["0", "1", "2"] and found.task_classes == 3


@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bit_images_go_to_the_nearest_byte(tmp_path, order):
    wide = np.arange(65536, dtype=f"{order}u2").reshape(16, 64, 64)
    found = read(tmp_path, images=wide, labels=np.zeros(16, int)).parts["train"].inputs
    assert found.dtype == np.uint8 and found.shape == (16, 64, 64, 1)
    np.testing.assert_array_equal(found[..., 0], np.rint(wide / 257))


def test_arrays_in_fortran_order_and_gray_images_without_channels_are_the_same(tmp_path):
    gray = IMAGES[..., 0]
    found = read(tmp_path, images=np.asfortranarray(gray), labels=LABELS).parts["train"]
    np.testing.assert_array_equal(found.inputs, gray[..., np.newaxis])


def test_images_are_brought_to_the_size_and_channels_asked_for(tmp_path):
    settings = config.DataConfig(image_size=(2,), image_channels=1)
    found = read(tmp_path, settings=settings, images=IMAGES, labels=LABELS).parts["train"]
    assert found.inputs.shape == (6, 2, 2, 1)
    rows = np.array([4, 0])
    np.testing.assert_array_equal(
        found.inputs.read(rows), images.fit(IMAGES[rows], settings).read(np.arange(2))
    )


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f4", "<f8", "longdouble"])
def test_vectors_of_any_float_become_float32(tmp_path, dtype):
    vectors = np.array([[0.5, -2], [3, 1]], dtype)
    found = read(tmp_path, inputs=vectors, labels=LABELS[:2]).parts["train"].inputs
    assert found.dtype == np.float32 and found.dtype.isnative
    np.testing.assert_array_equal(found, [[0.5, -2], [3, 1]])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ">i4", np.int64, np.uint64])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_labels_are_integers_in_a_row_or_in_a_column(tmp_path, dtype, shape):
    labels = LABELS.astype(dtype).reshape(shape)
    found = read(tmp_path, images=IMAGES, labels=labels).parts["train"].labels
    assert found.dtype == np.int32 and found.tolist() == LABELS.tolist()


def test_minus_one_is_no_label_and_numbers_may_have_gaps(tmp_path):
    labels = np.array([0, -1, 4, -1, 0, 4])
    found = read(tmp_path, images=IMAGES, labels=labels)
    assert found.class_names == ["0", "1", "2", "3", "4"]
    assert found.parts["train"].labels.tolist() == labels.tolist()


def test_class_names_give_names_and_number_of_the_classes(tmp_path):
    birds = ["kite", "tern", "wren", "høne"]
    found = read(tmp_path, images=IMAGES, labels=LABELS, class_names=birds)
    assert found.class_names == birds and found.task_classes is None


def test_a_class_of_unlabeled_examples_alone_makes_strangers(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, images=IMAGES, labels=LABELS, unlabeled=IMAGES[:2], unlabeled_labels=[3, 1])
    source = sources.load(sources.parse_name(f"npz:{path}.1@3-0"))
    assert source.num_classes == 3 and source.labels.tolist() == [*LABELS, -1, 1]
    assert np.flatnonzero(source.strangers).tolist() == [6]


def test_inputs_without_labels_can_be_joined_to_another_dataset(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    np.savez(tmp_path / "b.npz", images=IMAGES[:4])
    source = sources.load(
        sources.parse_name(f"npz:{tmp_path / 'a.npz'}.1@3-0"),
        config.DataConfig(unlabeled_data=f"npz:{tmp_path / 'b.npz'}"),
    )
    assert source.labels.tolist() == [*LABELS, -1, -1, -1, -1]


def test_other_arrays_are_ignored_and_named_in_the_log(tmp_path, caplog):
    caplog.set_level("INFO")
    objects = np.array([{"a": 1}], object)
    found = read(tmp_path, images=IMAGES, labels=LABELS, notes=objects, masks=np.zeros(3))
    assert len(found.parts["train"]) == 6 and "masks, notes" in caplog.text


def test_vectors_that_are_not_finite_are_left_out_where_bad_examples_are_skipped(tmp_path, caplog):
    vectors = np.arange(12, dtype=np.float64).reshape(6, 2)
    vectors[1, 1], vectors[4, 0] = np.nan, 1e300
    settings = config.DataConfig(on_bad_example="skip")
    found = read(tmp_path, settings=settings, inputs=vectors, labels=LABELS).parts["train"]
    assert found.inputs[:, 0].tolist() == [0, 4, 6, 10] and found.labels.tolist() == [0, 2, 0, 2]
    assert ["row 1 of 'inputs' holds nan" in found.skipped[0], "1e+300" in found.skipped[1]] == [
        True
    ] * 2
    assert "2 of 6 rows of 'inputs' left out" in caplog.text


def test_what_takes_more_memory_than_allowed_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "read_array", lambda *args: pytest.fail("read"))
    zeros = np.zeros((1000, 32, 32, 3), np.uint8)
    with pytest.raises(config.ConfigError, match="images.*max_memory_gb=0.001: raise that"):
        read(
            tmp_path,
            compress=True,
            settings=config.DataConfig(max_memory_gb=0.001),
            images=zeros,
            labels=np.zeros(1000, int),
        )


def test_test_examples_without_labels_are_named(tmp_path):
    found = read(tmp_path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES)
    with pytest.raises(config.ConfigError, match="test example number 0 has no label"):
        examples.assemble(found)
