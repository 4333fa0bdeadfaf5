"""Every base algorithm with fixed, single and per-example weights, on the same splits and seeds.

    python -m experiments.methods_study --model_dir=/tmp/methods

69 cells, about an hour on two idle cores.

The settings of each method are a flagfile of its name in --settings, here on scikit-learn's digits
with 20 labels (WRN-10-1); a weighting may have one too, which wins. Beside the methods, a network
is trained on the same labels alone and one on all labels. A cell, one method with one weighting on
one seed, is a run of its own in --model_dir/<method>/<weighting>/seed-<s>. --jobs processes of one
thread each train them, and write what they print to --model_dir/job-<n>.log.

Prints the test errors of the averaged weights at the end, mean +- standard deviation over the
seeds, and paired differences with their 95% intervals; study.json holds the numbers.

SIGTERM or SIGINT saves and exits; the same command goes on, without training finished cells again.
"""

import dataclasses
import json
import pathlib

from absl import flags

from experiments import cells, command, comparison, flags as shared_flags
from ssl_influence import config as config_lib, files
from ssl_influence.data import sources

_LINES = ("supervised", "fully_supervised")
_METHODS = tuple(name for name in config_lib.METHODS if name != "supervised")
_WEIGHTINGS = ("fixed", "single", "per_example")

shared_flags.define_model_dir()
flags.DEFINE_string(
    "settings", "experiments/flagfiles/digits", "Folder of the methods' settings, <method>.flags."
)
flags.DEFINE_list(
    "methods",
    [*_METHODS, *_LINES],
    "Names of flagfiles in --settings. One of --method=supervised is trained once a seed.",
)
flags.DEFINE_list("weightings", list(_WEIGHTINGS), "Weightings of each method.")
flags.DEFINE_list(
    "seeds", ["1-3"], "Seeds, of split and run alike, as 1-3 or 1,2,7. Those in flagfiles give way."
)
flags.DEFINE_integer("jobs", 2, "Cells that are trained at a time.", lower_bound=1)


def plan() -> list[comparison.Cell]:
    """The cells that the flags ask for, seed by seed; their rows are <method>/<weighting>.

    Raises:
      ConfigError: a method without a flagfile, a weighting that there is not, seeds that cannot be
        read, or settings that cannot work.
    """
    values, model_dir = flags.FLAGS, shared_flags.model_dir()
    for name in ("methods", "weightings", "seeds"):
        given = values[name].value
        if not given or len(set(given)) < len(given):
            raise config_lib.ConfigError(f"{name}={','.join(given)}: name one or more, each once.")
    unknown = set(values.weightings) - set(_WEIGHTINGS)
    if unknown:
        raise config_lib.ConfigError(
            f"weightings={','.join(values.weightings)}: choose among {', '.join(_WEIGHTINGS)}."
        )
    settings = pathlib.Path(values.settings).expanduser()
    planned = []
    for seed in comparison.parse_seeds(values.seeds):
        for method in values.methods:
            alone = _read(settings, method).method.name == "supervised"
            for weighting in ("fixed",) if alone else values.weightings:
                config = _read(settings, method, weighting)
                name = dataclasses.replace(sources.parse_name(config.data.dataset), seed=seed)
                of_cell = config.replace(
                    data={"dataset": str(name)},
                    weights={"weighting": weighting},
                    train={"seed": seed},
                )
                row = f"{method}/{weighting}"
                planned.append(
                    comparison.Cell(row, seed, of_cell, model_dir / row / f"seed-{seed}")
                )
    return planned


def _read(settings: pathlib.Path, method: str, weighting: str | None = None) -> config_lib.Config:
    path = settings / f"{method}.flags"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in settings.glob("*.flags"))) or "none"
        raise config_lib.ConfigError(
            f"methods={method}: there is no {path}; {settings} has flagfiles of: {there}."
        )
    of_weighting = settings / f"{weighting}.flags"
    return shared_flags.read_flagfile(path, *([of_weighting] if of_weighting.is_file() else []))


def main() -> None:
    planned = plan()
    from ssl_influence.reporting import tables

    done = {}
    for cell in planned:
        result = comparison.finished(cell)
        if result is not None:
            done[cell.row, cell.seed] = result

    def report(cell: comparison.Cell, result: dict) -> None:
        done[cell.row, cell.seed] = result
        of_all = f"{len(done)} of {len(planned)} done"
        print(f"{cell.row}, seed {cell.seed}: {result['ema']:.2f}% ({of_all})", flush=True)

    model_dir = shared_flags.model_dir()
    left = [cell for cell in planned if (cell.row, cell.seed) not in done]
    print(f"{len(left)} of {len(planned)} cells to train.", flush=True)
    cells.train(left, flags.FLAGS.jobs, model_dir, "experiments.methods_study", report)

    results: dict[str, dict[str, dict[int, dict]]] = {}
    for cell in planned:
        method, weighting = cell.row.split("/")
        by_seed = results.setdefault(method, {}).setdefault(weighting, {})
        by_seed[cell.seed] = done[cell.row, cell.seed]
    files.write_atomically(model_dir / "study.json", json.dumps(results, indent=1) + "\n")
    print(tables.by_weighting(results))


if __name__ == "__main__":
    command.run(main)
