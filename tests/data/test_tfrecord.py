"""Images in TFRecord files, written here by TensorFlow's own writer."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from ssl_influence import config
from ssl_influence.data import crc32c, rows, sources


def load(place, **settings):
    name = sources.parse_name(f"tfrecord:{place}.1@10-0")
    return sources.load(name, config.DataConfig(**settings))


def refused(place, *parts, **settings):
    """Reading it ends in one line that says all this."""
    with pytest.raises(config.ConfigError) as caught:
        load(place, **settings)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def feature(value):
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    if isinstance(value, int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def example(**features):
    features = {name.replace("__", "/"): feature(value) for name, value in features.items()}
    message = tf.train.Example(features=tf.train.Features(feature=features))
    return message.SerializeToString()


def png(image):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def random_images(seed, n, size=5):
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), np.uint8)


def records_of(images, labels):
    return [
        example(image=png(image), label=int(label))
        for image, label in zip(images, labels, strict=True)
    ]


@pytest.fixture
def one_file(tmp_path):
    images = random_images(0, 6)
    return write(tmp_path / "birds.tfrecord", records_of(images, [0, 1, 2, 0, 1, 2])), images


def test_the_checksum_is_that_of_the_standard_and_of_tensorflows_writer(tmp_path):
    assert crc32c.crc32c(b"123456789") == 0xE3069283
    assert crc32c.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    for size in (0, 1, 3, 4, 63, 64, 1023, 1024, 1025, 5000, 4096 * 3 + 7):
        data = np.random.default_rng(size).bytes(size)
        raw = write(tmp_path / "a", [data]).read_bytes()
        assert struct.pack("<I", crc32c.masked(crc32c.crc32c(data))) == raw[-4:]


@pytest.mark.parametrize("max_memory_gb", [4.0, 0.0])
def test_records_of_a_file_are_images_in_their_order(one_file, max_memory_gb):
    path, images = one_file
    data = load(path, max_memory_gb=max_memory_gb)
    assert isinstance(data.inputs, rows.LazyImages) == (max_memory_gb == 0)
    np.testing.assert_array_equal(rows.in_memory(data.inputs), images)
    np.testing.assert_array_equal(rows.take(data.inputs, np.array([4, 0, 4])), images[[4, 0, 4]])
    np.testing.assert_array_equal(data.labels, [0, 1, 2, 0, 1, 2])
    assert data.class_names == ["0", "1", "2"] and data.row_name(3) == "birds.tfrecord record 3"


def test_shards_of_a_folder_are_joined_by_name_and_make_parts(tmp_path):
    parts = {
        "a/x-train.tfrecord-00000-of-00002": ([0, 1], 1),
        "a/x-train.tfrecord-00001-of-00002": ([2, 0, 1], 2),
        "b-Train.tfrecords": ([1, 1], 3),
        "test/z.tfrecord": ([1], 4),
        "VAL/z.tfrecord": ([0, 2], 5),
        "x-unlabelled.tfrecord": ([-1, 1], 6),
    }
    for name, (labels, seed) in parts.items():
        write(tmp_path / name, records_of(random_images(seed, len(labels)), labels))
    write(tmp_path / "a/empty-train.tfrecord", [])
    (tmp_path / "notes.txt").write_text("none")
    data = load(tmp_path)
    np.testing.assert_array_equal(data.labels, [0, 1, 2, 0, 1, 1, 1, -1, 1, 0, 2])
    np.testing.assert_array_equal(data.parts, [0] * 7 + [1] * 2 + [2] * 2)
    np.testing.assert_array_equal(data.test_labels, [1])
    np.testing.assert_array_equal(data.inputs[2:5], random_images(2, 3))
    assert data.row_name(4) == "a/x-train.tfrecord-00001-of-00002 record 2"
    assert data.row_name(5) == "b-Train.tfrecords record 0"
    trained = load(tmp_path / "a" / "*-train*")
    np.testing.assert_array_equal(trained.labels, [0, 1, 2, 0, 1])
    only_test = load(
        tmp_path / "b-Train.tfrecords", test_data=f"tfrecord:{tmp_path}/te*/z.tfrecord"
    )
    np.testing.assert_array_equal(only_test.test_labels, [1])


def test_a_file_of_no_part_beside_one_of_train_is_refused_not_trained_on(tmp_path):
    for name in ("x-train.tfrecord", "x-holdout.tfrecord"):
        write(tmp_path / name, records_of(random_images(1, 2), [0, 1]))
    with pytest.raises(config.ConfigError, match="x-holdout.tfrecord names no part"):
        load(tmp_path)


def test_pixels_with_their_sizes_are_images_too(tmp_path):
    gray = random_images(0, 3)[..., :1]
    records = [
        example(image=image.tobytes(), height=5, width=5, depth=1, label=c)
        for c, image in enumerate(gray)
    ]
    data = load(write(tmp_path / "raw.tfrecord", records))
    np.testing.assert_array_equal(data.inputs, gray)
    five = [example(image=bytes(50), height=5, width=5, depth=2, label=0)]
    refused(write(tmp_path / "raw.tfrecord", five), "raw.tfrecord record 0", "depth 2")


def test_sizes_beside_an_encoded_image_do_not_matter(tmp_path):
    images = random_images(0, 2)
    records = [example(image=png(i), height=5, width=5, depth=3, label=1) for i in images]
    data = load(write(tmp_path / "a.tfrecord", records))
    np.testing.assert_array_equal(data.inputs, images)


def test_columns_are_those_named_or_else_the_common_ones(tmp_path):
    images = random_images(0, 2)
    common = [example(image__encoded=png(i), image__class__label=1) for i in images]
    data = load(write(tmp_path / "a.tfrecord", common))
    np.testing.assert_array_equal(data.inputs, images)
    np.testing.assert_array_equal(data.labels, [1, 1])
    own = [example(picture=png(i), kind=0, label=1) for i in images]
    path = write(tmp_path / "a.tfrecord", own)
    data = load(path, image_column="picture", label_column="kind")
    np.testing.assert_array_equal(data.labels, [0, 0])
    refused(path, "a.tfrecord record 0", "no image", "'image'", "'kind', 'label', 'picture'")
    refused(path, "record 0", "no label", "'class'", image_column="picture", label_column="class")


@pytest.mark.parametrize("name", ["labels.txt", "label.labels.txt"])
def test_classes_are_named_by_a_file_beside_the_records(one_file, name):
    path, _ = one_file
    (path.parent / name).write_text("crow\nowl\ntit\nwren\n")
    assert load(path).class_names == ["crow", "owl", "tit", "wren"]
    (path.parent / name).write_text("crow\nowl\n")
    refused(path, "birds.tfrecord record 2", "label 2", "2 classes")
    (path.parent / name).write_text("crow\ncrow\nowl\n")
    refused(path, name, "names 3 classes, 2 of them different")


def test_images_are_scaled_where_image_size_says_so(tmp_path):
    images = [random_images(0, 1, 8)[0], random_images(0, 1, 16)[0]]
    path = write(tmp_path / "a.tfrecord", records_of(images, [0, 0]))
    refused(path, "record 1", "image_size")
    data = load(path, image_size=(8,))
    assert data.inputs.shape == (2, 8, 8, 3)
    np.testing.assert_array_equal(data.inputs[0], images[0])


def test_a_label_may_be_missing_in_the_unlabeled_part_alone(tmp_path):
    images = random_images(0, 2)
    write(tmp_path / "train.tfrecord", records_of(images, [0, 0]))
    write(tmp_path / "unlabeled.tfrecord", [example(image=png(image)) for image in images])
    np.testing.assert_array_equal(load(tmp_path).labels, [0, 0, -1, -1])
    for record in (
        example(image=png(images[0])),
        example(image=png(images[0]), label=[0.5]),
        example(image=png(images[0]), label=-2),
        example(image=png(images[0]), label=2**40),
    ):
        refused(write(tmp_path / "train.tfrecord", [record]), "train.tfrecord record 0", "no label")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1], "record 5, which begins at byte"),
        (lambda data: data[: len(data) // 2 + 1], "record 3, which begins"),
        (lambda data: data + b"\0" * 5, "record 6, which begins at byte"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "record 0 is damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "record 5 is damaged"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "is no TFRecord file"),
        (lambda data: b"\x1f\x8b" + data[2:], "gunzip"),
        (lambda data: b"short", "record 0, which begins at byte 0, is cut short"),
        (lambda data: b"", "holds no record"),
        (lambda data: data + data[:11] + b"x" + data[12:], "the length of record 6"),
    ],
)
def test_a_damaged_file_is_refused_whatever_is_done_with_bad_examples(one_file, change, says):
    path, _ = one_file
    path.write_bytes(change(path.read_bytes()))
    for on_bad_example in ("error", "skip"):
        refused(path, "birds.tfrecord", says, on_bad_example=on_bad_example)


def test_records_that_are_no_examples_or_images_are_named(tmp_path):
    path = write(tmp_path / "a.tfrecord", [b"\xff\xff\xff"])
    refused(path, "a.tfrecord record 0", "no tf.train.Example")
    image = random_images(0, 1)[0]
    records = [*records_of([image], [0]), example(image=b"no image", label=1)]
    path = write(tmp_path / "a.tfrecord", records)
    refused(path, "a.tfrecord record 1")
    data = load(path, on_bad_example="skip")
    np.testing.assert_array_equal(data.inputs, image[np.newaxis])
    assert len(data.skipped) == 1 and "a.tfrecord record 1" in data.skipped[0]


def test_a_byte_that_changes_while_the_file_is_in_use_is_found(one_file):
    path, images = one_file
    data = load(path, max_memory_gb=0.0)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    np.testing.assert_array_equal(data.inputs.read(np.array([0])), images[:1])
    with pytest.raises(config.ConfigError, match="record 5 is damaged"):
        data.inputs.read(np.array([5]))
    path.write_bytes(raw[:-30])
    with pytest.raises(config.ConfigError, match="record 5 is cut short"):
        data.inputs.read(np.array([5]))


def test_other_data_have_another_digest(one_file):
    path, images = one_file
    before = load(path, max_memory_gb=0.0).inputs.digest()
    assert load(path, max_memory_gb=0.0).inputs.digest() == before
    images = images.copy()
    images[3, 2, 2, 0] ^= 1
    write(path, records_of(images, [0, 1, 2, 0, 1, 2]))
    assert load(path, max_memory_gb=0.0).inputs.digest() != before


def test_places_without_a_record_file_and_links_out_of_them_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (folder, folder / "none.tfrecord", folder / "*.tfrecord"):
        refused(place, "There is no TFRecord file", str(place))
    outside = write(tmp_path / "a.tfrecord", records_of(random_images(0, 1), [0]))
    (folder / "a.tfrecord").symlink_to(outside)
    refused(folder, "a.tfrecord", "leads out of")
