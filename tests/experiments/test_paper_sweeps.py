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
# What is trained of each.
CELLS = {
    "table1": "uda/cifar10/250",
    "table3": "30_0.01",
    "hessian": "neumann_last_block",
    "single_weight": "single/250",
    "optimizers": "sgd",
    "validation_size": "250/64",
    "influence_params": "last_block",
}


WITH_4000 = ("table3", "hessian", "optimizers", "influence_params")


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
    as_run = {
        row: (c.weights.inverse_hessian, c.weights.influence_params) for row, c in found.items()
    }
    assert as_run == {
        "exact": ("exact", "last_layer"),
        "identity": ("identity", "last_layer"),
        "neumann_last_block": ("neumann", "last_block"),
    }


def test_sizes_of_the_validation_set_go_from_64_to_5000():
    for row, config in configs("paper/validation_size").items():
        name = sources.parse_name(config.data.dataset)
        assert row == f"{name.labels}/{name.validation}"
    sizes = read("paper/validation_size").study.axes["validation"]
    assert (sizes[0], sizes[-1]) == ("64", "5000")


@pytest.mark.parametrize("name", CELLS)
def test_each_trains_and_reports_on_small_data(tmp_path, name):
    # The mock has 1,400 examples, too few for 4,000 labels.
    fewer = ["dataset=cifar10.1@250-1024"] if name in WITH_4000 else []
    settings = [f"--setting={text}" for text in [*SMALL, *fewer]]
    train_and_report(tmp_path, f"paper/{name}", CELLS[name], "1400", *settings)


def test_table_2_trains_and_reports_on_small_data(tmp_path):
    pytest.importorskip("tensorflow_text")
    encoder = text_encoder.write_encoder(tmp_path / "encoder", num_layers=1)
    settings = [
        *(f"encoder={encoder}", "sequence_length=20", "min_text_length=0", "train_steps=2"),
        *("learning_rate_warmup_steps=1", "checkpoint_every=1", "eval_every=1"),
    ]
    settings = [f"--setting={text}" for text in settings]
    train_and_report(tmp_path / "swept", "paper/table2", "supervised", "60", *settings)


def train_and_report(model_dir, name, row, examples, *settings):
    """Trains a cell on seed 2 under mock data, which other processes would not see, and tabulates.

    The table holds the number of the one cell.
    """
    sweep = f"--sweep={FOLDER}/{name}.json"
    arguments = [sweep, f"--model_dir={model_dir}", f"--cell={row}/seed-2", *settings]
    mocked = ("-m", "tests.experiments.mock_tfds", examples, "experiments.sweep", *arguments)
    succeeded(finish(start(*mocked)))
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
