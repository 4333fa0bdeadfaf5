"""Collections become one source: ids, classes by name, strangers, names."""

import numpy as np
import pytest

from ssl_influence import config
from ssl_influence.data import examples, rows


def part(labels, value=0, names=None, skipped=()):
    images = np.full([len(labels), 2, 2, 1], value, np.uint8)
    return examples.Examples(images, np.array(labels, np.int32), names, skipped)


def collection(class_names="ab", name="mine", **parts):
    return examples.Collection(name, list(class_names), parts)


def test_rows_with_ids_are_train_then_unlabeled_then_validation():
    source = examples.assemble(
        collection(
            test=part([1], 4),
            validation=part([1, 0], 3),
            unlabeled=part([-1], 2),
            train=part([0, 1, -1], 1),
        )
    )
    assert source.inputs[:, 0, 0, 0].tolist() == [1, 1, 1, 2, 3, 3]
    assert source.labels.tolist() == [0, 1, -1, -1, 1, 0]
    assert source.parts.tolist() == [0, 0, 0, 1, 2, 2]
    assert source.test_inputs[:, 0, 0, 0].tolist() == [4] and source.test_labels.tolist() == [1]
    assert source.strangers is None and source.row_name(4) == "4"


def test_a_source_of_a_training_part_alone_has_no_test_example():
    source = examples.assemble(collection(train=part([0, 1])))
    assert source.test_inputs.shape == (0, 2, 2, 1) and len(source.test_labels) == 0
    assert source.parts is None and source.names is None


def test_classes_of_joined_collections_match_by_name():
    other = collection("xba", train=part([0, 1, 2, -1], 7), unlabeled=part([2], 8))
    source = examples.assemble(collection(train=part([0, 1])), {"unlabeled": other})
    # Its unlabeled examples come first; x is no class of the task.
    assert source.labels[2:].tolist() == [0, -1, 1, 0, -1]
    assert source.strangers.tolist() == [False, False, False, True, False, False, False]
    assert source.class_names == ["a", "b"]


def test_a_part_is_taken_from_the_same_part_of_another_collection_or_from_its_training_part():
    both = collection(train=part([0], 5), test=part([1], 6))
    alone = collection(train=part([1], 5))
    own = collection(train=part([0, 1]), test=part([0], 4))
    for other, expected in ((both, [6]), (alone, [5])):
        source = examples.assemble(own, {"test": other})
        assert source.test_inputs[:, 0, 0, 0].tolist() == expected


def test_a_collection_in_parts_is_not_taken_for_one_that_it_has_not():
    other = collection(train=part([0, 1]), validation=part([1]), name="theirs")
    with pytest.raises(config.ConfigError, match="test_data=theirs has the parts train, valid"):
        examples.assemble(collection(train=part([0, 1])), {"test": other})
    source = examples.assemble(collection(train=part([0, 1])), {"validation": other})
    assert source.parts.tolist() == [0, 0, 2]


def test_classes_outside_the_task_are_strangers_among_the_unlabeled_examples():
    given = examples.Collection(
        "mine", ["a", "b", "z"], {"train": part([0, 1]), "unlabeled": part([2, 0])}, task_classes=2
    )
    source = examples.assemble(given)
    assert source.class_names == ["a", "b"]
    assert source.labels.tolist() == [0, 1, -1, 0]
    assert source.strangers.tolist() == [False, False, True, False]


def test_names_and_skipped_examples_are_kept():
    source = examples.assemble(
        collection(
            train=part([0, 1], names=rows.Strings(["x.png", "y.png"]), skipped=["z.png: bad"]),
            unlabeled=part([-1]),
            test=part([1], names=["t.png"], skipped=["u.png: bad"]),
        )
    )
    assert [source.row_name(i) for i in range(3)] == ["x.png", "y.png", "0"]
    assert source.test_names[0] == "t.png"
    assert source.skipped == ["z.png: bad", "u.png: bad"]


@pytest.mark.parametrize(
    "parts, says",
    [
        ({"test": part([0])}, "mine has no training example with a label"),
        ({"train": part([-1, -1])}, "mine has no training example with a label"),
        ({"train": part([0, 1]), "test": part([0, -1])}, "the test example number 1 has no label"),
        (
            {"train": part([0, 1]), "validation": part([2], names=["v/q.png"])},
            "the validation example 'v/q.png' is of class 'c', which is not of the task",
        ),
        (
            {
                "train": part([0, 1]),
                "test": examples.Examples(np.zeros([1, 3, 2, 1], np.uint8), np.zeros(1, np.int32)),
            },
            r"test examples are uint8 \(3, 2, 1\) each, the training examples of mine uint8 "
            r"\(2, 2, 1\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_example(parts, says):
    given = examples.Collection("mine", ["a", "b", "c"], parts, task_classes=2)
    with pytest.raises(config.ConfigError, match=says):
        examples.assemble(given)
