"""`experiments.evaluate` beside a run in training, and whose results a directory holds."""

import fcntl
import json
import logging
import signal
import threading
import time
import types

import pytest
import tensorflow as tf
import tf_keras as keras

from experiments import flags as shared_flags, launch
from ssl_influence import averages, checkpoints, config as config_lib
from tests.experiments.processes import TINY, assert_refused, finish, run, start, stopped, succeeded


def follow(model_dir, timeout_s=600, fresh=False):
    return start(
        "-m",
        "experiments.evaluate",
        f"--model_dir={model_dir}",
        "--follow",
        f"--timeout_s={timeout_s}",
        fresh=fresh,
    )


def train(model_dir):
    return start("-m", "experiments.uda_cifar", *TINY, "--model=mlp", f"--model_dir={model_dir}")


def wait_until(condition, process, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def mirror(model_dir, copy):
    """A directory that shows the same run and has an eval/ of its own."""
    copy.mkdir()
    for name in ("flags.txt", "split.json", "checkpoints"):
        (copy / name).symlink_to(model_dir / name)
    return copy


def results(model_dir):
    return [(model_dir / "eval" / name).read_bytes() for name in ("results.jsonl", "summary.json")]


def test_followers_started_before_and_during_training_write_what_a_plain_evaluation_does(tmp_path):
    model_dir = tmp_path / "run"
    before = follow(model_dir)
    training = train(model_dir)
    # Stopped after its first checkpoint: it leaves another one, off the schedule.
    wait_until((model_dir / "checkpoints" / "ckpt-10.index").exists, training)
    training.send_signal(signal.SIGTERM)
    stopped(finish(training))
    during = follow(mirror(model_dir, tmp_path / "during"))
    wait_until((tmp_path / "during" / "eval" / "results.jsonl").exists, during)
    succeeded(finish(train(model_dir)))
    after = mirror(model_dir, tmp_path / "after")
    plain = succeeded(run("evaluate", f"--model_dir={after}"))
    rows = [json.loads(line) for line in results(after)[0].splitlines()]
    assert [row["step"] for row in rows] == [10, 10, 20, 20, 30, 30, 40, 40]
    for follower, folder in ((before, model_dir), (during, tmp_path / "during")):
        followed = succeeded(finish(follower))
        assert results(folder) == results(after)
        assert followed.stdout == plain.stdout
        assert "Step 40, the last, is evaluated." in followed.stderr
        assert followed.stderr.count("step 20  error, %: test") == 1


def test_a_follower_that_waits_for_a_run_ends_in_time_or_when_it_is_told_to(tmp_path):
    nothing = tmp_path / "none"
    assert_refused(finish(follow(nothing, timeout_s=2)), str(nothing), "holds no flags.txt")
    for number in (signal.SIGTERM, signal.SIGINT):
        process = follow(nothing, fresh=True)  # which waits before it imports TensorFlow
        assert "Waiting for" in process.stderr.readline()
        process.send_signal(number)
        assert "Stopped" in succeeded(finish(process)).stderr
    assert not nothing.exists()
    lone = run("evaluate", f"--model_dir={nothing}", "--timeout_s=2")
    assert_refused(lone, "--timeout_s=2", "--follow")


@pytest.fixture
def built(tmp_path):
    """What `launch.evaluate` needs of a run, with one checkpoint in tmp_path/checkpoints."""
    inputs = keras.Input([2])
    head = keras.layers.Dense(2, kernel_initializer="identity", name="head")
    model = keras.Model(inputs, [inputs, head(inputs)])
    average = averages.ExponentialMovingAverage(model.trainable_variables, 0.0)
    batch = {
        "inputs": tf.constant([[1.0, 0.0], [0.0, 1.0]]),
        "label": tf.constant([0, 0]),
        "mask": tf.constant([True, True]),
    }
    saver = checkpoints.Checkpointer(tmp_path / "checkpoints", 1, model=model, ema=average)
    config = config_lib.Config().replace(
        train={"train_steps": 20, "checkpoint_every": 10}, optimizer={"schedule": "constant"}
    )
    run = types.SimpleNamespace(
        config=config,
        manifest={"sha256": "a"},
        encoder=None,
        source=types.SimpleNamespace(test_labels=[0]),
        trainer=types.SimpleNamespace(model=model, ema=average, strategy=None),
        pipeline=types.SimpleNamespace(evaluation_batches=lambda split, size: [batch]),
    )
    write_flags(tmp_path, config)
    saver.save(10)
    launch.evaluate(run, tmp_path)
    saver.save(20)  # and deletes the first
    return run


def write_flags(model_dir, config):
    (model_dir / "flags.txt").write_text(shared_flags.to_flagfile(config, "x"))


def steps(model_dir):
    lines = (model_dir / "eval" / "results.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["step"] for line in lines})


def with_settings(built, **concerns):
    return types.SimpleNamespace(**{**vars(built), "config": built.config.replace(**concerns)})


def test_results_of_the_same_run_stay(built, tmp_path):
    longer = with_settings(built, train={"train_steps": 30, "keep_checkpoints": 5})
    launch.evaluate(longer, tmp_path)
    assert steps(tmp_path) == [10, 20]


@pytest.mark.parametrize("follow_s", [None, 0])
@pytest.mark.parametrize("change", ["seed", "split", "nothing written down"])
def test_results_of_another_run_are_replaced(built, tmp_path, change, follow_s):
    if change == "seed":
        built = with_settings(built, train={"seed": 2})
        write_flags(tmp_path, built.config)
    elif change == "split":
        built = types.SimpleNamespace(**{**vars(built), "manifest": {"sha256": "b"}})
    else:
        (tmp_path / "eval" / "flags.txt").unlink()
    launch.evaluate(built, tmp_path, follow_s=follow_s)
    assert steps(tmp_path) == [20]
    launch.evaluate(built, tmp_path, follow_s=follow_s)
    assert steps(tmp_path) == [20]


def test_a_follower_ends_when_another_run_takes_the_directory(built, tmp_path):
    other = built.config.replace(train={"seed": 2})
    write_flags(tmp_path, other)
    with pytest.raises(config_lib.ConfigError, match="given to another run"):
        launch.evaluate(built, tmp_path, follow_s=0)
    assert steps(tmp_path) == [10]


def test_a_second_follower_is_refused_and_a_plain_evaluation_waits(built, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with (tmp_path / "eval" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(config_lib.ConfigError, match="Another process evaluates"):
            launch.evaluate(built, tmp_path, follow_s=0)
        waiting = threading.Thread(target=launch.evaluate, args=(built, tmp_path))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and steps(tmp_path) == [10]
        assert "waiting for it to end" in caplog.text
    waiting.join(60)
    assert steps(tmp_path) == [10, 20]


def test_a_place_that_cannot_be_written_is_named(built, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(config_lib.ConfigError, match=r"file.eval cannot be written"):
        launch.evaluate(built, tmp_path / "file")
