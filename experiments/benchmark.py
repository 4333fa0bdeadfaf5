"""Measures speed and memory, one suite at a time, and prints a table.

    python -m experiments.benchmark --suite=train_step --unlabeled_batch_size=256
    python -m experiments.benchmark --suite=augment --json=/tmp/augment.json

Of the shared flags, those of model, method, optimizer, weights, augmentation and batch sizes count;
the data are noise. Each case has a process of its own, with the settings of the other binaries (op
determinism on). Where others use the machine too, compare ratios, not seconds: repeats take turns,
so that all rows of a process see the same noise, and ratios of CPU seconds suffer least. WRN-28-2
at the default batch sizes takes about ten minutes on two cores.
"""

import importlib
import json
import os
import subprocess
import sys

from absl import flags

from experiments import benchmarks, command, flags as shared_flags
from experiments.benchmarks import timing
from ssl_influence import config as config_lib, files

shared_flags.define()
_SUITE = flags.DEFINE_enum("suite", None, benchmarks.SUITES, "What to measure.", required=True)
_REPEATS = flags.DEFINE_integer(
    "repeats", 5, "How often each row is timed, after the first calls.", lower_bound=1
)
_JSON = flags.DEFINE_string("json", None, "File to write the numbers to.")
_CASE = flags.DEFINE_string(
    "case", None, "Measure this case here and end with a line of JSON: what the others are run by."
)

# quantity -> heading, factor
_QUANTITIES = {
    "examples": ("examples", 1),
    "median_s": ("median, ms", 1e3),
    "min_s": ("min", 1e3),
    "max_s": ("max", 1e3),
    "cpu_s": ("CPU, ms", 1e3),
    "float_operations": ("GFLOP", 1e-9),
    "most_float_operations": ("at most", 1e-9),
    "peak_memory_bytes": ("peak, MiB", 2**-20),
    "images_per_s": ("images/s", 1),
    "tokens_per_s": ("tokens/s", 1),
    "texts_per_s": ("texts/s", 1),
    "steps": ("steps", 1),
    "mean_s": ("mean, ms", 1e3),
    "wait_share": ("waiting, %", 100),
    "bytes": ("MB", 1e-6),
}
# quantity -> heading, decimals
_RATIO_QUANTITIES = {
    "median_s": ("by the clock", 3),
    "cpu_s": ("in CPU seconds", 3),
    "peak_memory_bytes": ("in peak memory", 3),
    "float_operations": ("in operations", 5),
    "most_float_operations": ("at most", 5),
}


def main() -> None:
    suite = importlib.import_module(f"experiments.benchmarks.{_SUITE.value}")
    defaults = getattr(suite, "DEFAULTS", {})
    given = {name for name in defaults if flags.FLAGS[name].present}
    config = shared_flags.to_config({name: defaults[name] for name in defaults.keys() - given})
    suite.check(config)
    if _CASE.value is not None:
        _measure(suite, _CASE.value, config)
        return
    path = shared_flags.output_file(_JSON)
    if path is not None and not path.parent.is_dir():
        raise config_lib.ConfigError(f"--json={path}: make the folder {path.parent} first.")
    rows, environment = {}, {}
    for case in suite.CASES:
        measured = _in_own_process(case)
        environment = measured["environment"]
        for name, quantities in measured["rows"].items():
            rows.setdefault(name, {}).update(quantities)
    ratios = timing.ratios(suite.RATIOS, rows)
    print(_table(rows))
    if ratios:
        print()
        print(_ratio_table(ratios))
    if path is not None:
        result = {
            "suite": _SUITE.value,
            "repeats": _REPEATS.value,
            "flags": shared_flags.to_flagfile(config, "experiments.benchmark").splitlines()[1:],
            "environment": environment,
            "rows": rows,
            "ratios": ratios,
        }
        files.write_atomically(path, json.dumps(result, indent=1) + "\n")


def _measure(suite, case: str, config: config_lib.Config) -> None:
    if case not in suite.CASES:
        raise config_lib.ConfigError(f"case={case!r} is not one of {', '.join(suite.CASES)}.")
    import tensorflow as tf
    import tf_keras as keras

    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(config.train.seed)
    rows = suite.measure(case, config, _REPEATS.value)
    environment = {"tensorflow": tf.__version__, "cpus": os.cpu_count(), "op_determinism": True}
    print(json.dumps({"environment": environment, "rows": rows}))


def _in_own_process(case: str) -> dict:
    arguments = ["-m", "experiments.benchmark", *sys.argv[1:], f"--case={case}"]
    result = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.returncode)  # it has said why
    *said, measured = result.stdout.splitlines()
    for line in said:
        print(line)
    return json.loads(measured)


def _table(rows: timing.Rows) -> str:
    from ssl_influence.reporting import tables

    shown = [name for name in _QUANTITIES if any(name in row for row in rows.values())]
    cells = [
        [name, *(f"{row[q] * _QUANTITIES[q][1]:.4g}" if q in row else "-" for q in shown)]
        for name, row in rows.items()
    ]
    return tables.render(["", *(_QUANTITIES[q][0] for q in shown)], cells)


def _ratio_table(ratios: timing.Rows) -> str:
    from ssl_influence.reporting import tables

    shown = [name for name in _RATIO_QUANTITIES if any(name in row for row in ratios.values())]
    cells = [
        [name, *(f"{row[q]:.{_RATIO_QUANTITIES[q][1]}f}" if q in row else "-" for q in shown)]
        for name, row in ratios.items()
    ]
    return tables.render(["ratio", *(_RATIO_QUANTITIES[q][0] for q in shown)], cells)


if __name__ == "__main__":
    command.run(main)
