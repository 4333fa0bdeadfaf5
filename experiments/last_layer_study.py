"""What `experiments.last_layer` computes, tabulates and draws."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras as keras
from scipy import stats

from experiments import launch
from ssl_influence import checkpoints, config as config_lib, files
from ssl_influence.data import splits
from ssl_influence.influence import all_variables, inverse_hvp, solve_info
from ssl_influence.methods import base, registry as methods
from ssl_influence.models import registry as models
from ssl_influence.reporting import figures, tables


class Measurement(NamedTuple):
    """One checkpoint on the batch. Influences are of the unlabeled examples not masked, [n].

    Attributes:
      last_layer: dL_V/dlambda over the last layer, as the trainer computes it.
      all_variables: the same over all trainable variables.
      from_head, from_below: its two parts, along the last layer's variables and all others.
      identity, identity_head: -c_u <grad L_V, grad ell_U(u)> over all, and over the last layer's.
      features: of the unlabeled rows, [R, D].
      validation_share: share of |grad L_V|^2 that lies in the last layer.
      gradient_norm: |grad L| of the objective over all variables, 0 at a minimum.
      solve: of the influence over all variables.
    """

    last_layer: np.ndarray
    all_variables: np.ndarray
    from_head: np.ndarray
    from_below: np.ndarray
    identity: np.ndarray
    identity_head: np.ndarray
    features: np.ndarray
    validation_share: float
    gradient_norm: float
    solve: solve_info.SolveInfo


class Study:
    """Measures checkpoints of one run on one batch, all in float64.

    Args:
      config: of the run, with the damping of the study.
      model_dir: the run's directory, whose split must be what `config` gives now.
      examples: unlabeled examples in the batch.
      curvature: one of all_variables.CURVATURES.
      tolerance, max_iterations: of conjugate gradients.

    Attributes:
      settings: what was compared, by name.
    """

    def __init__(
        self,
        config: config_lib.Config,
        model_dir: files.AnyPath,
        *,
        examples: int,
        curvature: str,
        tolerance: float,
        max_iterations: int,
    ):
        manifest = splits.read(model_dir / "split.json")
        rows = {role: len(manifest[role]) for role in ("labeled", "validation")}
        built = launch.build(
            config.replace(
                data={
                    "labeled_batch_size": rows["labeled"],
                    "unlabeled_batch_size": examples,
                    "validation_batch_size": rows["validation"],
                },
                distribution={"strategy": "one_device", "tpu": None, "virtual_cpus": None},
            )
        )
        splits.check(manifest, built.manifest)
        self._config = config
        self._trainer = built.trainer
        classes, seed = len(built.source.class_names), config.train.seed
        with _double_precision():
            self._model, self._teacher = (
                models.build(config.model, built.source.inputs.shape[1:], classes, seed)
                for _ in range(2)
            )
            self._method = methods.build(
                config.method,
                classes,
                config.train.train_steps,
                feature_size=self._model.outputs[0].shape[-1],
                seed=seed,
            )
        if hasattr(self._method, "target_forward"):
            # The same numbers in inference mode, in half the time: targets have no backward pass.
            self._method = dataclasses.replace(self._method, target_forward="separate")
        # Of the stream that fused weight steps never draw from.
        self._batch = _to_float64(built.pipeline.fresh_batch(0))
        self._validation = _to_float64(built.pipeline.validation_batch(0))
        self._curvature, self._tolerance = curvature, tolerance
        self._max_iterations = max_iterations
        self._example_weight = tf.Variable(
            tf.zeros([len(self._method_output().example_id)], tf.float64)
        )
        self._head = self._model.get_layer(self._trainer.head.name)
        self._variables = list(self._model.trainable_variables)
        if isinstance(self._method, base.StatefulMethod):
            self._variables += self._method.trainable_variables
        self._measure = tf.function(self._measure_impl, autograph=False)
        self.settings = {
            "dataset": built.config.data.dataset,
            "seed": config.train.seed,
            "curvature": curvature,
            "damping": config.weights.damping,
            **rows,
            "unlabeled": built.pipeline.unlabeled_batch_size,
            "variables": int(sum(np.prod(v.shape) for v in self._variables)),
        }

    @property
    def description(self) -> str:
        """The settings on one line."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def measure(self, path: str) -> Measurement:
        """Measures the checkpoint at a path prefix.

        Raises:
          CheckpointError: it is damaged or of another run.
          ConfigError: the last layer's system is singular at this damping.
        """
        trainer = self._trainer
        names = {"model", "method", "ema", "example_weights", "step"}
        read = {name: part for name, part in trainer.state().items() if name in names}
        checkpoints.read(tf.train.Checkpoint(**read), path).assert_existing_objects_matched()
        self._model.set_weights(trainer.model.get_weights())
        with trainer.ema.swapped():
            self._teacher.set_weights(trainer.model.get_weights())
        if "method" in read:
            for own, value in zip(self._method.variables, trainer.method.variables, strict=True):
                own.assign(tf.cast(value, own.dtype))
        ids = self._method_output().example_id
        self._example_weight.assign(tf.cast(trainer.example_weights.lookup(ids), tf.float64))

        solved, coefficient, influences, measured = tf.nest.map_structure(
            lambda tensor: tensor.numpy(), self._measure()
        )
        if not solved:
            raise config_lib.ConfigError(
                f"damping={self._config.weights.damping} leaves the last layer's system at {path} "
                "without a solution: raise --damping."
            )
        _, place = np.unique(ids.numpy(), return_inverse=True)
        counted = np.bincount(place, coefficient) > 0
        by_example = {name: np.bincount(place, rows)[counted] for name, rows in influences.items()}
        return Measurement(**by_example, **measured)

    def _method_output(self):
        forward = base.Forward(
            train=self._forward,
            constant=self._forward,
            still=self._forward,
            teacher=lambda inputs: _outputs_of(self._teacher, inputs),
        )
        return self._method(forward, self._batch, self._trainer.step)

    def _forward(self, inputs):
        return _outputs_of(self._model, inputs)

    def _validation_loss(self):
        _, logits = self._forward(self._validation["inputs"])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(self._validation["label"], logits)
        return tf.reduce_mean(loss)

    def _measure_impl(self):
        variables = self._variables
        objective = all_variables.Objective(
            self._method_output,
            self._example_weight,
            variables,
            [self._trainer.l2_of(v) for v in self._trainer.trainable],
        )
        with tf.GradientTape(persistent=True) as tape:
            validation_loss, value = self._validation_loss(), objective.value()
        rhs = tape.gradient(validation_loss, variables, unconnected_gradients="zero")
        slope = tape.gradient(value, variables, unconnected_gradients="zero")
        direction, solve = inverse_hvp.conjugate_gradient(
            objective.product(self._curvature),
            rhs,
            damping=self._config.weights.damping,
            tolerance=self._tolerance,
            max_iterations=self._max_iterations,
        )
        exact = tf.constant(objective.is_exact(self._curvature))
        last_layer, solved, output = self._last_layer()
        from_head = objective.influence(self._head_alone(direction))
        total = objective.influence(direction)
        influences = {
            "last_layer": last_layer,
            "all_variables": total,
            "from_head": from_head,
            "from_below": total - from_head,
            "identity": objective.influence(rhs),
            "identity_head": objective.influence(self._head_alone(rhs)),
        }
        head_norm = tf.linalg.global_norm(self._head_alone(rhs))
        measured = {
            "features": output.unlabeled_head.features,
            "validation_share": (head_norm / tf.linalg.global_norm(rhs)) ** 2,
            "gradient_norm": tf.linalg.global_norm(slope),
            "solve": solve._replace(exact_curvature=exact),
        }
        return solved, output.unsupervised_coefficient, influences, measured

    def _last_layer(self):
        """The influence as the trainer computes it, and the rows it is of."""
        output = self._method_output()
        features, logits = self._forward(self._validation["inputs"])
        influence, info = self._trainer.weight_gradient(
            output, self._example_weight, features, logits, self._validation["label"]
        )
        return influence, info.converged, output

    def _head_alone(self, vector):
        """The vector with zeros for the variables of all other layers."""
        own = {id(variable) for variable in self._head.trainable_variables}
        return [
            part if id(variable) in own else tf.zeros_like(part)
            for part, variable in zip(vector, self._variables, strict=True)
        ]


def statistics(measured: Mapping[int, Measurement]) -> list[dict[str, Any]]:
    """The numbers of each checkpoint, by ascending step; NaN where too few rows are left.

    Args:
      measured: step -> what was measured. Features are compared with those of the last step.
    """
    end = measured[max(measured)].features
    rows = []
    for step, m in sorted(measured.items()):
        truth = m.all_variables
        below, head = np.abs(m.from_below).sum(), np.abs(m.from_head).sum()
        rows.append(
            {
                "step": step,
                "rows": len(truth),
                "spearman": spearman(m.last_layer, truth),
                "pearson": pearson(m.last_layer, truth),
                "same_sign": _mean(np.sign(m.last_layer) == np.sign(truth)),
                "identity": spearman(m.identity, truth),
                "identity_last_layer": spearman(m.identity_head, truth),
                "below": float(below / (below + head)) if below + head else float("nan"),
                "feature_distance": float(np.linalg.norm(m.features - end) / np.linalg.norm(end)),
                "validation_share": float(m.validation_share),
                "gradient_norm": float(m.gradient_norm),
                "iterations": int(m.solve.iterations),
                "residual": float(m.solve.residual),
                "negative_curvature": bool(m.solve.negative_curvature),
                "converged": bool(m.solve.converged),
            }
        )
    return rows


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; NaN below three pairs, or where one side is constant."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation of the ranks, the mean one where several tie."""
    return pearson(stats.rankdata(a), stats.rankdata(b))


def describe_solve(solve: solve_info.SolveInfo) -> str:
    """How a solve went, in a few words."""
    text = f"{int(solve.iterations)} steps to a residual of {float(solve.residual):.1e}"
    if solve.negative_curvature:
        return f"{text}, stopped at negative curvature"
    return text if solve.converged else f"{text}, short of the tolerance"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as plain text; experiments.last_layer explains the columns."""
    header = ["step", "rows", "spearman", "pearson", "same sign", "identity", "id. last"]
    header += ["below", "features", "steps", "residual", ""]
    names = ("spearman", "pearson", "same_sign", "identity", "identity_last_layer", "below")
    lines = []
    for row in rows:
        note = "negative" if row["negative_curvature"] else "" if row["converged"] else "unmet"
        lines.append(
            [
                f"{row['step']}",
                f"{row['rows']}",
                *(f"{row[name]:.3f}" for name in names),
                f"{row['feature_distance']:.2f}",
                f"{row['iterations']}",
                f"{row['residual']:.0e}",
                note,
            ]
        )
    return tables.render(header, lines)


def write(rows: list[dict[str, Any]], settings: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Writes {"settings", "checkpoints"} as JSON, null where a number is not finite."""
    finite = [
        {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}
        for row in rows
    ]
    report = {"settings": dict(settings), "checkpoints": finite}
    files.write_atomically(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def draw(
    rows: list[dict[str, Any]], measured: Mapping[int, Measurement], path: str | os.PathLike
) -> None:
    """Correlations over the steps, and both influences of each example early and late, as PNG.

    Early is the first checkpoint with rows to compare, late the last.
    """
    figure, (curves, *scatters) = figures.in_a_row(3)
    step = [row["step"] for row in rows]
    for name, label, color in (
        ("spearman", "last layer, exact", figures.BLUE),
        ("identity", "all layers, identity", figures.ORANGE),
        ("identity_last_layer", "last layer, identity", figures.GRAY),
    ):
        curves.plot(step, [row[name] for row in rows], "o-", ms=3, color=color, label=label)
    curves.set(
        xlabel="step",
        ylabel="rank correlation with the\ninfluence over all variables",
        ylim=(None, 1.05),
    )
    curves.legend(frameon=False)
    compared = [row for row in rows if np.isfinite(row["spearman"])]
    for axis, row in zip(scatters, (compared[:1] + compared[-1:]), strict=False):
        m = measured[row["step"]]
        x, y = _in_units(m.all_variables), _in_units(m.last_layer)
        axis.scatter(x, y, s=6, color=figures.BLUE)
        ends = np.array([min(x.min(), y.min()), 0, max(x.max(), y.max())])
        axis.plot(ends, ends, color=figures.GRAY, lw=0.8)
        axis.set_xscale("symlog", linthresh=0.1)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(
            title=f"step {row['step']}: rank correlation {row['spearman']:.2f}",
            xlabel="influence over all variables, in standard deviations",
            ylabel="over the last layer, likewise",
        )
    figures.save(figure, path)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _in_units(values: np.ndarray) -> np.ndarray:
    return values / np.sqrt(np.mean(values**2))


def _outputs_of(model, inputs):
    """In inference mode: a method's passes then differ by the model alone."""
    features, logits = model(inputs, training=False)
    return features, logits


def _to_float64(batch):
    return tf.nest.map_structure(
        lambda t: tf.cast(t, tf.float64) if t.dtype.is_floating else t, batch
    )


@contextlib.contextmanager
def _double_precision() -> Iterator[None]:
    """Within it Keras layers are made in float64."""
    floatx, policy = keras.backend.floatx(), keras.mixed_precision.global_policy()
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")  # floatx alone loses to a policy once set
    try:
        yield
    finally:
        keras.backend.set_floatx(floatx)
        keras.mixed_precision.set_global_policy(policy)
