"""Each alarm sounds where it should, once, and nowhere else."""

import dataclasses
import re

import numpy as np
import pytest

from ssl_influence import alarms, metrics, outer_loop
from ssl_influence.methods import pseudo_label
from tests import test_training as toy

FACTS = alarms.Facts(
    train_steps=1000,
    confidence=0.8,
    minimum=0.0,
    maximum=2.0,
    validation_counts=np.array([5, 3, 2]),
    class_names=["ox", "dog", "cat", *map(str, range(3, 1000))],
)
HEALTHY = {
    "step": 500,
    "train/mask_rate": 0.4,
    "validation/error": 20.0,
    "validation/classes_never_predicted": 0,
    "weights/share_at_minimum": 0.3,
    "weights/share_at_maximum": 0.2,
    "weights/updates_per_example": 2.0,
    "weights/share_updated": 1.0,
    "weights/skipped_steps": 0,
    "time/input_wait": 0.05,
    "time/window_s": 30.0,
}
# Alarm, what makes it sound, what its message must name.
SOUNDING = {
    "mask near 0": ({"train/mask_rate": 0.0}, "mask rate is 0.*--confidence=0.8"),
    "mask near 1": ({"train/mask_rate": 0.995, "step": 80}, "mask rate is 0.995 so early"),
    "chance": ({"validation/error": 50.0}, r"50.0% is no better .* one class \(50.0%\)"),
    "class": ({"validation/classes_never_predicted": 1}, "of class cat"),
    "minimum": ({"weights/share_at_minimum": 0.95}, "95% .* --weight_min=0, .* no longer"),
    "maximum": ({"weights/share_at_maximum": 1.0}, "100% .* --weight_max=2"),
    "skipped": ({"weights/skipped_steps": 3}, "3 weight steps were skipped.*--damping"),
    "input": ({"time/input_wait": 0.25}, "25% of the time .* batches"),
}
SILENT = {
    "mask near 0 early": {"train/mask_rate": 0.0, "step": 100},
    "mask near 1 late": {"train/mask_rate": 1.0},
    "chance early": {"validation/error": 80.0, "step": 240},
    "class early": {"validation/classes_never_predicted": 2, "step": 240},
    "weights that start at the bound": {
        "weights/share_at_minimum": 1.0,
        "weights/share_at_maximum": 1.0,
        "weights/updates_per_example": 1.0,  # few of them, often
        "weights/share_updated": 0.05,
    },
    "a hiccup of the input": {"time/input_wait": 0.5, "time/window_s": 0.5},
    "input while it starts": {"time/input_wait": 0.9, "step": 100},
}


def sounded(row, facts=FACTS):
    return alarms.Alarms(facts).check(row, never_predicted=[2])


@pytest.mark.parametrize("case", SOUNDING)
def test_alarm_sounds_alone_and_names_step_and_remedy(case):
    change, pattern = SOUNDING[case]
    row = {**HEALTHY, **change}
    (message,) = sounded(row)
    assert message.startswith(f"At step {row['step']} ") and "\n" not in message
    assert re.search(pattern, message)


@pytest.mark.parametrize("case", SILENT)
def test_nothing_sounds_too_early_or_for_what_is_meant(case):
    assert sounded({**HEALTHY, **SILENT[case]}) == []


def test_healthy_rows_are_silent_whatever_they_hold():
    assert sounded(HEALTHY) == []
    assert sounded({"step": 1000}) == []


@pytest.mark.parametrize("confidence", [None, 0.0])
@pytest.mark.parametrize("step, rate", [(50, 1.0), (500, 0.0)])
def test_a_method_without_threshold_has_no_mask_to_warn_of(confidence, step, rate):
    facts = dataclasses.replace(FACTS, confidence=confidence)
    assert sounded({**HEALTHY, "step": step, "train/mask_rate": rate}, facts) == []


def test_a_mask_rate_near_one_sounds_at_the_first_row_of_a_run_with_few():
    row = {"step": 200, "train/mask_rate": 1.0}
    watch = alarms.Alarms(FACTS)
    assert len(watch.check(row)) == 1 and watch.check(row) == []
    watch = alarms.Alarms(FACTS)
    assert watch.check({**row, "train/mask_rate": 0.5}) == [] and watch.check(row) == []


def test_validation_examples_of_one_class_have_no_chance_to_beat():
    facts = dataclasses.replace(FACTS, validation_counts=np.array([0, 4]))
    assert sounded({**HEALTHY, "validation/error": 0.0}, facts) == []


def test_grace_of_a_long_run_is_capped():
    facts = dataclasses.replace(FACTS, train_steps=400_000)
    row = {"train/mask_rate": 0.0}
    assert sounded({**row, "step": 5000}, facts) == []
    assert len(sounded({**row, "step": 5001}, facts)) == 1


def test_an_alarm_sounds_once_a_run_and_not_again_after_a_resume():
    bad = {**HEALTHY, "train/mask_rate": 0.0, "time/input_wait": 0.5}
    watch = alarms.Alarms(FACTS)
    assert len(watch.check(bad)) == 2
    assert watch.check({**bad, "step": 600}) == []
    resumed = alarms.Alarms(FACTS, [HEALTHY, {**bad, "time/input_wait": 0.0}])
    (message,) = resumed.check({**bad, "step": 700})
    assert "waiting for batches" in message


def test_many_missing_classes_stay_one_short_line():
    row = {**HEALTHY, "validation/classes_never_predicted": 900}
    (message,) = alarms.Alarms(FACTS).check(row, never_predicted=range(900))
    assert "ox, dog, cat, 3, 4, 5, 6, 7, 8, 9 and 890 more" in message


def test_classes_that_have_no_example_need_no_prediction():
    assert alarms.never_predicted(np.array([4, 0, 1, 2]), np.array([0, 0, 7, 0])) == [0, 3]


def test_alarms_of_a_run_reach_the_log_once_and_not_again_after_a_resume(tmp_path, caplog):
    config = toy.make_config(weights={"weighting": "fixed"}, train={"log_every": 2})
    method = pseudo_label.PseudoLabel(12, confidence=1.0)
    for stops_after in (7, 99):
        asked = iter(range(1, 100))
        outer_loop.train(
            toy.make_trainer(config, method=method),
            toy.ToyPipeline(),
            tmp_path,
            config.train,
            should_stop=lambda: next(asked) == stops_after,  # noqa: B023
        )
    said = [r.getMessage() for r in caplog.records if "mask rate" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("At step 2 ") and "--confidence=1" in said[0]
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("train/mask_rate") == 0] == [2, 4, 6, 8, 10, 12]
