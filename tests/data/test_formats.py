"""The same examples in every format give the same ids, splits and batches."""

import csv
import gzip
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from ssl_influence import config
from ssl_influence.data import pipeline, rows, sources, splits

ENDING = ".3@40-30"
FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def write_idx(folder, parts):
    folder.mkdir()
    for part, (images, labels) in parts.items():
        for name, array in zip(FILES[part], (images, labels.astype(np.uint8)), strict=True):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            with gzip.open(folder / f"{name}.gz", "wb") as file:
                file.write(head + array.tobytes())
    return f"idx:{folder}"


def write_npz(path, parts):
    arrays = {}
    for part, (images, labels) in parts.items():
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    np.savez_compressed(path, **arrays)
    return f"npz:{path}"


def write_table(folder, parts):
    """A folder of pictures with a list of them, in an order of its own."""
    table = [("image", "label", "part")]
    for part, (images, labels) in parts.items():
        (folder / part).mkdir(parents=True)
        for row, image in enumerate(images):
            name = f"{part}/{row:05d}.png"
            Image.fromarray(image).save(folder / name)
            table.append((name, labels[row], part))
    shuffled = np.random.default_rng(0).permutation(np.arange(1, len(table)))
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(table[row] for row in (0, *shuffled))
    return f"csv:{folder / 'list.csv'}"


def write_class_folders(folder, parts):
    for part, (images, labels) in parts.items():
        for row, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / part / str(label) / f"{row:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return f"folder:{folder}"


def write_tfrecord(folder, parts, shards=3):
    for part, (images, labels) in parts.items():
        (folder / part).mkdir(parents=True)
        for shard, chosen in enumerate(np.array_split(np.arange(len(labels)), shards)):
            path = folder / part / f"data.tfrecord-{shard:05d}-of-{shards:05d}"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in chosen:
                    encoded = tf.io.encode_png(images[row][..., np.newaxis]).numpy()
                    feature = {
                        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                        "label": tf.train.Feature(
                            int64_list=tf.train.Int64List(value=[int(labels[row])])
                        ),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=feature))
                    writer.write(example.SerializeToString())
    return f"tfrecord:{folder}"


def batches(place, **settings):
    """The source, its split, and two batches of a run."""
    name = sources.parse_name(place + ENDING)
    settings = config.DataConfig(labeled_batch_size=5, unlabeled_batch_size=9, **settings)
    source = sources.load(name, settings)
    split = splits.draw(source, name, settings)
    augment = config.AugmentConfig(operations=1)
    built = pipeline.Pipeline(source, split, settings, augment, seed=2, views=("weak", "strong"))
    return source, split, [built.train_batch(k) for k in (0, 7)]


def assert_same(found, expected):
    a, b = found[0], expected[0]
    for part in ("inputs", "test_inputs"):
        held = (rows.in_memory(getattr(source, part)) for source in (a, b))
        np.testing.assert_array_equal(*held)
    np.testing.assert_array_equal(a.labels, b.labels)
    np.testing.assert_array_equal(a.test_labels, b.test_labels)
    for role in splits.ROLES:
        np.testing.assert_array_equal(getattr(found[1], role), getattr(expected[1], role))
    tf.nest.map_structure(np.testing.assert_array_equal, found[2], expected[2])


def small():
    random = np.random.default_rng(1)
    return {
        part: (
            random.integers(0, 256, [size, 8, 8], np.uint8),
            random.permutation(np.arange(size) % 4),
        )
        for part, size in (("train", 120), ("test", 20))
    }


def fashion():
    """The first images of Fashion-MNIST, of Debian's dataset-fashion-mnist."""
    if not FASHION.is_dir():
        pytest.skip(f"Debian's package dataset-fashion-mnist is not installed: no {FASHION}")
    parts = {}
    for part, names in FILES.items():
        images, labels = (gzip.decompress((FASHION / f"{n}.gz").read_bytes()) for n in names)
        images = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)[:600]
        parts[part] = images, np.frombuffer(labels, np.uint8, offset=8)[:600].astype(np.int64)
    return parts


@pytest.mark.parametrize("read", [small, fashion])
def test_one_dataset_in_every_format_gives_the_same_batches(read, tmp_path):
    parts = read()
    expected = batches(write_idx(tmp_path / "idx", parts))
    np.testing.assert_array_equal(expected[0].inputs[..., 0], parts["train"][0])
    np.testing.assert_array_equal(expected[0].test_labels, parts["test"][1])
    others = [
        write_npz(tmp_path / "arrays.npz", parts),
        write_table(tmp_path / "listed", parts),
        write_tfrecord(tmp_path / "records", parts),
    ]
    for place in others:
        assert_same(batches(place), expected)
    for place in others[1:]:
        found = batches(place, max_memory_gb=0)
        assert isinstance(found[0].inputs, rows.LazyImages)
        assert_same(found, expected)


def test_class_folders_are_the_arrays_sorted_by_class(tmp_path):
    parts = {
        part: (images[order], labels[order])
        for part, (images, labels) in small().items()
        for order in [np.argsort(labels, kind="stable")]
    }
    expected = batches(write_npz(tmp_path / "arrays.npz", parts))
    assert_same(batches(write_class_folders(tmp_path / "folders", parts)), expected)


def test_all_of_fashion_mnist_is_read_as_released():
    fashion()
    source = sources.load(sources.parse_name(f"fashion_mnist:{FASHION}.1@250-1024"))
    assert source.inputs.shape == (60_000, 28, 28, 1)
    assert source.test_inputs.shape == (10_000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(source.labels), [6000] * 10)
    assert source.class_names[9] == "Ankle boot" and source.flip
    assert source.inputs.mean() == pytest.approx(72.94, abs=0.01)  # 0.2860 of 255, as published
