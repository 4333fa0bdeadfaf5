"""Trained models for other inputs: loading them, reading inputs, tables and SavedModels."""

import csv
import io
import json
import logging
import os
import pathlib
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from ssl_influence import averages, checkpoints, config
from ssl_influence.data import images, inputs as inputs_lib, tokens
from ssl_influence.models import registry as models
from ssl_influence.serving import classifier as classifier_lib, predictions, reading, saved_model
from tests import isolated
from tests.experiments import text_encoder

GRAY = inputs_lib.InputSpec("image", (4, 6, 1), ("no", "yes"), (2 / 255,), (-1.0,))
COLORED = inputs_lib.InputSpec("image", (4, 6, 3), ("a", "b"), (0.02, 0.01, 0.03), (-1, 0.5, 0))
VECTOR = inputs_lib.InputSpec("vector", (3,), ("left", "right", "up"))
TEXT = inputs_lib.InputSpec("text", (), ("no", "yes"))
AS_THEY_ARE = config.DataConfig()


def settings(**model):
    return config.Config().replace(
        model={"name": "mlp", "hidden_units": (5,), **model}, optimizer={"ema_decay": 0.5}
    )


def write_run(model_dir, run_settings, spec, steps=(10,)):
    """A run's directory whose checkpoints hold random weights, and the model and its average."""
    model = models.build(run_settings.model, spec.shape, len(spec.class_names), 1)
    average = averages.of_model(model, run_settings.optimizer)
    saver = checkpoints.Checkpointer(
        model_dir / "checkpoints", 9, model=model, ema=average, step=tf.Variable(3)
    )
    random = np.random.default_rng(0)
    for step in steps:
        for variable in model.variables:  # Positive, as variances have to be.
            variable.assign(random.uniform(0.1, 1, variable.shape) / variable.shape[-1])
        average.update()
        saver.save(step)
    inputs_lib.write(spec, model_dir / "inputs.json")
    return model, average


def images_of(spec, n=7):
    return np.random.default_rng(1).integers(0, 256, (n, *spec.shape), np.uint8)


def encoded(array, file_format="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array).save(
        file, file_format, **options
    )
    return file.getvalue()


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def mlp_logits(weights, inputs):
    kernel, bias, head_kernel, head_bias = (np.float64(w) for w in weights)
    hidden = np.maximum(inputs.reshape(len(inputs), -1) @ kernel + bias, 0)
    return hidden @ head_kernel + head_bias


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_probabilities_are_those_of_the_weights_in_the_checkpoint(tmp_path, weights):
    model, average = write_run(tmp_path, settings(), COLORED)
    values = model.trainable_variables if weights == "raw" else average.shadow
    pixels = images_of(COLORED)
    normalized = pixels * np.array(COLORED.scale) + np.array(COLORED.offset)
    expected = softmax(mlp_logits([v.numpy() for v in values], normalized))
    loaded = classifier_lib.load(tmp_path, settings(), weights=weights)
    probabilities, best = loaded.predict(pixels)
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    np.testing.assert_array_equal(best, expected.argmax(axis=1))


def test_the_average_may_be_of_batch_norm_statistics_too(tmp_path):
    run_settings = settings(name="wide_resnet", depth=10, width=1, filters=2).replace(
        optimizer={"ema_variables": "all"}
    )
    spec = inputs_lib.InputSpec("image", (8, 8, 1), ("a", "b", "c"), (2 / 255,), (-1.0,))
    model, average = write_run(tmp_path, run_settings, spec)
    pixels = images_of(spec)
    with average.swapped():
        expected = softmax(model(pixels * np.float32(2 / 255) - 1, training=False)[1].numpy())
    found, _ = classifier_lib.load(tmp_path, run_settings).predict(pixels)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    raw, _ = classifier_lib.load(tmp_path, run_settings, weights="raw").predict(pixels)
    assert np.abs(raw - expected).max() > 1e-3


def test_a_binary_head_gives_the_sigmoid_of_its_one_number(tmp_path):
    run_settings = settings(head="binary")
    model, _ = write_run(tmp_path, run_settings, GRAY)
    pixels = images_of(GRAY)
    normalized = pixels * np.float64(GRAY.scale) + GRAY.offset
    f = mlp_logits([v.numpy() for v in model.trainable_variables], normalized)[:, 0]
    expected = 1 / (1 + np.exp(-f))
    found, best = classifier_lib.load(tmp_path, run_settings, weights="raw").predict(pixels)
    np.testing.assert_allclose(found, np.stack([expected, 1 - expected], 1), atol=1e-6)
    np.testing.assert_array_equal(best, f < 0)


def test_a_checkpoint_is_chosen_by_its_step_and_is_else_the_newest(tmp_path):
    model, _ = write_run(tmp_path, settings(), VECTOR, steps=(10, 20))
    vectors = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    newest, _ = classifier_lib.load(tmp_path, settings(), weights="raw").predict(vectors)
    np.testing.assert_allclose(newest, softmax(model(vectors)[1].numpy()), atol=1e-6)
    second, first = (
        classifier_lib.load(tmp_path, settings(), step=step, weights="raw").predict(vectors)[0]
        for step in (20, 10)
    )
    np.testing.assert_array_equal(second, newest)
    assert np.abs(first - newest).max() > 1e-3
    # One that training is about to write: the data are there, the index is empty.
    for kind, content in (("index", b""), ("data-00000-of-00001", b"0" * 99)):
        (tmp_path / "checkpoints" / f"ckpt-30.{kind}").write_bytes(content)
    again, _ = classifier_lib.load(tmp_path, settings(), weights="raw").predict(vectors)
    np.testing.assert_array_equal(again, newest)
    with pytest.raises(config.ConfigError, match="no checkpoint of step 15: there are 10, 20, 30"):
        classifier_lib.load(tmp_path, settings(), step=15)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="inputs.json, which says what the model takes"):
        classifier_lib.load(tmp_path, settings())
    inputs_lib.write(VECTOR, tmp_path / "inputs.json")
    with pytest.raises(config.ConfigError, match="holds no checkpoint: train there first"):
        classifier_lib.load(tmp_path, settings())
    with pytest.raises(config.ConfigError, match="weights='best' is not one of ema, raw"):
        classifier_lib.load(tmp_path, settings(), weights="best")
    write_run(tmp_path, settings(), VECTOR)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit"):
        classifier_lib.load(tmp_path, settings(hidden_units=(6,)))
    inputs_lib.write(inputs_lib.InputSpec("text", (), ("a", "b")), tmp_path / "inputs.json")
    with pytest.raises(config.ConfigError, match="is of texts, and not of this run"):
        classifier_lib.load(tmp_path, settings())


def read(paths, spec, data=AS_THEY_ARE, resize=False, batch_size=2, on_bad_example="error"):
    """Names, and inputs as one array."""
    parts = reading.find(paths, spec, data, resize=resize)
    found = list(reading.batches(parts, batch_size, on_bad_example))
    assert all(len(names) == len(inputs) <= batch_size for names, inputs in found)
    return sum((names for names, _ in found), []), np.concatenate([x for _, x in found])


def test_files_folders_and_arrays_are_read_in_turn(tmp_path):
    pixels = images_of(GRAY)
    (tmp_path / "f/b").mkdir(parents=True)
    (tmp_path / "f/.hidden").mkdir()
    places = ["single", "f/B.png", "f/a.PNG", "f/b/10.png", "f/b/9.png"]
    for place, image in zip(places, pixels, strict=False):
        (tmp_path / place).write_bytes(encoded(image))
    (tmp_path / "f/notes.txt").write_text("no image")
    (tmp_path / "f/.hidden/c.png").write_text("no image")
    np.savez(tmp_path / "two.npz", pixels[5:, ..., 0])
    names, found = read([tmp_path / name for name in ("single", "f", "two.npz")], GRAY)
    expected = [*places, "two.npz[0]", "two.npz[1]"]
    assert names == [str(tmp_path / name) for name in expected]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, pixels)


def test_images_of_another_shape_are_named_or_brought_to_it(tmp_path):
    large = images_of(inputs_lib.InputSpec("image", (9, 11, 1), ()), 2)
    path, arrays = tmp_path / "large.png", tmp_path / "large.npz"
    path.write_bytes(encoded(large[0]))
    np.savez(arrays, images=large, other=np.zeros(3))
    for place in (path, arrays):
        with pytest.raises(config.ConfigError) as refused:
            read([place], GRAY)
        for part in (str(place), "9x11 (height x width) with 1 channel,", "4x6", "--resize"):
            assert part in str(refused.value)
    # The first as the run's own settings have it, the second as --resize has it.
    at_training = config.DataConfig(image_size=(4, 6), image_channels=3)
    expected = images.decode(path.read_bytes(), "", at_training)
    for options in ({"data": at_training}, {"resize": True}):
        _, (found, first, _) = read([path, arrays], COLORED, **options)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(first, expected)


def test_bad_images_end_reading_or_are_left_out_and_counted(tmp_path, caplog):
    pixels = images_of(GRAY, 5)
    for i, image in enumerate(pixels):
        (tmp_path / f"{i}.png").write_bytes(encoded(image))
    (tmp_path / "1.png").write_bytes(encoded(pixels[1])[:-30])
    (tmp_path / "3.png").write_bytes(b"")
    with pytest.raises(config.ConfigError, match="1.png is damaged or cut short"):
        read([tmp_path], GRAY)
    with caplog.at_level(logging.WARNING):
        names, found = read([tmp_path], GRAY, on_bad_example="skip")
    assert [pathlib.Path(name).name for name in names] == ["0.png", "2.png", "4.png"]
    np.testing.assert_array_equal(found, pixels[::2])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3 and messages[-1] == "2 of 5 inputs were left out."
    assert "1.png is damaged" in messages[0] and "3.png is empty" in messages[1]
    with pytest.raises(config.ConfigError, match="None of 2 inputs"):
        read([tmp_path / "1.png", tmp_path / "3.png"], GRAY, on_bad_example="skip")


def test_nothing_outside_a_folder_is_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(encoded(images_of(GRAY)[0]))
    (tmp_path / "in/link.png").symlink_to(tmp_path / "out.png")
    with pytest.raises(config.ConfigError, match="link.png.* leads out of the folder"):
        read([tmp_path / "in"], GRAY)


def test_vectors_are_rows_of_an_array_of_numbers(tmp_path, caplog):
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    np.savez(tmp_path / "v.npz", x=vectors, y=np.arange(5))
    names, found = read([tmp_path / "v.npz"], VECTOR)
    assert names[4] == f"{tmp_path / 'v.npz'}[4]" and found.dtype == np.float32
    np.testing.assert_array_equal(found, vectors.astype(np.float32))
    vectors[3, 1], vectors[4, 0] = np.nan, 1e300
    np.savez(tmp_path / "v.npz", vectors)
    with pytest.raises(config.ConfigError, match=r"v.npz\[3\] .*not finite"):
        read([tmp_path / "v.npz"], VECTOR)
    _, found = read([tmp_path / "v.npz"], VECTOR, on_bad_example="skip")
    np.testing.assert_array_equal(found, vectors[:3].astype(np.float32))
    assert "2 of 5 inputs were left out." in caplog.text


ODD = ["two\twords", "", "  ", "naïve 👍🏽", "好电影", "שלום \u202eab", "a\x01\x85b\u2028c"]


def test_texts_are_the_lines_of_files_the_files_of_folders_and_the_rows_of_tables(tmp_path):
    for name, end, mark in (("unix.txt", "\n", ""), ("windows", "\r\n", "\ufeff")):
        (tmp_path / name).write_bytes((mark + end.join([*ODD, ""])).encode())
        names, found = read([tmp_path / name], TEXT)
        assert found.dtype == object and found.tolist() == ODD
        assert names == [f"{tmp_path / name}, line {i}" for i in range(1, len(ODD) + 1)]
    (tmp_path / "last").write_bytes(b"no end of line\0")
    assert read([tmp_path / "last"], TEXT)[1].tolist() == ["no end of line\0"]
    (tmp_path / "folder/b").mkdir(parents=True)
    for place, text in (("a.txt", "\ufeffone\r\ntwo\n"), ("b/empty.txt", ""), ("c.md", "no")):
        (tmp_path / "folder" / place).write_bytes(text.encode())
    names, found = read([tmp_path / "folder"], TEXT)
    assert names == [str(tmp_path / "folder" / place) for place in ("a.txt", "b/empty.txt")]
    assert found.tolist() == ["one\r\ntwo\n", ""]
    with (tmp_path / "table.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([("stars", "review"), *((5, text) for text in [*ODD, "a\nb"])])
    of_reviews = config.DataConfig(text_column="review")
    names, found = read([tmp_path / "table.csv"], TEXT, of_reviews)
    assert found.tolist() == [*ODD, "a\nb"] and names[0] == f"{tmp_path / 'table.csv'}, line 2"
    (tmp_path / "bare.tsv").write_text("5\tfine\n1\tbad\n")
    without_header = config.DataConfig(columns=("stars", "text"))
    assert read([tmp_path / "bare.tsv"], TEXT, without_header)[1].tolist() == ["fine", "bad"]


BAD_TEXTS = {
    "column": ("t.csv", b"review,stars\nfine,5\n", "no column 'text' of texts, only 'review', 's"),
    "empty": ("t.txt", b"", "t.txt holds no text"),
    "mark alone": ("t.txt", b"\xef\xbb\xbf", "t.txt holds no text"),
    "empty table": ("t.tsv", b"", "t.tsv is empty: it needs a row of column names"),
    "header alone": ("t.tsv", b"text\tlabel\n", "t.tsv holds no text"),
    "UTF-16": ("t.txt", "good".encode("utf-16"), "line 1 has the byte 0xff, which is not UTF-8"),
    "image": ("t.png", b"\x89PNG\r\n", "the model takes texts: name files of lines, or tables"),
    "Latin-1": ("t.csv", "text\nnaïve\n".encode("latin-1"), "line 2 has the byte 0xef"),
    "open quote": ("t.csv", b'text\n"never closed\n', "a quotation mark in the row"),
    "no such file": ("", b"", "does not exist"),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_files_without_texts_are_refused_in_one_line(tmp_path, name, data, message):
    if name:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(config.ConfigError, match=message) as refused:
        read([tmp_path / (name or "nowhere.txt")], TEXT)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.txt"])
def test_bad_texts_end_reading_or_are_left_out_and_counted(tmp_path, caplog, name):
    header = b"" if name == "t.txt" else b"text\n"
    (tmp_path / name).write_bytes(header + b"fine\nna\xefve\r\nbad\n")
    line = 2 + bool(header)
    with pytest.raises(config.ConfigError, match=f"line {line} has the byte 0xef"):
        read([tmp_path / name], TEXT)
    names, found = read([tmp_path / name], TEXT, on_bad_example="skip")
    assert found.tolist() == ["fine", "bad"] and names[1].endswith(f"line {line + 1}")
    assert "1 of 3 inputs were left out." in caplog.text


def test_texts_given_themselves_have_to_be_utf_8_and_nothing_resizes_them(tmp_path):
    part = reading.texts(ODD)
    assert list(part.names) == ODD == [part.read(row).item() for row in range(len(ODD))]
    with pytest.raises(config.ConfigError, match="is not UTF-8"):
        reading.texts([os.fsdecode(b"na\xefve")]).read(0)
    with pytest.raises(config.ConfigError, match="--resize is for images, and the model takes tex"):
        reading.find([tmp_path], TEXT, AS_THEY_ARE, resize=True)
    with pytest.raises(config.ConfigError, match="holds no .txt file, and the model takes texts"):
        reading.find([tmp_path], TEXT, AS_THEY_ARE)


def test_texts_without_a_word_and_those_that_are_cut_are_counted(caplog):
    pytest.importorskip("tensorflow_text")
    tokenizer = tokens.TokenizerSpec(text_encoder.VOCABULARY, True, 5, "left")
    spec = inputs_lib.InputSpec("text", (), ("no", "yes"), tokenizer=tokenizer)

    def model(ids, training):
        return None, tf.one_hot(tf.argmax(ids, 1), 2)

    classifier = classifier_lib.Classifier(model, spec)
    batches = [
        (["a", "b", "c"], np.array(["", " \u3000", "good bad end"], object)),
        (["d"], np.array(["good bad end good"], object)),
    ]
    list(predictions.table(classifier, batches))
    said = "Of 4 texts 2 have no word, and 1 are cut to 5 tokens, their left end kept."
    assert caplog.messages == [said]
    caplog.clear()
    names, inputs = batches[0]
    list(predictions.table(classifier, [(names[2:], inputs[2:])]))
    assert not caplog.messages


def npz(path, **arrays):
    np.savez(path, **arrays)


def of_header(path, text):
    """An archive with an array of few bytes below the header."""
    size = len(text).to_bytes(2, "little")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\1\0" + size + text.encode() + bytes(24))


def encrypted(path):
    npz(path, x=np.ones([2, 3]))
    data = bytearray(path.read_bytes())
    data[6] |= 1  # the flags of the member itself
    data[data.index(b"PK\1\2") + 8] |= 1  # and in the list of members
    path.write_bytes(data)


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (9000000000000000, 3)}\n"
BAD_ARRAYS = {
    "which": (
        lambda p: npz(p, a=np.zeros([2, 3]), b=np.zeros([2, 3])),
        "holds the arrays 'a', 'b'",
    ),
    "none": (npz, "(none)"),
    "width": (lambda p: npz(p, x=np.zeros([2, 4])), "float64 [2, 4], and the model takes vectors"),
    "axes": (lambda p: npz(p, x=np.zeros([3])), "vectors of 3 numbers, [n, 3]"),
    "empty": (lambda p: npz(p, x=np.zeros([0, 3])), "[0, 3]"),
    "texts": (lambda p: npz(p, x=np.array([["a"] * 3])), "<U1"),
    "pickle": (lambda p: npz(p, x=np.array([[{}, 1, 2]], object)), "cannot be read (Object arrays"),
    "no zip": (lambda p: p.write_bytes(b"x" * 99), "is no .npz file"),
    "cut": (
        lambda p: (npz(p, x=np.ones([99, 3])), p.write_bytes(p.read_bytes()[:500])),
        "damaged or cut short",
    ),
    "member": (lambda p: zipfile.ZipFile(p, "w").writestr("x", "abc"), "(none)"),
    "header": (lambda p: of_header(p, HUGE[:50] + "\n"), "'x' cannot be read"),
    "size": (lambda p: of_header(p, HUGE), "has 24 bytes where shape (9000000000000000, 3)"),
    "flag": (encrypted, "is encrypted"),
    "folder": (pathlib.Path.mkdir, "cannot be read: Is a directory"),
}


@pytest.mark.parametrize(("write", "message"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
@pytest.mark.parametrize("on_bad_example", ["error", "skip"])
def test_a_file_without_the_right_array_is_refused(tmp_path, write, message, on_bad_example):
    path = tmp_path / "bad.npz"
    write(path)
    with pytest.raises(config.ConfigError) as refused:
        read([path], VECTOR, on_bad_example=on_bad_example)
    assert str(path) in str(refused.value) and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_images_in_arrays_have_bytes_or_16_bits(tmp_path):
    pixels = images_of(COLORED)
    np.savez(tmp_path / "wide.npz", pixels.astype(np.uint16) * 257)
    np.testing.assert_array_equal(read([tmp_path / "wide.npz"], COLORED)[1], pixels)
    np.savez(tmp_path / "floats.npz", pixels / 255)
    with pytest.raises(config.ConfigError, match=r"float64 \[7, 4, 6, 3\], and the model takes im"):
        read([tmp_path / "floats.npz"], COLORED)


@pytest.mark.parametrize(
    ("spec", "place", "resize", "message"),
    [
        (GRAY, "nowhere.png", False, "nowhere.png does not exist"),
        (GRAY, "empty", False, "empty holds no image"),
        (VECTOR, "empty", False, "is not a .npz file, and the model takes vectors of 3 numbers"),
        (VECTOR, "empty", True, "--resize is for images"),
        (GRAY, "pipe.png", False, "pipe.png is neither a regular file nor a folder"),
        (VECTOR, "pipe.npz", False, "pipe.npz is neither a regular file nor a folder"),
        (GRAY, "file/a.png", False, "file/a.png cannot be read: Not a directory"),
    ],
)
def test_places_without_inputs_are_refused(tmp_path, spec, place, resize, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for pipe in ("pipe.png", "pipe.npz"):
        os.mkfifo(tmp_path / pipe)
    with pytest.raises(config.ConfigError, match=message):
        reading.find([tmp_path / place], spec, AS_THEY_ARE, resize=resize)


class Fixed:
    """A classifier of given logits."""

    def __init__(self, logits, class_names):
        self.spec = inputs_lib.InputSpec("vector", (1,), class_names)
        self._logits = tf.constant(logits, tf.float32)

    def predict(self, rows):
        logits = tf.gather(self._logits, tf.cast(rows[:, 0], tf.int32))
        return tf.nn.softmax(logits), tf.argmax(logits, 1, tf.int32)


# The second and third of the last row differ, but not their probabilities.
LOGITS = np.float32([[0, 1, 2], [30, -30, 0], [-9, 0.1, 0.1]])
LOGITS[2, 2] = np.nextafter(LOGITS[2, 1], np.float32(1))
NAMES = ["a,b", 'c "d"', "e\nf"]


def table_of(class_names=("x", "y", "zü"), **options):
    rows = np.float32([[0], [1], [2]])
    batches = [(NAMES[:2], rows[:2]), (NAMES[2:], rows[2:])]
    return "".join(predictions.table(Fixed(LOGITS, class_names), batches, **options))


def test_tables_give_names_and_float32_back():
    probabilities = tf.nn.softmax(LOGITS).numpy()
    assert probabilities[2, 1] == probabilities[2, 2]
    header, *rows = csv.reader(io.StringIO(table_of(), newline=""))
    assert header == ["input", "class", "probability", "x", "y", "zü"]
    lines = [json.loads(line) for line in table_of(file_format="json").splitlines()]
    for i, (row, line) in enumerate(zip(rows, lines, strict=True)):
        predicted = [2, 0, 2][i]
        assert row[:2] == [line["input"], line["class"]] == [NAMES[i], ("x", "y", "zü")[predicted]]
        assert list(line["probabilities"]) == ["x", "y", "zü"]
        for found in (row[3:], list(line["probabilities"].values())):
            np.testing.assert_array_equal(np.array(found, np.float32), probabilities[i])
        for found in (row[2], line["probability"]):
            assert np.float32(found) == probabilities[i, predicted]


def test_tables_of_the_most_probable_classes_are_in_their_order():
    header, *rows = csv.reader(io.StringIO(table_of(top=2), newline=""))
    assert header == ["input", "class", "probability", "class_2", "probability_2"]
    assert [(row[1], row[3]) for row in rows] == [("zü", "y"), ("x", "zü"), ("zü", "y")]
    line = json.loads(table_of(file_format="json", top=2).splitlines()[0])
    assert list(line["probabilities"]) == ["zü", "y"]
    assert line["probability"] == line["probabilities"]["zü"] > line["probabilities"]["y"]


def test_tables_that_nobody_could_read_are_refused():
    for options, message in (
        ({"top": 4}, "top=4 is out of range: the model has 3 classes"),
        ({"file_format": "xml"}, "format='xml'"),
        ({"class_names": ("x", "class", "y")}, "The class 'class' has the name of another column"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            table_of(**options)
    assert table_of(class_names=("x", "class", "y"), top=1)
    nothing = predictions.table(Fixed(LOGITS, ("x", "y", "z")), [])
    assert list(nothing) == []


@pytest.mark.parametrize(
    ("spec", "head"), [(COLORED, "binary"), (GRAY, "softmax"), (VECTOR, "softmax")]
)
def test_a_saved_model_needs_nothing_of_this_library(tmp_path, spec, head):
    (tmp_path / "run").mkdir()
    run_settings = settings(head=head)
    write_run(tmp_path / "run", run_settings, spec)
    loaded = classifier_lib.load(tmp_path / "run", run_settings)
    saved_model.write(loaded, tmp_path / "model")
    if spec.kind == "vector":
        inputs, files = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32), []
    else:
        inputs = images_of(spec)
        files = [encoded(image) for image in inputs]
    probabilities, best = loaded.predict(inputs)
    found = isolated.signatures(tmp_path, tmp_path / "model", inputs, files)
    assert found.keys() == ({"serving_default", "encoded"} if files else {"serving_default"})
    for of_signature in found.values():
        np.testing.assert_allclose(of_signature["probabilities"], probabilities, atol=1e-6)
        np.testing.assert_array_equal(of_signature["class"], best)
        assert of_signature["class_name"] == [spec.class_names[c] for c in best]
    assert (tmp_path / "model/class_names.txt").read_text().split("\n") == [*spec.class_names, ""]


def test_a_saved_model_is_complete_or_not_there(tmp_path, monkeypatch):
    classifier = classifier_lib.Classifier(models.build(settings().model, (3,), 3, 1), VECTOR)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("")
    for place in (taken, taken / "file"):
        with pytest.raises(config.ConfigError, match="is there already and not an empty folder"):
            saved_model.write(classifier, place)
    with pytest.raises(config.ConfigError, match="cannot be written"):
        saved_model.write(classifier, taken / "file" / "below")

    def stop_halfway(module, folder, signatures):
        (pathlib.Path(folder) / "saved_model.pb").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "save", stop_halfway)
        with pytest.raises(KeyboardInterrupt):
            saved_model.write(classifier, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "empty").mkdir()
    saved_model.write(classifier, tmp_path / "empty")
    assert (tmp_path / "empty/saved_model.pb").exists()


def smooth(height, width, channels):
    """A picture as photographs are: JPEG has little to leave out."""
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (3 + c)) + np.cos(columns / (5 - c)) for c in range(channels)]
    return np.uint8(127.5 + 63 * np.stack(waves, -1))


FILES = {
    "png": {},
    "jpeg": {"file_format": "JPEG", "quality": 90},
    "progressive": {"file_format": "JPEG", "quality": 50, "progressive": True},
}


@pytest.mark.parametrize("options", FILES.values(), ids=FILES)
@pytest.mark.parametrize("size", [(32, 32), (150, 101), (13, 77)])
@pytest.mark.parametrize("channels", [1, 3])
def test_graphs_decode_as_pillow_does_but_for_one_gray_level(options, size, channels):
    data = encoded(smooth(*size, channels), **options)
    for wanted in (1, 3):
        shape = (32, 32, wanted)
        found = saved_model.decode(tf.constant(data), shape).numpy()
        expected = images.decode(
            data, "", config.DataConfig(image_size=shape[:2], image_channels=wanted)
        )
        assert found.shape == expected.shape
        most = 0 if size == shape[:2] else 1
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= most


def test_graphs_drop_transparency_as_pillow_does_but_do_not_turn_images():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 4), np.uint8)
    found = saved_model.decode(tf.constant(encoded(pixels)), (4, 6, 3))
    np.testing.assert_array_equal(found, pixels[..., :3])
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = encoded(pixels[..., :3], exif=exif)
    np.testing.assert_array_equal(saved_model.decode(turned, (4, 6, 3)), pixels[..., :3])
    np.testing.assert_array_equal(images.decode(turned, "", AS_THEY_ARE), pixels[::-1, ::-1, :3])
