"""Rows in memory and rows that are read when they are asked for give the same."""

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import rows

IMAGES = np.random.default_rng(0).integers(0, 256, [23, 4, 5, 3], np.uint8)


def lazy(images=IMAGES, stamp="stamp"):
    return rows.LazyImages(len(images), images.shape[1:], lambda row: images[row], stamp)


def test_strings_are_a_sequence_of_any_text():
    texts = ["", "a b", "naïve 日本", "\udcff", "end"]
    held = rows.Strings(texts)
    assert list(held) == texts and len(held) == 5
    assert held[-1] == "end" and held[1:3] == texts[1:3]
    assert held[np.int64(2)] == texts[2]
    with pytest.raises(IndexError):
        held[5]
    assert list(rows.Strings([])) == []


def test_lazy_rows_are_read_by_id_in_any_order_and_more_than_once():
    ids = np.array([7, 0, 22, 7])
    np.testing.assert_array_equal(lazy().read(ids), IMAGES[ids])
    np.testing.assert_array_equal(rows.take(lazy(), ids), rows.take(IMAGES, ids))
    np.testing.assert_array_equal(np.concatenate(list(rows.in_turn(lazy(), 5))), IMAGES)
    np.testing.assert_array_equal(rows.in_memory(lazy()), IMAGES)
    assert lazy().shape == IMAGES.shape and lazy().nbytes == IMAGES.nbytes


def test_parts_are_joined_whether_lazy_or_not():
    whole = rows.concatenate([IMAGES[:5], lazy(IMAGES[5:6]), IMAGES[6:6], lazy(IMAGES[6:])])
    assert isinstance(whole, rows.LazyImages)
    np.testing.assert_array_equal(rows.in_memory(whole), IMAGES)
    assert isinstance(rows.concatenate([IMAGES[:5], IMAGES[5:]]), np.ndarray)
    assert len(rows.concatenate([IMAGES[:0], IMAGES[:0]])) == 0


def test_selected_rows_are_those_of_the_array():
    kept = np.arange(23) % 3 == 1
    for chosen in (kept, np.flatnonzero(kept)[::-1]):
        np.testing.assert_array_equal(
            rows.in_memory(rows.select(lazy(), chosen)), rows.select(IMAGES, chosen)
        )


def test_lazy_rows_that_are_selected_or_joined_have_a_digest_of_their_own():
    first, second = lazy(IMAGES[:8], "first"), lazy(IMAGES[8:16], "second")
    array, other_array = IMAGES[16:20], IMAGES[19:23]
    digests = [
        each.digest()
        for each in (
            lazy(),
            *(rows.select(lazy(), ids) for ids in ([1, 4, 7], [1, 4, 8], [7, 4, 1], [1, 4])),
            rows.select(lazy(stamp="other"), [1, 4, 7]),
            rows.concatenate([first, second]),
            rows.concatenate([second, first]),
            rows.concatenate([first, lazy(IMAGES[8:16], "third")]),
            rows.concatenate([first, array]),
            rows.concatenate([first, other_array]),
        )
    ]
    assert len(set(digests)) == len(digests)
    again = rows.concatenate([first, array.copy()])
    assert again.digest() == rows.concatenate([first, array]).digest()


def test_a_digest_tells_contents_shapes_types_and_stamps_apart():
    digests = [
        rows.digest(IMAGES),
        rows.digest(IMAGES.reshape(23, 5, 4, 3)),
        rows.digest(IMAGES.astype(np.float32)),
        rows.digest(IMAGES[:-1]),
        rows.digest(lazy()),
        rows.digest(lazy(stamp="other")),
        rows.digest(lazy(IMAGES[:-1])),
        rows.digest(lazy(IMAGES.reshape(23, 5, 4, 3))),
        rows.digest(np.array(["a", "bc"], object)),
        rows.digest(np.array(["ab", "c"], object)),
        rows.digest(np.array(["a"], object), np.array(["bc"], object)),
        rows.digest(IMAGES[:5], IMAGES[5:]),
        rows.digest(IMAGES[:6], IMAGES[6:]),
    ]
    assert len(set(digests)) == len(digests)
    assert rows.digest(IMAGES) == rows.digest(IMAGES.copy(order="F"))
    assert rows.digest(np.arange(3, dtype=">i4")) == rows.digest(np.arange(3, dtype="<i4"))


def test_a_row_that_cannot_be_read_is_named():
    def fail(row):
        raise config.ConfigError(f"row {row} is damaged.")

    damaged = rows.LazyImages(3, (1, 1, 1), fail, "")
    with pytest.raises(config.ConfigError, match="row 1 is damaged"):
        damaged.read(np.array([1]))
