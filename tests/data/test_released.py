"""Datasets as they were released: tiny ones, written here from the published formats."""

import errno
import gzip
import io
import json
import os
import pathlib
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image
from scipy import io as scipy_io

from ssl_influence import config
from ssl_influence.data import rows, sources, splits
from third_party import published_splits

FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")


def load(source, **settings):
    return sources.load(sources.parse_name(f"{source}.1@10-0"), config.DataConfig(**settings))


def refused(source, *parts, **settings):
    """Reading it ends in one line that says all this."""
    with pytest.raises(config.ConfigError) as caught:
        load(source, **settings)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def random_images(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def tar_of(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


# IDX


def idx_bytes(array, code=8):
    head = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def write_idx(folder, *, train=20, test=5, labels=None, zipped=()):
    """Writes the four files; gives what they hold, by their names."""
    held = {}
    for seed, (prefix, n) in enumerate([("train", train), ("t10k", test)]):
        if n:
            held[f"{prefix}-images-idx3-ubyte"] = random_images(seed, n, 6, 4)
            held[f"{prefix}-labels-idx1-ubyte"] = (np.arange(n) % 10).astype(np.uint8)
    if labels is not None:
        held["train-labels-idx1-ubyte"] = np.array(labels, np.uint8)
    for name, array in held.items():
        data = idx_bytes(array)
        if name in zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)
    return held


def test_idx_files_plain_or_zipped_give_their_images_and_labels(tmp_path):
    held = write_idx(tmp_path, zipped=("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"))
    data = load(f"idx:{tmp_path}")
    np.testing.assert_array_equal(data.inputs[..., 0], held["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.labels, held["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(data.test_inputs[..., 0], held["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test_labels, held["t10k-labels-idx1-ubyte"])
    assert data.inputs.shape == (20, 6, 4, 1) and data.labels.dtype == np.int32
    assert data.class_names == [str(c) for c in range(10)] and not data.flip
    assert data.name == f"idx:{tmp_path}"


def test_the_classes_of_known_idx_sets_are_called_as_in_tensorflow_datasets(tmp_path):
    import tensorflow_datasets as tfds

    write_idx(tmp_path, test=0)
    for source in ("mnist", "fashion_mnist", "kmnist"):
        data = load(f"{source}:{tmp_path}")
        builder = tfds.builder(source, data_dir=str(tmp_path / "tfds"))
        assert data.class_names == builder.info.features["label"].names
        assert len(data.test_labels) == 0


def test_images_in_arrays_are_scaled_and_cut_as_image_files_are(tmp_path):
    held = write_idx(tmp_path)
    for settings in ({"max_memory_gb": 4.0}, {"max_memory_gb": 0.0}):
        data = load(f"idx:{tmp_path}", image_size=(8,), image_channels=3, **settings)
        assert data.inputs.shape == (20, 8, 8, 3)
        image = Image.fromarray(held["train-images-idx3-ubyte"][3])
        # 6 x 4 scaled to cover 8 x 8: the middle 4 rows, doubled.
        expected = image.resize((8, 8), Image.Resampling.BILINEAR, box=(0, 1, 4, 5))
        found = rows.take(data.inputs, np.array([3]))[0]
        np.testing.assert_array_equal(found, np.asarray(expected.convert("RGB")))
    assert isinstance(data.inputs, rows.LazyImages)


def damage_idx(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (IMAGES, lambda data: b"\1" + data[1:], "is no IDX file"),
        (IMAGES, lambda data: b"", "(none)"),
        (IMAGES, lambda data: data[:2] + b"\x0d" + data[3:], "0x0d: only unsigned bytes"),
        (IMAGES, lambda data: data[:3] + b"\1" + data[4:], "has 1 dimensions, and 3"),
        (IMAGES, lambda data: data[:-1], "cut short"),
        (IMAGES, lambda data: data[:4] + b"\xff" * 12 + data[16:], "cut short"),
        (IMAGES, lambda data: data + b"\0", "goes on after"),
        (IMAGES, lambda data: idx_bytes(np.zeros((0, 6, 4), np.uint8)), "is empty"),
        (LABELS, lambda data: idx_bytes(np.zeros(19, np.uint8)), "19 labels"),
        (LABELS, lambda data: idx_bytes(np.full(20, 10, np.uint8)), "label 0 is 10"),
    ],
)
def test_a_damaged_idx_file_is_named_in_one_line(name, change, says, tmp_path):
    write_idx(tmp_path)
    damage_idx(tmp_path, name, change)
    for on_bad_example in ("error", "skip"):
        refused(f"mnist:{tmp_path}", name, says, on_bad_example=on_bad_example)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: data[:-8] + bytes(8), "damaged"),
        (lambda data: b"no gzip" + data, "damaged"),
    ],
)
def test_a_damaged_gzip_file_is_named_in_one_line(change, says, tmp_path):
    write_idx(tmp_path, zipped=(IMAGES,))
    damage_idx(tmp_path, f"{IMAGES}.gz", change)
    refused(f"idx:{tmp_path}", f"{IMAGES}.gz", says)


def test_missing_idx_files_and_folders_are_named(tmp_path):
    refused(f"idx:{tmp_path / 'nowhere'}", "nowhere", "train-images-idx3-ubyte")
    refused(f"idx:{tmp_path}", "has no train-images-idx3-ubyte")
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(f"idx:{tmp_path}", "has no t10k-labels-idx1-ubyte")


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    write_idx(inner)
    (inner / IMAGES).rename(tmp_path / IMAGES)
    os.symlink(tmp_path / IMAGES, inner / IMAGES)
    refused(f"idx:{inner}", IMAGES, "leads out of")


@pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_of_the_debian_package_has_its_published_sizes():
    data = load(f"fashion_mnist:{FASHION_MNIST}")
    assert data.inputs.shape == (60000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(data.labels), [6000] * 10)
    np.testing.assert_array_equal(np.bincount(data.test_labels), [1000] * 10)
    assert data.class_names[data.labels[0]] == "Ankle boot" and data.flip
    assert round(data.inputs.mean(), 2) == 72.94


# CIFAR


def cifar_data(kind):
    """(images [n, 32, 32, 3], labels [n]) of the training batches and the test batch, in turn."""
    batches = 5 if kind == "cifar10" else 1
    n = 4 if kind == "cifar10" else 20
    classes = 10 if kind == "cifar10" else 100
    data = []
    for seed in range(batches + 1):
        size = n if seed < batches else 4
        labels = np.random.default_rng(seed).integers(0, classes, size)
        data.append((random_images(seed, size, 32, 32, 3), labels))
    return data


def planes(image):
    """The 3,072 bytes of an image: red, green, blue, each row by row."""
    return b"".join(image[..., channel].tobytes() for channel in range(3))


def cifar_binary(kind):
    """The files of the binary archive, by their paths."""
    folder = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[kind]
    train = [f"data_batch_{i}.bin" for i in range(1, 6)] if kind == "cifar10" else ["train.bin"]
    test = "test_batch.bin" if kind == "cifar10" else "test.bin"
    meta = "batches.meta.txt" if kind == "cifar10" else "fine_label_names.txt"
    coarse = b"" if kind == "cifar10" else b"\7"
    names = class_names(kind)
    files = {f"{folder}/{meta}": ("\n".join(names) + "\n\n").encode()}
    for name, (images, labels) in zip([*train, test], cifar_data(kind), strict=True):
        files[f"{folder}/{name}"] = b"".join(
            coarse + bytes([label]) + planes(image)
            for image, label in zip(images, labels, strict=True)
        )
    return files


def class_names(kind):
    return [f"thing {c}" for c in range(10 if kind == "cifar10" else 100)]


def cifar_python(kind, protocol):
    """The files of the python archive, by their paths."""
    folder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[kind]
    train = [f"data_batch_{i}" for i in range(1, 6)] if kind == "cifar10" else ["train"]
    test = "test_batch" if kind == "cifar10" else "test"
    meta = "batches.meta" if kind == "cifar10" else "meta"
    key = b"labels" if kind == "cifar10" else b"fine_labels"
    names_key = b"label_names" if kind == "cifar10" else b"fine_label_names"
    names = [name.encode() for name in class_names(kind)]
    files = {f"{folder}/{meta}": pickle.dumps({names_key: names}, protocol)}
    for name, (images, labels) in zip([*train, test], cifar_data(kind), strict=True):
        pixels = np.stack([np.frombuffer(planes(image), np.uint8) for image in images])
        batch = {b"data": pixels, key: labels.tolist(), b"filenames": [b"a.png"] * len(labels)}
        files[f"{folder}/{name}"] = pickle.dumps(batch, protocol)
    return files


def assert_is_cifar(data, kind):
    *train, test = cifar_data(kind)
    np.testing.assert_array_equal(data.inputs, np.concatenate([images for images, _ in train]))
    np.testing.assert_array_equal(data.labels, np.concatenate([labels for _, labels in train]))
    np.testing.assert_array_equal(data.test_inputs, test[0])
    np.testing.assert_array_equal(data.test_labels, test[1])
    assert data.class_names == class_names(kind) and data.flip


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["binary", "python 2", "python 4"])
def test_a_cifar_archive_is_read_in_the_order_of_its_batches(kind, form, tmp_path):
    files = cifar_binary(kind) if form == "binary" else cifar_python(kind, int(form[-1]))
    # Members in another order than their numbers, as in the real archives.
    shuffled = dict(sorted(files.items(), key=lambda item: item[0][::-1]))
    path = tar_of(tmp_path / "renamed.tar.gz", shuffled)
    assert_is_cifar(load(f"{kind}:{path}"), kind)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_a_cifar_folder_is_read_wherever_it_lies_the_binary_form_first(kind, tmp_path):
    broken_python = {name: b"never read" for name in cifar_python(kind, 2)}
    for name, data in {**cifar_binary(kind), **broken_python}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert_is_cifar(load(f"{kind}:{tmp_path}"), kind)
    inner = tmp_path / next(iter(cifar_binary(kind))).split("/")[0]
    assert_is_cifar(load(f"{kind}:{inner}"), kind)
    outer = tmp_path / "outer"
    outer.mkdir()
    archive = {"cifar10": "cifar-10", "cifar100": "cifar-100"}[kind] + "-binary.tar.gz"
    tar_of(outer / archive, cifar_binary(kind))
    assert_is_cifar(load(f"{kind}:{outer}"), kind)


def test_cifar_without_a_file_of_names_has_the_published_ones(tmp_path):
    for kind in ("cifar10", "cifar100"):
        files = {n: d for n, d in cifar_binary(kind).items() if not n.endswith(".txt")}
        names = load(f"{kind}:{tar_of(tmp_path / f'{kind}.tar', files, 'w')}").class_names
        assert len(set(names)) == len(class_names(kind)) and names == sorted(names)
        assert {"airplane", "truck"} <= set(names) or {"apple", "worm"} <= set(names)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_asks_for_anything_but_arrays_is_refused_and_runs_nothing(tmp_path):
    for value in (Malicious(tmp_path / "run"), {b"data": np.array([Malicious(tmp_path / "run")])}):
        files = cifar_python("cifar10", 2)
        files["cifar-10-batches-py/data_batch_2"] = pickle.dumps(value, 2)
        path = tar_of(tmp_path / "a.tar.gz", files)
        refused(f"cifar10:{path}", "data_batch_2", "mkdir")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("cifar-10-batches-bin/data_batch_3.bin", lambda data: None, "holds no data_batch_3.bin"),
        ("cifar-10-batches-bin/test_batch.bin", lambda data: data[:-1], "no multiple of the 3073"),
        ("cifar-10-batches-bin/data_batch_4.bin", lambda data: data[3073:], "3 images beside"),
        ("cifar-10-batches-bin/data_batch_1.bin", lambda data: b"\x0a" + data[1:], "is 10, and"),
        ("cifar-10-batches-bin/batches.meta.txt", lambda data: b"a\nb\n", "names 2 classes"),
        ("cifar-10-batches-py/data_batch_5", lambda data: data[:-9], "data_batch_5"),
        ("cifar-10-batches-py/data_batch_5", lambda data: pickle.dumps([1], 2), "data_batch_5"),
        ("cifar-10-batches-py/test_batch", lambda data: pickle.dumps({b"data": 1}, 2), "'labels'"),
    ],
)
def test_a_cifar_archive_with_a_wrong_file_is_refused(file, change, says, tmp_path):
    files = cifar_binary("cifar10") if "-bin/" in file else cifar_python("cifar10", 2)
    files[file] = change(files[file])
    kept = {name: data for name, data in files.items() if data is not None}
    refused(f"cifar10:{tar_of(tmp_path / 'a.tar.gz', kept)}", "a.tar.gz", says)


@pytest.mark.parametrize("mode", ["w:gz", "w", "w:xz"])
def test_an_archive_that_is_cut_short_or_none_is_refused(mode, tmp_path):
    path = tar_of(tmp_path / "a.tar", cifar_binary("cifar10"), mode)
    whole = path.read_bytes()
    for share in (0.5, 0.1, 0.001):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(f"cifar10:{path}", "a.tar")
    path.write_bytes(b"")
    refused(f"cifar10:{path}", "a.tar")


def test_a_flipped_byte_is_found_by_the_checksum_of_gzip(tmp_path):
    path = tmp_path / "a.tar.gz"
    data = bytearray(
        gzip.compress(tar_of(tmp_path / "a", cifar_binary("cifar10"), "w").read_bytes())
    )
    data[-5] ^= 1  # within the checksum itself, so that nothing else can find it
    path.write_bytes(data)
    refused(f"cifar10:{path}", "a.tar.gz", "damaged")


def test_members_of_an_archive_that_are_links_or_lead_out_of_it_are_refused(tmp_path):
    path = tar_of(tmp_path / "a.tar.gz", {"../data_batch_1.bin": b"x"})
    refused(f"cifar10:{path}", "../data_batch_1.bin", "no plain file")
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    refused(f"cifar10:{path}", "data_batch_1.bin", "no plain file")


def test_a_place_without_cifar_says_what_belongs_there(tmp_path):
    refused(f"cifar10:{tmp_path}", str(tmp_path), "cifar-10-binary.tar.gz")
    refused(f"cifar100:{tmp_path / 'x'}", "There is no", "cifar-100-binary.tar.gz")


def test_ids_of_another_project_choose_the_images_of_the_archive_that_they_mean(tmp_path):
    path = tar_of(tmp_path / "a.tar.gz", cifar_binary("cifar10"))
    ids = [0, 7, 19]
    (tmp_path / "x-label.json").write_text(json.dumps({"distribution": [1.0] * 10, "label": ids}))
    published_splits.write_ids(
        tmp_path / "ids.txt", published_splits.read_fixmatch(tmp_path / "x-label.json"), "of a test"
    )
    settings = config.DataConfig(labeled_ids=str(tmp_path / "ids.txt"))
    name = sources.parse_name(f"cifar10:{path}.1@3-0")
    data = sources.load(name, settings)
    np.testing.assert_array_equal(splits.draw(data, name, settings).labeled, ids)
    batches = cifar_data("cifar10")
    expected = [batches[i // 4][0][i % 4] for i in ids]
    np.testing.assert_array_equal(data.inputs[ids], expected)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    path = tar_of(tmp_path / "a.tar.gz", cifar_binary("cifar10"))

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(tarfile, "open", denied)
    refused(f"cifar10:{path}", "a.tar.gz cannot be read: Permission denied.")


# SVHN


def write_mat(path, seed, labels, **changes):
    labels = np.asarray(labels, np.uint8)
    images = random_images(seed, len(labels), 32, 32, 3)
    content = {"X": images.transpose(1, 2, 3, 0), "y": labels[:, np.newaxis], **changes}
    scipy_io.savemat(path, content, do_compression=True)
    return images


def test_svhn_is_read_with_the_digit_0_for_the_label_10_and_extra_after_train(tmp_path):
    train = write_mat(tmp_path / "train_32x32.mat", 0, [10, 1, 9, 10, 2])
    test = write_mat(tmp_path / "test_32x32.mat", 1, [3, 10])
    extra = write_mat(tmp_path / "extra_32x32.mat", 2, [8, 10, 4])
    data = load(f"svhn_cropped:{tmp_path}")
    np.testing.assert_array_equal(data.inputs, train)
    np.testing.assert_array_equal(data.labels, [0, 1, 9, 0, 2])
    np.testing.assert_array_equal(data.test_inputs, test)
    np.testing.assert_array_equal(data.test_labels, [3, 0])
    assert data.class_names == list("0123456789") and not data.flip
    assert data.inputs.flags.c_contiguous
    both = load(f"svhn_cropped_extra:{tmp_path}")
    np.testing.assert_array_equal(both.inputs, np.concatenate([train, extra]))
    np.testing.assert_array_equal(both.labels, [0, 1, 9, 0, 2, 8, 0, 4])
    np.testing.assert_array_equal(both.test_inputs, test)


def test_svhn_files_that_are_missing_or_damaged_are_named(tmp_path):
    train = tmp_path / "train_32x32.mat"
    write_mat(train, 0, [1, 2])
    refused(f"svhn_cropped:{tmp_path}", "There is no", "test_32x32.mat")
    write_mat(tmp_path / "test_32x32.mat", 1, [3])
    refused(f"svhn_cropped_extra:{tmp_path}", "There is no", "extra_32x32.mat")
    whole = train.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:100], b"", b"not MATLAB at all" * 20):
        train.write_bytes(data)
        refused(f"svhn_cropped:{tmp_path}", "train_32x32.mat")
    for labels, changes, says in (
        ([0, 1], {}, "label 0 is 0"),
        ([1, 11], {}, "label 1 is 11"),
        ([1, 2], {"y": np.ones((3, 1), np.uint8)}, "y uint8 (3, 1)"),
        ([1, 2], {"X": np.zeros((32, 32, 3, 2))}, "X float64"),
        ([1, 2], {"X": np.zeros((2, 32, 32, 3), np.uint8)}, "X uint8 (2, 32, 32, 3)"),
    ):
        write_mat(train, 0, labels, **changes)
        refused(f"svhn_cropped:{tmp_path}", "train_32x32.mat", says)


# STL-10


def stl10_files():
    """The files of the archive by name; the images [n, 96, 96, 3] of each part."""
    images = {
        part: random_images(seed, n, 96, 96, 3)
        for seed, (part, n) in enumerate({"train": 6, "unlabeled": 5, "test": 3}.items())
    }
    files = {
        # Channel by channel, each column by column.
        f"{part}_X.bin": b"".join(i[..., c].T.tobytes() for i in of_part for c in range(3))
        for part, of_part in images.items()
    }
    files["train_y.bin"], files["test_y.bin"] = bytes([1, 10, 3, 4, 5, 1]), bytes([2, 9, 10])
    files["class_names.txt"] = "\n".join(f"kind{c}" for c in range(10)).encode()
    files["fold_indices.txt"] = b"0 1 \n2 3 \n"
    return files, images


@pytest.mark.parametrize("form", ["archive", "folder", "folder around it", "lazy"])
def test_stl10_has_its_unlabeled_images_after_the_labeled_ones(form, tmp_path):
    files, images = stl10_files()
    place, settings = tmp_path, {}
    if form == "archive":
        place = tar_of(tmp_path / "a.tar.gz", {f"stl10_binary/{n}": d for n, d in files.items()})
    else:
        folder = tmp_path / "stl10_binary"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        place = tmp_path if form == "folder around it" else folder
        settings = {"max_memory_gb": 0.0} if form == "lazy" else {}
    data = load(f"stl10:{place}", **settings)
    assert isinstance(data.inputs, rows.LazyImages) == (form == "lazy")
    expected = np.concatenate([images["train"], images["unlabeled"]])
    np.testing.assert_array_equal(rows.in_memory(data.inputs), expected)
    np.testing.assert_array_equal(data.labels, [0, 9, 2, 3, 4, 0, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(data.parts, [0] * 6 + [1] * 5)
    np.testing.assert_array_equal(rows.in_memory(data.test_inputs), images["test"])
    np.testing.assert_array_equal(data.test_labels, [1, 8, 9])
    assert data.class_names == [f"kind{c}" for c in range(10)] and data.flip and not data.skipped


def test_stl10_lazily_read_has_another_digest_where_an_image_differs_but_not_for_a_copy(tmp_path):
    files, _ = stl10_files()
    digests = []
    for number, change in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        images = bytearray(files["train_X.bin"])
        images[100_000] ^= change
        for name, data in {**files, "train_X.bin": images}.items():
            (folder / name).write_bytes(data)
        digests.append(load(f"stl10:{folder}", max_memory_gb=0.0).inputs.digest())
    assert digests[0] == digests[1] != digests[2]


def test_stl10_is_scaled_where_image_size_says_so(tmp_path):
    files, images = stl10_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tar_of(tmp_path / "a.tar.gz", files)
    expected = Image.fromarray(images["unlabeled"][1]).resize((32, 32), Image.Resampling.BILINEAR)
    for place in (tmp_path, tmp_path / "a.tar.gz"):
        data = load(f"stl10:{place}", image_size=(32,))
        assert data.inputs.shape == (11, 32, 32, 3)
        np.testing.assert_array_equal(data.inputs[7], np.asarray(expected))


@pytest.mark.parametrize("in_archive", [True, False])
@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("train_X.bin", lambda data: data[:-1], "no multiple of the 27648"),
        ("train_X.bin", lambda data: b"", "has 0 bytes"),
        ("train_y.bin", lambda data: data[:-1], "5 labels"),
        ("test_y.bin", lambda data: b"\0" + data[1:], "label 0 of test_y.bin is 0"),
        ("train_y.bin", lambda data: data[:-1] + b"\x0b", "label 5 of train_y.bin is 11"),
        ("class_names.txt", lambda data: b"one two", "names 2 classes"),
        ("train_y.bin", lambda data: None, "holds no train_y.bin"),
        ("test_X.bin", lambda data: None, "holds no test_X.bin"),
    ],
)
def test_stl10_with_a_wrong_file_is_refused(in_archive, file, change, says, tmp_path):
    files, _ = stl10_files()
    files[file] = change(files[file])
    kept = {name: data for name, data in files.items() if data is not None}
    place = tmp_path / "stl10"
    if in_archive:
        tar_of(place, kept)
    else:
        place.mkdir()
        for name, data in kept.items():
            (place / name).write_bytes(data)
    refused(f"stl10:{place}", "stl10", says)


def test_an_archive_of_stl10_that_memory_may_not_hold_is_refused_with_the_remedy(tmp_path):
    path = tar_of(tmp_path / "a.tar.gz", stl10_files()[0])
    refused(f"stl10:{path}", "max_memory_gb=1e-05", "unpack", max_memory_gb=1e-5)


# TensorFlow Datasets


def prepared(folder, *, name="tiny_birds", splits=None, sizes=((8, 6),), dtype=np.uint8):
    """A set that TFDS itself prepares in `folder`; gives the images and labels of each split."""
    import tensorflow_datasets as tfds

    splits = splits or {"train": 5, "test": 2, "validation": 3, "unlabelled": 4}
    one_size = sizes[0] if len(sizes) == 1 else (None, None)

    class TinyBirds(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = folder

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(
                    {
                        "image": tfds.features.Image(shape=(*one_size, 3), dtype=dtype),
                        "label": tfds.features.ClassLabel(names=["crow", "owl"]),
                        "wing": tfds.features.ClassLabel(num_classes=3),
                        "size": tfds.features.Scalar(np.int32),
                    }
                ),
            )

        def _split_generators(self, _):
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split):
            for number in range(splits[split]):
                size = sizes[number % len(sizes)]
                image = random_images(number + 10 * len(split), *size, 3).astype(dtype)
                label = -1 if split == "unlabelled" else number % 2
                features = {"image": image, "label": label, "wing": number % 3, "size": number}
                yield number, features

    TinyBirds.name = name
    builder = TinyBirds(data_dir=str(folder))
    builder.download_and_prepare()
    return {split: list(tfds.as_numpy(builder.as_dataset(split=split))) for split in splits}


def load_tfds(folder, name="tiny_birds", **settings):
    return load(f"tfds:{name}", data_dir=str(folder), **settings)


def test_splits_of_a_tfds_set_are_the_parts_in_the_order_of_its_files(tmp_path):
    held = prepared(tmp_path)
    for name in ("tiny_birds", "tiny_birds:1.0.0"):
        data = load_tfds(tmp_path, name)
        in_order = [e for split in ("train", "unlabelled", "validation") for e in held[split]]
        np.testing.assert_array_equal(data.inputs, np.stack([e["image"] for e in in_order]))
        np.testing.assert_array_equal(data.labels, [e["label"] for e in in_order])
        np.testing.assert_array_equal(data.parts, [0] * 5 + [1] * 4 + [2] * 3)
        np.testing.assert_array_equal(data.test_labels, [e["label"] for e in held["test"]])
        assert data.class_names == ["crow", "owl"]
    other = load_tfds(tmp_path, label_column="wing")
    np.testing.assert_array_equal(other.labels[:5], [e["wing"] for e in held["train"]])
    assert other.class_names == ["0", "1", "2"]


def test_tfds_images_that_differ_in_size_need_image_size(tmp_path):
    held = prepared(tmp_path, sizes=((8, 6), (12, 12)))
    refused("tfds:tiny_birds", "differ in size", "image_size", data_dir=str(tmp_path))
    data = load_tfds(tmp_path, image_size=(6,), image_channels=1)
    assert data.inputs.shape == (12, 6, 6, 1)
    for found, example in zip(data.inputs, held["train"], strict=False):
        image = Image.fromarray(example["image"])
        box = (0, 1, 6, 7) if image.size == (6, 8) else None
        expected = image.convert("L").resize((6, 6), Image.Resampling.BILINEAR, box=box)
        np.testing.assert_array_equal(found[..., 0], np.asarray(expected))


def test_prepared_files_of_a_tfds_set_can_be_read_as_records(tmp_path):
    held = prepared(tmp_path)
    data = load(f"tfrecord:{tmp_path}/tiny_birds/1.0.0")
    np.testing.assert_array_equal(data.inputs[:5], np.stack([e["image"] for e in held["train"]]))
    np.testing.assert_array_equal(data.labels[5:9], [-1] * 4)
    assert data.class_names == ["crow", "owl"] and len(data.test_labels) == 2


def test_a_tfds_set_that_memory_may_not_hold_is_refused_with_the_remedies(tmp_path):
    prepared(tmp_path)
    refused(
        "tfds:tiny_birds",
        "max_memory_gb=1e-07",
        f"tfrecord:{tmp_path}/tiny_birds",
        data_dir=str(tmp_path),
        max_memory_gb=1e-7,
    )


def test_tfds_sets_that_cannot_be_used_are_refused(tmp_path):
    here = {"data_dir": str(tmp_path)}
    refused("tfds:cifra10", "'cifra10'", "did you mean cifar10", **here)
    refused("tfds:cifar10:9.9.9", "9.9.9", "only: 3.0.2", **here)
    refused("tfds:cifar10/none", "'cifar10/none'", "BuilderConfig none not found", **here)
    refused("tfds:a b", "'a b'", **here)
    prepared(tmp_path, name="no_train", splits={"test": 2})
    refused("tfds:no_train", "no split 'train', only test", **here)
    prepared(tmp_path, name="deep", splits={"train": 2}, dtype=np.uint16)
    refused("tfds:deep", "uint16", **here)
    prepared(tmp_path)
    refused(
        "tfds:tiny_birds", "no Image called 'photo'", "size (Scalar)", **here, image_column="photo"
    )
    refused("tfds:tiny_birds", "no ClassLabel called 'size'", **here, label_column="size")
    for path in (tmp_path / "tiny_birds" / "1.0.0").glob("*-train.tfrecord*"):
        path.write_bytes(path.read_bytes()[:-9])
    refused("tfds:tiny_birds", "cannot be read", str(tmp_path), "prepare", **here)


def test_a_bad_image_of_a_tfds_set_is_left_out_where_bad_examples_are_skipped(tmp_path):
    import tensorflow as tf

    held = prepared(tmp_path, splits={"train": 3})
    (path,) = (tmp_path / "tiny_birds" / "1.0.0").glob("*-train.tfrecord*")
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(records[0])
        writer.write(records[1].replace(b"PNG", b"GNP"))
        writer.write(records[2])
    refused("tfds:tiny_birds", "train example 1", data_dir=str(tmp_path), image_size=(8, 6))
    data = load_tfds(tmp_path, image_size=(8, 6), on_bad_example="skip")
    expected = np.stack([held["train"][row]["image"] for row in (0, 2)])
    np.testing.assert_array_equal(data.inputs, expected)
    assert len(data.skipped) == 1 and "train example 1" in data.skipped[0]


def test_stl10_and_svhn_extra_of_tfds_have_all_their_splits():
    import tensorflow_datasets as tfds

    asked = []
    with tfds.testing.mock_data(num_examples=6):
        as_dataset = tfds.core.DatasetBuilder.as_dataset

        def recording(self, split=None, **arguments):
            asked.append((self.name, split))
            return as_dataset(self, split=split, **arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tfds.core.DatasetBuilder, "as_dataset", recording)
            stl10, svhn = load("stl10"), load("svhn_cropped_extra")
    np.testing.assert_array_equal(stl10.parts, [0] * 6 + [1] * 6)
    assert stl10.inputs.shape == (12, 96, 96, 3) and svhn.inputs.shape == (6, 32, 32, 3)
    assert asked == [
        ("stl10", "train"),
        ("stl10", "unlabelled"),
        ("stl10", "test"),
        ("svhn_cropped", "train+extra"),
        ("svhn_cropped", "test"),
    ]


def test_a_bucket_is_handed_to_tfds_as_it_is(monkeypatch):
    import tensorflow_datasets as tfds

    def builder(name, data_dir):
        raise RuntimeError(f"asked for {name} in {data_dir}")

    monkeypatch.setattr(tfds, "builder", builder)
    refused("tfds:mnist", "asked for mnist in gs://bucket/sets)", data_dir="gs://bucket/sets")


def test_a_tfds_set_without_the_inputs_named_is_refused_before_it_is_downloaded():
    refused(
        "tfds:imdb_reviews",
        "no Image called 'image' nor Text called 'review'",
        "text (Text), label (ClassLabel)",
        text_column="review",
    )
