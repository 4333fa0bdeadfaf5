"""What the influence of unlabeled examples costs.

Rows named solve_METHOD_DxCxn: one solve of the last layer's damped system by `softmax_head.solve`,
for D head inputs (the bias among them), C classes and n rows; cg_warm starts from the answer of a
step of descent earlier. solve_autodiff is what one writes without it: the Hessian of the objective
by tf.hessians inside a tf.function, and its explicit inverse. All of a size take turns in a process
of their own, in float32. Beside seconds, the JSON file tells iterations and the difference from a
solve in float64, relative to the largest entry of the answer. --damping and --weight_decay (of
which the bias has none) count.

Rows named weight_VARIABLES_SOLVER: a weight step alone (`BilevelTrainer.weight_step`) of the
network of the flags, on batches of noise, by default of the paper's sizes (64 labeled, 256
unlabeled and 320 validation examples). Each has a process of its own, for the peak memory of all
that it held. The influence is over the last layer, the last block with it, or all variables; beyond
the last layer cg takes 20 iterations at most, and steps are timed twice at most. neumann has 20
terms of a given step; over all variables it is left out, as it would take minutes and more than
20 GB. weight_in_turn_exact and weight_in_turn_identity are those of the last layer again, taking
turns in one process.
"""

import importlib

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

_WEIGHT_STEPS = (
    "last_layer_exact",
    "last_layer_identity",
    "last_layer_cg",
    "last_layer_neumann",
    "last_block_identity",
    "last_block_cg",
    "last_block_neumann",
    "all_identity",
)

# case -> module with `measure(case, config, repeats)`
_MODULES = {
    "solve_129x10x512": "head_solve",
    "solve_129x100x512": "head_solve",
    "solve_2049x1000x512": "head_solve",
    **{f"weight_{name}": "weight_steps" for name in (*_WEIGHT_STEPS, "in_turn")},
}
CASES = tuple(_MODULES)

DEFAULTS = {"unlabeled_batch_size": "256"}

RATIOS = {
    **{
        f"solve_autodiff_over_{method}": timing.Ratio(
            "solve_autodiff_129x10x512", f"solve_{method}_129x10x512"
        )
        for method in ("cholesky", "cg", "cg_warm", "auto")
    },
    "weight_exact_over_identity": timing.Ratio("weight_in_turn_exact", "weight_in_turn_identity"),
    **{
        f"weight_{name}_over_last_layer_exact": timing.Ratio(
            f"weight_{name}",
            "weight_last_layer_exact",
            quantities=("median_s", "cpu_s", "peak_memory_bytes"),
        )
        for name in _WEIGHT_STEPS[1:]
    },
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for settings that this suite varies itself, or without weight steps."""
    weights, default = config.weights, config_lib.WeightConfig()
    for name in ("influence_params", "inverse_hessian", "cg_tolerance"):
        if getattr(weights, name) != getattr(default, name):
            raise config_lib.ConfigError(
                f"{name}={getattr(weights, name)}: this suite measures all variables and solvers, "
                "so leave it out."
            )
    if weights.weighting == "fixed":
        raise config_lib.ConfigError(
            "weighting=fixed has no weight steps to measure: use per_example or single."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case."""
    module = importlib.import_module(f"experiments.benchmarks.{_MODULES[case]}")
    return module.measure(case, config, repeats)
