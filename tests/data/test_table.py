import csv
import io
import os
import random

import numpy as np
import pytest
from PIL import Image

from ssl_influence import config
from ssl_influence.data import names, sources
from ssl_influence.data.readers import table


def read(tmp_path, text, kind="csv", **settings):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    name = names.DatasetName(kind, 1, 1, 1)
    return table.read(name, str(path), config.DataConfig(**settings))


def write_images(folder, *paths):
    """Gray PNGs, the i-th of value i."""
    for value, path in enumerate(paths):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 3), value).save(folder / path)


TEXTS = ['a, "quoted"', "two\nlines", "carriage\r\nreturn", "", "naïve 猫", "tab\there", " space "]


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_is_read_as_the_csv_module_writes_it(tmp_path, end, mark):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end)
    writer.writerows([["label", "text"], *([str(i % 2), text] for i, text in enumerate(TEXTS))])
    found = read(tmp_path, mark + out.getvalue()).parts["train"]
    assert found.inputs.tolist() == TEXTS and found.inputs.dtype == object
    assert found.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert found.names[0] == "line 2" and found.names[2] == "line 5"


def test_in_a_tsv_a_quotation_mark_is_a_character(tmp_path):
    text = 'text\tlabel\n"open\t0\n5" screen, \'ok\'\t1\r\n"both"\t0\r\n\x85 \u2028 \x0b\t1'
    found = read(tmp_path, text, "tsv").parts["train"]
    assert found.inputs.tolist() == ['"open', "5\" screen, 'ok'", '"both"', "\x85 \u2028 \x0b"]
    assert list(found.names) == ["line 2", "line 3", "line 4", "line 5"]


@pytest.mark.parametrize("kind, separator", [("csv", ","), ("tsv", "\t")])
def test_empty_lines_do_not_count_and_the_last_needs_no_end(tmp_path, kind, separator):
    text = "\ntext,label\n\na,x\n\r\n\nb,y".replace(",", separator)
    found = read(tmp_path, text, kind)
    assert found.parts["train"].inputs.tolist() == ["a", "b"]
    assert list(found.parts["train"].names) == ["line 4", "line 7"]


def test_labels_that_are_all_integers_are_sorted_as_numbers(tmp_path):
    found = read(tmp_path, "text,label\na,10\nb,9\nc,-1\nd, 10 \ne,\nf,09\n")
    assert found.class_names == ["-1", "9", "10"]
    assert found.parts["train"].labels.tolist() == [2, 1, 0, 2, -1, 1]


def test_other_labels_are_sorted_as_texts(tmp_path):
    found = read(tmp_path, "text,label\na,10\nb,9\nc,x\nd,é\n")
    assert found.class_names == ["10", "9", "x", "é"]
    assert found.parts["train"].labels.tolist() == [0, 1, 2, 3]


def test_columns_go_by_the_names_in_the_settings(tmp_path):
    text = "id,review,stars,text\n1,good,5,x\n2,bad,1,y\n"
    found = read(tmp_path, text, text_column="review", label_column="stars")
    assert found.parts["train"].inputs.tolist() == ["good", "bad"]
    assert found.class_names == ["1", "5"]


def test_a_table_without_a_header_takes_its_columns_from_the_settings(tmp_path):
    found = read(tmp_path, "5\tgood\n1\tbad\n", "tsv", columns=("label", "text"))
    assert found.parts["train"].inputs.tolist() == ["good", "bad"]
    assert found.parts["train"].labels.tolist() == [1, 0]
    assert list(found.parts["train"].names) == ["line 1", "line 2"]


def test_without_a_label_column_all_is_unlabeled_with_a_warning(tmp_path, caplog):
    found = read(tmp_path, "text,lable\na,1\n")
    assert found.parts["train"].labels.tolist() == [-1] and found.class_names == []
    assert "no column 'label'" in caplog.text and "'lable'" in caplog.text


def test_the_column_part_says_which_part_and_order_stays_within_each(tmp_path):
    text = "part,text,label\ntest,a,x\ntrain,b,x\nval,c,y\ntrain,d,y\nunlabeled,e,\nunlabeled,f,z\n"
    found = read(tmp_path, text)
    inputs = {part: of_part.inputs.tolist() for part, of_part in found.parts.items()}
    assert inputs == {
        "train": ["b", "d"],
        "unlabeled": ["e", "f"],
        "validation": ["c"],
        "test": ["a"],
    }
    assert found.class_names == ["x", "y", "z"] and found.task_classes == 2
    assert found.parts["unlabeled"].labels.tolist() == [-1, 2]
    source = sources.load(sources.parse_name(f"csv:{tmp_path / 'data.csv'}.1@2-0"))
    assert source.strangers.tolist() == [False, False, False, True, False]
    assert source.row_name(2) == "line 6"


def test_all_other_columns_are_a_vector_where_there_is_neither_text_nor_image(tmp_path):
    found = read(tmp_path, "b,label,a,part\n1,0,2.5,train\n-1e3,1, .5 ,test\n")
    train, test = found.parts["train"].inputs, found.parts["test"].inputs
    assert train.dtype == np.float32 and train.tolist() == [[1, 2.5]]
    assert test.tolist() == [[-1000, 0.5]]


def test_images_are_found_beside_the_table_and_sorted_by_path(tmp_path):
    paths = ["b/1.png", "a/2.png", "a-/1.png", "é 1.png"]
    write_images(tmp_path, *paths)
    listed = [f"{path},{label}" for label, path in enumerate(paths)]
    first = None
    for seed in range(3):
        random.Random(seed).shuffle(listed)
        found = read(tmp_path, "\n".join(["image,label", *listed])).parts["train"]
        assert list(found.names) == sorted(paths, key=str.encode)
        assert found.labels.tolist() == [2, 1, 0, 3]
        assert found.inputs.read(np.arange(4))[:, 0, 0, 0].tolist() == [2, 1, 0, 3]
        first = first or found.inputs.digest()
        assert found.inputs.digest() == first


def test_paths_of_images_go_by_the_table_and_not_by_where_we_are(tmp_path, monkeypatch):
    write_images(tmp_path / "data", "a.png")
    (tmp_path / "data" / "list.csv").write_text("image,label\n./a.png,0\n")
    monkeypatch.chdir(tmp_path)
    source = sources.load(sources.parse_name("csv:data/list.csv.1@1-0"))
    assert source.inputs.shape == (1, 3, 3, 1) and list(source.names) == ["a.png"]


def test_an_image_by_a_link_within_the_folder_is_read(tmp_path):
    write_images(tmp_path, "real/1.png")
    os.symlink("real", tmp_path / "linked")
    os.symlink("1.png", tmp_path / "real" / "2.png")
    found = read(tmp_path, "image,label\nlinked/1.png,0\nreal/2.png,1\n").parts["train"]
    assert found.inputs.read(np.arange(2)).tolist() == np.zeros((2, 3, 3, 1)).tolist()


@pytest.mark.parametrize(
    "path", ["../out.png", "a/../../out.png", "{}/out.png", "up/out.png", "o.png"]
)
def test_images_outside_the_folder_are_refused_even_where_bad_examples_are_skipped(tmp_path, path):
    write_images(tmp_path, "out.png", "data/in.png")
    os.symlink("..", tmp_path / "data" / "up")
    os.symlink("../out.png", tmp_path / "data" / "o.png")
    text = f"image,label\nin.png,0\n{path.format(tmp_path)},1\n"
    for choice in ("error", "skip"):
        with pytest.raises(config.ConfigError, match="data.csv, line 3: the image .* lies outside"):
            read(tmp_path / "data", text, on_bad_example=choice)


@pytest.mark.parametrize("kind, separator", [("csv", ","), ("tsv", "\t")])
def test_skipping_leaves_out_each_bad_row_and_no_other(tmp_path, caplog, kind, separator):
    good = [f"text {i},{i % 2}".encode() for i in range(6)]
    bad = [b"caf\xe9,1", b"a,b,c", b"lonely", b"nul\0,1"]
    if kind == "csv":
        bad.append(b'"x"y,1')
    lines = [line for pair in zip(good, bad, strict=False) for line in pair] + good[len(bad) :]
    text = b"\n".join([b"text,label", *lines]).replace(b",", separator.encode())
    found = read(tmp_path, text, kind, on_bad_example="skip").parts["train"]
    assert found.inputs.tolist() == [f"text {i}" for i in range(6)]
    assert found.labels.tolist() == [0, 1, 0, 1, 0, 1]
    lines_left_out = [line.partition("line ")[2].split()[0] for line in found.skipped]
    assert lines_left_out == [str(3 + 2 * i) for i in range(len(bad))]
    assert f"{len(bad)} rows left out" in caplog.text


@pytest.mark.parametrize("column", ["part", "Part", "split", "SPLIT"])
def test_a_column_of_parts_is_known_by_either_name_in_any_case(tmp_path, column):
    found = read(tmp_path, f"text,label,{column}\na,x,Train\nb,y,VAL\nc,x,test\n").parts
    assert {part: examples.inputs.tolist() for part, examples in found.items()} == {
        "train": ["a"],
        "validation": ["b"],
        "test": ["c"],
    }
    with pytest.raises(config.ConfigError, match="'part' and 'Split'"):
        read(tmp_path, "text,part,Split\na,train,test\n")
