"""Throughput, means of pairs, and event files read back as TensorBoard reads them."""

import resource

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from ssl_influence import event_files, metrics, outer_loop
from tests import test_training as toy


def read(directory):
    """tag -> [(step, value)], of all event files there, in TensorBoard's order."""
    keep_all = {"tensors": 0}
    accumulator = event_accumulator.EventAccumulator(str(directory), keep_all)
    accumulator.Reload()
    return {
        tag: [
            (event.step, tensor_util.make_ndarray(event.tensor_proto))
            for event in accumulator.Tensors(tag)
        ]
        for tag in accumulator.Tags()["tensors"]
    }


def scalars(directory):
    """step -> {tag: float}; fails where a step appears twice."""
    found = {}
    for tag, events in read(directory).items():
        for step, value in events:
            if value.ndim == 0:
                assert tag not in found.setdefault(step, {}), (tag, step)
                found[step][tag] = float(value)
    return found


def test_pair_is_a_mean_over_what_it_counts():
    window = metrics.MetricWindow()
    window.add(1, {"accuracy": np.float32([3, 4]), "never": np.float32([0, 0])})
    window.add(2, {"accuracy": np.float32([0, 0]), "never": np.float32([0, 0])})
    window.add(3, {"accuracy": np.float32([1, 1]), "never": np.float32([0, 0])})
    copy = metrics.MetricWindow()
    copy.deserialize(window.serialize())
    assert window.flush() == copy.flush() == {"accuracy": 0.8}
    with pytest.raises(metrics.NonFiniteError, match="accuracy is .*nan.* at step 4"):
        window.add(4, {"accuracy": np.float32([np.nan, 1])})


def test_throughput_counts_all_but_the_first_batch():
    now = [0.0]

    def batches():
        for wait, examples in ((50, 7), (1, 10), (3, 10), (0, 10)):
            now[0] += wait
            yield examples

    throughput = metrics.Throughput(lambda examples: examples, clock=lambda: now[0])
    measured = []
    for _ in throughput.timed(batches()):
        now[0] += 2  # the step
        measured.append(throughput.flush())
        now[0] += 1  # a checkpoint, after the log line
    assert measured == [
        {},
        {"time/examples_per_second": 10 / 3, "time/input_wait": 1 / 3, "time/window_s": 3},
        {"time/examples_per_second": 10 / 6, "time/input_wait": 3 / 6, "time/window_s": 6},
        {"time/examples_per_second": 10 / 3, "time/input_wait": 0.0, "time/window_s": 3},
    ]


def test_event_files_hold_what_was_written(tmp_path):
    writer = event_files.EventWriter(tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()
    for step in (1, 3):
        writer.write(step, {"a/b": step / 4, "c": 7}, {"h": np.repeat([0.0, 2.0], [step, 9])})
    assert scalars(tmp_path / "tensorboard") == {
        step: {"a/b": step / 4, "c": 7.0} for step in (1, 3)
    }
    for (step, buckets), expected in zip(read(tmp_path / "tensorboard")["h"], (1, 3), strict=True):
        assert step == expected
        assert (buckets[0, 0], buckets[-1, 1]) == (0.0, 2.0)  # left and right ends
        assert (buckets[0, 2], buckets[-1, 2]) == (step, 9)


def test_cut_removes_later_steps_and_half_an_event_and_nothing_else(tmp_path):
    for start in (1, 4):
        writer = event_files.EventWriter(tmp_path)
        for step in range(start, start + 3):
            writer.write(step, {"a": step, "b": step})
        if start == 1:  # as a kill leaves it
            (first,) = tmp_path.iterdir()
            first.write_bytes(first.read_bytes() + b"\x30\0\0\0\0\0\0\0half")
    whole = scalars(tmp_path)
    event_files.cut(tmp_path, 5)
    assert scalars(tmp_path) == {step: whole[step] for step in (1, 2, 3, 4, 5)}
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    event_files.cut(tmp_path, 5)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    event_files.cut(tmp_path, 2)
    assert list(scalars(tmp_path)) == [1, 2]
    event_files.cut(tmp_path / "none", 2)


def test_damaged_event_file_is_an_error_that_names_it(tmp_path):
    event_files.EventWriter(tmp_path).write(1, {"a": 1.0})
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:12] + b"\xff" * 8 + data[20:])
    with pytest.raises(event_files.EventFileError, match=f"{path.name} is damaged at byte 0"):
        event_files.cut(tmp_path, 1)


def test_full_disk_is_an_error_that_names_the_directory(tmp_path):
    writer = event_files.EventWriter(tmp_path)
    writer.write(1, {"a": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(event_files.EventFileError, match=f"{tmp_path} cannot be .*make room"):
            for step in range(2, 200):
                writer.write(step, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (tmp_path / "file").write_text("")
    with pytest.raises(event_files.EventFileError, match="file cannot be written"):
        event_files.EventWriter(tmp_path / "file").write(1, {"a": 1.0})


def test_event_files_of_a_resumed_run_say_what_metrics_jsonl_says(tmp_path):
    config = toy.make_config(weights={"minimum": 0.98, "maximum": 1.02}, train={"log_every": 2})
    folder = tmp_path / "tensorboard"

    def train(poison=None, train_config=config.train):
        trainer = toy.make_trainer(config)
        outer_loop.train(trainer, toy.ToyPipeline(poison=poison), tmp_path, train_config)
        return trainer.example_weights.values()

    with pytest.raises(metrics.NonFiniteError):  # at step 7, the last checkpoint being of step 4
        train(poison=np.nan)
    assert max(scalars(folder)) == 6
    weights = train()
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    written = scalars(folder)
    assert sorted(written) == [row["step"] for row in rows]
    for row in rows:
        step, _ = row.pop("step"), row.pop("wall_s")
        assert written[step] == pytest.approx(row, rel=1e-6)
    assert rows[-1]["weights/share_at_minimum"] == np.mean(weights == np.float32(0.98)) > 0
    assert rows[-1]["weights/share_at_maximum"] == np.mean(weights == np.float32(1.02)) > 0
    histograms = read(folder)["weights/example_weights"]
    assert [step for step, _ in histograms] == [2, 4, 6, 8, 10, 12]
    assert histograms[-1][1][:, 2].sum() == toy.SIZE


def test_without_tensorboard_no_event_file_is_written(tmp_path):
    config = toy.make_config(weights={"weighting": "fixed"}, train={"tensorboard": False})
    outer_loop.train(toy.make_trainer(config), toy.ToyPipeline(), tmp_path, config.train)
    assert not (tmp_path / "tensorboard").exists()
    row = metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row["weights/share_at_minimum"] == 0 and "weights/share_at_maximum" not in row
    assert row["time/examples_per_second"] > 0 and 0 < row["time/input_wait"] < 1
    assert tf.io.gfile.exists(str(tmp_path / "checkpoints"))
