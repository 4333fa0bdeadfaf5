"""Metrics, checkpoints and evaluation: what a run leaves on disk."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import averages, checkpoints, evaluation, metrics


def test_window_averages_each_name_over_the_steps_that_report_it():
    window = metrics.MetricWindow()
    window.add(1, {"a": 1.0})
    window.add(2, {"a": 2.0, "b": 5.0})
    copy = metrics.MetricWindow()
    copy.deserialize(window.serialize())
    assert window.flush() == copy.flush() == {"a": 1.5, "b": 5.0}
    assert window.flush() == {}


def test_window_refuses_a_non_finite_value_and_names_it():
    window = metrics.MetricWindow()
    with pytest.raises(metrics.NonFiniteError, match="train/loss_l2 is nan at step 31"):
        window.add(31, {"train/loss": 1.0, "train/loss_l2": float("nan")})
    assert window.flush() == {}


def test_writer_drops_later_steps_and_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 10, "wall_s": 2.5, "x": 0.1}\n{"step": 20, "wall_s": 5, "x": 1}\n{"st'
    )
    writer = metrics.MetricsWriter(path, resume_step=10)
    writer.write(20, {"x": 3.0})
    rows = metrics.read_metrics(path)
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[0]["x"] == 0.1 and rows[1]["x"] == 3.0
    assert rows[1]["wall_s"] >= 2.5


def test_damage_inside_metrics_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2"):
        metrics.read_metrics(path)


def test_checkpoint_keeps_the_newest_and_restores_all(tmp_path):
    variable, window = tf.Variable(0.0), metrics.MetricWindow()
    saver = checkpoints.Checkpointer(tmp_path, 2, variable=variable, window=window)
    for step in (5, 10, 15):
        variable.assign(step)
        window.add(step, {"loss": step / 7})
        saver.save(step)
    assert list(checkpoints.list_checkpoints(tmp_path)) == [10, 15]
    other, other_window = tf.Variable(-1.0), metrics.MetricWindow()
    assert checkpoints.Checkpointer(
        tmp_path, 2, variable=other, window=other_window
    ).restore_latest()
    assert float(other) == 15.0
    assert other_window.flush() == window.flush()


def test_restoring_half_a_checkpoint_is_an_error(tmp_path):
    checkpoints.Checkpointer(tmp_path, 2, a=tf.Variable(1.0)).save(1)
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-1 does not fit"):
        checkpoints.Checkpointer(
            tmp_path, 2, a=tf.Variable(0.0), b=tf.Variable(0.0)
        ).restore_latest()
    checkpoints.Checkpointer(tmp_path, 2, a=tf.Variable(1.0), b=tf.Variable(1.0)).save(2)
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-2 does not fit"):
        checkpoints.Checkpointer(tmp_path, 2, a=tf.Variable(0.0)).restore_latest()
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-2 does not fit"):
        checkpoints.Checkpointer(
            tmp_path, 2, a=tf.Variable([0.0, 1.0]), b=tf.Variable(0.0)
        ).restore_latest()
    assert not checkpoints.Checkpointer(tmp_path / "none", 2, a=tf.Variable(0.0)).restore_latest()


def test_a_lost_or_damaged_checkpoint_gives_way_to_the_one_before_and_never_to_none(
    tmp_path, caplog
):
    variable = tf.Variable(np.zeros(500, np.float32))

    def saver():
        return checkpoints.Checkpointer(tmp_path, 5, a=variable)

    def restored_step():
        variable.assign(tf.fill([500], -1.0))
        caplog.clear()
        assert saver().restore_latest()
        return variable.numpy()[0]

    for step in (10, 20):
        variable.assign(tf.fill([500], float(step)))
        saver().save(step)
    data = tmp_path / "ckpt-20.data-00000-of-00001"
    whole = data.read_bytes()
    for damaged in (whole[:100], whole[:-5] + bytes(5)):
        data.write_bytes(damaged)
        assert restored_step() == 10
        assert re.search("(?s)ckpt-20 cannot be read.*damaged.*Going back to .*10", caplog.text)
    data.unlink()
    assert restored_step() == 10 and "ckpt-20 is incomplete" in caplog.text
    before = tmp_path / "ckpt-10.data-00000-of-00001"
    kept = before.read_bytes()
    before.unlink()
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-20 is incomplete.*none before it"):
        saver().restore_latest()
    before.write_bytes(kept[:100])
    with pytest.raises(checkpoints.CheckpointError, match="ckpt-10 cannot be read.*damaged"):
        saver().restore_latest()
    before.write_bytes(kept)
    data.write_bytes(whole)
    assert restored_step() == 20 and not caplog.text
    for name in ("index", "data-00000-of-00001"):
        (tmp_path / f"ckpt-best.{name}").write_bytes(b"of another program")
    for text in ("", "garbage", 'model_checkpoint_path: "foo"'):
        (tmp_path / "checkpoint").write_text(text)
        assert saver().restore_latest()
    (tmp_path / "checkpoint").unlink()  # as a kill within the first save leaves it
    assert saver().restore_latest()
    index = tmp_path / "ckpt-20.index"
    written = index.read_bytes()
    for size in (0, 4, len(written) - 1):  # or as one leaves it that falls while that is written
        index.write_bytes(written[:size])
        assert saver().restore_latest()
    (tmp_path / "ckpt-20.index").unlink()
    (tmp_path / "ckpt-10.index").unlink()
    assert not saver().restore_latest()


def identity_model():
    """Logits are the two inputs themselves, so a test decides each prediction."""
    inputs = keras.Input([2])
    head = keras.layers.Dense(2, kernel_initializer="identity", name="head")
    return keras.Model(inputs, [inputs, head(inputs)])


def batches_of(inputs, labels, size):
    found = []
    for start in range(0, len(labels), size):
        x, y = inputs[start : start + size], labels[start : start + size]
        pad = size - len(y)
        found.append(
            {
                "inputs": tf.constant(np.pad(x, [[0, pad], [0, 0]]), tf.float32),
                "label": tf.constant(np.pad(y, [0, pad]), tf.int32),
                "mask": tf.constant(np.arange(size) < len(y)),
            }
        )
    return found


@pytest.mark.parametrize("size", [1, 4, 7, 50])
def test_error_counts_every_example_once_whatever_the_batch_size(size):
    random = np.random.RandomState(0)
    inputs, labels = random.randn(23, 2), random.randint(2, size=23)
    expected = 100 * np.mean(inputs.argmax(1) != labels)
    error, examples = evaluation.Evaluator(identity_model()).error(batches_of(inputs, labels, size))
    assert (error, examples) == (pytest.approx(expected), 23)


def test_counts_say_how_often_each_class_is_predicted():
    inputs = np.array([[2.0, 1.0], [3.0, 1.0], [0.0, 1.0], [5.0, 0.0], [1.0, 0.0]])
    batches = batches_of(inputs, np.array([0, 1, 1, 0, 0]), 3)
    wrong, examples, predicted = evaluation.Evaluator(identity_model()).counts(batches)
    assert (wrong, examples, predicted.tolist()) == (1, 5, [4, 1])


def test_evaluation_of_a_run_writes_results_and_summary(tmp_path):
    model = identity_model()
    average = averages.ExponentialMovingAverage(model.trainable_variables, 0.0)
    saver = checkpoints.Checkpointer(
        tmp_path / "checkpoints", 9, model=model, ema=average, other=tf.Variable(0.0)
    )
    inputs, labels = (
        np.array([[2.0, 1.0], [3.0, 1.0], [0.0, 1.0], [0.0, 5.0]]),
        np.array([0, 0, 1, 1]),
    )
    for step, bias in ((10, [0.0, 0.0]), (20, [3.0, 0.0]), (30, [1.5, 0.0])):
        model.get_layer("head").bias.assign(bias)
        saver.save(step)  # the average keeps the bias it began with: no error
    summary = evaluation.evaluate_run(
        model, average, {"test": batches_of(inputs, labels, 3)}, tmp_path
    )
    rows = [json.loads(line) for line in (tmp_path / "eval/results.jsonl").read_text().splitlines()]
    assert [(row["step"], row["raw_error"], row["ema_error"]) for row in rows] == [
        (10, 0.0, 0.0),
        (20, 25.0, 0.0),
        (30, 25.0, 0.0),
    ]
    assert {row["examples"] for row in rows} == {4} and {row["split"] for row in rows} == {"test"}
    assert summary == json.loads((tmp_path / "eval/summary.json").read_text())
    raw = summary["test"]["raw"]
    assert raw["last"] == {"step": 30, "error": 25.0}
    assert raw["best"] == {"step": 10, "error": 0.0, "chosen_on": "test"}
    assert raw["median"]["1"] == {"error": 25.0, "checkpoints": 1}
    assert raw["median"]["10"] == {"error": 25.0, "checkpoints": 3}
    regular = evaluation.evaluate_run(
        model, average, {"test": batches_of(inputs, labels, 3)}, tmp_path, every=20
    )
    assert regular["test"]["checkpoints"] == 2  # 20, and 30 as the last


def test_evaluation_without_a_checkpoint_says_so(tmp_path):
    model = identity_model()
    average = averages.ExponentialMovingAverage(model.trainable_variables, 0.0)
    with pytest.raises(checkpoints.CheckpointError, match="holds no checkpoint"):
        evaluation.evaluate_run(model, average, {}, tmp_path)


def test_exported_weights_read_back_exactly(tmp_path):
    weight = np.float32([0.1, 1.0, 2.3456789])
    path = tmp_path / "weights" / "weights-3.csv"
    checkpoints.export_weights(path, np.array([0, 2]), weight, np.array([4, 0, 1]))
    lines = path.read_text().splitlines()
    assert lines[0] == "example_id,weight,updates"
    assert np.float32(lines[2].split(",")[1]) == weight[2] and lines[2].endswith(",1")
