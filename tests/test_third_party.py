"""Split files of other projects, written here in their published formats."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from ssl_influence.data import splits
from third_party import published_splits as published

ROOT = pathlib.Path(__file__).resolve().parents[1]


def convert(tmp_path, *arguments):
    output = tmp_path / "ids.txt"
    result = subprocess.run(
        [sys.executable, "-m", "third_party.published_splits", f"--output={output}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result, output


def write_fixmatch(path, ids):
    # As scripts/create_split.py writes it.
    content = {"distribution": [1.0] * 10, "label": sorted(ids)}
    path.write_text(json.dumps(content, indent=2, sort_keys=True))
    return path


def test_the_command_writes_ids_that_the_library_reads(tmp_path):
    path = write_fixmatch(tmp_path / "cifar10.1@4-label.json", [49999, 0, 17, 3])
    result, output = convert(tmp_path, "--format=fixmatch", f"--input={path}")
    assert result.returncode == 0, result.stderr
    np.testing.assert_array_equal(splits.read_ids(output), [0, 3, 17, 49999])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--format=fixmatch", "--input=nowhere.json"],
            "error: nowhere.json cannot be read: No such",
        ),
        (["--format=stl10_folds", "--input=x"], "needs --fold"),
        (["--format=uda_imdb", "--input=x"], "needs --size"),
        (["--format=usb", "--input=x", "more"], "unexpected argument 'more'"),
    ],
)
def test_the_command_ends_in_one_line_where_it_cannot_work(arguments, says, tmp_path):
    result, output = convert(tmp_path, *arguments)
    assert result.returncode == 1 and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and says in result.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ("[1, 2]", "'label'"),
        ('{"label": {}}', "'label'"),
        ('{"label": [1, true]}', "'label'"),
        ('{"label": [1.5]}', "'label'"),
        ('{"label": []}', "holds no id"),
        ('{"label": [3, -1]}', "-1"),
        ('{"label": [3, 1, 3]}', "id 3 more than once"),
        ("[" * 200_000, "no JSON that can be read"),
        ('{"label": [' + "9" * 5000 + "]}", "digits"),
        ('{"label": [1000000000000000000]}', "more than 18 digits"),
    ],
)
def test_a_file_that_is_none_of_fixmatch_is_refused(content, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(published.SplitError, match=says) as refused:
        published.read_fixmatch(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_ids_are_there_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "ids.txt"
    published.write_ids(path, [10**18 - 1], "the largest")
    np.testing.assert_array_equal(splits.read_ids(path), [10**18 - 1])
    before = path.read_bytes()

    def cut_short():
        yield 1
        raise OSError("no space")

    def replace_fails(*_):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        published.write_ids(path, cut_short(), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_fails)
        with pytest.raises(OSError, match="no space"):
            published.write_ids(path, [1], "")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path / "pipe", tmp_path, pathlib.Path("")):
        with pytest.raises(published.SplitError, match="is not a regular file: name one"):
            published.write_ids(wrong, [1], "")


def test_arrays_of_usb_are_ids_and_pickles_are_refused(tmp_path):
    path = tmp_path / "lb_labels40_1.0_seed0_idx.npy"
    for dtype in (np.int64, np.int32, np.uint16):
        np.save(path, np.array([7, 2, 5], dtype))
        assert published.read_usb(path) == [2, 5, 7]
    whole = path.read_bytes()
    for data in (b"", b"\x93NUMPY", whole[:-1], whole[:40], b"PK\3\4"):
        path.write_bytes(data)
        with pytest.raises(published.SplitError, match="no .npy"):
            published.read_usb(path)
    huge = whole.replace(b"(3,), }" + b" " * 15, b"(3000000000000000,), }")
    assert len(huge) == len(whole) and huge != whole
    for data in (huge, whole.replace(b"}", b" ")):
        path.write_bytes(data)
        with pytest.raises(published.SplitError, match="no .npy") as refused:
            published.read_usb(path)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    np.save(path, np.array([1, 10**18]))
    with pytest.raises(published.SplitError, match="more than 18 digits"):
        published.read_usb(path)
    np.save(path, np.array([1, None]), allow_pickle=True)
    with pytest.raises(published.SplitError, match="no .npy.*"):
        published.read_usb(path)
    for wrong in (np.array([1.0]), np.array([[1]]), np.array(3)):
        np.save(path, wrong)
        with pytest.raises(published.SplitError, match="whole numbers"):
            published.read_usb(path)


def test_a_fold_of_stl10_is_a_line(tmp_path):
    path = tmp_path / "fold_indices.txt"
    path.write_text("0 5 4999 \n7 6 \n\n")
    assert published.read_stl10_fold(path, 0) == [0, 5, 4999]
    assert published.read_stl10_fold(path, 1) == [6, 7]
    for fold, says in ((2, "no fold 2, only 0 to 1"), (-1, "no fold -1")):
        with pytest.raises(published.SplitError, match=says):
            published.read_stl10_fold(path, fold)
    for text in ("x1", "1" * 19, "1" * 5000):
        path.write_text(f"0 {text} 2\n")
        with pytest.raises(published.SplitError, match=f"'{text[:40]}' is no id"):
            published.read_stl10_fold(path, 0)


def test_udas_labeled_reviews_are_the_first_of_each_class(tmp_path):
    path = tmp_path / "train_id_list.txt"
    listed = ["neg_9_1.txt", "unsup_3_0.txt", "neg_4_4.txt", "pos_7_9.txt", "neg_1_1.txt"]
    path.write_text("\n".join([*listed, "pos_2_8.txt", "pos_0_8.txt"]) + "\n")
    assert published.read_uda_imdb(path, 4) == [0, 2, 3, 5]
    names = ["neg/4_4.txt", "train/pos/2_8.txt", "pos_7_9.txt", "neg/1_1.txt", "neg_9_1.txt"]
    assert published.read_uda_imdb(path, 4, names) == [0, 1, 2, 4]
    for size, given, says in (
        (3, None, "even"),
        (0, None, "even"),
        (8, None, "names 3 pos reviews, not 4"),
        (4, names[1:], "'neg_4_4.txt' is not among the 4 names"),
        (4, [*names, "test/neg/4_4.txt"], "names of your reviews: 'neg_4_4.txt' is there 2 times"),
    ):
        with pytest.raises(published.SplitError, match=says):
            published.read_uda_imdb(path, size, given)
    assert published.read_uda_imdb(path, 2, [*names, "neg/1_1.txt"]) == [2, 4]  # not a chosen one
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    result, output = convert(
        tmp_path,
        "--format=uda_imdb",
        f"--input={path}",
        "--size=2",
        f"--names={tmp_path / 'names.txt'}",
    )
    assert result.returncode == 0, result.stderr
    np.testing.assert_array_equal(splits.read_ids(output), [2, 4])
