"""Following the checkpoints of a run: on a clock that takes no time, with training as events."""

import json
import logging
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import averages, checkpoints, config, evaluation

EVERY, LAST, STOPPED_AT = 10, 35, 17
STEPS = (10, STOPPED_AT, 20, 30, LAST)


@pytest.fixture(scope="module")
def run():
    """A model with its average, and two splits whose errors depend on the model's bias."""
    inputs = keras.Input([2])
    head = keras.layers.Dense(2, kernel_initializer="identity", name="head")
    model = keras.Model(inputs, [inputs, head(inputs)])
    average = averages.ExponentialMovingAverage(model.trainable_variables, 0.0)
    margins = {"test": np.linspace(-20, 20, 41), "validation": np.linspace(-18, 18, 7)}
    splits = {
        name: [
            {
                "inputs": tf.constant(np.stack([x, 0 * x], 1), tf.float32),
                "label": tf.constant(x < 0, tf.int32),
                "mask": tf.constant([True] * len(x)),
            }
        ]
        for name, x in margins.items()
    }
    return model, average, splits


class Training:
    """Writes checkpoints at given times of a clock that moves when the follower sleeps."""

    def __init__(self, run, model_dir, keep=99):
        self.run, self.model_dir = run, model_dir
        self.settings = config.TrainConfig(train_steps=LAST, checkpoint_every=EVERY)
        self.now, self.events = 0.0, []
        model, average, _ = run
        self._saver = checkpoints.Checkpointer(
            model_dir / "checkpoints", keep, model=model, ema=average
        )

    def save(self, step):
        model, average, _ = self.run
        model.get_layer("head").bias.assign([step / 2, 0.0])
        average.update()
        model.get_layer("head").bias.assign([step / 3, 0.0])
        self._saver.save(step)

    def at(self, time, action, *arguments):
        self.events.append((time, action, arguments))

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        due = [event for event in self.events if event[0] <= self.now]
        self.events = [event for event in self.events if event[0] > self.now]
        for _, action, arguments in due:
            action(*arguments)

    def follow(self, timeout_s=100):
        return evaluation.follow_run(
            *self.run,
            self.model_dir,
            current=lambda: self.settings,
            timeout_s=timeout_s,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def file(self, step, kind):
        (path,) = (self.model_dir / "checkpoints").glob(f"ckpt-{step}.{kind}*")
        return path

    def steps(self):
        lines = (self.model_dir / "eval" / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["split"] for row in rows] == ["test", "validation"] * (len(rows) // 2)
        return [row["step"] for row in rows][::2]

    def results(self):
        return [
            (self.model_dir / "eval" / name).read_bytes()
            for name in ("results.jsonl", "summary.json")
        ]


@pytest.fixture
def training(run, tmp_path):
    return Training(run, tmp_path / "run")


@pytest.fixture
def reads(monkeypatch):
    """The steps whose checkpoints were read, as often as they were."""
    seen, read = [], checkpoints.read

    def noted(reader, path):
        seen.append(checkpoints.step_of(path))
        return read(reader, path)

    monkeypatch.setattr(checkpoints, "read", noted)
    return seen


@pytest.fixture
def expected(run, tmp_path):
    """What a plain evaluation of the finished run leaves."""
    finished = Training(run, tmp_path / "finished")
    for step in STEPS:
        finished.save(step)
    evaluation.evaluate_run(*run, finished.model_dir, EVERY)
    assert finished.steps() == [10, 20, 30, LAST]
    rows = [json.loads(line) for line in finished.results()[0].splitlines()]
    assert len({row["raw_error"] for row in rows} | {row["ema_error"] for row in rows}) > 6
    return finished.results()


def warnings_of(caplog):
    """What was logged as a warning, TensorFlow's own aside."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == "ssl_influence"
    ]


@pytest.mark.parametrize("already", range(len(STEPS) + 1))
def test_results_are_the_same_whenever_the_follower_starts(training, expected, reads, already):
    for step in STEPS[:already]:
        training.save(step)
    for i, step in enumerate(STEPS[already:]):
        training.at(40 * i + 7, training.save, step)
    summary = training.follow()
    assert training.results() == expected
    assert summary == json.loads(expected[1])
    assert sorted(reads) == [10, 20, 30, LAST]
    assert not training.events


def test_a_follower_that_was_stopped_goes_on_where_it_was(training, expected, reads):
    def interrupt():
        raise KeyboardInterrupt

    for i, step in enumerate(STEPS):
        training.at(10 * i, training.save, step)
        training.at(10 * i + 5, interrupt)
    training.events.pop()
    for _ in range(len(STEPS) - 1):
        with pytest.raises(KeyboardInterrupt):
            training.follow()
    training.follow()
    assert training.results() == expected
    assert sorted(reads) == [10, 20, 30, LAST]
    evaluation.evaluate_run(*training.run, training.model_dir, EVERY, keep=True)
    assert training.results() == expected and len(reads) == 4


def test_rows_stay_when_their_checkpoints_are_deleted(run, tmp_path, expected):
    training = Training(run, tmp_path / "run", keep=1)
    for i, step in enumerate(STEPS):
        training.at(10 * i, training.save, step)
    training.follow()
    assert list(checkpoints.list_checkpoints(training.model_dir / "checkpoints")) == [LAST]
    assert training.results() == expected
    evaluation.evaluate_run(*run, training.model_dir, EVERY, keep=True)
    assert training.results() == expected
    evaluation.evaluate_run(*run, training.model_dir, EVERY)
    assert training.steps() == [LAST]


def test_what_a_stopped_run_left_counts_until_it_goes_on(training, expected, caplog):
    caplog.set_level(logging.INFO)
    training.save(10)
    training.save(STOPPED_AT)
    training.follow(timeout_s=30)
    assert training.now == 30 and "No new checkpoint came for 30 s" in caplog.text
    assert training.steps() == [10, STOPPED_AT]
    followed = training.results()
    evaluation.evaluate_run(*training.run, training.model_dir, EVERY)
    assert training.results() == followed
    for step in (20, 30, LAST):
        training.save(step)
    training.follow()
    assert training.results() == expected


def test_the_timeout_counts_from_the_newest_checkpoint(training):
    for i, step in enumerate(STEPS[:4]):
        training.at(25 * (i + 1), training.save, step)
    training.follow(timeout_s=51)
    assert training.steps() == [10, 20, 30] and training.now == 100 + 51


def test_a_run_that_becomes_longer_is_followed_to_its_new_end(training):
    def lengthen():
        training.settings = config.TrainConfig(train_steps=40, checkpoint_every=20)

    training.save(10)
    training.save(20)
    training.at(10, lengthen)
    training.at(20, training.save, 35)
    training.at(30, training.save, 40)
    training.follow()
    assert training.steps() == [20, 40]


# TensorFlow reads the model's values first, and the save counter after them.
@pytest.mark.parametrize("moment", ["read", "_maybe_create_save_counter"])
def test_a_checkpoint_deleted_while_it_is_read_is_left_out(training, monkeypatch, caplog, moment):
    caplog.set_level(logging.INFO)
    owner = checkpoints if moment == "read" else tf.train.Checkpoint
    original = getattr(owner, moment)

    def deleted_first(*arguments):
        for kind in ("index", "data"):
            training.file(10, kind).unlink()
        monkeypatch.undo()
        return original(*arguments)

    for step in (10, 20, LAST):
        training.save(step)
    copy = training.model_dir.with_name("copy")
    shutil.copytree(training.model_dir, copy)
    monkeypatch.setattr(owner, moment, deleted_first)
    training.follow()
    assert training.steps() == [20, LAST]
    assert caplog.text.count("ckpt-10 was deleted before it could be read") == 1
    assert not warnings_of(caplog)
    training.model_dir = copy
    monkeypatch.setattr(owner, moment, deleted_first)
    evaluation.evaluate_run(*training.run, copy, EVERY)
    assert training.steps() == [20, LAST]


@pytest.mark.parametrize("kind", ["index", "data"])
def test_a_checkpoint_still_being_written_is_read_once_it_is_whole(training, caplog, kind):
    for step in (10, 20, LAST):
        training.save(step)
    path = training.file(LAST, kind)
    whole = path.read_bytes()
    path.write_bytes(b"")
    training.at(evaluation.POLL_S, path.write_bytes, whole[:-9])
    training.at(2 * evaluation.POLL_S, path.write_bytes, whole)
    training.follow()
    assert training.steps() == [10, 20, LAST]
    assert not warnings_of(caplog)


def test_a_damaged_checkpoint_is_reported_once_and_read_when_it_was_mended(training, reads, caplog):
    for step in (10, 20):
        training.save(step)
    path = training.file(20, "data")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    training.at(20, training.save, LAST)
    training.follow()
    assert training.steps() == [10, LAST]
    (warning,) = warnings_of(caplog)
    assert "ckpt-20 cannot be read" in warning
    assert reads.count(20) == 2
    with pytest.raises(checkpoints.UnreadableError, match="ckpt-20 cannot be read"):
        evaluation.evaluate_run(*training.run, training.model_dir, EVERY, keep=True)
    path.write_bytes(whole)
    training.follow()
    assert training.steps() == [10, 20, LAST]


def test_a_checkpoint_that_failed_once_and_was_then_deleted_is_not_waited_for(training, caplog):
    caplog.set_level(logging.INFO)
    for step in (10, LAST):
        training.save(step)
    training.file(10, "data").write_bytes(b"")
    training.at(evaluation.POLL_S, lambda: training.file(10, "index").unlink())
    training.follow()
    assert training.steps() == [LAST] and training.now == evaluation.POLL_S
    assert caplog.text.count("ckpt-10 was deleted before it could be read") == 1
    assert not warnings_of(caplog)


def test_a_damaged_last_checkpoint_is_waited_for_and_reported(training, caplog):
    training.save(10)
    training.save(LAST)
    path = training.file(LAST, "index")
    path.write_bytes(path.read_bytes()[:-1])
    training.at(20, training.save, LAST)
    training.follow()
    assert training.steps() == [10, LAST] and training.now == 20
    assert caplog.text.count("ckpt-35 cannot be read") == 1


@pytest.mark.parametrize("timeout_s", [0, 30])
def test_without_any_checkpoint_the_follower_ends_with_an_error(training, caplog, timeout_s):
    with pytest.raises(checkpoints.CheckpointError, match=f"no checkpoint.*for {timeout_s} s"):
        training.follow(timeout_s)
    assert training.now == timeout_s
    training.save(10)
    training.file(10, "index").write_bytes(b"")
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint"):
        training.follow(timeout_s)
    assert caplog.text.count("ckpt-10 cannot be read") == 1
    assert not (training.model_dir / "eval").exists()


def test_a_checkpoint_that_lacks_the_average_ends_the_follower_at_once(run, training):
    checkpoints.Checkpointer(training.model_dir / "checkpoints", 9, model=run[0]).save(10)
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-10 does not fit"):
        training.follow()
    assert training.now == 0


def test_no_row_is_written_once_the_directory_was_given_to_another_run(training):
    training.save(10)
    answers = iter([training.settings])

    def current():
        try:
            return next(answers)
        except StopIteration:
            raise config.ConfigError("another run") from None

    with pytest.raises(config.ConfigError, match="another run"):
        evaluation.follow_run(*training.run, training.model_dir, current=current, timeout_s=0)
    assert not (training.model_dir / "eval").exists()
