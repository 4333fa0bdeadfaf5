"""The flagfiles: each is valid and is what its name says, and those of the paper hold its facts."""

import dataclasses
import re

import numpy as np
import pytest

from experiments import flags as shared_flags
from ssl_influence import config as config_lib, metrics
from ssl_influence.data import sources
from tests.experiments import text_encoder
from tests.experiments.processes import ROOT, finish, start, succeeded

FOLDER = ROOT / "experiments/flagfiles"
DATASETS = {"cifar10": "cifar10", "svhn": "svhn_cropped"}
ALL, SOME = (250, 500, 1000, 2000, 4000), (250, 1000, 4000)
# Table 1, row by row: the label counts it has numbers for, and of which weighting.
TABLE = {
    "pseudo_label": (ALL, "fixed"),
    "vat": (ALL, "fixed"),
    "mean_teacher": (ALL, "fixed"),
    "mixmatch": (ALL, "fixed"),
    "uda_fixed": (ALL, "fixed"),
    "remixmatch": (SOME, "fixed"),
    "fixmatch_fixed": (SOME, "fixed"),
    "uda": (ALL, "per_example"),
    "fixmatch": (SOME, "per_example"),
}

# Table 2, the rows of the paper and the one of UDA's own: (method, weighting, tokens).
IMDB = {
    "supervised_imdb_20": ("supervised", "fixed", 128),
    "uda_fixed_imdb_20": ("uda", "fixed", 128),
    "uda_imdb_20": ("uda", "per_example", 128),
    "uda_fixed_imdb_20_512": ("uda", "fixed", 512),
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    """Flagfiles name each other from the root of the checkout."""
    monkeypatch.chdir(ROOT)


def read(name):
    return shared_flags.read_flagfile(FOLDER / f"{name}.flags")


def rows_of(folder):
    """(method, whether its weights are fixed, dataset, labels, config) of files named for them."""
    for path in sorted((FOLDER / folder).glob("*_[0-9]*.flags")):
        if path.stem in IMDB:
            continue
        match = re.fullmatch(r"(.+?)(_fixed)?_(cifar10|svhn)_(\d+)", path.stem)
        config = shared_flags.read_flagfile(path)
        yield match[1], bool(match[2]), match[3], int(match[4]), config


def test_the_paper_has_a_flagfile_for_each_number_of_its_table():
    expected = {
        f"{row}_{dataset}_{labels}"
        for row, (counts, _) in TABLE.items()
        for dataset in DATASETS
        for labels in counts
    } | set(IMDB)
    found = {path.stem for path in (FOLDER / "paper").glob("*.flags")}
    assert {name for name in found if not name.endswith("_base")} == expected


@pytest.mark.parametrize("folder", ["paper", "published_code"])
def test_flagfiles_hold_what_their_names_say(folder):
    found = 0
    for method, fixed, dataset, labels, config in rows_of(folder):
        name = sources.parse_name(config.data.dataset)
        assert (name.source, name.labels, name.validation) == (DATASETS[dataset], labels, 1024)
        assert config.method.name == method
        _, weighting = TABLE[f"{method}_fixed" if fixed else method]
        assert config.weights.weighting == weighting
        assert dataclasses.asdict(config.model) == dataclasses.asdict(config_lib.ModelConfig())
        found += 1
    assert found >= 6


@pytest.mark.parametrize("name", ["pseudo_label", "vat", "mean_teacher", "mixmatch", "remixmatch"])
def test_the_published_code_of_the_baselines_differs_where_it_says_so(name):
    paper, code = read(f"paper/{name}_cifar10_250"), read(f"published_code/{name}")
    assert code.method.name == name and code.data.dataset == paper.data.dataset
    assert paper.method.settings()["forward_pass"] == "joint"
    assert code.data.unlabeled_includes_labeled and code.data.validation_overlap
    assert (code.model, code.train) == (paper.model, paper.train)
    adam = dataclasses.replace(
        code.optimizer,
        name="adam",
        learning_rate=0.002,
        schedule="constant",
        weight_decay=0,
        decoupled_weight_decay=0.02,
    )
    sgd = dataclasses.replace(
        adam,
        name="sgd",
        learning_rate=0.03,
        schedule="cosine",
        weight_decay=5e-4,
        decoupled_weight_decay=0,
    )
    assert paper.optimizer == adam
    assert code.optimizer == (adam if name in ("vat", "remixmatch") else sgd)
    published = config_lib.METHODS[name] | {"forward_pass": "separate"}
    if name == "vat":
        published["vat_probe"] = 1e-6
    assert code.method.settings() == published


def test_uda_of_the_paper_has_the_batches_steps_and_weights_of_its_appendix():
    for _, fixed, _, labels, config in rows_of("paper"):
        if config.method.name == "uda":
            assert batches(config) == (64, 320)
            assert config.train.train_steps == 400_000
            assert config.optimizer.learning_rate == 0.03
            weights = config.weights
            assert weights.initial == (1 if fixed or labels != 250 else 5)
            assert (weights.learning_rate, weights.inner_steps) == (0.01, 100)
            assert (weights.optimizer, weights.warmup_steps) == ("m_adam", 20_000)


def test_fixmatch_of_the_paper_has_the_batches_steps_and_weights_of_its_appendix():
    for folder in ("paper", "published_code"):
        for _, _, _, _, config in rows_of(folder):
            if config.method.name == "fixmatch":
                assert batches(config) == (64, 448)
                assert config.train.train_steps == 1024 * 1024
                assert config.optimizer.learning_rate == 0.03
                assert config.augment.strong == "ctaugment" and config.augment.cutout == 0.5
                weights = config.weights
                assert (weights.learning_rate, weights.inner_steps) == (0.01, 512)
                assert (weights.optimizer, weights.initial) == ("m_adam", 1)


@pytest.mark.parametrize("name", IMDB)
def test_imdb_of_the_paper_has_the_settings_of_its_appendix(name):
    config = read(f"paper/{name}")
    method, weighting, length = IMDB[name]
    assert (config.method.name, config.weights.weighting) == (method, weighting)
    assert config.data.dataset == "imdb_reviews.1@20-20" and config.data.min_text_length == 500
    assert (config.model.name, config.model.head) == ("bert", "binary")
    assert (config.model.sequence_length, config.model.keep_end) == (length, "right")
    assert batches(config) == ((8, 32) if length == 128 else (32, 224))
    assert config.train.train_steps == 10_000
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.clip_norm) == ("adam", 2e-5, 1)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("linear", 1000)
    assert not optimizer.adam_bias_correction and optimizer.decoupled_weight_decay == 0.01
    if method == "uda":
        settings = config.method.settings()
        assert (settings["tsa"], settings["confidence"]) == ("linear", 0)
        assert settings["temperature"] == (1 if length == 128 else 0.85)
    if weighting == "per_example":
        weights = config.weights
        assert (weights.learning_rate, weights.inner_steps, weights.initial) == (0.01, 5, 1)
        assert (weights.optimizer, weights.warmup_steps) == ("m_adam", 1000)


def test_flagfiles_of_the_snippets_differ_in_what_their_names_say():
    for encoder in ("bert_tiny", "minilm"):
        supervised, words, translated = (
            read(f"snippets/{encoder}_{name}")
            for name in ("supervised", "tf_idf", "back_translation")
        )
        assert supervised.method.name == "supervised" and supervised.model.encoder == encoder
        assert words == supervised.replace(
            method=dataclasses.asdict(words.method),
            weights={"weighting": "per_example"},
            augment={"strong": "tf_idf"},
        )
        assert translated == words.replace(
            augment={"strong": "paraphrases", "paraphrases": translated.augment.paraphrases}
        )
        assert words.method.name == "uda"


def test_weights_of_the_unlabeled_loss_are_those_published_for_each_dataset():
    published = {"pseudo_label": (1, 2), "mean_teacher": (50, 150), "mixmatch": (75, 250)}
    for method, by_dataset in published.items():
        for dataset, weight in zip(DATASETS, by_dataset, strict=True):
            for labels in ALL:
                config = read(f"paper/{method}_{dataset}_{labels}")
                assert config.method.unsupervised_weight == weight


def test_the_release_bounds_the_weights_and_adds_one_to_the_hessian():
    paper, release = read("paper/fixmatch_svhn_1000"), read("published_code/fixmatch_svhn_1000")
    assert (release.weights.damping, release.weights.maximum) == (1, 2)
    assert release.weights.validation_batch_norm == "batch"
    assert paper.weights == dataclasses.replace(
        release.weights,
        damping=config_lib.WeightConfig.damping,
        maximum=None,
        validation_batch_norm="inference",
    )


def test_methods_of_the_study_share_all_but_their_own_settings():
    base = read("digits/base")
    for path in (FOLDER / "digits").glob("*.flags"):
        config = shared_flags.read_flagfile(path)
        if path.stem in config_lib.METHODS:
            assert config.method.name == path.stem
        name, of_base = (sources.parse_name(c.data.dataset) for c in (config, base))
        assert (name.source, name.validation) == (of_base.source, of_base.validation)
        shared = base.replace(data={"dataset": config.data.dataset})
        if config.method.name == "supervised":
            shared = shared.replace(weights={"weighting": "fixed"})
        assert dataclasses.replace(config, method=shared.method) == shared


def test_fixmatch_trains_from_the_paper_s_flagfile(tmp_path):
    succeeded(
        finish(
            start(
                "-m",
                "tests.experiments.mock_tfds",
                "1400",
                "experiments.fixmatch_cifar",
                f"--flagfile={FOLDER / 'paper/fixmatch_cifar10_250.flags'}",
                f"--model_dir={tmp_path}",
                "--depth=10",
                "--filters=4",
                "--labeled_batch_size=8",
                "--unlabeled_batch_size=16",
                "--validation_batch_size=16",
                "--train_steps=2",
                "--inner_steps=1",
                "--confidence=0",
            )
        )
    )
    row = metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row["step"] == 2 and np.isfinite(row["validation/error"])
    weights = np.loadtxt(tmp_path / "weights/weights-2.csv", delimiter=",", skiprows=1)
    assert len(weights) == 1400 - 250 - 1024
    updated = weights[:, 2] > 0
    assert np.any(updated) and np.all(weights[~updated, 1] == 1)
    assert np.all(weights[updated, 1] != 1)


def batches(config):
    return config.data.labeled_batch_size, config.data.unlabeled_batch_size


def test_imdb_trains_from_the_paper_s_flagfile(tmp_path):
    pytest.importorskip("tensorflow_text")
    mocked = ("-m", "tests.experiments.mock_tfds", "60")
    data = ["--dataset=imdb_reviews.1@20-20", "--min_text_length=0"]
    paraphrases = tmp_path / "paraphrases.tsv"
    translation = ["experiments.back_translate", *data, "--forward=cat", "--backward=cat"]
    succeeded(finish(start(*mocked, *translation, f"--output={paraphrases}")))
    succeeded(
        finish(
            start(
                *mocked,
                "experiments.uda_imdb",
                f"--flagfile={FOLDER / 'paper/uda_imdb_20.flags'}",
                *data,
                f"--encoder={text_encoder.write_encoder(tmp_path / 'encoder')}",
                f"--paraphrases={paraphrases}",
                "--sequence_length=20",
                f"--model_dir={tmp_path / 'run'}",
                "--train_steps=3",
                "--learning_rate_warmup_steps=1",
                "--weight_warmup_steps=0",
                "--inner_steps=1",
                "--rows_per_pass=25",
                "--mixed_precision=bfloat16",
            )
        )
    )
    row = metrics.read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert row["step"] == 3 and np.isfinite(row["validation/error"])
    weights = np.loadtxt(tmp_path / "run/weights/weights-3.csv", delimiter=",", skiprows=1)
    # 60 of the training part, the labeled ones among them, and 60 unsupervised ones.
    assert len(weights) == 60 - 20 + 60
    updated = weights[:, 2] > 0
    assert np.any(updated) and np.all(weights[~updated, 1] == 1)
