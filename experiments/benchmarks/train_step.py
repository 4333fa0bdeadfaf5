"""Training steps beside a plain hand-written TensorFlow step of the same graph.

Rows: theta (one step of the network), fused (with the weight step in it), weight (a weight step
alone) and plain (by hand, with the optimizers of tf_keras: no example weights, moving average or
metrics), each with the target view in the joint pass and in a separate one, which in the plain step
updates BatchNorm's moving statistics too; the forward pass of a validation batch in inference mode;
and the peak memory of runs without and with weight steps. "weight_overhead" is what a fused weight
step costs beside that forward pass: (fused - theta - validation_forward) / theta.
"""

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

CASES = ("times", "run_without_weights", "run_with_weights")

STEPS = ("theta", "fused", "weight", "plain")

RATIOS = {
    **{
        f"weight_overhead_{mode}": timing.Ratio(
            f"fused_{mode}", f"theta_{mode}", (f"theta_{mode}", "validation_forward")
        )
        for mode in config_lib.TARGET_FORWARDS
    },
    **{
        f"theta_over_plain_{mode}": timing.Ratio(f"theta_{mode}", f"plain_{mode}")
        for mode in config_lib.TARGET_FORWARDS
    },
    "theta_separate_over_joint": timing.Ratio("theta_separate", "theta_joint"),
    "run_with_over_without_weights": timing.Ratio(
        "run_with_weights", "run_without_weights", quantities=("peak_memory_bytes",)
    ),
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for another method than the plain step's, or a mode where both are due."""
    if config.method.name != "uda" or config.method.settings()["tsa"] != "none":
        raise config_lib.ConfigError(
            f"method={config.method.name} with tsa={config.method.tsa}: the plain step beside it "
            "is UDA's without annealing, so use method=uda and tsa=none."
        )
    if config.method.settings()["target_forward"] != "joint":
        raise config_lib.ConfigError(
            f"target_forward={config.method.target_forward}: this suite measures both modes, so "
            "leave it out."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case; random images of 32 x 32 x 3, ten classes."""
    from experiments.benchmarks import steps

    if case == "times":
        return steps.times(config, repeats)
    steps.run(config, repeats, with_weights=case == "run_with_weights")
    return {case: {"peak_memory_bytes": timing.peak_memory()}}
