"""Every method with every weighting trains from its flagfile, resumes, and is what it is called.

The runs are of a few steps, most of them of an MLP, which compiles faster than a Wide-ResNet.
"""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from experiments import flags as shared_flags, launch
from ssl_influence import config as config_lib, outer_loop, training
from ssl_influence.methods import base
from tests.experiments.processes import assert_same_contents, contents

FLAGFILES = pathlib.Path("experiments/flagfiles/digits")
METHODS = tuple(name for name in config_lib.METHODS if name != "supervised")
SHORT = {
    "train_steps": 8,
    "log_every": 4,
    "eval_every": 8,
    "checkpoint_every": 4,
    "tensorboard": False,
}


@functools.cache
def of_flagfile(name):
    return shared_flags.read_flagfile(FLAGFILES / f"{name}.flags")


def make_config(name, weighting, network="mlp", **augment):
    method = {"augmentations": 2} if name == "remixmatch" else {}
    # Short runs: no ramp, and a mask that lets rows count from the start.
    method |= {"ramp_up": 0.25} if "ramp_up" in config_lib.METHODS[name] else {}
    method |= {"confidence": 0.11} if "confidence" in config_lib.METHODS[name] else {}
    return of_flagfile(name).replace(
        data={"labeled_batch_size": 8, "unlabeled_batch_size": 12, "validation_batch_size": 40},
        model={"name": network, "filters": 4, "hidden_units": (16,)},
        method=method,
        weights={"weighting": weighting, "warmup_steps": 1, "inner_steps": 2},
        augment=augment,
        train=SHORT,
    )


def train(config, model_dir):
    built = launch.build(config)
    outer_loop.train(
        built.trainer,
        built.pipeline,
        model_dir,
        config.train,
        weight_ids=built.split.unlabeled,
    )
    return built


def cut_back(model_dir):
    """Leaves what a kill after the first checkpoint leaves."""
    for name in ("checkpoint", *(f.name for f in (model_dir / "checkpoints").glob("ckpt-8.*"))):
        (model_dir / "checkpoints" / name).unlink()


CASES = [
    *((name, kind, "mlp", {}) for name in METHODS for kind in config_lib.WEIGHTINGS),
    ("remixmatch", "per_example", "wide_resnet", {}),
    # The checkpoint at step 4 lies within an interval of CTAugment's.
    ("fixmatch", "per_example", "mlp", {"strong": "ctaugment", "ctaugment_interval": 3}),
]


@pytest.mark.parametrize("name,weighting,network,augment", CASES)
def test_trains_from_its_flagfile_and_resumes_bit_for_bit(
    name, weighting, network, augment, tmp_path
):
    config = make_config(name, weighting, network, **augment)
    built = train(config, tmp_path / "run")
    weights = built.trainer.example_weights.values()[built.split.unlabeled]
    moved = np.mean(weights != 1)
    expected = {"fixed": lambda: moved == 0, "single": lambda: moved == 1}
    assert expected.get(weighting, lambda: 0 < moved < 1)()
    whole = contents(tmp_path / "run", step=8)
    cut_back(tmp_path / "run")
    assert int(train(config, tmp_path / "run").trainer.step) == 8
    assert_same_contents(whole, contents(tmp_path / "run", step=8))
    assert [row["step"] for row in whole[1]] == [4, 8]
    if augment:
        names = {variable.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for variable in whole[0]}
        assert {"augmenter/rates", "augmenter/snapshot"} <= names
        assert float(tf.reduce_min(built.trainer.augmenter.rates)) < 1


class LabeledTermsAlone(base.StatefulMethod):
    """A method without its unlabeled rows in the objective, but with them in the forward pass."""

    def __init__(self, method):
        super().__init__()
        self._method, self.views = method, method.views

    def __call__(self, forward, batch, step):
        output = self._method(forward, batch, step)
        return output._replace(
            unsupervised=output.unsupervised[:0],
            unsupervised_coefficient=output.unsupervised_coefficient[:0],
            example_id=output.example_id[:0],
            terms={},
        )

    def observe(self, observation):
        if isinstance(self._method, base.StatefulMethod):
            self._method.observe(observation)


def variables_after(config, wrap=lambda method: method, steps=3):
    """All variables of the model and its method after some steps of theta."""
    built = launch.build(config)
    trainer = built.trainer
    method = wrap(trainer.method)
    trainer = training.BilevelTrainer(trainer.model, method, trainer.example_weights, config)
    for step in range(steps):
        trainer.theta_step(built.pipeline.train_batch(step))
    variables = trainer.model.variables + trainer.optimizer.variables
    if isinstance(method, base.StatefulMethod):
        variables = [*variables, *method.variables]
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("name", METHODS)
def test_weights_of_one_are_fixed_weights_and_weights_of_zero_leave_the_labeled_terms(name):
    config = make_config(name, "per_example").replace(weights={"warmup_steps": 100})

    def with_weight(value, weighting="per_example"):
        return config.replace(weights={"initial": float(value), "weighting": weighting})

    one = variables_after(with_weight(1))
    for a, b in zip(one, variables_after(with_weight(1, "fixed")), strict=True):
        assert a.tobytes() == b.tobytes()
    zero = variables_after(with_weight(0))
    alone = variables_after(with_weight(1), LabeledTermsAlone)
    for a, b in zip(zero, alone, strict=True):
        assert a.tobytes() == b.tobytes()
    assert any(np.any(a != b) for a, b in zip(one, zero, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_step_descends_the_base_algorithms_own_objective(name):
    """Against a step written out without the trainer: plain SGD, weights of one."""
    network = "wide_resnet" if name in ("remixmatch", "mean_teacher") else "mlp"
    config = make_config(name, "fixed", network).replace(
        optimizer={"momentum": 0.0, "schedule": "constant", "learning_rate": 0.1}
    )
    built, other = launch.build(config), launch.build(config)
    batch = built.pipeline.train_batch(7)
    built.trainer.step.assign(7)
    built.trainer.theta_step(batch)

    model, method = other.trainer.model, other.trainer.method
    statistics = [v.numpy() for v in model.non_trainable_variables]

    def call(inputs):
        return tuple(model(inputs, training=True))

    def restore(inputs):  # the average equals the weights before the first step
        before = [v.numpy() for v in model.non_trainable_variables]
        outputs = call(inputs)
        for v, value in zip(model.non_trainable_variables, before, strict=True):
            v.assign(value)
        return outputs

    variables = [*model.trainable_variables, *getattr(method, "trainable_variables", ())]
    with tf.GradientTape() as tape:
        output = method(base.Forward(call, restore, restore, restore), batch, 7)
        loss = tf.reduce_sum(output.supervised_coefficient * output.supervised)
        loss += tf.reduce_sum(output.unsupervised_coefficient * output.unsupervised)
        kernels = [v for v in variables if "kernel" in v.name]
        loss += 5e-4 * tf.add_n([tf.nn.l2_loss(v) for v in kernels])
    expected = [v - 0.1 * g for v, g in zip(variables, tape.gradient(loss, variables), strict=True)]
    found = built.trainer.trainable
    assert [v.shape for v in found] == [v.shape for v in variables]
    for a, b, start in zip(found, expected, variables, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.max(np.abs(b - start)) + 1e-7)
    for a, b in zip(
        built.trainer.model.non_trainable_variables, model.non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    changed = [
        np.any(a != b) for a, b in zip(statistics, model.non_trainable_variables, strict=True)
    ]
    assert all(changed)  # of the MLP there are none
