"""The bilevel step of the paper's Algorithm 1; `outer_loop` goes around it."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from ssl_influence import (
    averages,
    config as config_lib,
    dropout,
    example_weights as example_weights_lib,
    head_rows,
    optimizers,
    parts,
)
from ssl_influence.influence import all_variables, solve_info, weight_gradients
from ssl_influence.methods import base
from ssl_influence.models import registry as models

_log = logging.getLogger("ssl_influence")

Batch = Mapping[str, Any]

# Purposes of random numbers at a step: those of methods count from 0 up, passes from -1 down.
_VALIDATION_PASS = -(2**31)


def make_example_weights(
    config: config_lib.WeightConfig, size: int
) -> example_weights_lib.ExampleWeights:
    """Lambda for examples 0 to size - 1, all at the initial weight, as `config` moves them."""
    return example_weights_lib.ExampleWeights(
        size,
        initial=config.initial,
        mode=config.weighting,
        optimizer=optimizers.make_weight_optimizer(config),
        minimum=config.minimum,
        maximum=config.maximum,
    )


class BilevelTrainer(tf.Module):
    """Theta steps on a weighted objective, and influence-driven steps of the example weights.

    The objective on a batch, with example weights lambda:

        L = sum_l a_l ell_S(l) + sum_r c_r lambda_id(r) ell_U(r) + 1/2 sum_v l2_v |v|^2

    where a_l, c_r, ell_S and ell_U come from the method. A weight step moves lambda_u of the batch
    by M-Adam along dL_V/dlambda_u = -grad L_V^T (H + damping I)^-1 c_u grad ell_U(u)
    (eq:influence). By default theta is the last layer there, in closed form; see
    config.WeightConfig for other variables and ways to invert H.

    Args:
      model: a keras.Model that maps inputs to (features [B, D], logits [B, C]), where logits is a
        Dense layer (the head, with linear activation) of features.
      method: an object with `views` and `__call__(forward, batch, step) -> MethodOutput`; see
        ssl_influence.methods.base, and the methods beside it.
      example_weights: Lambda.
      config: `weights`, `optimizer`, `train.train_steps` and `train.jit_compile` are read.
      optimizer: replaces the one that `config.optimizer` names.
      head: the Dense layer; None finds the layer called "head", or else the model's last Dense
        layer. One with a single unit f is the binary head, of logits (f/2, -f/2).
      last_block: the variables that influence_params=last_block is over; None are those of
        models.registry.last_block.
      augmenter: an augmentation that learns, as augment.ctaugment.CTAugment, with
        `update(slots, probabilities, label)`: after each step of theta it is told how well the
        model, in inference mode, classifies the batch's "probe".

    Raises:
      ConfigError: the model has no Dense layer to serve as head, it has an activation, or (at the
        first step) the logits are not head(features); influence_params=last_block of a model whose
        last block is not known; or inverse_hessian=exact over too many variables.
    """

    def __init__(
        self,
        model: keras.Model,
        method: Callable,
        example_weights: example_weights_lib.ExampleWeights,
        config: config_lib.Config,
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
        head: keras.layers.Dense | None = None,
        last_block: Sequence[tf.Variable] | None = None,
        augmenter: tf.Module | None = None,
    ):
        super().__init__(name="bilevel_trainer")
        self.model = model
        self.method = method
        self.augmenter = augmenter
        self.example_weights = example_weights
        self.config = config
        self.head = head or _find_head(model)
        if self.head.activation is not keras.activations.linear:
            raise config_lib.ConfigError(
                f"The head {self.head.name!r} has an activation: its outputs must be the logits."
            )
        self._dropout = dropout.KeyedDropout(model)
        _warn_of_random_layers(model)
        self._binary = self.head.units == 1
        stateful = isinstance(method, base.StatefulMethod)
        self.trainable = [
            *model.trainable_variables,
            *(method.trainable_variables if stateful else ()),
        ]
        self.optimizer = optimizer
        if optimizer is None:
            self.optimizer = optimizers.make_optimizer(config.optimizer, config.train.train_steps)
            self.optimizer.exclude_from_weight_decay(
                [v for v in self.trainable if not self._is_decayed(v)]
            )
        self.optimizer.build(self.trainable)
        self.ema = averages.of_model(model, config.optimizer)
        self._influence_variables = self._variables_of_influence(last_block)
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.skipped_weight_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._l2 = [(v, self.l2_of(v)) for v in self.trainable if self.l2_of(v)]
        self._head_checked = False
        self._passes_of_step = 0
        self._in_parts = self._make_parts()
        if self._in_parts is not None:
            rows = config.train.rows_per_pass
            self._inference_in_parts = parts.PassesInParts(self._infer, rows, [])
        compiled = tf.function(jit_compile=config.train.jit_compile or None)
        self._theta_step = compiled(self._theta_step_impl)
        self._bilevel_step = compiled(self._bilevel_step_impl)
        self._weight_step = compiled(self._weight_step_impl)

    def state(self) -> dict[str, Any]:
        """Every trackable object of the run, by its name in the checkpoint."""
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "example_weights": self.example_weights,
            "step": self.step,
            "skipped_weight_steps": self.skipped_weight_steps,
        }
        if isinstance(self.method, base.StatefulMethod):
            state["method"] = self.method
        if self.augmenter is not None:
            state["augmenter"] = self.augmenter
        return state

    def theta_step(self, batch: Batch) -> dict[str, tf.Tensor]:
        """One step of theta with Lambda held.

        Returns named float32 scalars, and pairs (sum, count) of what is a mean over counted rows.
        """
        self._check(batch)
        return self._theta_step(batch)

    def bilevel_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step on this batch, then a theta step on it with the new Lambda.

        Features and logits of the batch are those of the theta step's own forward pass; only the
        validation batch ({"inputs", "label"}) costs another. Returns what `theta_step` returns.
        """
        self._check(batch)
        return self._bilevel_step(batch, validation)

    def weight_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step alone; theta and BatchNorm's moving statistics stay as they are."""
        self._check(batch)
        return self._weight_step(batch, validation)

    def weight_gradient(
        self,
        output: base.MethodOutput,
        example_weight: tf.Tensor,
        validation_features: tf.Tensor,
        validation_logits: tf.Tensor,
        validation_label: tf.Tensor,
    ) -> tuple[tf.Tensor, solve_info.SolveInfo]:
        """dL_V/dlambda of each unlabeled row over the last layer, by the settings of the run.

        Nothing moves. See `weight_gradients.last_layer` for shapes, dtypes and errors.
        """
        kernel = tf.convert_to_tensor(self.head.kernel)
        if self.head.use_bias:
            kernel = tf.concat([kernel, tf.convert_to_tensor(self.head.bias)[tf.newaxis]], axis=0)
        labeled, unlabeled = output.labeled_head, output.unlabeled_head
        if self._binary:
            labeled, unlabeled = map(_of_binary_head, (labeled, unlabeled))
            validation_logits = validation_logits[:, :1] - validation_logits[:, 1:]
        return weight_gradients.last_layer(
            labeled,
            output.supervised_coefficient,
            unlabeled,
            output.unsupervised_coefficient,
            example_weight,
            validation_features,
            validation_logits,
            validation_label,
            l2=self.l2_of(self.head.kernel),
            l2_bias=self.l2_of(self.head.bias) if self.head.use_bias else 0.0,
            use_bias=self.head.use_bias,
            kernel=kernel,
            settings=self.config.weights,
            seed=self._solver_seed(),
        )

    def l2_of(self, variable: tf.Variable) -> float:
        """l2_v of the objective for one variable."""
        return self.config.optimizer.weight_decay if self._is_decayed(variable) else 0.0

    def concrete_step(self, name: str, *batches: Batch) -> tf.types.experimental.ConcreteFunction:
        """The compiled function that a step runs on such batches, for profilers.

        Args:
          name: "theta_step", "bilevel_step" or "weight_step".
          batches: the arguments of that step.
        """
        return getattr(self, f"_{name}").get_concrete_function(*batches)

    def _is_decayed(self, variable):
        name = variable.name.split("/")[-1].split(":")[0]
        return {
            "kernels": name.endswith("kernel"),
            "no_norm_no_bias": not name.endswith(("bias", "beta", "gamma")),
            "all": True,
        }[self.config.optimizer.decayed_variables]

    def _theta_step_impl(self, batch):
        return self._descend(batch, lambda output: {})

    def _bilevel_step_impl(self, batch, validation):
        return self._descend(batch, lambda output: self._move_weights(output, batch, validation))

    def _weight_step_impl(self, batch, validation):
        return self._move_weights(self._rows_of(batch), batch, validation)

    def _descend(self, batch, before_loss):
        recorded = parts.Recorded()
        with tf.GradientTape() as tape:
            output = self.method(self._passes(tape, recorded), batch, self.step)
            with tape.stop_recording():
                reported = before_loss(output)
            weight = self.example_weights.lookup(output.example_id)
            terms = {
                "loss_supervised": tf.reduce_sum(output.supervised_coefficient * output.supervised),
                "loss_unsupervised": tf.reduce_sum(
                    weight * output.unsupervised_coefficient * output.unsupervised
                ),
                "loss_l2": sum((l2 * tf.nn.l2_loss(v) for v, l2 in self._l2), tf.zeros([])),
            }
            loss = tf.add_n(list(terms.values()))
        gradients = self._gradients(tape, loss, recorded)
        norm = tf.linalg.global_norm(gradients)
        gradients = optimizers.clip(gradients, norm, self.config.optimizer.clip_norm)
        if self.augmenter is not None:
            self._grade(batch["probe"])
        self.optimizer.apply_gradients(zip(gradients, self.trainable, strict=True))
        self.ema.update()
        if isinstance(self.method, base.StatefulMethod):
            self.method.observe(output.observation)
        self.step.assign_add(1)
        terms["gradient_norm"] = norm
        # Terms first: where several are not finite, the run names the first.
        of_terms = {
            f"loss_{name}_unweighted": tf.reduce_mean(tf.cast(rows, tf.float32))
            for name, rows in output.terms.items()
        }
        named = {**terms, **of_terms, **output.metrics}
        return {**{f"train/{name}": value for name, value in named.items()}, **reported}

    def _gradients(self, tape, loss, recorded):
        """Of the loss by the trainable variables, what passes in parts contribute among them."""
        if not recorded.outputs:
            gradients = tape.gradient(loss, self.trainable, unconnected_gradients="zero")
            return [optimizers.total([gradient]) for gradient in gradients]
        of_outputs, direct = tape.gradient(
            loss, (recorded.outputs, self.trainable), unconnected_gradients="zero"
        )
        of_model = self._in_parts.gradients(recorded, of_outputs)
        found = {id(v): [] for v in self.trainable}
        for variable, gradients in zip(self.model.trainable_variables, of_model, strict=True):
            found[id(variable)] = gradients
        # A zero of the size of a table would make its sparse gradient dense.
        touched = {id(v) for v, _ in self._l2}
        return [
            optimizers.total(
                [*found[id(v)], *([g] if not found[id(v)] or id(v) in touched else [])]
            )
            for v, g in zip(self.trainable, direct, strict=True)
        ]

    def _grade(self, probe):
        """Tells the augmenter what the model, before this step, makes of the probe."""
        _, logits = self.model(probe["inputs"], training=False)
        probabilities = tf.nn.softmax(tf.cast(logits, tf.float32))
        self.augmenter.update(probe["slots"], probabilities, probe["label"])

    def _move_weights(self, output, batch, validation):
        weight = self.example_weights.lookup(output.example_id)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._influence_variables)
            features, logits = self._on_validation(validation["inputs"])
            validation_loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    validation["label"], tf.cast(logits, tf.float32), from_logits=True
                )
            )
        if self._influence_variables:
            slope = tape.gradient(
                validation_loss, self._influence_variables, unconnected_gradients="zero"
            )
            gradient, info = self._gradient_over_variables(batch, weight, slope)
        else:
            gradient, info = self.weight_gradient(
                output, weight, features, logits, validation["label"]
            )
        # A row whose gradient is exactly zero stays where it is, moments included: M-Adam's mask.
        usable = info.converged
        self.skipped_weight_steps.assign_add(tf.cast(~usable, tf.int64))
        self.example_weights.update(
            output.example_id, tf.where(usable, gradient, tf.zeros_like(gradient))
        )
        return {
            "weights/validation_loss": validation_loss,
            "weights/solver_iterations": tf.cast(info.iterations, tf.float32),
        }

    def _on_validation(self, inputs):
        if self.config.weights.validation_batch_norm == "batch":
            key = base.step_seed(self.config.train.seed, self.step, _VALIDATION_PASS)
            return self._keeping_statistics(lambda: self._forward(inputs, key))
        if self._in_parts is not None:
            return self._inference_in_parts.forward(inputs, tf.zeros([2], tf.int64))
        return self._infer(inputs)

    def _infer(self, inputs, key=None):
        features, logits = self.model(inputs, training=False)
        return features, logits

    def _gradient_over_variables(self, batch, example_weight, validation_gradient):
        """As `weight_gradient`, by derivatives of the whole network in the mode it trains in."""
        variables = self._influence_variables

        def output_fn():
            return self._rows_of(batch)

        if self.config.weights.inverse_hessian == "unrolled":
            output_fn = all_variables.with_constant_targets(output_fn)
        l2 = [self.l2_of(variable) for variable in variables]
        objective = all_variables.Objective(output_fn, example_weight, variables, l2)
        return weight_gradients.over(
            objective,
            validation_gradient,
            settings=self.config.weights,
            seed=self._solver_seed(),
        )

    def _rows_of(self, batch):
        """The method's output, without a trace in the model's moving statistics."""
        forward = self._passes()
        return self._keeping_statistics(lambda: self.method(forward, batch, self.step))

    def _solver_seed(self):
        seed = tf.constant(self.config.train.seed, tf.int32)
        return tf.stack([seed, tf.cast(self.step, tf.int32)])

    def _variables_of_influence(self, last_block):
        """Those that derivatives are taken by; none where the last layer has its closed form."""
        config = self.config.weights
        if config.weighting == "fixed" or config.influence_params == "last_layer":
            return []
        variables = self.trainable
        if config.influence_params == "last_block":
            variables = last_block or models.last_block(self.model)
        if config.inverse_hessian == "exact":
            all_variables.check_exact(variables)
        return list(variables)

    def _passes(
        self, tape: tf.GradientTape | None = None, recorded: parts.Recorded | None = None
    ) -> base.Forward:
        """What a method may call.

        Args:
          tape: what records passes with a gradient, and no others; None where there is none.
          recorded: takes in those that are run in parts, instead of the tape.
        """
        self._passes_of_step = 0
        unrecorded = contextlib.nullcontext if tape is None else tape.stop_recording

        def train(inputs):
            key = self._pass_key()
            if self._in_parts is None:
                return self._run(inputs, key)
            with unrecorded():
                outputs = self._in_parts.forward(inputs, key, recorded)
            if tape is not None:
                tape.watch(outputs)
            return outputs

        def still(inputs):
            return self._keeping_statistics(lambda: train(inputs))

        def silent(inputs):
            key = self._pass_key()
            return self._keeping_statistics(lambda: self._forward(inputs, key))

        def constant(inputs):
            with unrecorded():
                return silent(inputs)

        def teacher(inputs):
            with unrecorded():  # Once: a tape that is stopped cannot be stopped again.
                return self.ema.applied(lambda: silent(inputs))

        return base.Forward(train, constant, still, teacher)

    def _pass_key(self):
        """What the next pass of this step draws its dropout by, int64 [2]."""
        self._passes_of_step += 1
        return base.step_seed(self.config.train.seed, self.step, -self._passes_of_step)

    def _forward(self, inputs, key):
        if self._in_parts is None:
            return self._run(inputs, key)
        return self._in_parts.forward(inputs, key)

    def _run(self, inputs, key):
        with self._dropout.drawing(key):
            features, logits = self.model(inputs, training=True)
        return features, logits

    def _make_parts(self):
        rows = self.config.train.rows_per_pass
        if rows is None:
            return None
        for module in self.model.submodules:
            if isinstance(module, keras.layers.BatchNormalization):
                raise config_lib.ConfigError(
                    f"rows_per_pass={rows}: the model has BatchNormalization ({module.name!r}), "
                    "whose statistics would be those of a part: leave it out."
                )
        return parts.PassesInParts(self._run, rows, self.model.trainable_variables)

    def _keeping_statistics(self, compute):
        """compute(), after which non-trainable variables hold what they held before."""
        statistics = self.model.non_trainable_variables
        before = [tf.identity(variable) for variable in statistics]
        result = compute()
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)
        return result

    def _check(self, batch) -> None:
        if self.config.train.jit_compile:  # XLA drops the assertion that the step itself makes
            self.example_weights.check_ids(batch["unlabeled"]["example_id"])
        if self._head_checked:
            return
        few = tf.nest.map_structure(lambda tensor: tensor[:2], batch["labeled"]["inputs"])
        features, logits = self.model(few, training=False)
        expected = tf.cast(self.head(features), tf.float32)
        if self._binary:
            expected = tf.concat([expected / 2, -expected / 2], axis=1)
        error = tf.reduce_max(tf.abs(expected - tf.cast(logits, tf.float32)))
        scale = 1.0 + tf.reduce_max(tf.abs(expected))
        if not error <= 1e-2 * scale:
            raise config_lib.ConfigError(
                f"The model's logits are not {self.head.name!r} applied to its features (they "
                f"differ by {float(error):.3g}): return [features, logits] with logits = "
                "head(features), or pass the right layer as head=."
            )
        self._head_checked = True


def _find_head(model: keras.Model) -> keras.layers.Dense:
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    named = [layer for layer in dense if layer.name == "head"]
    if not dense:
        raise config_lib.ConfigError(
            "The model has no Dense layer among model.layers to serve as head: pass head=."
        )
    return (named or dense)[-1]


def _of_binary_head(rows: head_rows.HeadRows) -> head_rows.HeadRows:
    """Rows of logits (f/2, -f/2) as those of f alone."""
    return rows._replace(
        logits=rows.logits[:, :1] - rows.logits[:, 1:],
        gradient=(rows.gradient[:, :1] - rows.gradient[:, 1:]) / 2,
    )


def _warn_of_random_layers(model: keras.Model) -> None:
    """Warns of layers that draw by themselves; Dropout does not, see `dropout`."""
    for module in model.submodules:
        is_random = isinstance(module, keras.__internal__.layers.BaseRandomLayer)
        if is_random and not isinstance(module, keras.layers.Dropout):
            _log.warning(
                "The model has the layer %r (%s), whose random state no checkpoint holds: a "
                "resumed run will differ from one that was not stopped.",
                module.name,
                type(module).__name__,
            )
            return
