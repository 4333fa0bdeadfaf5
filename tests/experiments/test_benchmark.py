"""The benchmark: as a process on tiny settings, and that its yardsticks do the same work."""

import collections
import json
import random

import numpy as np
import pytest
import tensorflow as tf

from experiments.benchmarks import (
    influence,
    inner_steps,
    m_adam,
    per_example,
    pillow_policy,
    shards,
    steps,
    timing,
    train_step,
    weight_steps,
)
from ssl_influence import config as config_lib, training
from ssl_influence.per_example import convolution, products, rows as per_example_rows
from tests.experiments.processes import assert_refused, run, succeeded

SMALL = ["--labeled_batch_size=8", "--unlabeled_batch_size=16", "--validation_batch_size=10"]
TINY_NET = ["--model=mlp", "--hidden_units=4"]


def test_train_step_suite_writes_every_row_and_quotients_of_its_medians(tmp_path):
    path = tmp_path / "steps.json"
    arguments = ["--suite=train_step", *TINY_NET, *SMALL, "--repeats=1", f"--json={path}"]
    table = succeeded(run("benchmark", *arguments)).stdout
    result = json.loads(path.read_text())
    rows, ratios = result["rows"], result["ratios"]
    assert result["suite"] == "train_step" and "--model=mlp" in result["flags"]
    assert result["environment"]["op_determinism"] is True
    timed = [f"{row}_{mode}" for mode in config_lib.TARGET_FORWARDS for row in train_step.STEPS]
    for name in (*timed, "validation_forward"):
        row = rows[name]
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"] and row["float_operations"] > 0
        assert name in table
    for mode in config_lib.TARGET_FORWARDS:
        theta, fused, plain = (rows[f"{row}_{mode}"] for row in ("theta", "fused", "plain"))
        for quantity in ("median_s", "cpu_s"):
            extra = fused[quantity] - theta[quantity] - rows["validation_forward"][quantity]
            assert ratios[f"weight_overhead_{mode}"][quantity] == extra / theta[quantity]
            assert ratios[f"theta_over_plain_{mode}"][quantity] == theta[quantity] / plain[quantity]
    separate, joint = (rows[f"theta_{mode}"] for mode in ("separate", "joint"))
    assert ratios["theta_separate_over_joint"]["median_s"] == (
        separate["median_s"] / joint["median_s"]
    )
    assert separate["float_operations"] < 0.85 * joint["float_operations"]
    peaks = [rows[f"run_{kind}_weights"]["peak_memory_bytes"] for kind in ("with", "without")]
    assert min(peaks) > 1e8
    assert ratios["run_with_over_without_weights"] == {"peak_memory_bytes": peaks[0] / peaks[1]}


def test_inner_steps_suite_times_whole_rounds_with_and_without_weights(tmp_path):
    path = tmp_path / "rounds.json"
    arguments = ["--suite=inner_steps", *TINY_NET, *SMALL, "--inner_steps=7", "--repeats=2"]
    succeeded(run("benchmark", *arguments, f"--json={path}"))
    result = json.loads(path.read_text())
    for row in result["rows"].values():
        assert row["images_per_s"] == pytest.approx(7 * (8 + 2 * 16) / row["median_s"])
    with_weights, without = (result["rows"][f"{kind}_weights"] for kind in ("with", "without"))
    assert result["ratios"]["with_over_without_weights"]["cpu_s"] == (
        with_weights["cpu_s"] / without["cpu_s"]
    )


@pytest.mark.parametrize(("batch", "theta_steps"), [("fused", 4), ("fresh", 5)])
def test_a_round_is_its_theta_steps_and_one_weight_step(monkeypatch, batch, theta_steps):
    calls = collections.Counter()

    class Trainer:
        def __init__(self, config):
            self.weighting = config.weights.weighting

        def __getattr__(self, name):
            return lambda *arguments: calls.update([(self.weighting, name)]) or {}

    monkeypatch.setattr(steps, "make_trainer", Trainer)
    monkeypatch.setattr(timing, "interleaved", lambda rounds, *_, **__: _measured(rounds, calls))
    config = config_lib.Config().replace(weights={"inner_steps": 5, "batch": batch})
    inner_steps.measure("rounds", config, 1)
    weight_step = "bilevel_step" if batch == "fused" else "weight_step"
    assert calls == {
        ("per_example", "theta_step"): theta_steps,
        ("per_example", weight_step): 1,
        ("fixed", "theta_step"): 5,
    }


def _measured(rounds, calls):
    calls.clear()  # those that compile
    for call in rounds.values():
        call()
    return {name: {"median_s": 1.0} for name in rounds}


def test_augment_suite_compares_with_pillow_and_times_the_wait(tmp_path):
    path = tmp_path / "augment.json"
    arguments = ["--suite=augment", *TINY_NET, *SMALL, "--repeats=1"]
    table = succeeded(run("benchmark", *arguments, f"--json={path}")).stdout
    result = json.loads(path.read_text())
    rows = result["rows"]
    for view in ("weak", "strong"):
        ours, pillow = rows[view], rows[f"{view}_pillow"]
        assert ours["images_per_s"] == pytest.approx(16 / ours["median_s"])
        assert result["ratios"][f"{view}_pillow_over_library"]["median_s"] == (
            pillow["median_s"] / ours["median_s"]
        )
    assert 0 < rows["training"]["wait_share"] < 1 and rows["training"]["steps"] > 0
    assert "strong_pillow" in table


def test_m_adam_suite_names_a_row_and_its_memory_for_every_size(monkeypatch):
    monkeypatch.setattr(m_adam, "SIZES", {"m_adam": (3, 4), "adam": (3,), "dense": (4,)})
    monkeypatch.setattr(m_adam, "CALLS", 2)
    config = config_lib.Config().replace(data={"unlabeled_batch_size": 8})
    rows = m_adam.measure("times", config, 2)
    assert set(rows) == {
        *(f"m_adam_{call}_1e{power}" for call in ("update", "lookup") for power in (3, 4)),
        *("adam_update_1e3", "dense_update_1e4"),
    }
    ratios = timing.ratios(m_adam.RATIOS, rows)
    growth = rows["m_adam_update_1e4"]["median_s"] / rows["m_adam_update_1e3"]["median_s"]
    assert ratios["m_adam_update_1e4_over_1e3"]["median_s"] == growth
    assert {"m_adam_lookup_1e4_over_1e3", "adam_over_m_adam_1e3", "dense_over_m_adam_1e4"} < set(
        ratios
    )
    (held,) = m_adam.measure("memory_dense_1e4", config, 1).items()
    assert held[0] == "dense_update_1e4" and held[1]["peak_memory_bytes"] > 1e8
    named = [name for ratio in m_adam.RATIOS.values() for name in (ratio.top, ratio.bottom)]
    assert "m_adam_update_1e8" in named and "memory_m_adam_1e8" in m_adam.CASES


def test_m_adam_suite_measures_a_case_as_a_process():
    arguments = ["--suite=m_adam", "--case=memory_m_adam_1e4", "--unlabeled_batch_size=8"]
    measured = json.loads(succeeded(run("benchmark", *arguments)).stdout)
    assert measured["rows"]["m_adam_update_1e4"]["peak_memory_bytes"] > 1e8


@pytest.mark.parametrize("kind", ["adam", "dense"])
def test_yardsticks_of_m_adam_move_their_rows(kind):
    config = config_lib.Config().replace(data={"unlabeled_batch_size": 4})
    variable, call = m_adam.yardstick(kind, 6, config.weights)
    call(tf.constant([4, 1, 4, 2]), tf.constant([1.0, -1.0, 1.0, 0.0]))
    np.testing.assert_allclose(variable, [1, 1.01, 1, 1, 0.99, 1], atol=1e-6)


TINY = config_lib.Config().replace(
    model={"name": "mlp", "hidden_units": (4,)},
    data={"labeled_batch_size": 4, "unlabeled_batch_size": 8, "validation_batch_size": 6},
)


def test_ranges_of_a_divided_table_move_as_one_table_does_also_dealt_out_anew(tmp_path):
    settings, size = config_lib.WeightConfig(learning_rate=0.1), 25
    whole = training.make_example_weights(settings, 4 * size)
    hosts = [shards.Ranges(held, size, settings) for held in ((0, 1), (2, 3))]
    rng = np.random.default_rng(0)
    for step in range(8):
        if step == 4:  # one host of all ranges, then goes on
            sizes = [host.save(tmp_path) for host in hosts]
            hosts = [shards.Ranges(range(4), size, settings)]
            hosts[0].restore(tmp_path)
        ids = tf.constant(rng.integers(4 * size, size=30))
        gradients = tf.constant(rng.normal(size=30), tf.float32)
        whole.update(ids, gradients)
        rows = shards.gathered([host.read(ids, to_move=True) for host in hosts])
        table = hosts[0].tables[0]
        moved = table.moved(rows, ids, gradients)
        for host in hosts:
            host.write(moved)
        of_ranges = [table for host in hosts for table in host.tables.values()]
        np.testing.assert_array_equal(
            np.concatenate([table.values() for table in of_ranges]), whole.values()
        )
    np.testing.assert_array_equal(
        np.concatenate([table.update_counts() for table in of_ranges]), whole.update_counts()
    )
    assert min(sizes) > 2 * size * 24  # lambda, m, v, t and the count of updates


def test_shards_suite_measures_a_host(monkeypatch):
    monkeypatch.setattr(shards, "EXAMPLES", 64 * 50)
    rows = shards.measure(
        "host", config_lib.Config().replace(data={"unlabeled_batch_size": 128}), 1
    )
    assert rows["read"]["bytes"] == 4 * (4 + 8) and rows["weight_step"]["bytes"] == 4 * (16 + 8)
    assert rows["save"]["bytes"] > 2 * 50 * 24
    assert all(rows[name]["median_s"] > 0 for name in ("read", "save", "restore", "restore_of_16"))


def test_per_example_suite_computes_what_its_rows_are_named_for():
    found = {n: call() for n, call in per_example.calls(TINY, per_example.names("quarter")).items()}
    plain = found["plain"]
    vectors = per_example.vectors_like(plain)
    product = sum(np.vdot(g, v) for g, v in zip(plain, vectors, strict=True))
    for name in per_example.GRADIENTS:
        for rows, mean in zip(found[name], plain, strict=True):
            assert rows.shape == (8, *mean.shape)
            np.testing.assert_allclose(np.mean(rows, 0), mean, atol=1e-6)
    for name in per_example.DOTS:
        assert found[name].shape == (8,)
        np.testing.assert_allclose(np.mean(found[name]), product, rtol=1e-4)
    ways = [tuple(how.values()) for how in per_example.GRADIENTS.values()]
    assert set(ways) == {
        *(("kernels", conv_method) for conv_method in convolution.METHODS),
        *((method,) for method in per_example_rows.METHODS if method != "kernels"),
    }
    assert [how["method"] for how in per_example.DOTS.values()] == list(products.METHODS)


def test_per_example_suite_times_every_row():
    rows = per_example.measure("times_quarter", TINY, 1)
    timed = ("plain", *per_example.GRADIENTS, *per_example.DOTS)
    assert rows.keys() == {f"quarter_{name}" for name in timed}
    assert {row["examples"] for row in rows.values()} == {2}
    assert set(timed) - set(per_example.names("whole")) == {"loop"}
    ratios = timing.ratios(per_example.RATIOS, rows)
    assert {name for name in per_example.RATIOS if name.startswith("quarter")} == ratios.keys()
    assert ratios["quarter_dots_ghost_over_plain"]["median_s"] == (
        rows["quarter_dots_ghost"]["median_s"] / rows["quarter_plain"]["median_s"]
    )


def test_per_example_suite_has_a_default_batch_size_of_its_own():
    arguments = ["--suite=per_example", "--case=memory_dots_ghost", "--repeats=1", *TINY_NET]
    measured = json.loads(succeeded(run("benchmark", *arguments)).stdout)
    row = measured["rows"]["memory_dots_ghost"]
    assert row["examples"] == 64 and row["peak_memory_bytes"] > 1e8


def test_influence_suite_times_exact_and_identity_in_turn_as_a_process():
    arguments = ["--suite=influence", "--case=weight_in_turn", *TINY_NET, *SMALL, "--repeats=1"]
    rows = json.loads(succeeded(run("benchmark", *arguments)).stdout)["rows"]
    assert rows.keys() == {"weight_in_turn_exact", "weight_in_turn_identity"}
    assert timing.ratios(influence.RATIOS, rows).keys() == {"weight_exact_over_identity"}


@pytest.mark.parametrize("name", weight_steps.SETTINGS)
def test_influence_suite_measures_a_weight_step_by_its_solver(name):
    case = f"weight_{name}"
    assert case in influence.CASES
    (row,) = influence.measure(case, TINY, 1).values()
    assert row["median_s"] > 0 and row["peak_memory_bytes"] > 1e8
    least, most = {"neumann": (20, 20), "identity": (0, 0)}.get(name.rsplit("_", 1)[1], (1, 20))
    assert least <= row["iterations"] <= most


WRONG = {
    "another model": (["--suite=text", "--model=mlp"], "use model=bert"),
    "a step that the Model Garden lacks": (["--suite=text", "--pooling=mean"], "pooler"),
    "texts without weight steps": (["--suite=text", "--weighting=fixed"], "use per_example"),
    "no suite": ([], "--suite"),
    "unknown suite": (["--suite=everything"], "everything"),
    "unknown case": (["--suite=augment", "--case=sound"], "images, training"),
    "no repeats": (["--suite=augment", "--repeats=0"], "repeats"),
    "method without the plain step": (
        ["--suite=train_step", "--method=pseudo_label"],
        "use method=uda",
    ),
    "rounds of a method with other views": (
        ["--suite=inner_steps", "--method=mixmatch"],
        "uda and fixmatch",
    ),
    "a batch that ranges cannot share": (
        ["--suite=shards", "--unlabeled_batch_size=100"],
        "no multiple of the 64 ranges",
    ),
    "rounds without learned weights": (
        ["--suite=inner_steps", "--weighting=fixed"],
        "nothing to compare",
    ),
    "one mode of two": (
        ["--suite=train_step", "--target_forward=separate"],
        "measures both",
    ),
    "an optimizer that is compared anyway": (
        ["--suite=m_adam", "--weight_optimizer=adam"],
        "leave it out",
    ),
    "no table": (["--suite=m_adam", "--weighting=single"], "use per_example"),
    "nothing to quarter": (["--suite=per_example", "--unlabeled_batch_size=3"], "use 4 or more"),
    "one solver of all": (["--suite=influence", "--inverse_hessian=cg"], "leave it out"),
    "no weight steps": (["--suite=influence", "--weighting=fixed"], "use per_example or single"),
    "missing folder": (["--suite=augment", "--json=/dev/null/a/b.json"], "make the folder"),
    "stray argument": (["--suite=augment", "now"], "'now'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_flags_end_with_one_line(name):
    arguments, part = WRONG[name]
    assert_refused(run("benchmark", *arguments), part)


@pytest.mark.parametrize("mode", config_lib.TARGET_FORWARDS)
def test_plain_step_does_to_the_network_what_the_theta_step_does(mode):
    config = config_lib.Config().replace(
        model={"depth": 10, "width": 1, "filters": 2},
        method={"confidence": 0.0, "target_forward": mode},
        data={"labeled_batch_size": 4, "unlabeled_batch_size": 4, "validation_batch_size": 2},
    )
    batch, _ = steps.batches(config.data)
    trainer, (plain, model) = steps.make_trainer(config), steps.plain_step(config, mode)
    before = [v.numpy() for v in model.trainable_variables]
    reported = trainer.theta_step(batch)
    terms = [float(value) for name, value in reported.items() if name.startswith("train/loss_")]
    assert np.isfinite(float(plain(batch))) and len(terms) > 2
    own = trainer.model.trainable_variables
    for a, b, old in zip(own, model.trainable_variables, before, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.any(b != old)


def test_repeats_take_turns_after_the_warm_up():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    rows = timing.interleaved(calls, 3, warmup=2)
    assert "".join(called) == "aabb" + "ab" + "ba" + "ab"
    assert all(row["min_s"] <= row["median_s"] <= row["max_s"] for row in rows.values())


def test_ratios_subtract_and_leave_out_rows_that_were_not_measured():
    rows = {name: {"median_s": s, "cpu_s": 2 * s} for name, s in {"a": 7.0, "b": 2.0}.items()}
    wanted = {"one": timing.Ratio("a", "b", ("b",)), "other": timing.Ratio("a", "c")}
    assert timing.ratios(wanted, rows) == {"one": {"median_s": 2.5, "cpu_s": 2.5}}


def test_pillow_policy_makes_the_views_that_the_settings_describe():
    images = np.random.default_rng(0).integers(0, 256, [40, 16, 16, 3], np.uint8)
    still = config_lib.AugmentConfig(flip=False, shift=0, operations=0, cutout=0.0)
    rng = random.Random(0)
    for make in (pillow_policy.weak, pillow_policy.strong):
        np.testing.assert_array_equal(make(images, rng, still), images)
    moved = pillow_policy.weak(images, rng, config_lib.AugmentConfig(shift=0))
    flips = [np.array_equal(new, old[:, ::-1]) for new, old in zip(moved, images, strict=True)]
    same = [np.array_equal(new, old) for new, old in zip(moved, images, strict=True)]
    assert all(np.logical_xor(flips, same)) and 8 < sum(flips) < 32
    cut = config_lib.AugmentConfig(flip=False, shift=0, operations=0, cutout=0.5)
    gray = np.all(pillow_policy.strong(images, rng, cut) == 128, -1).sum((1, 2))
    assert gray.min() >= 16 and gray.max() == 64
    every = config_lib.AugmentConfig(flip=False, shift=0, cutout=0.0, probability=1.0)
    changed = np.any(pillow_policy.strong(images, rng, every) != images, (1, 2, 3))
    assert changed.mean() > 0.8
