"""The sweep files: each of the paper's tables and figures is one, and runs on small data."""

import json

import pytest

from experiments import flags as shared_flags, sweep_files
from ssl_influence import files
from ssl_influence.data import sources
from tests.experiments import text_encoder
from tests.experiments.processes import ROOT, finish, run, start, succeeded

FOLDER = ROOT / "experiments/sweeps"
EVERY = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.json"))
SMALL = [
    *("depth=10", "width=1", "filters=4", "labeled_batch_size=8", "unlabeled_batch_size=16"),
    *("validation_batch_size=16", "train_steps=2", "weight_warmup_steps=0", "inner_steps=1"),
    *("confidence=0", "checkpoint_every=1", "eval_every=1", "log_every=1"),
]
# What is trained of each: the labels of its axes, and the flags that differ from SMALL.
CELLS = {
    "table1": ("method=uda", "dataset=cifar10", "labels=250"),
    "table3": ("N_eta=30_0.01",),
    "hessian": ("influence=neumann_last_block",),
    "single_weight": ("weighting=single", "labels=250"),
    "optimizers": ("weight_optimizer=sgd",),
    "validation_size": ("labels=250", "validation=64"),
    "influence_params": ("influence_params=last_block",),
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    """Flagfiles name each other from the root of the checkout."""
    monkeypatch.chdir(ROOT)


def read(name):
    return sweep_files.read(files.path(FOLDER / f"{name}.json"))


def configs(name, **only):
    """Combination -> its config on the first seed."""
    sweep = read(name)
    found = sweep_files.cells(sweep, files.path("/tmp/none"), seeds=sweep.seeds[:1], only=only)
    return {cell.row: cell.config for cell in found}


@pytest.mark.parametrize("name", EVERY)
def test_every_file_has_cells_that_differ(name):
    found = configs(name)
    assert found and len(set(found.values())) == len(found)


def test_table_1_is_the_flagfile_of_each_of_its_numbers():
    found = configs("paper/table1")
    assert len(found) == 9 * 10 - 3 * 2 * 2
    for row, config in found.items():
        path = ROOT / "experiments/flagfiles/paper" / f"{row.replace('/', '_')}.flags"
        assert config == shared_flags.read_flagfile(path).replace(train={"seed": 1})
    study = read("paper/table1").study
    assert study.statistic == "median_20"
    paper = study.paper
    assert paper["uda"]["cifar10"]["250"] == {"mean": 5.53, "std": 0.17}
    assert paper["fixmatch"]["svhn"]["4000"] == {"mean": 2.15, "std": 0.03}
    numbers = [len(by_label) for by_data in paper.values() for by_label in by_data.values()]
    assert sum(numbers) == len(found)


def test_the_grid_of_table_3_is_as_its_labels_say():
    for row, config in configs("paper/table3").items():
        steps, size = row.split("_")
        assert (config.weights.inner_steps, config.weights.learning_rate) == (
            int(steps),
            float(size),
        )
        assert config.data.dataset == "cifar10.1@4000-1024"
    assert read("paper/table3").study.split == "validation"


def test_the_approximations_are_those_of_the_paper():
    found = configs("paper/hessian")
    as_run = {row: (c.weights.inverse_hessian, c.weights.params) for row, c in found.items()}
    assert as_run == {
        "exact": ("exact", "last_layer"),
        "identity": ("identity", "last_layer"),
        "neumann_last_block": ("neumann", "last_block"),
    }


def test_sizes_of_the_validation_set_go_from_64_to_5000():
    for row, config in configs("paper/validation_size").items():
        name = sources.parse_name(config.data.dataset)
        assert row == f"{name.labeled}/{name.validation}"
    sizes = read("paper/validation_size").study.axes["validation"]
    assert (sizes[0], sizes[-1]) == ("64", "5000")


@pytest.mark.parametrize("name", CELLS)
def test_each_trains_and_reports_on_small_data(tmp_path, name):
    sweep = f"--sweep={FOLDER}/paper/{name}.json"
    only = [f"--only={text}" for text in CELLS[name]]
    settings = [f"--setting={text}" for text in SMALL]
    arguments = [sweep, f"--model_dir={tmp_path}", "--jobs=1", "--seeds=2", *only, *settings]
    check_reported(tmp_path, "1400", "experiments.sweep", *arguments)


def test_table_2_trains_and_reports_on_small_data(tmp_path):
    pytest.importorskip("tensorflow_text")
    encoder = text_encoder.write_encoder(tmp_path / "encoder", num_layers=1)
    settings = [
        *(f"encoder={encoder}", "sequence_length=20", "min_text_length=0", "train_steps=2"),
        *("learning_rate_warmup_steps=1", "checkpoint_every=1", "eval_every=1"),
    ]
    check_reported(
        tmp_path / "swept",
        "60",
        "experiments.sweep",
        f"--sweep={FOLDER}/paper/table2.json",
        f"--model_dir={tmp_path / 'swept'}",
        "--jobs=1",
        "--seeds=1",
        "--only=row=supervised",
        *(f"--setting={text}" for text in settings),
    )


def check_reported(model_dir, examples, *arguments):
    """Trains under mock data, then tabulates: the table holds the number of the one cell."""
    swept = finish(start("-m", "tests.experiments.mock_tfds", examples, *arguments))
    succeeded(swept)
    table = succeeded(run("report", f"--model_dir={model_dir}", "--format=markdown")).stdout
    (path,) = model_dir.rglob("eval/summary.json")
    study = sweep_files.read(files.path(model_dir / "sweep.json")).study
    error = study.error({"summary": json.loads(path.read_text())})
    assert f" {error:.2f}" in table and study.title in table
    if study.paper:
        assert "| paper |" in table
    if study.figure is not None:
        figure = f"--figure={model_dir / 'figure.pdf'}"
        succeeded(run("report", f"--model_dir={model_dir}", figure))
        assert (model_dir / "figure.pdf").read_bytes().startswith(b"%PDF")
