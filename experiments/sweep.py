r"""Trains the cells of a sweep file: combinations of settings, on several seeds.

    python -m experiments.sweep --sweep=experiments/sweeps/digits_methods.json \
        --model_dir=/tmp/digits

What sweep files say is in `experiments/sweep_files.py`. A cell is a run of its own, in
--model_dir/<label of each axis>/seed-<s>, trained, evaluated at every checkpoint it keeps, and its
weights judged. --jobs processes train them, of --threads_per_job threads each, and write what they
print to --model_dir/job-<n>.log. A cell that fails does not keep the others, and makes the exit
code 1.

SIGTERM or SIGINT saves and exits; the same command goes on, without training finished cells again
(where a file of data changed and kept its name, remove the folders of its cells).
`python -m experiments.report --model_dir=/tmp/digits` tabulates what is there at any time.

    python -m experiments.sweep --sweep=... --model_dir=/data/digits --print_commands

prints a command for each cell that is not finished instead, for the launcher of a cluster: each
trains --cell=<labels>/seed-<s> in the process it is called in, on all devices it sees.

--setting=train_steps=100 and the like win over the file, --only=method=uda,fixmatch keeps some
labels of an axis, and --seeds=4-6 takes the place of the file's seeds.
"""

import re
import shlex

from absl import flags

from experiments import cells, command, comparison, flags as shared_flags, sweep_files
from ssl_influence import config as config_lib, files
from ssl_influence.reporting import studies

shared_flags.define_model_dir()
flags.DEFINE_string("sweep", None, "The sweep file.", required=True)
flags.register_validator("sweep", lambda path: path != "", "name a file")
flags.DEFINE_list("seeds", [], "Seeds, as 1-3 or 1,2,7, instead of the file's.")
flags.DEFINE_multi_string(
    "only", [], "Labels of an axis that are trained, as method=uda,fixmatch (default: all)."
)
flags.DEFINE_multi_string(
    "setting", [], "A setting of all cells, which wins over the file's, as train_steps=100."
)
flags.DEFINE_integer("jobs", 2, "Cells that are trained at a time.", lower_bound=1)
flags.DEFINE_integer(
    "threads_per_job",
    1,
    "Threads that each process computes with, of which results depend in their last digits, and "
    "soon in more; 0 leaves it to TensorFlow.",
    lower_bound=0,
)
flags.DEFINE_string("cell", None, "Train this one alone, in this process.")
flags.DEFINE_boolean("print_commands", False, "Print a command a cell instead of training.")


def main() -> int:
    values, model_dir = flags.FLAGS, shared_flags.model_dir()
    sweep = sweep_files.read(files.path(values.sweep).expanduser())
    settings = [_setting(text) for text in values.setting]
    if values.cell is not None:
        for flag in ("only", "seeds", "print_commands"):
            if flags.FLAGS[flag].present:
                raise config_lib.ConfigError(
                    f"--{flag} has no meaning beside --cell={values.cell}: leave one out."
                )
        labels, seed = _of_cell(sweep, values.cell)
        only = {axis: [label] for axis, label in zip(sweep.study.axes, labels, strict=True)}
        (cell,) = sweep_files.cells(sweep, model_dir, seeds=[seed], only=only, settings=settings)
        sweep_files.record(sweep, model_dir)
        return _train_one(cell)
    planned = sweep_files.cells(
        sweep,
        model_dir,
        seeds=sweep_files.parse_seeds(values.seeds) if values.seeds else None,
        only=_only(values.only),
        settings=settings,
    )
    left = [cell for cell in planned if comparison.finished(cell) is None]
    finished = len(planned) - len(left)
    sweep_files.record(sweep, model_dir)
    if values.print_commands:
        for cell in left:
            print(_command(cell))
        return 0
    print(f"{len(left)} of {len(planned)} cells to train.", flush=True)
    if any(cell.config.train.tensorboard for cell in planned):
        shown = shared_flags.tensorboard_command(model_dir)
        print(f"Curves, and the cells by their settings (HParams): {shown}", flush=True)

    def report(cell: comparison.Cell, result: dict | str) -> None:
        nonlocal finished
        if isinstance(result, str):
            print(f"{name(cell)} failed: {result}", flush=True)
            return
        finished += 1
        of_all = f"{finished} of {len(planned)} done"
        print(f"{name(cell)}: {result['ema']:.2f}% ({of_all})", flush=True)

    failed = cells.train(
        left, values.jobs, model_dir, "experiments.sweep", report, values.threads_per_job
    )
    if failed:
        raise cells.CellError(
            f"{len(failed)} of {len(planned)} cells failed, see above; the same command tries them "
            "again."
        )
    return 0


def name(cell: comparison.Cell) -> str:
    """What --cell and messages call a cell."""
    return f"{cell.row}/seed-{cell.seed}"


def _of_cell(sweep: sweep_files.Sweep, wanted: str) -> tuple[studies.Labels, int]:
    """The labels and the seed of "uda/fixed/seed-3"."""
    match = re.fullmatch(r"(.+)/seed-([0-9]+)", wanted)
    there = sweep.study.combinations()
    if not match or tuple(match[1].split("/")) not in there:
        raise config_lib.ConfigError(
            f"cell={wanted} is not one of the sweep's, such as {'/'.join(there[0])}/seed-1."
        )
    return tuple(match[1].split("/")), int(match[2])


def _train_one(cell: comparison.Cell) -> int:
    result = comparison.finished(cell)
    if result is None:
        from experiments import launch

        result = launch.train_and_judge(
            cell.config, cell.model_dir, "experiments.sweep", cell.labels
        )
    if result is None:
        return command.STOPPED
    print(f"{name(cell)}: {result['ema']:.2f}%")
    return 0


def _command(cell: comparison.Cell) -> str:
    values = flags.FLAGS
    given = [f"--sweep={values.sweep}", f"--model_dir={values.model_dir}"]
    given += [f"--setting={text}" for text in values.setting]
    arguments = shlex.join([*given, f"--cell={name(cell)}"])
    return f"python -m experiments.sweep {arguments}"


def _only(texts: list[str]) -> dict[str, list[str]]:
    """["method=uda,vat"] -> {"method": ["uda", "vat"]}."""
    kept = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(.+)", text)
        if not match or match[1] in kept:
            raise config_lib.ConfigError(
                f"only={text} is not of the form axis=label,label, or names an axis again."
            )
        kept[match[1]] = match[2].split(",")
    return kept


def _setting(text: str) -> str:
    if not re.fullmatch(r"\w+=.*", text) or text.startswith("seed="):
        raise config_lib.ConfigError(
            f"setting={text} is not of the form flag=value, or is what --seeds says."
        )
    return text


if __name__ == "__main__":
    command.run(main)
