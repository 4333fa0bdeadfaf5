"""The benchmark of texts: rows are what they are named for, and its yardsticks do the same work."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from experiments import encoders
from experiments.benchmarks import text, text_steps, timing
from ssl_influence import config as config_lib
from ssl_influence.data import tokens
from ssl_influence.models import bert
from tests.experiments import text_encoder
from tests.experiments.processes import run, succeeded

pytest.importorskip("tensorflow_text")
pytest.importorskip("official.nlp")


OF_TEXTS = {"encode", "encode_ready_made", "tf_idf_view"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """With a tiny encoder, and without dropout."""
    encoder = text_encoder.write_encoder(tmp_path_factory.mktemp("text") / "encoder", num_layers=1)
    return config_lib.Config().replace(
        data={"labeled_batch_size": 4, "unlabeled_batch_size": 6, "validation_batch_size": 4},
        model={"name": "bert", "encoder": str(encoder), "dropout": 0.0, "sequence_length": 10},
        method={"confidence": 0.0},
        optimizer={
            "name": "adam",
            "learning_rate": 0.01,
            "schedule": "linear",
            "warmup_steps": 10,
            "clip_norm": 1.0,
            "weight_decay": 0.0,
            "decoupled_weight_decay": 0.01,
            "decayed_variables": "no_norm_no_bias",
            "adam_epsilon": 1e-6,
        },
        weights={"inner_steps": 3},
        train={"rows_per_pass": 5},
    )


def test_encoding_is_measured_as_a_process(config):
    arguments = ["--suite=text", f"--encoder={config.model.encoder}", "--sequence_length=10"]
    measured = run("benchmark", *arguments, "--case=texts", "--repeats=1")
    rows = json.loads(succeeded(measured).stdout)["rows"]
    assert rows.keys() == OF_TEXTS
    for row in rows.values():
        assert row["texts_per_s"] == pytest.approx(32 / row["median_s"])  # A default of the suite.


class NotedTrainer:
    """Notes the steps that it is asked for, with the config that it was made of."""

    def __init__(self, config, noted):
        self.config, self.noted, self.model = config, noted, None

    def theta_step(self, batch):
        self.noted.append(("theta", self.config))
        return {}

    def bilevel_step(self, batch, validation):
        self.noted.append(("bilevel", self.config))
        return {}


def test_rows_of_labeled_examples_are_what_they_are_named_for(config, monkeypatch):
    noted = []
    garden = lambda of, *_: (lambda batch: noted.append(("garden", of)) or {}, None)  # noqa: E731
    monkeypatch.setattr(text_steps, "model_garden_step", garden)
    monkeypatch.setattr(text_steps, "make_trainer", lambda of, *_: NotedTrainer(of, noted))
    rows = text.measure("supervised", config, 1)
    assert list(rows) == ["supervised", "model_garden"]
    found = [(step, of.method.name) for step, of in noted[-2:]]
    assert found == [("theta", "supervised"), ("garden", "supervised")]
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(4 * 10 / row["median_s"])


def test_rows_of_uda_are_the_steps_that_they_are_named_for(config, monkeypatch):
    noted, made = [], []

    def make_trainer(of, encoder, spec):
        made.append(of)
        return NotedTrainer(of, noted)

    monkeypatch.setattr(text_steps, "make_trainer", make_trainer)
    for call in text_steps.uda_calls(config, text_steps.UDA_ROWS).values():
        call()
    assert len(made) == 4
    found = {
        row: (step, of.method.target_forward, of.model.mixed_precision, of.train.rows_per_pass)
        for row, (step, of) in zip(text_steps.UDA_ROWS, noted, strict=True)
    }
    assert found == {
        "uda_joint": ("theta", "joint", "none", None),
        "uda_joint_bilevel": ("bilevel", "joint", "none", None),
        "uda_separate": ("theta", "separate", "none", None),
        "uda_separate_bilevel": ("bilevel", "separate", "none", None),
        "uda_separate_bfloat16": ("theta", "separate", "bfloat16", None),
        "uda_joint_in_parts": ("theta", "joint", "none", 5),
    }
    rows = text.measure("uda", config, 1)
    assert rows.keys() == {*text_steps.UDA_ROWS, "uda_joint_run", "uda_separate_run"}
    fixed, bilevel = rows["uda_joint"]["cpu_s"], rows["uda_joint_bilevel"]["cpu_s"]
    assert rows["uda_joint_run"]["cpu_s"] == pytest.approx((2 * fixed + bilevel) / 3)
    joint = rows["uda_joint"]
    assert joint["tokens_per_s"] == pytest.approx((4 + 2 * 6) * 10 / joint["median_s"])


def test_memory_is_measured_after_a_real_step_in_parts(config, monkeypatch):
    made, real = [], text_steps.make_trainer
    monkeypatch.setattr(
        text_steps, "make_trainer", lambda *arguments: made.append(real(*arguments)) or made[-1]
    )
    rows = text.measure("memory_uda_joint_in_parts", config, 1)
    assert rows["uda_joint_in_parts"]["peak_memory_bytes"] > 1e8
    assert [int(trainer.step) for trainer in made] == [1]


def test_every_ratio_is_of_rows_that_some_case_has():
    assert {case.removeprefix("memory_") for case in text.CASES[2:-1]} < set(text_steps.UDA_ROWS)
    quantities = {"median_s": 2.0, "cpu_s": 2.0, "peak_memory_bytes": 2.0}
    names = {
        *("supervised", "model_garden"),
        *(*text_steps.UDA_ROWS, "uda_joint_run", "uda_separate_run"),
        *OF_TEXTS,
    }
    ratios = timing.ratios(text.RATIOS, dict.fromkeys(names, quantities))
    assert ratios.keys() == text.RATIOS.keys()


def test_model_garden_step_does_to_the_network_what_the_theta_step_does(config):
    config = dataclasses.replace(
        config,
        method=config_lib.MethodConfig("supervised"),
        weights=config_lib.WeightConfig("fixed"),
        train=config_lib.TrainConfig(),
    )
    encoder, spec = encoders.load(config.model)
    # No token twice: the Model Garden clips by a norm in which each counts by itself.
    ids = np.random.default_rng(0).permutation(np.arange(6, 46)).reshape(4, 10)
    batch = {"labeled": {"inputs": tf.constant(ids, tf.int32), "label": tf.constant([0, 1, 1, 0])}}
    trainer = text_steps.make_trainer(config, encoder, spec)
    plain, classifier = text_steps.model_garden_step(config, trainer.model, encoder.sizes, spec)
    before = [v.numpy() for v in classifier.trainable_variables]
    for _ in range(3):
        loss = trainer.theta_step(batch)["train/loss_supervised"]
        np.testing.assert_allclose(plain(batch), loss, rtol=1e-5)
    own = [*bert.encoder_of(trainer.model).trainable_variables, *trainer.head.trainable_variables]
    for a, b, old in zip(own, classifier.trainable_variables, before, strict=True):
        # A bias of the keys has a gradient of nothing but rounding.
        np.testing.assert_allclose(
            a, b, atol=1e-4 if "key/bias" in a.name else 1e-5, err_msg=a.name
        )
        assert np.any(b != old)


def test_ready_made_tokenizer_gives_the_same_ids_of_plain_texts(config):
    _, spec = encoders.load(config.model)
    texts = [*text_steps.make_texts(spec, 5), "Good film!", ""]
    assert {len(text) for text in texts[:5]} == {text_steps.TEXT_LENGTH}
    for keep_end in config_lib.KEPT_ENDS:
        kept = dataclasses.replace(spec, keep_end=keep_end)
        np.testing.assert_array_equal(
            text_steps.ready_made_encode(kept)(tf.constant(texts)),
            tokens.Tokenizer(kept).encode(texts),
        )
