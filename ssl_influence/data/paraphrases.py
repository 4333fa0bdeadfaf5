"""Paraphrases of the texts of a dataset, in a file that `experiments.back_translate` writes.

A table in UTF-8, cells parted by tabs, with the header

    example_id  text_sha256  paraphrase

and one or more rows for each example, in any order. `text_sha256` are the first 16 hexadecimal
digits of the sha256 of the example's text in UTF-8: ids of other data, or of data that have changed
since, are noticed. A paraphrase is one line without tabs.
"""

import codecs
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ssl_influence import config

if TYPE_CHECKING:
    import tensorflow as tf

HEADER = "example_id\ttext_sha256\tparaphrase\n"
_DIGITS = 16
_SHOWN = 60


@dataclasses.dataclass(frozen=True, eq=False)
class Paraphrases:
    """The paraphrases of n examples.

    Attributes:
      texts: [m], by example, those of one in the order of the file.
      starts: int64 [n + 1]: those of example i are texts[starts[i]:starts[i + 1]].
    """

    texts: list[str]
    starts: np.ndarray


def one_line(text: str) -> str:
    """The text with single spaces for all its white space, and none around it."""
    return " ".join(text.split())


def row(example_id: int, text: str, paraphrase: str) -> str:
    """A row of the file, with its line end, for an example of this text."""
    return f"{example_id}\t{_digest(text)}\t{one_line(paraphrase)}\n"


def read(path: str | os.PathLike, texts: np.ndarray, needed: np.ndarray) -> Paraphrases:
    """The paraphrases in a file.

    Args:
      path: the file; ~ is the home directory.
      texts: those of the examples, object [n] of str; the row is the id.
      needed: ids of the examples that must have a paraphrase, integers [k].

    Raises:
      ConfigError: the file cannot be read, is not of this form, is of other texts, or lacks a
        paraphrase that is needed.
    """
    path = os.path.expanduser(path)
    ids, found, digests = [], [], {}
    try:
        with open(path, "rb") as file:
            for line, cells in _lines(path, file):
                example_id = _check_row(f"paraphrases={path}, line {line}", cells, texts, digests)
                ids.append(example_id)
                found.append(cells[2])
    except OSError as error:
        raise config.ConfigError(
            f"paraphrases={path} cannot be read ({error.strerror}): experiments.back_translate "
            "writes such a file."
        ) from error
    ids = np.array(ids, np.int64)
    counts = np.bincount(ids, minlength=len(texts))
    missing = np.asarray(needed)[counts[needed] == 0]
    if len(missing):
        raise config.ConfigError(
            f"paraphrases={path} has no row for {len(missing)} of the {len(needed)} examples that "
            f"need one, such as example {missing.min()}: write it again for this dataset by "
            "experiments.back_translate."
        )
    order = np.argsort(ids, kind="stable")
    return Paraphrases([found[i] for i in order], np.concatenate([[0], np.cumsum(counts)]))


def pick(texts: "tf.Tensor", starts: "tf.Tensor", ids: "tf.Tensor", seed: "tf.Tensor"):
    """One paraphrase of each example, each of its own with the same chance.

    Args:
      texts: string [m], `Paraphrases.texts`.
      starts: int64 [n + 1], `Paraphrases.starts`.
      ids: int64 [B], of examples that have a paraphrase.
      seed: integers [2]; the draws depend on it and on the place in the batch alone.

    Returns:
      string [B].
    """
    import tensorflow as tf

    first, end = tf.gather(starts, ids), tf.gather(starts, ids + 1)
    # Philox by name: the default depends on the device. In float64 the product stays below the
    # count.
    fractions = tf.random.stateless_uniform(tf.shape(ids), seed, dtype=tf.float64, alg="philox")
    drawn = tf.cast(fractions * tf.cast(end - first, tf.float64), tf.int64)
    return tf.gather(texts, first + drawn)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:_DIGITS]


def _lines(path: str, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, its cells) of all lines after the header."""
    header = file.readline()
    if header.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n") != HEADER.rstrip("\n").encode():
        raise config.ConfigError(
            f"paraphrases={path} begins with {header[:_SHOWN].decode('utf-8', 'replace')!r}: the "
            f"header {HEADER!r} is expected, as experiments.back_translate writes it."
        )
    for line, data in enumerate(file, 2):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise config.ConfigError(
                f"paraphrases={path}, line {line} has the byte 0x{data[error.start]:02x}, which is "
                "not UTF-8: save it as UTF-8 text."
            ) from error
        yield line, text.removesuffix("\n").removesuffix("\r").split("\t")


def _check_row(where: str, cells: list[str], texts: np.ndarray, digests: dict[int, str]) -> int:
    """The id of a row; `digests` keeps those of the texts seen.

    Raises:
      ConfigError: the row cannot be one of these texts.
    """
    if len(cells) != 3:
        raise config.ConfigError(
            f"{where} has {len(cells)} cells, and an example_id, a text_sha256 and a paraphrase "
            "are expected, parted by tabs: mend it."
        )
    number, digest, paraphrase = cells
    if not (number.isascii() and number.isdigit() and len(number) <= 18):
        raise config.ConfigError(f"{where}: {number[:_SHOWN]!r} is no example_id: mend it.")
    example_id = int(number)
    if example_id >= len(texts):
        raise config.ConfigError(
            f"{where}: there is no example {example_id}, only 0 to {len(texts) - 1}: the file is "
            "of other data; write one for this dataset by experiments.back_translate."
        )
    text = texts[example_id]
    if example_id not in digests:
        digests[example_id] = _digest(text)
    if digest != digests[example_id]:
        raise config.ConfigError(
            f"{where}: text_sha256 is {digest[:_SHOWN]!r}, and {digests[example_id]!r} for the "
            f"text of example {example_id}: the file is of other data, or they have changed; "
            "write it again by experiments.back_translate."
        )
    if not paraphrase.strip() and text.strip():
        raise config.ConfigError(
            f"{where}: the paraphrase of example {example_id} is empty: mend or remove it."
        )
    return example_id
