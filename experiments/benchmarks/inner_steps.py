"""Throughput of training with and without learned weights, over whole rounds of N steps.

A round with weights is N - 1 theta steps and a fused weight step (--inner_steps=N; by
--weight_batch=fresh N theta steps and a weight step); a round without is N theta steps with
--weighting=fixed. The rounds take turns, see `timing.interleaved`, and take minutes each for
WRN-28-2 with a quarter of the paper's rows on two cores.
"""

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

CASES = ("rounds",)
RATIOS = {"with_over_without_weights": timing.Ratio("with_weights", "without_weights")}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError without learned weights, or for a method that the noise does not suit."""
    if config.weights.weighting == "fixed":
        raise config_lib.ConfigError(
            "weighting=fixed leaves nothing to compare: this suite measures it beside the others."
        )
    if config.method.name not in ("uda", "fixmatch"):
        raise config_lib.ConfigError(
            f"method={config.method.name}: this suite has views for uda and fixmatch."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """Seconds of rounds, and images (rows of the labeled batch and of both views) a second."""
    from experiments.benchmarks import steps

    batch, validation = steps.batches(config.data)
    learned = steps.make_trainer(config)
    fixed = steps.make_trainer(config.replace(weights={"weighting": "fixed"}))
    count = config.weights.inner_steps
    fused = config.weights.batch == "fused"

    weight_step = learned.bilevel_step if fused else learned.weight_step

    def with_weights():
        for _ in range(count - 1 if fused else count):
            steps.wait(learned.theta_step(batch))
        steps.wait(weight_step(batch, validation))

    def without_weights():
        for _ in range(count):
            steps.wait(fixed.theta_step(batch))

    # What a first call compiles is not timed, and a whole round would be too long for that.
    steps.wait(learned.theta_step(batch))
    steps.wait(fixed.theta_step(batch))
    steps.wait(weight_step(batch, validation))
    calls = {"with_weights": with_weights, "without_weights": without_weights}
    rows = timing.interleaved(calls, repeats, warmup=0)
    images = config.data.labeled_batch_size + 2 * config.data.unlabeled_batch_size
    for row in rows.values():
        row["images_per_s"] = count * images / row["median_s"]
    return rows
