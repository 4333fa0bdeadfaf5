"""Per-example gradients, and their products with a vector, beside the plain gradient of a batch.

All over every variable of the network, in inference mode. Rows, for --unlabeled_batch_size examples
("whole", 64 unless told otherwise) and a fourth as many ("quarter"), each batch size timed in one
process:

- plain: the gradient of the mean loss;
- kernels_auto, kernels_shifted_matmul, kernels_im2col, kernels_vectorized_map: every example's
  gradient by a kernel for each layer, and how those of convolutions sum (the paper's section 4.4
  takes the last);
- vectorized_map: every example's gradient by tf.vectorized_map over the whole model, the paper's
  "parallel" baseline;
- loop: one example after the other, its "serial" baseline; of the quarter alone, as it is slow;
- dots_double_backprop, dots_ghost, dots_forward_mode, dots_materialize: the product of every
  example's gradient with one vector.

TensorFlow 2.20 has no batched gradient of a convolution's kernel: within tf.vectorized_map, in both
rows that use it, those run in a while loop, an example at a time. That is TensorFlow's doing.

Peak memory, a process for each row of the whole batch, is of all that the process held; "start" has
the network and the batch alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

DEFAULTS = {"unlabeled_batch_size": "64"}

SHARES = {"quarter": 4, "whole": 1}  # name -> what the batch size is divided by
GRADIENTS = {
    "kernels_auto": {"method": "kernels", "conv_method": "auto"},
    "kernels_shifted_matmul": {"method": "kernels", "conv_method": "shifted_matmul"},
    "kernels_im2col": {"method": "kernels", "conv_method": "im2col"},
    "kernels_vectorized_map": {"method": "kernels", "conv_method": "vectorized_map"},
    "vectorized_map": {"method": "vectorized_map"},
    "loop": {"method": "loop"},
}
DOTS = {
    f"dots_{method}": {"method": method}
    for method in ("double_backprop", "ghost", "forward_mode", "materialize")
}
MEMORY = ("start", "plain", "dots_double_backprop", "dots_ghost", "kernels_auto")

CASES = (
    *(f"times_{share}" for share in SHARES),
    *(f"memory_{name}" for name in MEMORY),
)


def names(share: str) -> tuple[str, ...]:
    """What is timed for a share of the batch."""
    measured = ("plain", *GRADIENTS, *DOTS)
    return tuple(name for name in measured if name != "loop" or share == "quarter")


RATIOS = {
    **{
        f"{share}_{name}_over_plain": timing.Ratio(f"{share}_{name}", f"{share}_plain")
        for share in SHARES
        for name in names(share)[1:]
    },
    **{
        f"{share}_kernels_auto_over_{name}": timing.Ratio(
            f"{share}_kernels_auto", f"{share}_{name}"
        )
        for share in SHARES
        for name in ("kernels_vectorized_map", "vectorized_map")
    },
    "quarter_loop_over_kernels_auto": timing.Ratio("quarter_loop", "quarter_kernels_auto"),
    **{
        f"memory_{name}_over_plain": timing.Ratio(
            f"memory_{name}", "memory_plain", quantities=("peak_memory_bytes",)
        )
        for name in MEMORY[2:]
    },
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for a batch that has no fourth part."""
    if config.data.unlabeled_batch_size < max(SHARES.values()):
        raise config_lib.ConfigError(
            f"unlabeled_batch_size={config.data.unlabeled_batch_size} is too few examples to "
            "measure a fourth of: use 4 or more."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case; random images of 32 x 32 x 3, ten classes."""
    kind, name = case.split("_", 1)
    if kind == "memory":
        for call in calls(config, [] if name == "start" else [name]).values():
            for _ in range(repeats):
                call()
        examples = config.data.unlabeled_batch_size
        return {case: {"examples": examples, "peak_memory_bytes": timing.peak_memory()}}
    examples = config.data.unlabeled_batch_size // SHARES[name]
    config = config.replace(data={"unlabeled_batch_size": examples})
    rows = timing.interleaved(calls(config, names(name)), repeats)
    return {f"{name}_{row}": {"examples": examples, **rows[row]} for row in rows}


def calls(config: config_lib.Config, wanted: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Functions that compute the rows for a batch of noise; what they give has been computed.

    Losses are those of the network's logits; products are with `vectors_like` its variables.
    """
    import tensorflow as tf

    from experiments.benchmarks import steps
    from ssl_influence.models import registry as models
    from ssl_influence.per_example import products, rows

    model = models.build(config.model, steps.IMAGE_SHAPE, steps.NUM_CLASSES, config.train.seed)
    batch = steps.batches(config.data)[0]["unlabeled"]
    vector = vectors_like(model.trainable_variables)

    def loss_fn(outputs, targets):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs[1])

    def plain(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(model(inputs, training=False), targets))
        return tape.gradient(loss, model.trainable_variables)

    def gradients(how, inputs, targets):
        return rows.gradients(model, inputs, targets, loss_fn, **how)

    def dots(how, inputs, targets):
        return products.dots(model, inputs, targets, loss_fn, vector, **how)

    def call(function):
        compiled = tf.function(function, jit_compile=config.train.jit_compile or None)

        def computed():
            result = compiled(batch["weak"], batch["label"])
            tf.test.experimental.sync_devices()  # to read the result would copy it
            return result

        return computed

    every = {
        "plain": plain,
        **{name: functools.partial(gradients, how) for name, how in GRADIENTS.items()},
        **{name: functools.partial(dots, how) for name, how in DOTS.items()},
    }
    return {name: call(every[name]) for name in wanted}


def vectors_like(variables: Sequence[Any]) -> list[Any]:
    """What gradients are multiplied with: noise, one tensor a variable, of its shape."""
    import tensorflow as tf

    return [
        tf.random.stateless_normal(variable.shape, [0, index])
        for index, variable in enumerate(variables)
    ]
