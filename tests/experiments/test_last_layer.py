"""The study of the last layer: where it is all there is, beside the trainer, and as a process."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from scipy import stats

from experiments import last_layer_study, launch
from ssl_influence import checkpoints, config as config_lib
from ssl_influence.data import splits
from ssl_influence.influence import all_variables, solve_info
from ssl_influence.models import registry
from tests.experiments.processes import assert_refused, run, succeeded

CONFIG = config_lib.Config().replace(
    data={
        "dataset": "two_moons.1@10-30",
        "labeled_batch_size": 10,
        "unlabeled_batch_size": 40,
        "validation_batch_size": 30,
    },
    model={"name": "mlp", "hidden_units": (8,)},
    method={"name": "pseudo_label", "confidence": 0.55, "ramp_up": 0.0},
    optimizer={"name": "adam", "learning_rate": 0.01, "schedule": "constant"},
    weights={"inner_steps": 1, "damping": 0.02},
    train={"train_steps": 12, "checkpoint_every": 6, "tensorboard": False},
)
OTHER_METHOD = {"confidence": None, "ramp_up": 0.0}
MEAN_TEACHER = {"method": {"name": "mean_teacher", **OTHER_METHOD}}
REMIXMATCH = {
    "data": {"dataset": "digits.1@60-40"},
    "method": {"name": "remixmatch", "augmentations": 1, **OTHER_METHOD},
}


def measure(config, model_dir, **settings):
    settings = {"examples": 50, "curvature": "gauss_newton", "tolerance": 1e-11, **settings}
    study = last_layer_study.Study(config, model_dir, max_iterations=1000, **settings)
    path = checkpoints.list_checkpoints(model_dir / "checkpoints")[12]
    return study, study.measure(path)


def save_untrained(config, model_dir):
    """A checkpoint of uneven weights and a teacher that differs, sooner than by a training run."""
    built, rng = launch.build(config), np.random.default_rng(0)
    weights = built.trainer.example_weights.variable
    weights.assign(rng.uniform(0.3, 2.0, weights.shape))
    for shadow in built.trainer.ema.shadow:
        shadow.assign_add(rng.normal(size=shadow.shape))
    splits.write(built.manifest, model_dir / "split.json")
    state = built.trainer.state()
    checkpoints.Checkpointer(model_dir / "checkpoints", 1, **state).save(12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("last_layer") / "run"
    assert launch.train(launch.build(CONFIG), path, "tests")
    return path


def logistic_regression(model_config, input_shape, num_classes, seed):
    del model_config, seed
    inputs = keras.Input(input_shape)
    features = keras.layers.Flatten()(inputs)
    return keras.Model(inputs, [features, keras.layers.Dense(num_classes, name="head")(features)])


@pytest.mark.parametrize(
    ("changes", "curvature"),
    [({}, "gauss_newton"), (MEAN_TEACHER, "gauss_newton"), (REMIXMATCH, "hessian")],
)
def test_of_a_model_that_is_a_last_layer_both_are_equal(tmp_path, monkeypatch, changes, curvature):
    monkeypatch.setattr(registry, "build", logistic_regression)
    config = CONFIG.replace(**changes)
    save_untrained(config, tmp_path)
    _, found = measure(config, tmp_path, curvature=curvature)
    assert found.solve.converged and found.solve.curvature == curvature
    assert 3 < len(found.last_layer) <= 50 - (not changes)  # pseudo-labels are masked
    size = np.abs(found.last_layer).max()
    assert size > 1e-3
    np.testing.assert_allclose(found.all_variables, found.last_layer, rtol=0, atol=1e-8 * size)
    np.testing.assert_array_equal(found.from_below, 0)
    np.testing.assert_allclose(found.identity, found.identity_head, rtol=1e-12)
    np.testing.assert_allclose(found.validation_share, 1)


def test_the_last_layers_influence_is_what_the_trainer_computes(model_dir):
    study, found = measure(CONFIG, model_dir)
    trainer = study._trainer
    recorded = tf.Variable(tf.zeros([50]))
    moved = trainer.example_weights.moved

    def record(rows, ids, gradients):
        recorded.assign(gradients)
        return moved(rows, ids, gradients)

    trainer.example_weights.moved = record
    batches = tf.nest.map_structure(
        lambda t: tf.cast(t, tf.float32) if t.dtype.is_floating else t,
        (study._batch, study._validation),
    )
    trainer.weight_step(*batches)
    order = np.argsort(study._batch["unlabeled"]["example_id"].numpy())
    expected = recorded.numpy()[order]
    expected = expected[expected != 0]
    size = np.abs(expected).max()
    np.testing.assert_allclose(found.last_layer, expected, rtol=0, atol=1e-3 * size)
    # Here the layers below do matter.
    assert np.abs(found.from_below).max() > 0.01 * size
    np.testing.assert_allclose(found.from_head + found.from_below, found.all_variables, rtol=1e-9)
    assert np.abs(found.identity - found.identity_head).max() > 0.01 * np.abs(found.identity).max()


def test_rank_correlation_equals_scipys_ties_included():
    rng = np.random.default_rng(0)
    a, b = rng.integers(6, size=40).astype(float), rng.normal(size=40)
    b[:20] += a[:20]
    assert last_layer_study.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert last_layer_study.pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)
    assert np.isnan(last_layer_study.spearman(a[:2], b[:2]))
    assert np.isnan(last_layer_study.spearman(np.ones(5), b[:5]))


def measurement(influence, **changes):
    influence = np.array(influence)
    names = ("all_variables", "from_head", "identity", "identity_head")
    return last_layer_study.Measurement(
        last_layer=influence,
        **{**dict.fromkeys(names, influence), **changes},
        from_below=0 * influence,
        features=np.ones([4, 2]),
        validation_share=np.float64(0.5),
        gradient_norm=np.float64(0.1),
        solve=solve_info.SolveInfo(0.1, 7, True, False, 6),
    )


def test_statistics_are_of_the_rows_that_count_and_undefined_without(tmp_path):
    some = measurement([1.0, -2.0, 3.0, 4.0], all_variables=np.array([1.0, 2.0, 3.0, 5.0]))
    rows = last_layer_study.statistics({4: some, 2: measurement([])})
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[1]["same_sign"] == 0.75 and rows[1]["below"] == 0 and rows[1]["rows"] == 4
    assert rows[1]["spearman"] == pytest.approx(0.8)
    table = last_layer_study.table(rows).splitlines()
    assert "nan" in table[1] and table[2].endswith("negative")
    last_layer_study.write(rows, {"seed": 1}, tmp_path / "a.json")
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["checkpoints"][0]["spearman"] is None and report["settings"] == {"seed": 1}
    last_layer_study.draw(rows, {4: some, 2: measurement([])}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_binary_writes_table_numbers_and_figure(model_dir):
    result = succeeded(run("last_layer", f"--model_dir={model_dir}", "--examples=60"))
    lines = result.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("step  rows"))
    report = json.loads((model_dir / "last_layer.json").read_text())
    assert [line.split()[0] for line in lines[header + 1 :]] == ["6", "12"]
    assert [row["step"] for row in report["checkpoints"]] == [6, 12]
    assert report["settings"]["unlabeled"] == 60 and report["settings"]["damping"] == 0.02
    for row in report["checkpoints"]:
        assert row["converged"] and -1 <= row["spearman"] <= 1
    assert (model_dir / "last_layer.png").stat().st_size > 10000


def test_what_cannot_be_studied_ends_with_one_line(model_dir, tmp_path):
    assert_refused(run("last_layer", f"--model_dir={model_dir.parent}"), "holds no flags.txt")
    assert_refused(
        run("last_layer", f"--model_dir={model_dir}", "--steps=6,7"), "steps=7", "the steps 6, 12"
    )
    (tmp_path / "flags.txt").write_text("--method=supervised\n--weighting=fixed\n")
    assert_refused(run("last_layer", f"--model_dir={tmp_path}"), "holds a supervised run")


def test_the_flag_offers_the_curvatures_there_are():
    result = run("last_layer", "--help")
    assert f"<{'|'.join(all_variables.CURVATURES)}>" in result.stdout
    assert "python -m experiments.last_layer" in result.stdout
