"""Sweeps as processes: their cells, interruption, failures and commands; and what files may say."""

import json
import shlex
import shutil
import signal
import time

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import metadata as hparams_metadata

from experiments import cells, comparison, flags as shared_flags, sweep_files, sweep_tables
from ssl_influence import config as config_lib, files
from tests.experiments.processes import (
    TINY,
    assert_refused,
    assert_same_run,
    finish,
    run,
    start,
    succeeded,
)

COMMON = [flag for flag in TINY if not flag.startswith("--confidence")]
AXES = {
    "method": {
        "supervised": {"method": "supervised", "weighting": "fixed"},
        "mean_teacher": {"method": "mean_teacher"},
    },
    "labels": {"20": {"dataset": "digits.1@20-40"}, "30": {"dataset": "digits.1@{labels}-40"}},
}


def write_sweep(folder, **changes):
    """A sweep file and its flagfile; keys that are None are left out."""
    flagfile = folder / "common.flags"
    flagfile.write_text("\n".join([*COMMON, "--model=mlp"]))
    contents = {
        "title": "A sweep",
        "flags": {"flagfile": str(flagfile)},
        "axes": AXES,
        "skip": [{"labels": "30", "method": "supervised"}],
        "seeds": "9",
        "columns": ["labels"],
        **changes,
    }
    path = folder / "sweep.json"
    path.write_text(json.dumps({key: v for key, v in contents.items() if v is not None}))
    return path


def sweep(path, model_dir, *flags):
    return ("sweep", f"--sweep={path}", f"--model_dir={model_dir}", *flags)


def results_in(model_dir):
    return {
        str(path.parent.parent.relative_to(model_dir)): path.read_text()
        for path in model_dir.rglob("eval/result.json")
    }


def hparams_of(folder):
    """What TensorBoard's HParams tab reads of a run, which also has its test error."""
    accumulator = event_accumulator.EventAccumulator(str(folder))
    accumulator.Reload()
    assert {"test/error", "test/ema_error", "validation/error"} <= set(
        accumulator.Tags()["tensors"]
    )
    summary = accumulator.SummaryMetadata(hparams_metadata.SESSION_START_INFO_TAG)
    found = hparams_metadata.parse_session_start_info_plugin_data(summary.plugin_data.content)
    return {name: value.string_value or value.number_value for name, value in found.hparams.items()}


def test_an_interrupted_sweep_goes_on_and_ends_as_one_that_was_not(tmp_path):
    path, folder = write_sweep(tmp_path), tmp_path / "swept"
    only = "--only=labels=20"
    module, *arguments = sweep(path, folder, only, "--jobs=1")
    process = start("-m", f"experiments.{module}", *arguments)
    deadline = time.monotonic() + 120
    while not results_in(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert_refused(finish(process), "the same command goes on")
    before = results_in(folder)
    assert list(before) == ["supervised/20/seed-9"]

    result = succeeded(run(module, *arguments))
    assert "1 of 2 cells to train" in result.stdout
    assert f"(HParams): tensorboard --logdir={folder}\n" in result.stdout
    found = results_in(folder)
    last = "mean_teacher/20/seed-9"
    assert set(found) == {"supervised/20/seed-9", last} and before.items() <= found.items()
    flagfile = (folder / last / "flags.txt").read_text().splitlines()
    assert {"--dataset=digits.9@20-40", "--seed=9", "--method=mean_teacher"} <= set(flagfile)

    listed = hparams_of(folder / last / "tensorboard")
    assert listed == {"method": "mean_teacher", "labels": "20", "seed": 9.0}

    # Each cell alone, as the launcher of a cluster starts it, in as many threads.
    printed = run(*sweep(path, tmp_path / "alone", only, "--print_commands"))
    commands = [shlex.split(line) for line in succeeded(printed).stdout.splitlines()]
    assert [command[-1] for command in commands] == [f"--cell={name}" for name in found]
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    assert set(names) == set(cells.THREADS)
    threads = dict.fromkeys(names, "1")
    for command in commands:
        assert command[:2] == ["python", "-m"]
        succeeded(finish(start(*command[1:], environment=threads)))
    assert_same_run(folder / last, tmp_path / "alone" / last)
    assert results_in(tmp_path / "alone") == found
    printed = run(*sweep(path, tmp_path / "alone", only, "--print_commands"))
    assert succeeded(printed).stdout == ""


def test_the_others_go_on_where_a_cell_fails(tmp_path):
    axes = {"rate": {"wild": {"learning_rate": 1e30}, "tame": {}}}
    path = write_sweep(tmp_path, axes=axes, skip=None, columns=None)
    settings = ["--setting=log_every=1", "--setting=train_steps=20", "--seeds=7"]
    result = run(*sweep(path, tmp_path / "swept", "--jobs=1", *settings))
    assert_refused(result, "1 of 2 cells failed")
    assert "wild/seed-7 failed: " in result.stdout and "at step" in result.stdout
    assert list(results_in(tmp_path / "swept")) == ["tame/seed-7"]
    assert "--train_steps=20" in (tmp_path / "swept/tame/seed-7/flags.txt").read_text()


def test_a_cell_whose_process_dies_is_named_with_what_it_printed(tmp_path):
    broken = [comparison.Cell(f"uda/{n}", 1, None, tmp_path / f"uda/{n}/seed-1") for n in (1, 2)]
    reported = {}
    failed = cells.train(broken, 1, tmp_path, "experiments.sweep", reported.__setitem__)
    assert [cell.row for cell in failed] == ["uda/1", "uda/2"]
    assert reported == failed
    for line in failed.values():
        assert "exit code 1" in line and "job-1.log" in line
    assert (tmp_path / "job-1.log").read_text().count("AttributeError: ") == 2


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--sweep=/tmp/nowhere.json", "/tmp/nowhere.json cannot be read"),
        ("--only=method=cotraining", "cotraining"),
        ("--only=color=red", "'color' is no axis"),
        ("--only=method", "axis=label"),
        ("--seeds=3-1", "3-1"),
        ("--setting=train_steps", "flag=value"),
        ("--setting=colour=red", "colour"),
        ("--setting=train_steps=-1", "train_steps"),
        ("--setting=seed=3", "--seeds"),
        ("--cell=supervised/20/seed-1 --seeds=3", "no meaning beside --cell"),
        ("--cell=uda/seed-1", "cell=uda/seed-1"),
        ("--jobs=0", "jobs"),
        (f"--model_dir={__file__}/run", "cannot be written"),
    ],
)
def test_wrong_commands_are_refused_with_one_line(tmp_path, flag, part):
    path = write_sweep(tmp_path)
    assert_refused(run(*sweep(path, tmp_path / "swept", *flag.split())), part)
    assert not (tmp_path / "swept").exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"title": None}, "title is missing"),
        ({"axes": None}, "axes is missing"),
        ({"axis": {}}, "'axis' is not one of title, "),
        ({"axes": {"model": []}}, "'model' needs a list"),
        ({"axes": {"model": ["mlp", "mlp"]}}, "a value twice"),
        ({"axes": {"model": {"../x": {}}}}, "to name a folder"),
        ({"axes": {"model": {"..": {}}}}, "to name a folder"),
        ({"axes": {"model": {"mlp": "mlp"}}}, "an object of flags"),
        ({"axes": {"hidden_units": [[4, 4]]}}, "is no value of a flag"),
        ({"seeds": "a"}, "neither a seed nor a range"),
        ({"seeds": []}, "name one or more"),
        ({"seeds": 3}, "seeds=3 is of the wrong kind"),
        ({"seeds": "0-2000000000"}, "name less"),
        ({"seeds": "7" * 5000}, "neither a seed nor a range"),
        ({"axes": {"seed": [1, 2]}}, "a key of their own"),
        ({"axes": {"model": {"mlp": {"seed": 5}}}}, "a key of their own"),
        ({"flags": {"seed": 5}}, "a key of their own"),
        ({"flags": {"train_steps": None}}, "train_steps=null is no value"),
        ({"flags": {"train_steps": True}}, "train_steps=true"),
        ({"axes": {"model": {"job-1.log": {}}}}, "the name of a file of the sweep's own"),
        ({"axes": {"model": {"m" * 300: {}}}}, "too long"),
        ({"title": "two\nlines"}, "is to be a line"),
        ({"figure": {"kind": "lines", "x": ["labels"]}}, "name axes by text"),
        ({"columns": [["labels"]]}, "name axes by text"),
        ({"baseline": {"labels": 25}}, "'25' is not one of"),
        ({"skip": [[]]}, "names no axis"),
        ({"columns": ["color"]}, "'color' is no axis"),
        ({"statistic": "mean"}, "mean"),
        ({"flags": {"colour": 3}}, "The cell supervised/20 cannot be read: .*colour"),
        ({"flags": {"flagfile": "/tmp/nowhere.flags"}}, "nowhere.flags"),
    ],
)
def test_wrong_files_are_refused_with_the_key(tmp_path, changes, part):
    path = files.path(write_sweep(tmp_path, **changes))
    with pytest.raises(config_lib.ConfigError, match=part):
        sweep_files.cells(sweep_files.read(path), tmp_path / "swept")


@pytest.mark.parametrize("text", ["{", '{"title": "a", "title": "b"}', "[]", "[" * 100_000])
def test_what_is_no_object_is_refused(tmp_path, text):
    path = files.path(tmp_path / "sweep.json")
    path.write_text(text)
    with pytest.raises(config_lib.ConfigError, match="sweep.json"):
        sweep_files.read(path)


def test_later_flags_win_and_labels_stand_for_their_axes(tmp_path):
    axes = {
        "size": {"small": {"filters": 4, "flip": True}, "large": {"filters": 8, "flip": False}},
        "train_steps": [10, 20],
        "hidden": {"two": {"hidden_units": [3, 5]}},
    }
    common = {"flagfile": str(tmp_path / "{size}.flags"), "width": 3}
    path = files.path(write_sweep(tmp_path, flags=common, axes=axes, skip=None, columns=None))
    for size in ("small", "large"):
        (tmp_path / f"{size}.flags").write_text(
            f"--width=7\n--filters=2\n--log_every={len(size)}\n"
        )
    planned = sweep_files.cells(
        sweep_files.read(path), tmp_path, seeds=[3], settings=["checkpoint_every=5"]
    )
    assert [cell.row for cell in planned] == [
        f"{size}/{steps}/two" for size in ("small", "large") for steps in (10, 20)
    ]
    small = planned[0].config
    assert (small.model.width, small.model.filters, small.train.log_every) == (3, 4, 5)
    assert small.augment.flip is True and planned[-1].config.augment.flip is False
    assert small.model.hidden_units == (3, 5) and small.train.checkpoint_every == 5
    assert (small.train.train_steps, small.train.seed) == (10, 3)
    assert small.data.dataset.startswith("digits.3@")
    assert planned[0].model_dir == tmp_path / "small/10/two/seed-3"


def ended(folder, config, error=5.0):
    """A cell that has ended, as far as a report looks at it."""
    (folder / "eval").mkdir(parents=True)
    (folder / "flags.txt").write_text(shared_flags.to_flagfile(config, "experiments.sweep"))
    (folder / "eval/result.json").write_text(json.dumps({"step": 40, "ema": error}))
    numbers = {"last": {"step": 40, "error": error}}
    summary = {"test": {"checkpoints": 4, "ema": numbers}}
    (folder / "eval/summary.json").write_text(json.dumps(summary))


def test_a_report_takes_cells_that_ended_and_refuses_to_mix_settings(tmp_path):
    path = files.path(write_sweep(tmp_path, columns=None))
    swept = sweep_files.read(path)
    sweep_files.record(swept, tmp_path)
    planned = sweep_files.cells(
        swept, tmp_path, seeds=[1, 2, 3], only={"method": ["mean_teacher"], "labels": ["20"]}
    )
    for cell in planned[:2]:
        ended(cell.model_dir, cell.config)
    replaced = planned[2].model_dir  # results of it are being replaced
    ended(replaced, planned[2].config)
    (replaced / "eval/summary.json").unlink()
    (replaced.parent / "seed-2.bak").mkdir()
    found = sweep_files.results(swept, tmp_path)
    assert {labels: list(by_seed) for labels, by_seed in found.items()} == {
        ("mean_teacher", "20"): [1, 2]
    }
    table = sweep_tables.tabulate(tmp_path, "markdown", {})
    assert "| mean_teacher | 20 | 5.00 +- 0.00 |" in table
    with pytest.raises(config_lib.ConfigError, match="validation: cells were not evaluated"):
        sweep_tables.tabulate(tmp_path, "text", {"split": "validation"})
    with pytest.raises(config_lib.ConfigError, match="asks for no figure"):
        sweep_tables.draw(tmp_path, tmp_path / "figure.png", {})

    other = planned[1].config.replace(optimizer={"learning_rate": 0.25})
    (planned[1].model_dir / "flags.txt").write_text(shared_flags.to_flagfile(other, "x"))
    with pytest.raises(config_lib.ConfigError, match="=0.03 and .*seed-2 with 0.25"):
        sweep_tables.tabulate(tmp_path, "text", {})


def test_a_report_refuses_rows_that_differ_in_more_than_the_file_says(tmp_path, caplog):
    path = files.path(write_sweep(tmp_path, columns=None))
    swept = sweep_files.read(path)
    settings = ["learning_rate=0.25", "method=mean_teacher"]
    for cell in sweep_files.cells(swept, tmp_path, seeds=[1], settings=settings):
        ended(cell.model_dir, cell.config)
    assert len(sweep_files.results(swept, tmp_path)) == 3  # --setting of all cells alike
    (cell,) = sweep_files.cells(swept, tmp_path, seeds=[1], only={"method": ["supervised"]})
    (cell.model_dir / "flags.txt").write_text(shared_flags.to_flagfile(cell.config, "x"))
    with pytest.raises(config_lib.ConfigError, match="supervised.*=0.03 and .*mean_teacher.*0.25"):
        sweep_files.results(swept, tmp_path)
    shutil.rmtree(cell.model_dir)
    settings = ["learning_rate=0.25", "unsupervised_weight=2"]  # which supervised runs have not
    only = {"method": ["mean_teacher"]}
    for other in sweep_files.cells(swept, tmp_path, seeds=[1], only=only, settings=settings):
        text = shared_flags.to_flagfile(other.config, "x")
        (other.model_dir / "flags.txt").write_text(text)
    ended(cell.model_dir, cell.config.replace(optimizer={"learning_rate": 0.25}))
    assert len(sweep_files.results(swept, tmp_path)) == 3
    (tmp_path / "common.flags").unlink()  # nothing says what rows differ in
    assert len(sweep_files.results(swept, tmp_path)) == 3
    assert "common.flags" in caplog.text


def test_a_reader_that_has_had_enough_is_no_traceback(tmp_path):
    module, *arguments = sweep(write_sweep(tmp_path), tmp_path / "swept", "--print_commands")
    process = start("-m", f"experiments.{module}", *arguments, fresh=True)
    process.stdout.close()
    message = process.stderr.read()
    assert message == "error: what read the output has closed it.\n"
    assert process.wait() == 1


@pytest.mark.parametrize("damage", ["", "[]", "{}", None])
@pytest.mark.parametrize("name", ["result.json", "summary.json"])
def test_a_cell_with_damaged_results_has_not_ended(tmp_path, name, damage):
    swept = sweep_files.read(files.path(write_sweep(tmp_path)))
    only = {"method": ["mean_teacher"], "labels": ["20"]}
    (cell,) = sweep_files.cells(swept, tmp_path, only=only, settings=["train_steps=40"])
    ended(cell.model_dir, cell.config)
    evaluated = cell.model_dir / "eval"
    (evaluated / "flags.txt").write_text((cell.model_dir / "flags.txt").read_text())
    assert comparison.finished(cell) == {"step": 40, "ema": 5.0}
    (evaluated / name).unlink()
    if damage is not None:
        (evaluated / name).write_text(damage)
    assert comparison.finished(cell) is None
    assert sweep_files.results(swept, tmp_path) == {}
