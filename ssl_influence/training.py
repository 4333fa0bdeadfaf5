"""The bilevel step of the paper's Algorithm 1; `outer_loop` goes around it."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras as keras

from ssl_influence import (
    averages,
    config as config_lib,
    distribution,
    dropout,
    example_weights as example_weights_lib,
    graphs,
    head_rows,
    optimizers,
    parts,
    replicas,
)
from ssl_influence.influence import all_variables, solve_info, weight_gradients
from ssl_influence.methods import base
from ssl_influence.models import registry as models

_log = logging.getLogger("ssl_influence")

Batch = Mapping[str, Any]

# Purposes of random numbers at a step: those of methods count from 0 up, passes from -1 down.
_VALIDATION_PASS = -(2**31)

# What weight steps report, and theta steps do not.
REPORTED_OF_WEIGHTS = ("weights/validation_loss", "weights/solver_iterations")


class _Step(NamedTuple):
    """What a replica gives of a step; the same on each, and to be remembered once.

    Attributes:
      rows: the batch's rows of Lambda, moved where the step moves them.
      skipped: whether a weight step was skipped.
      reported: scalars by name, and pairs (sum, count).
      observation: what a StatefulMethod is to remember, or ().
      graded: (slots, probabilities, label) of all of the batch's probe, or ().
    """

    rows: example_weights_lib.Rows
    skipped: tf.Tensor
    reported: dict[str, tf.Tensor]
    observation: Any = ()
    graded: tuple[tf.Tensor, ...] = ()


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
      optimizer: replaces the one that `config.optimizer` names. Either scales the loss if
        `config.model.mixed_precision` is float16.
      head: the Dense layer; None finds the layer called "head", or else the model's last Dense
        layer. One with a single unit f is the binary head, of logits (f/2, -f/2).
      last_block: the variables that influence_params=last_block is over; None are those of
        models.registry.last_block.
      augmenter: an augmentation that learns, as augment.ctaugment.CTAugment, with
        `update(slots, probabilities, label)`: after each step of theta it is told how well the
        model, in inference mode, classifies the batch's "probe".
      strategy: divides each batch among its replicas, in equal parts, and adds up what they make of
        them: losses, gradients and Lambda are those of the whole batch. The model, the method and
        an `optimizer` have to be made within its scope, the example weights outside. None is the
        strategy whose scope this is called in, or none.

    Raises:
      ConfigError: the model has no Dense layer to serve as head, it has an activation, or (at the
        first step) the logits are not head(features); influence_params=last_block of a model whose
        last block is not known; inverse_hessian=exact over too many variables; or settings that
        several replicas cannot share.
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
        strategy: tf.distribute.Strategy | None = None,
    ):
        super().__init__(name="bilevel_trainer")
        self.strategy = strategy or tf.distribute.get_strategy()
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
        with self.strategy.scope():
            self.optimizer = optimizer
            if optimizer is None:
                self.optimizer = optimizers.make_optimizer(
                    config.optimizer, config.train.train_steps
                )
                self.optimizer.exclude_from_weight_decay(
                    [v for v in self.trainable if not self._is_decayed(v)]
                )
            if config.model.mixed_precision == "float16" and self._loss_scale is None:
                self.optimizer = keras.mixed_precision.LossScaleOptimizer(self.optimizer)
            self.optimizer.build(self.trainable)
            self.ema = averages.of_model(model, config.optimizer)
        self._influence_variables = self._variables_of_influence(last_block)
        self._check_replicas()
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.skipped_weight_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._l2 = [(v, self.l2_of(v)) for v in self.trainable if self.l2_of(v)]
        self._head_checked = False
        self._passes_of_step = 0
        self._in_parts = self._make_parts()
        if self._in_parts is not None:
            rows = config.train.rows_per_pass
            self._inference_in_parts = parts.PassesInParts(self._infer, rows, [])
        compiled = distribution.compiled(self.strategy, config.train.jit_compile)
        self._replica_theta = compiled(self._replica_theta_impl)
        self._replica_bilevel = compiled(self._replica_bilevel_impl)
        self._replica_weight = compiled(self._replica_weight_impl)
        self._theta_step = tf.function(self._theta_step_impl, autograph=False)
        self._bilevel_step = tf.function(self._bilevel_step_impl, autograph=False)
        self._weight_step = tf.function(self._weight_step_impl, autograph=False)
        self._steps = tf.function(self._steps_impl)  # loops by AutoGraph

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

        Args:
          batch: of all replicas; divided among them here, unless `distribution.split` did that.

        Returns:
          Named scalars, and pairs (sum, count) of what is a mean over counted rows.

        Raises:
          ConfigError: rows cannot be divided equally; see also the constructor.
        """
        return self._theta_step(self._split(batch))

    def bilevel_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step on this batch, then a theta step on it with the new Lambda.

        Features and logits of the batch are those of the theta step's own forward pass; only the
        validation batch ({"inputs", "label"}) costs another. Returns what `theta_step` returns.
        """
        return self._bilevel_step(*self._split_both(batch, validation))

    def weight_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step alone; theta and BatchNorm's moving statistics stay as they are."""
        return self._weight_step(*self._split_both(batch, validation))

    def steps(
        self,
        count: int | tf.Tensor,
        batches: Iterator,
        weight_batches: tuple[Iterator, ...] = (),
        *,
        whole: bool = False,
    ) -> dict[str, tf.Tensor]:
        """Steps of theta without a look at them from Python, as single steps would take them.

        `check_head` is to be called before the first.

        Args:
          count: how many, K.
          batches: gives theirs, as `distribution.split_dataset` does.
          weight_batches: if the first begins with a weight step, what gives its validation batch,
            and where it does not share that of theta its training batch.
          whole: whether each replica is given whole validation batches.

        Returns:
          What the steps return, [K, ...] each; what the weight step adds, [...].
        """
        return self._steps(tf.convert_to_tensor(count), batches, weight_batches, whole)

    def weight_gradient(
        self,
        output: base.MethodOutput,
        example_weight: tf.Tensor,
        validation_features: tf.Tensor,
        validation_logits: tf.Tensor,
        validation_label: tf.Tensor,
        *,
        step: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, solve_info.SolveInfo]:
        """dL_V/dlambda of each unlabeled row over the last layer, by the settings of the run.

        Nothing moves. See `weight_gradients.last_layer` for shapes, dtypes and errors. What lissa
        draws is a function of the step; None is that of the trainer.
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
            seed=self._solver_seed(self.step if step is None else step),
        )

    def l2_of(self, variable: tf.Variable) -> float:
        """l2_v of the objective for one variable."""
        return self.config.optimizer.weight_decay if self._is_decayed(variable) else 0.0

    def concrete_step(self, name: str, *batches: Batch) -> tf.types.experimental.ConcreteFunction:
        """The traced function that a step runs on such batches, for profilers.

        Args:
          name: "theta_step", "bilevel_step" or "weight_step".
          batches: the arguments of that step.
        """
        divided = (self._split(*batches),) if len(batches) == 1 else self._split_both(*batches)
        return getattr(self, f"_{name}").get_concrete_function(*divided)

    def _is_decayed(self, variable):
        name = variable.name.split("/")[-1].split(":")[0]
        return {
            "kernels": name.endswith("kernel"),
            "no_norm_no_bias": not name.endswith(("bias", "beta", "gamma")),
            "all": True,
        }[self.config.optimizer.decayed_variables]

    def _theta_step_impl(self, batch):
        done = self._on_replicas(self._replica_theta, self._rows(batch), batch)
        return self._finish_theta(done)

    def _bilevel_step_impl(self, batch, validation, whole):
        rows = self._rows(batch, to_move=True)
        done = self._on_replicas(self._replica_bilevel, rows, batch, validation, whole)
        self._finish_weights(done)
        return self._finish_theta(done)

    def _weight_step_impl(self, batch, validation, whole):
        rows = self._rows(batch, to_move=True)
        done = self._on_replicas(self._replica_weight, rows, batch, validation, whole)
        self._finish_weights(done)
        return done.reported

    def _steps_impl(self, count, batches, weight_batches, whole):
        # Which steps move Lambda is not decided in here: replicas cannot meet within a condition.
        batch, of_weights = next(batches), {}
        if not weight_batches:
            of_theta = self._theta_step(batch)
        elif len(weight_batches) == 1:
            of_theta = self._bilevel_step(batch, next(weight_batches[0]), whole)
            of_weights = {name: of_theta.pop(name) for name in REPORTED_OF_WEIGHTS}
        else:
            validation, fresh = map(next, weight_batches)
            of_weights = self._weight_step(fresh, validation, whole)
            of_theta = self._theta_step(batch)
        stacked = {
            name: tf.TensorArray(value.dtype, count, element_shape=value.shape).write(0, value)
            for name, value in of_theta.items()
        }
        for index in tf.range(1, count):
            of_theta = self._theta_step(next(batches))
            stacked = {name: stacked[name].write(index, of_theta[name]) for name in stacked}
        return {**of_weights, **{name: values.stack() for name, values in stacked.items()}}

    def _rows(self, batch, to_move=False):
        """The rows of Lambda that a batch needs, of all replicas."""
        ids = batch.get("unlabeled", {}).get("example_id", tf.zeros([0], tf.int64))
        return self.example_weights.read(self._of_all(ids), to_move=to_move)

    def _of_all(self, rows):
        if self.strategy.num_replicas_in_sync == 1:
            return rows
        return self.strategy.gather(rows, axis=0)

    def _on_replicas(self, replica_step, rows, *args) -> _Step:
        """What each replica gives of its part; the step and the rows of Lambda are all's."""
        done = self.strategy.run(replica_step, (rows, tf.identity(self.step), *args))
        return tf.nest.map_structure(
            lambda value: self.strategy.experimental_local_results(value)[0], done
        )

    def _finish_weights(self, done):
        self.example_weights.write(done.rows)
        self.skipped_weight_steps.assign_add(tf.cast(done.skipped, tf.int64))

    def _finish_theta(self, done):
        """Once for all replicas, and outside of what is compiled for them."""
        if isinstance(self.method, base.StatefulMethod):
            self.method.observe(done.observation)
        if self.augmenter is not None:
            self.augmenter.update(*done.graded)
        self.step.assign_add(1)
        return done.reported

    def _replica_theta_impl(self, rows, step, batch):
        return self._descend(rows, step, batch)

    def _replica_bilevel_impl(self, rows, step, batch, validation, whole):
        return self._descend(
            rows,
            step,
            batch,
            lambda output: self._move_weights(rows, step, output, batch, validation, whole),
        )

    def _replica_weight_impl(self, rows, step, batch, validation, whole):
        output = self._rows_of(batch, step)
        return self._move_weights(rows, step, output, batch, validation, whole)

    def _descend(self, rows, step, batch, before_loss=None):
        recorded = parts.Recorded()
        with tf.GradientTape() as tape:
            forward = self._passes(step, tape, recorded)
            output = graphs.converted(self.method)(forward, batch, step)
            moved = _Step(rows, tf.zeros([], tf.bool), {})
            if before_loss is not None:
                with tape.stop_recording():
                    moved = before_loss(output)
            weight = self.example_weights.weight_of(moved.rows, output.example_id)
            unsupervised = tf.cast(weight, output.unsupervised.dtype) * (
                output.unsupervised_coefficient * output.unsupervised
            )
            terms = {
                "loss_supervised": tf.reduce_sum(output.supervised_coefficient * output.supervised),
                "loss_unsupervised": tf.reduce_sum(unsupervised),
                # Each replica has a share of it, as of the other terms.
                "loss_l2": self._half_squares(output.supervised.dtype) / replicas.count(),
            }
            loss = self._scaled(tf.add_n(list(terms.values())))
        gradients = [
            replicas.total_gradient(gradient, optimizers.total)
            for gradient in self._gradients(tape, loss, recorded)
        ]
        gradients = self._unscaled(gradients)
        norm = tf.linalg.global_norm(gradients)
        gradients = optimizers.clip(gradients, norm, self.config.optimizer.clip_norm)
        graded = () if self.augmenter is None else self._graded(batch["probe"])
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable, strict=True), skip_gradients_aggregation=True
        )
        self._share_statistics()
        self.ema.update()
        # Terms first: where several are not finite, the run names the first.
        of_terms = {
            f"loss_{name}_unweighted": tf.reduce_mean(tf.cast(losses, tf.float32))
            for name, losses in output.terms.items()
        }
        reported = {
            **replicas.total(terms),
            "gradient_norm": norm if self._loss_scale is None else _where_finite(norm),
            **_of_all_rows({**of_terms, **output.metrics}),
        }
        reported = {f"train/{name}": value for name, value in reported.items()}
        return moved._replace(
            reported={**reported, **moved.reported},
            observation=() if output.observation is None else replicas.mean(output.observation),
            graded=graded,
        )

    @property
    def _loss_scale(self):
        scales = isinstance(self.optimizer, keras.mixed_precision.LossScaleOptimizer)
        return self.optimizer if scales else None

    def _scaled(self, loss):
        """The loss times what keeps its gradients within the range of float16."""
        return loss if self._loss_scale is None else self._loss_scale.get_scaled_loss(loss)

    def _unscaled(self, gradients):
        """Gradients of the loss from those of `_scaled`; not finite where that was too large.

        The optimizer then leaves the step out and lowers the scale.
        """
        if self._loss_scale is None:
            return gradients
        return self._loss_scale.get_unscaled_gradients(gradients)

    def _half_squares(self, dtype):
        """1/2 sum_v l2_v |v|^2."""
        return sum((l2 * tf.nn.l2_loss(v) for v, l2 in self._l2), tf.zeros([], dtype))

    def _share_statistics(self):
        """Makes BatchNorm's moving statistics, of a batch's parts, those of all parts again.

        Without it each replica would go on from its own, and a checkpoint holds one for all.
        """
        if replicas.count() == 1:
            return
        own = [v for v in self.model.non_trainable_variables if replicas.has_own_copy(v)]
        for variable, value in zip(own, replicas.mean([tf.identity(v) for v in own]), strict=True):
            variable.assign(value)

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

    def _graded(self, probe):
        """What the model, before this step, makes of the probe: (slots, probabilities, label)."""
        _, logits = graphs.converted(self.model)(probe["inputs"], training=False)
        probabilities = tf.nn.softmax(tf.cast(logits, tf.float32))
        return replicas.gathered((probe["slots"], probabilities, probe["label"]))

    def _move_weights(self, rows, step, output, batch, validation, whole) -> _Step:
        """A weight step for the rows of all replicas, the same on each.

        Args:
          rows: of Lambda.
          step: the step.
          output: the method's, of this replica's part of the batch.
          batch: this replica's part.
          validation: likewise, or all of it if `whole`.
          whole: a Python bool.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._influence_variables)
            features, logits = self._on_validation(validation["inputs"], step)
            label, logits = validation["label"], base.at_least_float32(logits)
            if not whole:
                features, logits, label = replicas.gathered((features, logits, label))
            validation_loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(label, logits, from_logits=True)
            )
        output = _of_all_replicas(output)
        weight = self.example_weights.weight_of(rows, output.example_id)
        if self._influence_variables:
            slope = tape.gradient(
                validation_loss, self._influence_variables, unconnected_gradients="zero"
            )
            gradient, info = self._gradient_over_variables(batch, step, weight, slope)
        else:
            gradient, info = self.weight_gradient(
                output, weight, features, logits, label, step=step
            )
        # A row whose gradient is exactly zero stays where it is, moments included: M-Adam's mask.
        usable = info.converged
        moved = self.example_weights.moved(
            rows, output.example_id, tf.where(usable, gradient, tf.zeros_like(gradient))
        )
        values = (validation_loss, tf.cast(info.iterations, tf.float32))
        return _Step(moved, ~usable, dict(zip(REPORTED_OF_WEIGHTS, values, strict=True)))

    def _on_validation(self, inputs, step):
        if self.config.weights.validation_batch_norm == "batch":
            key = base.step_seed(self.config.train.seed, step, _VALIDATION_PASS)
            return self._keeping_statistics(lambda: self._forward(inputs, key))
        if self._in_parts is not None:
            return self._inference_in_parts.forward(inputs, tf.zeros([2], tf.int64))
        return self._infer(inputs)

    def _infer(self, inputs, key=None):
        features, logits = graphs.converted(self.model)(inputs, training=False)
        return features, logits

    def _gradient_over_variables(self, batch, step, example_weight, validation_gradient):
        """As `weight_gradient`, by derivatives of the whole network in the mode it trains in."""
        variables = self._influence_variables

        def output_fn():
            return self._rows_of(batch, step)

        if self.config.weights.inverse_hessian == "unrolled":
            output_fn = all_variables.with_constant_targets(output_fn)
        l2 = [self.l2_of(variable) for variable in variables]
        objective = all_variables.Objective(output_fn, example_weight, variables, l2)
        return weight_gradients.over(
            objective,
            validation_gradient,
            settings=self.config.weights,
            seed=self._solver_seed(step),
        )

    def _rows_of(self, batch, step):
        """The method's output, without a trace in the model's moving statistics."""
        forward = self._passes(step)
        method = graphs.converted(self.method)
        return self._keeping_statistics(lambda: method(forward, batch, step))

    def _solver_seed(self, step):
        seed = tf.constant(self.config.train.seed, tf.int32)
        return tf.stack([seed, tf.cast(step, tf.int32)])

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
        self,
        step: tf.Tensor,
        tape: tf.GradientTape | None = None,
        recorded: parts.Recorded | None = None,
    ) -> base.Forward:
        """What a method may call.

        Args:
          step: what passes draw their dropout by.
          tape: what records passes with a gradient, and no others; None where there is none.
          recorded: takes in those that are run in parts, instead of the tape.
        """
        self._passes_of_step = 0
        unrecorded = contextlib.nullcontext if tape is None else tape.stop_recording

        def train(inputs):
            key = self._pass_key(step)
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
            key = self._pass_key(step)
            return self._keeping_statistics(lambda: self._forward(inputs, key))

        def constant(inputs):
            with unrecorded():
                return silent(inputs)

        def teacher(inputs):
            with unrecorded():  # Once: a tape that is stopped cannot be stopped again.
                return self.ema.applied(lambda: silent(inputs))

        return base.Forward(*map(graphs.as_written, (train, constant, still, teacher)))

    def _pass_key(self, step):
        """What the next pass of this step draws its dropout by, int64 [2]."""
        self._passes_of_step += 1
        return base.step_seed(self.config.train.seed, step, -self._passes_of_step)

    def _forward(self, inputs, key):
        if self._in_parts is None:
            return self._run(inputs, key)
        return self._in_parts.forward(inputs, key)

    def _run(self, inputs, key):
        with self._dropout.drawing(key):
            features, logits = graphs.converted(self.model)(inputs, training=True)
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
        """compute(), after which non-trainable variables hold what they held before.

        Of several replicas, those that may differ between them, as all do that a pass changes.
        """
        statistics = self.model.non_trainable_variables
        if replicas.count() > 1:
            statistics = [v for v in statistics if replicas.has_own_copy(v)]
        before = [tf.identity(variable) for variable in statistics]
        result = compute()
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)
        return result

    def _check_replicas(self):
        """Raises ConfigError for settings that several replicas cannot share."""
        count, weights = self.strategy.num_replicas_in_sync, self.config.weights
        if count == 1:
            return
        if self._influence_variables:
            raise config_lib.ConfigError(
                f"influence_params={weights.influence_params} differentiates the network in a "
                f"loop, which {count} replicas cannot do together: use last_layer, or one replica."
            )
        if not self.example_weights.moves_rows:
            raise config_lib.ConfigError(
                f"weight_optimizer={weights.optimizer} moves examples that are not in the batch, "
                f"which {count} replicas cannot do together: use m_adam or sgd, or one replica."
            )
        for variable in self.trainable:
            if not self.strategy.extended.variable_created_in_scope(variable):
                raise config_lib.ConfigError(
                    f"{variable.name} was not made within the scope of the strategy: make the "
                    "model and the method there."
                )

    def _split(self, batch, whole=False):
        """A batch of all replicas, checked and divided among them; as it is if that was done."""
        if tf.distribute.has_strategy():
            raise config_lib.ConfigError(
                "A step was called within the scope of a strategy: call it outside, it divides the "
                "batch by itself."
            )
        if distribution.is_split(batch):
            return batch
        if "labeled" in batch:
            self.check_head(batch)
        return distribution.split(batch, self.strategy, whole=whole)

    def _split_both(self, batch, validation):
        """The batches of a weight step, and whether replicas get the validation batch whole."""
        whole = not distribution.divides(self.strategy, validation)
        return self._split(batch), self._split(validation, whole=whole), whole

    def check_head(self, batch: Batch) -> None:
        """Raises ConfigError unless logits are head(features), which single steps check too.

        Args:
          batch: one that is not divided; of its labeled inputs two are passed.
        """
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


def _where_finite(value: tf.Tensor) -> tf.Tensor:
    """(value, 1), or (0, 0) where it is not finite: what `metrics.MetricWindow` takes means of."""
    finite = tf.math.is_finite(value)
    return tf.stack([tf.where(finite, value, 0.0), tf.cast(finite, value.dtype)])


def _of_all_rows(metrics: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Metrics of all replicas' rows: the mean of scalars, which are means, and sums of pairs."""
    shares = {
        name: value if value.shape.rank else value / tf.cast(replicas.count(), value.dtype)
        for name, value in metrics.items()
    }
    return replicas.total(shares)


def _of_all_replicas(output: base.MethodOutput) -> base.MethodOutput:
    """What a weight step reads of the output, with the rows of all replicas."""
    if replicas.count() == 1:
        return output
    return output._replace(
        supervised_coefficient=replicas.gathered(output.supervised_coefficient),
        unsupervised_coefficient=replicas.gathered(output.unsupervised_coefficient),
        example_id=replicas.gathered(output.example_id),
        labeled_head=_gathered_head(output.labeled_head),
        unlabeled_head=_gathered_head(output.unlabeled_head),
    )


def _gathered_head(rows: head_rows.HeadRows) -> head_rows.HeadRows:
    tensors = {name: x for name, x in rows._asdict().items() if tf.is_tensor(x)}
    return rows._replace(**replicas.gathered(tensors))


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
