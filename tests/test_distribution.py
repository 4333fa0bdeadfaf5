"""Replicas of one step: the same run on any number of them."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config as config_lib, distribution, example_weights, training
from tests import replicated
from tests.test_training import make_config, make_model

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = ["uda:mlp:float64", "fixmatch:mlp:float64", "fixmatch:wide_resnet:float64"]
STATE = ("losses", "weights", "updates", "theta", "average")


def free_ports(number):
    """Ports that nothing listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def workers_environment(ports):
    """What TF_CONFIG is in each of some workers on this machine."""
    hosts = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"chief": hosts[:1], "worker": hosts[1:]}
    tasks = [("chief", 0), *(("worker", index) for index in range(len(ports) - 1))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}
        for kind, index in tasks
    ]


def start(path, count, cases, environment=None):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.replicated", str(path), str(count), *cases],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stderr=subprocess.PIPE,
        text=True,
    )


def results(*processes_and_paths):
    found = []
    for process, path in processes_and_paths:
        _, err = process.communicate(timeout=500)
        assert process.returncode == 0, err[-3000:]
        found.append(np.load(path))
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "one.npz"
    (found,) = results((start(path, 1, CASES), path))
    assert found["replicas"] == 1
    return found


def assert_same(one, found, cases):
    assert np.all(one["evaluated"][:, 1] == 10_003)
    assert len(set(one["evaluated"][:, 0])) == 1
    np.testing.assert_array_equal(found["evaluated"], one["evaluated"])
    for case in cases:
        for name in STATE:
            expected = one[f"{case}/{name}"]
            np.testing.assert_allclose(
                found[f"{case}/{name}"], expected, rtol=0, atol=1e-8, err_msg=f"{case} {name}"
            )
        weights = one[f"{case}/weights"]
        assert np.sum(weights != 1) > 10 and one[f"{case}/updates"].max() > 1


@pytest.mark.parametrize(
    ("count", "cases"), [(2, CASES), (4, CASES[:1])], ids=["2 replicas", "4 replicas"]
)
def test_virtual_replicas_do_what_one_does(one, tmp_path, count, cases):
    alone = ["uda:own_norms:float32"] if count == 2 else []
    process = start(tmp_path / "found.npz", count, [*cases, *alone])
    (found,) = results((process, tmp_path / "found.npz"))
    assert found["replicas"] == count
    assert_same(one, found, cases)


def test_two_workers_do_what_one_does(one, tmp_path):
    cases = [CASES[0], CASES[2]]
    paths = [tmp_path / f"{index}.npz" for index in range(2)]
    started = [
        start(path, 1, cases, environment)
        for path, environment in zip(paths, workers_environment(free_ports(2)), strict=True)
    ]
    for found in results(*zip(started, paths, strict=True)):
        assert found["replicas"] == 2
        assert_same(one, found, cases)


def test_the_batches_of_that_comparison_hold_an_example_on_two_replicas():
    for step in range(replicated.STEPS):
        batch, _ = replicated.batches(step, (6,), tf.float64)
        ids = batch["unlabeled"]["example_id"].numpy()
        halves = [set(ids[: len(ids) // 2]), set(ids[len(ids) // 2 :])]
        assert halves[0] & halves[1] == {ids[0]}


class Replicas:
    """As a strategy of so many replicas, as far as dividing a batch asks it."""

    def __init__(self, count):
        self.num_replicas_in_sync = count

    def experimental_distribute_values_from_function(self, value_fn):
        class Context:
            def __init__(self, index):
                self.replica_id_in_sync_group = index

        return [value_fn(Context(index)) for index in range(self.num_replicas_in_sync)]


def test_a_batch_is_divided_in_order_and_filled_up_where_it_does_not_go():
    batch = {"x": tf.reshape(tf.range(20), [10, 2]), "mask": tf.ones([10], tf.bool)}
    with pytest.raises(config_lib.ConfigError, match="10 examples cannot .* among 4 .*multiples"):
        distribution.split(batch, Replicas(4))
    assert not distribution.divides(Replicas(4), batch)
    dataset = tf.data.Dataset.from_tensors(batch)
    with pytest.raises(config_lib.ConfigError, match="10 examples cannot .* among 4 .*multiples"):
        distribution.split_dataset(dataset, Replicas(4))
    assert distribution.divides(Replicas(5), batch) and distribution.divides(Replicas(1), batch)
    whole = distribution.split(batch, Replicas(4), whole=True)
    assert all(part is batch for part in whole)
    parts = distribution.split(distribution.filled_up(batch, Replicas(4)), Replicas(4))
    assert [part["x"].shape[0] for part in parts] == [3] * 4
    joined = np.concatenate([part["x"] for part in parts])
    np.testing.assert_array_equal(joined[:10], batch["x"])
    np.testing.assert_array_equal(joined[10:], 0)
    mask = np.concatenate([part["mask"] for part in parts])
    np.testing.assert_array_equal(mask, np.arange(12) < 10)
    assert distribution.filled_up(batch, Replicas(5))["x"] is batch["x"]


def test_without_other_devices_the_strategy_is_that_of_one(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = distribution.make(config_lib.DistributionConfig())
    assert strategy.num_replicas_in_sync == 1 and distribution.is_chief(strategy)
    assert distribution.any_worker(strategy, True) and not distribution.any_worker(strategy, False)


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        ({"strategy": "tpu"}, "", "strategy=tpu with tpu=local finds none"),
        ({"tpu": "no-such-tpu"}, "", "tpu=no-such-tpu finds none"),
        ({"strategy": "multi_worker"}, "", "from the environment's TF_CONFIG, which names none"),
        ({}, "{'a'", r"TF_CONFIG=\{'a' is not JSON"),
        ({}, '{"cluster": {"worker": ["a:1"]}}', "does not say which of its workers this is"),
        ({}, '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}', "does not"),
        (
            {},
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "does not",
        ),
        ({"strategy": "multi_worker"}, "[]", "from the environment's TF_CONFIG, which names none"),
        ({"virtual_cpus": 7}, "", "virtual_cpus=7 comes too late"),
    ],
)
def test_devices_that_there_are_not_are_named(settings, environment, message, monkeypatch):
    tf.config.list_logical_devices()  # a device was used
    monkeypatch.setenv("TF_CONFIG", environment)
    with pytest.raises(config_lib.ConfigError, match=message):
        distribution.make.__wrapped__(config_lib.DistributionConfig(**settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"influence_params": "all", "inverse_hessian": "cg"}}, "influence_params=all"),
        ({"weights": {"optimizer": "adam"}}, "weight_optimizer=adam moves examples that are not"),
    ],
)
def test_what_replicas_cannot_do_together_is_refused(change, message):
    config = make_config(**change)
    trainer = training.BilevelTrainer(
        make_model(), lambda *_: None, training.make_example_weights(config.weights, 5), config
    )
    trainer.strategy = Replicas(2)
    with pytest.raises(config_lib.ConfigError, match=message):
        trainer._check_replicas()


def test_rows_travel_and_come_back(monkeypatch):
    weights = example_weights.ExampleWeights(9)
    ids = tf.constant([7, 2, 7, 4], tf.int64)
    rows = weights.read(ids, to_move=True)
    np.testing.assert_array_equal(rows.ids, [2, 4, 7, 7])
    moved = weights.moved(rows, tf.constant([7, 2, 7], tf.int64), tf.constant([1.0, -2.0, 1.0]))
    np.testing.assert_array_equal(weights.values(), 1)  # not yet
    np.testing.assert_allclose(weights.weight_of(moved, ids), [0.99, 1.01, 0.99, 1.0], rtol=1e-6)
    weights.write(moved)
    np.testing.assert_allclose(weights.values()[[2, 4, 7]], [1.01, 1.0, 0.99], rtol=1e-6)
    np.testing.assert_array_equal(weights.update_counts(), np.isin(np.arange(9), [2, 7]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not one of the batch"):
        weights.weight_of(rows, tf.constant([3], tf.int64))
