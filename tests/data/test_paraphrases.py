"""The file of paraphrases: what is read from it, what is refused, and drawing from it."""

import hashlib

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import paraphrases

TEXTS = np.array(["A good film.", "Bad!\tVery\nbad.", "schön", "  ", "so so"], object)
EVERY = np.arange(4)


def _row(example_id, paraphrase, text=None):
    text = TEXTS[example_id] if text is None else text
    return f"{example_id}\t{hashlib.sha256(text.encode()).hexdigest()[:16]}\t{paraphrase}\n"


ROWS = [_row(2, "nice"), _row(0, "fine film"), _row(2, "été"), _row(1, "poor"), _row(3, "")]


def _write(path, rows, header="example_id\ttext_sha256\tparaphrase\n"):
    path.write_bytes(b"".join(r if isinstance(r, bytes) else r.encode() for r in [header, *rows]))
    return path


def test_paraphrases_are_sorted_by_example_and_then_as_they_stand(tmp_path):
    path = _write(tmp_path / "p.tsv", [*ROWS[:-1], ROWS[-1].removesuffix("\n")])
    read = paraphrases.read(path, TEXTS, EVERY)
    assert read.texts == ["fine film", "poor", "nice", "été", ""]
    assert read.starts.tolist() == [0, 1, 2, 4, 5, 5] and read.starts.dtype == np.int64


def test_what_is_written_is_one_line_and_reads_back(tmp_path):
    assert paraphrases.row(2, TEXTS[2], " a\tb\r\nc d ") == _row(2, "a b c d")
    rows = [paraphrases.row(i, text, f"of {text}") for i, text in enumerate(TEXTS)]
    path = _write(tmp_path / "p.tsv", rows, paraphrases.HEADER)
    read = paraphrases.read(path, TEXTS, np.arange(5))
    assert read.texts == ["of A good film.", "of Bad! Very bad.", "of schön", "of", "of so so"]


def test_files_that_another_editor_saved_are_read_as_well(tmp_path):
    rows = [row.replace("\n", "\r\n") for row in ROWS]
    path = _write(tmp_path / "p.tsv", rows, "\ufeffexample_id\ttext_sha256\tparaphrase\r\n")
    assert paraphrases.read(path, TEXTS, EVERY).texts == ["fine film", "poor", "nice", "été", ""]


@pytest.mark.parametrize(
    "rows, says",
    [
        ([ROWS[0], ROWS[1], ROWS[4]], "no row for 1 of the 4 examples.*such as example 1"),
        ([], "no row for 4 of the 4 examples.*such as example 0"),
        ([*ROWS, _row(5, "extra", "x")], "line 7: there is no example 5, only 0 to 4"),
        ([*ROWS, _row(0, "old", "A good film")], "line 7: text_sha256 is.*text of example 0"),
        ([ROWS[0], _row(1, "a\tb")], "line 3 has 4 cells"),
        (["\n", *ROWS], "line 2 has 1 cells"),
        ([_row(1, "a").replace("1", "-1", 1)], "line 2: '-1' is no example_id"),
        ([_row(1, "a").replace("1", "²", 1)], "line 2: '²' is no example_id"),
        ([*ROWS, _row(1, " ")], "line 7: the paraphrase of example 1 is empty"),
        ([ROWS[0], b"0\tabc\t\xe9t\xe9\n"], "line 3 has the byte 0xe9.*UTF-8"),
    ],
)
def test_rows_that_cannot_be_those_of_the_texts_are_refused(rows, says, tmp_path):
    path = _write(tmp_path / "p.tsv", rows)
    with pytest.raises(config.ConfigError, match=says) as caught:
        paraphrases.read(path, TEXTS, EVERY)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("header", ["", "id\ttext_sha256\tparaphrase\n", _row(0, "no header")])
def test_a_file_without_the_header_is_refused(header, tmp_path):
    path = _write(tmp_path / "p.tsv", ROWS if header else [], header)
    with pytest.raises(config.ConfigError, match="the header 'example_id.*is expected"):
        paraphrases.read(path, TEXTS, EVERY)


def test_a_file_that_is_not_there_is_refused_and_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(config.ConfigError, match="none.tsv cannot be read .No such file"):
        paraphrases.read("~/none.tsv", TEXTS, EVERY)
    _write(tmp_path / "p.tsv", ROWS)
    assert len(paraphrases.read("~/p.tsv", TEXTS, EVERY).texts) == 5


def test_each_paraphrase_of_an_example_is_drawn_as_often_in_a_graph_too():
    import tensorflow as tf

    # Examples with 1, 0, 3 and 2 paraphrases.
    texts, starts = tf.constant(["a", "b0", "b1", "b2", "c0", "c1"]), tf.constant([0, 1, 1, 4, 6])
    starts = tf.cast(starts, tf.int64)
    pick = tf.function(paraphrases.pick)
    size = 30_000
    ids = np.tile(np.array([0, 2, 3], np.int64), size)
    seed = tf.constant([3, 4], tf.int64)
    drawn = pick(texts, starts, tf.constant(ids), seed).numpy().reshape(size, 3).astype(str)
    assert set(drawn[:, 0]) == {"a"}
    for column, names, chance in ((1, ["b0", "b1", "b2"], 1 / 3), (2, ["c0", "c1"], 1 / 2)):
        found, counts = np.unique(drawn[:, column], return_counts=True)
        assert found.tolist() == names
        # Five standard deviations.
        bound = 5 * np.sqrt(size * chance * (1 - chance))
        np.testing.assert_allclose(counts, size * chance, atol=bound)
    again = paraphrases.pick(texts, starts, tf.constant(ids), seed).numpy()
    np.testing.assert_array_equal(again.astype(str), drawn.ravel())
    other = paraphrases.pick(texts, starts, tf.constant(ids), tf.constant([3, 5], tf.int64))
    assert np.any(other.numpy() != again)
