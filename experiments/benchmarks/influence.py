"""What the influence of unlabeled examples costs.

Rows named solve_METHOD_DxCxn: one solve of the last layer's damped system by `softmax_head.solve`,
for D head inputs (the bias among them), C classes and n rows; cg_warm starts from the answer of a
step of descent earlier. solve_autodiff is what one writes without it: the Hessian of the objective
by tf.hessians inside a tf.function, and its explicit inverse. All of a size take turns in a process
of their own, in float32. Beside seconds, the JSON file tells iterations and the difference from a
solve in float64, relative to the largest entry of the answer. --damping and --weight_decay (of
which the bias has none) count.
"""

import importlib

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

# case -> module with `measure(case, config, repeats)`
_MODULES = {
    "solve_129x10x512": "head_solve",
    "solve_129x100x512": "head_solve",
    "solve_2049x1000x512": "head_solve",
}
CASES = tuple(_MODULES)

RATIOS = {
    f"solve_autodiff_over_{method}": timing.Ratio(
        "solve_autodiff_129x10x512", f"solve_{method}_129x10x512"
    )
    for method in ("cholesky", "cg", "cg_warm", "auto")
}


def check(config: config_lib.Config) -> None:
    """Any settings will do."""


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case."""
    module = importlib.import_module(f"experiments.benchmarks.{_MODULES[case]}")
    return module.measure(case, config, repeats)
