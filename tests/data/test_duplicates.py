import collections
import itertools
import time

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import duplicates, examples, rows, splits


def make_source(inputs, labels, test_inputs, test_labels, **fields):
    return examples.Source(
        name="mine",
        inputs=inputs,
        labels=np.array(labels, np.int32),
        test_inputs=test_inputs,
        test_labels=np.array(test_labels, np.int32),
        class_names=["cat", "dog"],
        flip=False,
        **fields,
    )


def make_split(labeled=(), validation=(), unlabeled=()):
    return splits.Split(*(np.array(ids, np.int64) for ids in (labeled, validation, unlabeled)))


def texts(*values):
    return np.array(values, object)


# Ids 0 to 6, and test rows 0 and 1: "a" is 0, 3, 5 and test 1; "b" is 1 and 4; the rest are alone.
LETTERS = make_source(
    texts("a", "b", "c", "a", "b", "a", "d"), [0, 1, 0, 0, 0, -1, 1], texts("e", "a"), [1, 0]
)
ROLES = make_split(labeled=[0, 1], validation=[2, 3, 4], unlabeled=[5, 6])


def test_groups_are_found_within_and_across_roles_and_parts():
    report = duplicates.find(LETTERS, ROLES)
    assert [group.tolist() for group in report.groups] == [[0, 3, 5, 8], [1, 4]]
    counts = {pair: count for pair, count in report.counts.items() if count}
    assert counts == {
        ("labeled", "validation"): 2,
        ("validation", "labeled"): 2,
        ("labeled", "unlabeled"): 1,
        ("unlabeled", "labeled"): 1,
        ("validation", "unlabeled"): 1,
        ("unlabeled", "validation"): 1,
        ("labeled", "test"): 1,
        ("test", "labeled"): 1,
        ("validation", "test"): 1,
        ("test", "validation"): 1,
        ("unlabeled", "test"): 1,
        ("test", "unlabeled"): 1,
    }
    assert report.contradictory.tolist() == [1]


def test_what_was_found_is_told_with_the_first_names():
    names = [f"{letter}.txt" for letter in "stuvwxy"]
    source = make_source(
        LETTERS.inputs,
        LETTERS.labels,
        LETTERS.test_inputs,
        LETTERS.test_labels,
        names=names,
        test_names=["one", "two"],
    )
    report = duplicates.find(source, ROLES)
    lines = duplicates.describe(report, source)
    assert lines[0] == "6 examples are in 2 groups of exact copies"
    assert "2 validation examples are identical to labeled ones: v.txt = s.txt, w.txt = t.txt" in (
        lines
    )
    assert "1 test example is identical to labeled ones: test two = s.txt" in lines
    assert lines[-1] == (
        "labels disagree within 1 group of exact copies: t.txt (dog) = w.txt (cat)"
    )
    validation, test, labels = duplicates.alarms(report, source)
    assert validation.startswith("2 validation examples are identical to labeled or unlabeled ones")
    assert "v.txt = s.txt" in validation and "Take one of each pair out" in validation
    assert test.startswith("1 test example is identical") and "test two = s.txt" in test
    assert labels.startswith("Labels disagree within 1 group") and "mend" in labels


def test_data_without_copies_raise_no_alarm():
    source = make_source(texts("a", "b"), [0, 1], texts("c"), [0])
    report = duplicates.find(source, make_split(labeled=[0], validation=[1]))
    assert report.groups == [] and not any(report.counts.values())
    assert duplicates.describe(report, source) == ["no two examples are the same"]
    assert duplicates.alarms(report, source) == []


def test_one_example_in_two_roles_by_a_flag_is_no_copy_of_itself():
    source = make_source(texts("a", "b", "b"), [0, 1, 1], texts(), [])
    split = make_split(labeled=[0, 1, 2], validation=[2], unlabeled=[0, 1])
    report = duplicates.find(source, split)
    assert [group.tolist() for group in report.groups] == [[1, 2]]
    assert report.counts["labeled", "labeled"] == 2
    assert report.counts["labeled", "unlabeled"] == report.counts["labeled", "validation"] == 1
    assert report.counts["unlabeled", "unlabeled"] == 0
    # Example 2 is trained on by design; that it also has a copy there is no news.
    assert len(report.leaks("validation")) == 0 and duplicates.alarms(report, source) == []


def test_examples_without_a_role_are_in_groups_and_in_no_count():
    source = make_source(texts("a", "a", "b"), [0, 0, 1], texts(), [])
    report = duplicates.find(source, make_split(labeled=[0], validation=[2]))
    assert len(report.groups) == 1 and not any(report.counts.values())


def brute_force_copies(contents, roles, a, b):
    return [
        x
        for x, y in itertools.product(range(len(contents)), repeat=2)
        if x != y and contents[x] == contents[y] and a in roles[x] and b in roles[y]
    ]


@pytest.mark.parametrize("seed", range(3))
def test_everything_agrees_with_comparing_each_with_each(seed):
    random = np.random.default_rng(seed)
    inputs = random.integers(0, 2, (50, 2, 2, 1), dtype=np.uint8)  # 16 different images
    labels = random.integers(-1, 2, 50)
    split = make_split(
        *(np.flatnonzero(random.random(40) < share) for share in (0.3, 0.2, 0.5)),
    )
    source = make_source(inputs[:40], labels[:40], inputs[40:], labels[40:])
    report = duplicates.find(source, split)

    contents = [image.tobytes() for image in inputs]
    by_content = collections.defaultdict(list)
    for place, content in enumerate(contents):
        by_content[content].append(place)
    groups = sorted(group for group in by_content.values() if len(group) > 1)
    assert [group.tolist() for group in report.groups] == groups
    roles = [
        {role for role in splits.ROLES if place in getattr(split, role)} for place in range(40)
    ] + [{"test"}] * 10
    for a, b in itertools.product(duplicates.ROLES, repeat=2):
        expected = brute_force_copies(contents, roles, a, b)
        assert report.counts[a, b] == len(set(expected)), (a, b)
    disagree = [i for i, g in enumerate(groups) if len({labels[p] for p in g} - {-1}) > 1]
    assert report.contradictory.tolist() == disagree
    for role in ("validation", "test"):
        expected = {
            x
            for other in ("labeled", "unlabeled")
            for x in brute_force_copies(contents, roles, role, other)
            if not roles[x] & {"labeled", "unlabeled"}
        }
        leaks = report.leaks(role)
        assert set(leaks[:, 0].tolist()) == expected
        assert all(contents[x] == contents[y] and x != y for x, y in leaks)


def test_vectors_count_by_their_bytes():
    vectors = np.array([[1.5, np.nan], [1.5, 2], [1.5, np.nan]], np.float32)
    source = make_source(vectors, [0, 1, 0], np.empty((0, 2), np.float32), [])
    report = duplicates.find(source, make_split(labeled=[0, 1], unlabeled=[2]))
    assert [group.tolist() for group in report.groups] == [[0, 2]]


def test_lazy_images_are_each_read_once_and_a_few_at_a_time():
    read = []
    pixels = np.arange(3000) % 2990

    def read_one(row):
        read.append(row)
        return np.frombuffer(int(pixels[row]).to_bytes(4, "little"), np.uint8).reshape(2, 2, 1)

    images = rows.LazyImages(3000, (2, 2, 1), read_one, "stamp")
    source = make_source(images, np.zeros(3000), np.empty((0, 2, 2, 1), np.uint8), [])
    report = duplicates.find(source, make_split(labeled=range(2000), validation=range(2000, 3000)))
    assert sorted(read) == list(range(3000))
    assert report.leaks("validation").tolist() == [[2990 + i, i] for i in range(10)]
    assert duplicates.describe(report, source)[-1].endswith("2990 = 0, 2991 = 1, 2992 = 2, ...")


def test_a_lazy_image_that_cannot_be_read_is_named():
    def read_one(row):
        raise config.ConfigError(f"image {row} is damaged.")

    images = rows.LazyImages(1, (2, 2, 1), read_one, "stamp")
    source = make_source(images, [0], np.empty((0, 2, 2, 1), np.uint8), [])
    with pytest.raises(config.ConfigError, match="image 0 is damaged"):
        duplicates.find(source, make_split(labeled=[0]))


def test_a_data_set_of_the_size_of_mnist_takes_no_noticeable_time():
    images = np.random.default_rng(0).integers(0, 256, (60_000, 28, 28, 1), dtype=np.uint8)
    source = make_source(images, np.zeros(60_000), images[:0], [])
    start = time.process_time()
    report = duplicates.find(source, make_split(labeled=range(60_000)))
    assert time.process_time() - start < 5  # 0.15 s; a comparison of all pairs would take minutes
    assert not report.groups
