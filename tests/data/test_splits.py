import json
import os

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import examples, names, sources, splits

UNEVEN = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [100, 120, 83]))
FLAGS = [(a, b) for a in (False, True) for b in (False, True)]


def _make(labels=UNEVEN, num_classes=3, *, labeled=10, validation=40, seed=1, **flags):
    return splits.make(
        labels, num_classes, labeled=labeled, validation=validation, seed=seed, **flags
    )


def test_roles_are_disjoint_sorted_and_cover_every_row_once():
    split = _make()
    together = np.concatenate([split.labeled, split.validation, split.unlabeled])
    np.testing.assert_array_equal(np.sort(together), np.arange(len(UNEVEN)))
    assert set(split.overlaps.values()) == {0}
    for role in splits.ROLES:
        ids = getattr(split, role)
        assert ids.dtype == np.int64 and np.all(np.diff(ids) > 0)


@pytest.mark.parametrize("labeled", [3, 10, 11, 60])
def test_labeled_examples_are_balanced_and_the_remainder_goes_one_to_a_class(labeled):
    for seed in range(5):
        counts = np.bincount(UNEVEN[_make(labeled=labeled, seed=seed).labeled], minlength=3)
        assert counts.sum() == labeled
        assert counts.min() == labeled // 3 and counts.max() <= labeled // 3 + 1


def test_the_seed_chooses_the_classes_of_the_remainder():
    favored = {
        int(np.argmax(np.bincount(UNEVEN[_make(seed=s).labeled], minlength=3))) for s in range(30)
    }
    assert favored == {0, 1, 2}


def test_a_split_is_repeatable_and_another_seed_gives_another():
    assert all(np.array_equal(getattr(_make(), r), getattr(_make(), r)) for r in splits.ROLES)
    assert not np.array_equal(_make().labeled, _make(seed=2).labeled)
    assert not np.array_equal(_make().validation, _make(seed=2).validation)


def test_the_draws_do_not_change_from_release_to_release():
    split = splits.make(np.arange(20) % 2, 2, labeled=4, validation=3, seed=7)
    assert split.labeled.tolist() == [3, 8, 10, 13]
    assert split.validation.tolist() == [4, 5, 19]


def test_labeled_may_include_validation_and_nothing_else_changes():
    apart, together = _make(), _make(labeled_includes_validation=True)
    np.testing.assert_array_equal(together.labeled, np.union1d(apart.labeled, apart.validation))
    np.testing.assert_array_equal(together.validation, apart.validation)
    np.testing.assert_array_equal(together.unlabeled, apart.unlabeled)
    assert together.overlaps["labeled", "validation"] == 40


@pytest.mark.parametrize(
    "share, expected",
    [
        (0.0, (0, 153)),
        (0.25, (51, 153)),
        (0.53, (83, 73)),  # In float64, 83 / 0.53 * 0.53 is less than 83.
        (0.6, (83, 55)),
        (1.0, (83, 0)),
    ],
)
def test_mismatch_keeps_the_most_unlabeled_rows_that_have_its_share(share, expected):
    strangers = UNEVEN == 2
    labels = np.where(strangers, -1, UNEVEN)
    settings = {"labeled": 20, "validation": 47, "num_classes": 2, "strangers": strangers}
    split = _make(labels, unlabeled_mismatch=share, **settings)
    counts = (strangers[split.unlabeled].sum(), (~strangers[split.unlabeled]).sum())
    assert counts == expected
    whole = _make(labels, **settings)
    np.testing.assert_array_equal(split.labeled, whole.labeled)
    np.testing.assert_array_equal(split.validation, whole.validation)
    assert np.isin(split.unlabeled, whole.unlabeled).all()
    assert "other class" in splits.describe(whole, labels, ["a", "b"], strangers)


def test_the_pool_has_the_size_asked_for_and_smaller_ones_are_parts_of_it():
    whole, large, small = (_make(unlabeled_size=size) for size in (None, 120, 40))
    assert (len(large.unlabeled), len(small.unlabeled)) == (120, 40)
    assert set(small.unlabeled) < set(large.unlabeled) < set(whole.unlabeled)
    for role in ("labeled", "validation"):
        np.testing.assert_array_equal(getattr(small, role), getattr(whole, role))
    assert not np.array_equal(_make(unlabeled_size=40, seed=2).unlabeled, small.unlabeled)
    with pytest.raises(config.ConfigError, match="unlabeled_size=300: only 253"):
        _make(unlabeled_size=300)


def test_manifests_of_runs_from_before_there_was_a_size_are_the_same(tmp_path):
    source = sources.load(names.DatasetName("digits", 1, 20, 40))
    name = names.DatasetName("digits", 1, 20, 40)
    for settings in (config.DataConfig(), config.DataConfig(unlabeled_size=100)):
        split = splits.draw(source, name, settings)
        contents = splits.manifest(split, name, source, settings)
        assert ("unlabeled_size" in contents) == (settings.unlabeled_size is not None)
        splits.write(contents, tmp_path / "split.json")
        splits.check(splits.read(tmp_path / "split.json"), contents)
    whole = splits.manifest(splits.draw(source, name, config.DataConfig()), name, source)
    with pytest.raises(config.ConfigError, match="unlabeled_size was 100 and is now None"):
        splits.check(contents, whole)


@pytest.mark.parametrize(("size", "share", "counts"), [(50, 0.5, (25, 25)), (7, 0.3, (2, 5))])
def test_a_pool_of_a_size_has_the_share_of_strangers(size, share, counts):
    strangers = UNEVEN == 2
    labels = np.where(strangers, -1, UNEVEN)
    split = _make(
        labels,
        num_classes=2,
        strangers=strangers,
        unlabeled_mismatch=share,
        unlabeled_size=size,
    )
    marked = strangers[split.unlabeled]
    assert (marked.sum(), (~marked).sum()) == counts
    with pytest.raises(config.ConfigError, match="unlabeled_size=250: only"):
        _make(
            labels, num_classes=2, strangers=strangers, unlabeled_mismatch=share, unlabeled_size=250
        )


def test_mismatch_without_known_classes_or_without_strangers_is_refused():
    with pytest.raises(config.ConfigError, match="known_classes"):
        _make(unlabeled_mismatch=0.5)
    with pytest.raises(config.ConfigError, match="unlabeled_mismatch=1.0.*0 strangers"):
        _make(strangers=np.zeros(len(UNEVEN), bool), unlabeled_mismatch=1.0)


def test_more_labels_with_the_same_seed_include_the_fewer_ones():
    few, many = _make(labeled=10), _make(labeled=50, validation=7)
    assert np.isin(few.labeled, many.labeled).all()


def test_validation_is_balanced_and_a_class_that_runs_out_is_made_up_for():
    np.testing.assert_array_equal(
        np.bincount(UNEVEN[_make(validation=42).validation]), [14, 14, 14]
    )
    counts = np.bincount(UNEVEN[_make(labeled=6, validation=270).validation])
    assert counts.sum() == 270 and counts[2] == 81 and counts[0] in (94, 95)


@pytest.mark.parametrize("includes, overlap", FLAGS)
def test_each_flag_does_what_it_says(includes, overlap):
    split = _make(
        labeled=60, validation=90, unlabeled_includes_labeled=includes, validation_overlap=overlap
    )
    n = len(UNEVEN)
    assert not np.isin(split.unlabeled, split.validation).any()
    is_labeled, is_validation = (
        np.isin(np.arange(n), x) for x in (split.labeled, split.validation)
    )
    expected = ~is_validation if includes else ~(is_validation | is_labeled)
    np.testing.assert_array_equal(split.unlabeled, np.flatnonzero(expected))
    shared = split.overlaps[("labeled", "validation")]
    assert shared == np.count_nonzero(is_labeled & is_validation)
    assert (shared > 0) == overlap
    assert split.overlaps[("labeled", "unlabeled")] == (60 - shared if includes else 0)


def test_with_validation_overlap_the_validation_rows_are_the_same_for_every_seed():
    a, b = (_make(seed=s, validation_overlap=True) for s in (1, 2))
    np.testing.assert_array_equal(a.validation, b.validation)
    assert not np.array_equal(a.labeled, b.labeled)
    first = [np.flatnonzero(c == UNEVEN)[:13] for c in range(3)]
    extra = np.flatnonzero(UNEVEN == 0)[13:14]
    np.testing.assert_array_equal(a.validation, np.sort(np.concatenate([*first, extra])))


def test_rows_of_unknown_label_are_unlabeled_only():
    labels = np.where(np.arange(len(UNEVEN)) % 3 == 0, -1, UNEVEN)
    for overlap in (False, True):
        split = _make(labels, validation_overlap=overlap)
        assert labels[split.labeled].min() >= 0 and labels[split.validation].min() >= 0
        assert np.isin(np.flatnonzero(labels < 0), split.unlabeled).all()
    assert "unknown" in splits.describe(split, labels, ["a", "b", "c"])


@pytest.mark.parametrize(
    "kwargs, says",
    [
        ({"labeled": 2}, "2 labeled.*3 classes.*labeled class with no example"),
        ({"num_classes": 4}, "class 3, which has only 0: a labeled class with no example"),
        ({"labeled": 270, "validation": 0}, "90 of class 2, which has only 83"),
        ({"labeled": 10, "validation": 300}, "10 labeled and 300 validation.*303"),
        ({"labeled": 10, "validation": 304, "validation_overlap": True}, "304 validation.*303"),
    ],
)
def test_a_split_that_the_data_cannot_give_is_refused_with_the_numbers(kwargs, says):
    with pytest.raises(config.ConfigError, match=says):
        _make(**kwargs)


def test_describe_counts_classes_per_role_and_overlaps():
    split = _make(unlabeled_includes_labeled=True)
    lines = splits.describe(split, UNEVEN, ["cat", "dog", "ox"]).splitlines()
    for c, name in enumerate(["cat", "dog", "ox"]):
        expected = [np.count_nonzero(UNEVEN[getattr(split, r)] == c) for r in splits.ROLES]
        assert lines[c + 1].split() == [name, *map(str, expected)]
    assert lines[4].split() == ["total", "10", "40", str(len(UNEVEN) - 40)]
    assert "labeled and unlabeled 10" in lines[5] and "labeled and validation 0" in lines[5]


def _manifest(seed=1, change=None, **settings):
    inputs = np.arange(len(UNEVEN) * 2, dtype=np.float32).reshape(-1, 2)
    labels = UNEVEN.astype(np.int32)
    held = {
        "inputs": inputs,
        "labels": labels,
        "test_inputs": inputs[:9] + 0.5,
        "test_labels": labels[:9].copy(),
    }
    if change is not None:
        held[change][5] = (held[change][5] + 1) % 3
    source = examples.Source("mine", class_names=["a", "b", "c"], flip=False, **held)
    settings = config.DataConfig(**settings)
    name = names.DatasetName("mine", seed, 10, 40)
    split = splits.draw(source, name, settings)
    return splits.manifest(split, name, source, settings), split


def test_counts_have_other_classes_unknown_ones_and_the_test_part_where_there_are_any():
    labels = np.array([0, 0, 1, -1, -1, 1, 0])
    strangers = np.array([False, False, False, True, False, False, False])
    split = splits.Split(np.array([0, 2]), np.array([1]), np.array([0, 3, 4, 5]))
    test_labels = np.array([1, 1, 1, 0])
    assert splits.class_counts(split, labels, ["a", "b"], strangers, test_labels) == [
        ("a", [1, 1, 1, 1]),
        ("b", [1, 0, 1, 3]),
        ("other class", [0, 0, 1, 0]),
        ("unknown", [0, 0, 1, 0]),
    ]
    assert splits.class_counts(split, np.maximum(labels, 0), ["a", "b"]) == [
        ("a", [1, 1, 3]),
        ("b", [1, 0, 1]),
    ]
    lines = splits.describe(split, labels, ["a", "b"], strangers, test_labels).splitlines()
    assert lines[0].split() == ["class", "labeled", "validation", "unlabeled", "test"]
    assert lines[-2].split() == ["total", "2", "1", "4", "4"]


def test_a_manifest_survives_the_disk_and_leaves_no_other_file(tmp_path):
    contents, split = _manifest()
    path = tmp_path / "run" / "split.json"
    splits.write(contents, path)
    splits.write(contents, path)
    assert os.listdir(path.parent) == ["split.json"]
    back = splits.read(path)
    assert back == contents
    assert back["dataset"] == "mine.1@10-40" and back["seed"] == 1 and len(back["sha256"]) == 64
    np.testing.assert_array_equal(back["unlabeled"], split.unlabeled)
    splits.check(back, _manifest()[0])


def test_a_failed_write_keeps_the_old_manifest(tmp_path):
    path = tmp_path / "split.json"
    splits.write(_manifest()[0], path)
    with pytest.raises(TypeError):
        splits.write({"labeled": object()}, path)
    assert splits.read(path) == _manifest()[0]
    assert os.listdir(tmp_path) == ["split.json"]


@pytest.mark.parametrize(
    "kwargs, says",
    [
        ({"seed": 2}, "dataset was 'mine.1@10-40' and is now 'mine.2@10-40'"),
        ({"unlabeled_includes_labeled": True}, "unlabeled_includes_labeled was False"),
        ({"validation_overlap": True}, "validation_overlap was False and is now True"),
        ({"labeled_includes_validation": True}, "labeled_includes_validation was False"),
        ({"balance": False}, "balance was True and is now False"),
        ({"label_noise": 0.25}, "label_noise was 0.0 and is now 0.25"),
        ({"unlabeled_classes": (0, 2)}, r"unlabeled_classes was \[\] and is now \[0, 2\]"),
        ({"change": "inputs"}, "the inputs of the data have changed"),
        ({"change": "labels"}, "the labels of the data have changed"),
        ({"change": "test_inputs"}, "the inputs of the data have changed"),
        ({"change": "test_labels"}, "the labels of the data have changed"),
    ],
)
def test_a_resume_with_another_split_is_refused_and_told_what_differs(kwargs, says):
    old, new = _manifest()[0], _manifest(**kwargs)[0]
    assert old["sha256"] != new["sha256"]
    with pytest.raises(config.ConfigError, match=says):
        splits.check(old, new)


def test_other_ids_under_the_same_name_are_refused():
    old = _manifest()[0]
    with pytest.raises(config.ConfigError, match="other examples are validation"):
        splits.check(old, {**old, "validation": old["validation"][1:]})


def test_a_missing_damaged_or_edited_manifest_is_refused(tmp_path):
    path = tmp_path / "split.json"
    with pytest.raises(config.ConfigError, match="no split manifest at .*split.json"):
        splits.read(path)
    path.write_text("{")
    with pytest.raises(config.ConfigError, match="not valid JSON"):
        splits.read(path)
    path.write_text(json.dumps({**_manifest()[0], "seed": 3}))
    with pytest.raises(config.ConfigError, match="sha256"):
        splits.read(path)


def test_without_balance_examples_are_drawn_from_all_alike():
    rare = np.where(np.arange(3000) % 100 == 0, 1, 0)
    counts = [
        np.bincount(
            rare[_make(rare, 2, labeled=50, validation=500, seed=s, balance=False).labeled],
            minlength=2,
        )[1]
        for s in range(40)
    ]
    assert min(counts) == 0 and 5 <= sum(counts) <= 45  # 20 expected
    split = _make(rare, 2, labeled=1, validation=500, balance=False)
    assert len(split.labeled) == 1
    assert np.count_nonzero(rare[split.validation]) < 20
    assert np.array_equal(split.labeled, _make(rare, 2, labeled=1, balance=False).labeled)


def test_parts_say_what_an_example_may_be():
    parts = np.repeat([0, 1, 2], [150, 100, 53])
    split = _make(parts=parts, labeled=30, validation=20)
    assert parts[split.labeled].max() == 0
    assert set(parts[split.validation]) == {2}
    assert set(parts[split.unlabeled]) == {0, 1}
    assert len(split.unlabeled) == 250 - 30
    split = _make(parts=np.minimum(parts, 1), labeled=30, validation=20)
    assert np.minimum(parts, 1)[split.validation].max() == 0
    with pytest.raises(config.ConfigError, match=r"150 for training, 53 for validation"):
        _make(parts=parts, labeled=30, validation=54)


def test_some_classes_may_be_kept_out_of_the_pool():
    split = _make(allowed=UNEVEN != 1)
    whole = _make()
    np.testing.assert_array_equal(split.labeled, whole.labeled)
    np.testing.assert_array_equal(split.unlabeled, whole.unlabeled[UNEVEN[whole.unlabeled] != 1])


def test_chosen_ids_play_their_role_and_the_rest_is_drawn_around_them():
    labeled = np.array([5, 250, 17, 99])
    split = _make(labeled=4, chosen={"labeled": labeled})
    np.testing.assert_array_equal(split.labeled, np.sort(labeled))
    assert not np.isin(labeled, np.r_[split.validation, split.unlabeled]).any()
    assert len(split.validation) == 40 and len(split.unlabeled) == len(UNEVEN) - 44

    validation = np.arange(40)
    split = _make(chosen={"validation": validation})
    assert split.labeled.min() >= 40 and len(split.unlabeled) == len(UNEVEN) - 50

    pool = np.arange(100, 200)
    split = _make(chosen={"unlabeled": pool})
    np.testing.assert_array_equal(split.unlabeled, pool)
    assert set(split.overlaps.values()) == {0}

    published = {"labeled": labeled, "unlabeled": np.arange(len(UNEVEN))}
    split = _make(labeled=4, validation=0, chosen=published, unlabeled_includes_labeled=True)
    assert split.overlaps["labeled", "unlabeled"] == 4


def test_with_validation_overlap_labeled_examples_are_drawn_from_chosen_validation_ids_too():
    chosen, flags = {"validation": np.arange(90)}, {"labeled": 60, "validation": 90}
    split = _make(chosen=chosen, validation_overlap=True, **flags)
    np.testing.assert_array_equal(split.labeled, _make(**flags).labeled)
    assert 0 < split.overlaps["labeled", "validation"] < 60


def test_with_validation_overlap_chosen_unlabeled_ids_are_still_of_no_other_role():
    pool = np.arange(100, len(UNEVEN))
    split = _make(chosen={"unlabeled": pool}, labeled=60, validation_overlap=True)
    np.testing.assert_array_equal(split.unlabeled, pool)
    assert split.labeled.max() < 100 and split.validation.max() < 100


@pytest.mark.parametrize(
    "chosen, says",
    [
        ({"labeled": [1, 2]}, "labeled_ids names 2 examples, and the dataset's name asks for 10"),
        ({"labeled": [*range(9), 303]}, "id 303, and there are 303 examples"),
        ({"labeled": [*range(9), 8]}, "names the id 8 2 times"),
        ({"labeled": [*range(9), 44]}, "names the id 44, which has no label"),
        ({"labeled": range(200, 210), "validation": range(205, 245)}, "id 205: .*_overlap"),
        ({"validation": range(45, 85), "unlabeled": [44, 45]}, "both validation and unlabeled"),
        ({"labeled": range(10), "unlabeled": [9, 99]}, "both labeled and unlabeled.*id 9"),
    ],
)
def test_chosen_ids_that_cannot_be_are_refused(chosen, says):
    labels = np.where(np.arange(len(UNEVEN)) == 44, -1, UNEVEN)
    chosen = {role: np.array(ids) for role, ids in chosen.items()}
    with pytest.raises(config.ConfigError, match=says):
        _make(labels, chosen=chosen)


def test_ids_are_read_from_a_text_of_one_a_line(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xef\xbb\xbf# published\r\n12\r\n\r\n 7 # cat\r\n0")
    assert splits.read_ids(path).tolist() == [12, 7, 0]
    for text, says in (
        ("1\n2.5\n", "line 2: '2.5' is no id"),
        ("-1\n", "line 1: '-1'"),
        ("1 2\n", "line 1: '1 2'"),
        ("²\n", "line 1"),
        ("9" * 19, "line 1"),
        ("# none\n", "holds no id"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(config.ConfigError, match=says):
            splits.read_ids(path)
    path.write_bytes(b"\xff\xfe1")
    with pytest.raises(config.ConfigError, match="not a text of ids"):
        splits.read_ids(path)
    with pytest.raises(config.ConfigError, match="No such file"):
        splits.read_ids(tmp_path / "none")


def test_label_noise_gives_a_share_of_the_labeled_examples_another_class():
    inputs, labels = np.zeros((len(UNEVEN), 2), np.float32), UNEVEN.astype(np.int32)
    source = examples.Source("mine", inputs, labels, inputs, labels, ["a", "b", "c"], False)
    split = _make(labeled=60, labeled_includes_validation=True)
    noisy = splits.with_label_noise(source, split, 0.3, seed=4)
    changed = np.flatnonzero(noisy.labels != labels)
    assert len(changed) == 18
    assert np.isin(changed, np.setdiff1d(split.labeled, split.validation)).all()
    assert noisy.labels.min() >= 0 and noisy.labels.max() <= 2
    again, other = (splits.with_label_noise(source, split, 0.3, seed=s).labels for s in (4, 5))
    np.testing.assert_array_equal(noisy.labels, again)
    assert not np.array_equal(noisy.labels, other)
    assert splits.with_label_noise(source, split, 0.0, seed=4) is source
    every = splits.with_label_noise(source, split, 1.0, seed=4).labels[changed]
    assert (every != labels[changed]).all()


def test_a_wrong_label_is_any_other_class_and_each_as_likely():
    labels = (np.arange(400) % 4).astype(np.int32)
    inputs = np.zeros((400, 2), np.float32)
    source = examples.Source("mine", inputs, labels, inputs, labels, list("abcd"), False)
    split = _make(labels, 4, labeled=400, validation=0)
    noisy = splits.with_label_noise(source, split, 1.0, seed=4)
    counts = np.zeros((4, 4), int)
    np.add.at(counts, (labels, noisy.labels), 1)
    np.testing.assert_array_equal(np.diag(counts), 0)
    # 33 +- 5 expected.
    assert counts[~np.eye(4, dtype=bool)].min() > 15
