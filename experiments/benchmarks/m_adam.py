"""Updates and look-ups of the example weights by their number |U|, with M-Adam and without.

Rows, each for a batch of --unlabeled_batch_size ids drawn anew from all |U|: m_adam_update and
m_adam_lookup (`ExampleWeights` as a run uses it: duplicates, bounds and counts included), adam (the
Adam of tf_keras on the same rows, alone) and dense (M-Adam with a gradient and a mask of |U|
numbers, as Algorithm A1 is printed, alone). All sizes are timed in one process in turn; the peak
memory is that of a process which holds and updates one table. Needs 4 GB of free memory, nearly all
of it for the largest table.
"""

import dataclasses

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

SIZES = {"m_adam": range(3, 9), "adam": range(3, 8), "dense": range(3, 7)}  # powers of ten
CALLS = 20  # in a row are one measurement

MEMORY = {
    f"memory_{kind}_1e{power}": (kind, power) for kind, powers in SIZES.items() for power in powers
}
CASES = ("times", *MEMORY)

RATIOS = {
    **{
        f"{row}_1e{power}_over_1e3": timing.Ratio(f"{row}_1e{power}", f"{row}_1e3")
        for row in ("m_adam_update", "m_adam_lookup")
        for power in SIZES["m_adam"][1:]
    },
    **{
        f"{kind}_over_m_adam_1e{power}": timing.Ratio(
            f"{kind}_update_1e{power}", f"m_adam_update_1e{power}"
        )
        for kind in ("adam", "dense")
        for power in SIZES[kind]
    },
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for a table without a weight for each example, or another optimizer."""
    weights = config.weights
    if weights.weighting != "per_example":
        raise config_lib.ConfigError(
            f"weighting={weights.weighting} has no weights to look up by id: use per_example."
        )
    if weights.optimizer != "m_adam":
        raise config_lib.ConfigError(
            f"weight_optimizer={weights.optimizer}: this suite compares m_adam with adam, so leave "
            "it out."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case."""
    if case == "times":
        return _times(config, repeats)
    kind, power = MEMORY[case]
    _calls(kind, power, config, count=1)["update"]()
    return {f"{kind}_update_1e{power}": {"peak_memory_bytes": timing.peak_memory()}}


def _times(config, repeats, warmup=1):
    calls = {
        f"{kind}_{name}_1e{power}": _repeated(call)
        for kind, powers in SIZES.items()
        for power in powers
        for name, call in _calls(kind, power, config, (warmup + repeats) * CALLS).items()
    }
    rows = timing.interleaved(calls, repeats, warmup)
    return {
        name: {quantity: seconds / CALLS for quantity, seconds in row.items()}
        for name, row in rows.items()
    }


def _repeated(call):
    def calls():
        for _ in range(CALLS):
            call()

    return calls


def _calls(kind, power, config, count):
    """What is timed on a table of 10**power examples, by name; good for `count` calls of each."""
    import numpy as np
    import tensorflow as tf

    from ssl_influence import training

    size, rows = 10**power, config.data.unlabeled_batch_size
    rng = np.random.default_rng(power)
    ids = tf.constant(rng.integers(0, size, [count, rows]))
    gradients = tf.constant(rng.normal(size=[count, rows]), tf.float32)

    def call(function, *arguments):
        step = tf.function(function, jit_compile=config.train.jit_compile or None)
        turns = iter(list(zip(*(tf.unstack(argument) for argument in arguments), strict=True)))
        return lambda: step(*next(turns))

    if kind == "m_adam":
        weights = training.make_example_weights(config.weights, size)
        return {
            "update": call(weights.update, ids, gradients),
            "lookup": call(weights.lookup, ids),
        }
    _, update = yardstick(kind, size, config.weights)
    return {"update": call(update, ids, gradients)}


def yardstick(kind: str, size: int, weights: config_lib.WeightConfig):
    """The weights that "adam" or "dense" moves, float32 [size], and the update (ids, gradients)."""
    import tensorflow as tf

    from ssl_influence import optimizers

    moving = {"adam": "adam", "dense": "m_adam"}[kind]
    optimizer = optimizers.make_weight_optimizer(dataclasses.replace(weights, optimizer=moving))
    variable = tf.Variable(tf.ones([size]))
    optimizer.build([variable])

    def update(ids, gradients):
        if kind == "dense":
            gradient = tf.math.unsorted_segment_sum(gradients, ids, size)
        else:
            gradient = tf.IndexedSlices(gradients, ids)
        optimizer.apply_gradients([(gradient, variable)])

    return variable, update
