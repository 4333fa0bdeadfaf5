"""Weight steps over the variables, and by the inverses of the Hessian, that the paper compares."""

from collections.abc import Callable

from experiments.benchmarks import steps, timing
from ssl_influence import config as config_lib

# 20 products. Without a step the series would first estimate one, by as many products again.
_NEUMANN = {"inverse_hessian": "neumann", "neumann_terms": 20, "neumann_step": 0.01}
SETTINGS = {
    "last_layer_exact": {"inverse_hessian": "exact"},
    "last_layer_identity": {"inverse_hessian": "identity"},
    "last_layer_cg": {"inverse_hessian": "cg"},
    "last_layer_neumann": _NEUMANN,
    "last_block_identity": {"inverse_hessian": "identity"},
    "last_block_cg": {"inverse_hessian": "cg", "cg_iterations": 20},
    "last_block_neumann": _NEUMANN,
    "all_identity": {"inverse_hessian": "identity"},
}
SLOW_REPEATS = 2


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case weight_VARIABLES_SOLVER, or of weight_in_turn."""
    if case == "weight_in_turn":
        calls = {
            f"{case}_{solver}": weight_step(f"last_layer_{solver}", config)
            for solver in ("exact", "identity")
        }
        return timing.interleaved(calls, repeats)
    if "last_layer" not in case:
        repeats = min(repeats, SLOW_REPEATS)
    step = weight_step(case.removeprefix("weight_"), config)
    reports = []
    rows = timing.interleaved({case: lambda: reports.append(step())}, repeats, warmup=1)
    rows[case]["iterations"] = int(reports[-1]["weights/solver_iterations"])
    rows[case]["peak_memory_bytes"] = timing.peak_memory()
    return rows


def weight_step(name: str, config: config_lib.Config) -> Callable[[], dict]:
    """A weight step on noise by SETTINGS[name], where every unlabeled example is confident."""
    influence_params = name.rsplit("_", 1)[0]
    trainer = steps.make_trainer(
        config.replace(
            method={"confidence": 0.0},
            weights={"influence_params": influence_params, **SETTINGS[name]},
        )
    )
    batch, validation = steps.batches(config.data)

    def step():
        reported = trainer.weight_step(batch, validation)
        steps.wait(reported)
        return reported

    return step
