"""Trains the rows of a comparison, over one seed or many, and tabulates their test errors.

A cell is one row on one seed: a run of its own, with a directory of its own. Finished cells are not
trained again, so that a comparison can be stopped and resumed, and spread over processes that share
a --model_dir and have different --seeds; the same command with all seeds then tabulates them.
"""

import dataclasses
import json
import re

from absl import flags

from experiments import flags as shared_flags
from ssl_influence import config as config_lib, files
from ssl_influence.data import sources

flags.disclaim_key_flags()

_SUPERVISED = {
    "method": {
        **{field.name: None for field in dataclasses.fields(config_lib.MethodConfig)},
        "name": "supervised",
    },
    "weights": {"weighting": "fixed"},
}
ROWS = {
    "supervised": _SUPERVISED,
    "supervised_all_labels": {**_SUPERVISED, "data": {"labeled_includes_validation": True}},
    "fixed": {"weights": {"weighting": "fixed"}},
    "single": {"weights": {"weighting": "single"}},
    "per_example": {"weights": {"weighting": "per_example"}},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row on one seed (None: the seeds that the flags name).

    A sweep's cell has labels too: its axes, each with its label.
    """

    row: str
    seed: int | None
    config: config_lib.Config
    model_dir: files.AnyPath
    labels: tuple[tuple[str, str], ...] = ()


def define_flags(defaults: dict) -> None:
    """The shared flags, --model_dir, --rows, --seeds and --row_setting."""
    shared_flags.define(defaults)
    shared_flags.define_model_dir()
    flags.DEFINE_list(
        "rows",
        ["supervised", "fixed", "per_example"],
        f"Rows to train, of {', '.join(ROWS)}. supervised_all_labels trains on the labels of the "
        "validation examples too.",
    )
    flags.DEFINE_list(
        "seeds",
        [],
        "Repeat on these seeds, of split and run alike, as 1-5 or 1,2,7, under "
        "--model_dir/seed-<s>/<row>, and tabulate mean, standard deviation and paired differences.",
    )
    flags.DEFINE_multi_string(
        "row_setting", [], "A setting of one row alone, as fixed:unsupervised_weight=0.3."
    )


def cells() -> list[Cell]:
    """What the flags ask for, seed by seed.

    Raises:
      ConfigError: an unknown row, seeds that cannot be read, or a setting that cannot work.
    """
    model_dir, rows = shared_flags.model_dir(), flags.FLAGS.rows
    unknown = [row for row in rows if row not in ROWS]
    if unknown or not rows:
        raise config_lib.ConfigError(f"rows={','.join(rows)}: choose among {', '.join(ROWS)}.")
    if shared_flags.to_config().method.name == "supervised":
        raise config_lib.ConfigError(
            "method=supervised leaves nothing to compare: name the method of the other rows."
        )
    settings = _row_settings(flags.FLAGS.row_setting)
    for row in settings.keys() - set(rows):
        flag, text = next(iter(settings[row].items()))
        raise config_lib.ConfigError(
            f"row_setting={row}:{flag}={text} is for a row that --rows={','.join(rows)} leaves out."
        )
    found = []
    for seed in parse_seeds(flags.FLAGS.seeds) or [None]:
        folder = model_dir if seed is None else model_dir / f"seed-{seed}"
        for row in rows:
            asked = shared_flags.to_config(settings.get(row, {}))
            config = asked.replace(**ROWS[row])
            name = sources.parse_name(config.data.dataset)
            if seed is not None:
                name = dataclasses.replace(name, seed=seed)
                config = config.replace(train={"seed": seed})
            for flag, text in settings.get(row, {}).items():
                if shared_flags.value(asked, flag) != shared_flags.value(config, flag):
                    raise config_lib.ConfigError(
                        f"row_setting={row}:{flag}={text} cannot be: the row {row} or --seeds says "
                        f"{shared_flags.value(config, flag)}."
                    )
            config = config.replace(data={"dataset": str(name)})
            found.append(Cell(row, seed, config, folder / row))
    return found


def main(program: str) -> list[Cell]:
    """Trains, or resumes, each cell, evaluates it and prints the table.

    Returns:
      The cells, all finished; none where a stop was asked for.
    """
    planned = cells()
    from experiments import launch
    from ssl_influence.reporting import tables

    results: dict[str, dict[int, dict]] = {}
    for cell in planned:
        result = finished(cell)
        if result is None:
            of_seed = "" if cell.seed is None else f", seed {cell.seed}"
            print(f"\n{cell.row}{of_seed}:", flush=True)
            result = launch.train_and_judge(cell.config, cell.model_dir, program)
        if result is None:
            return []
        results.setdefault(cell.row, {})[cell.config.train.seed] = result
    config = planned[0].config
    seeds = ",".join(flags.FLAGS.seeds) or str(config.train.seed)
    title = f"{config.data.dataset}, seed {seeds}, {config.train.train_steps} steps:"
    files.write_atomically(
        shared_flags.model_dir() / "comparison.json", json.dumps(results, indent=1) + "\n"
    )
    print(title, tables.comparison(results), sep="\n")
    return planned


def finished(cell: Cell) -> dict | None:
    """The result of a cell that ended earlier, under the same settings; else None.

    Also None where data have other names now: training then compares what they hold, and ends at
    once if it is the same.

    Raises:
      ConfigError: the directory holds a run with other settings.
    """
    path, flagfile = cell.model_dir / "eval" / "result.json", cell.model_dir / "flags.txt"
    if not path.exists() or not flagfile.exists():
        return None
    shared_flags.check_resumable(flagfile, cell.config)
    if not shared_flags.same_places(flagfile, cell.config):
        return None
    try:
        shared_flags.check_resumable(path.with_name("flags.txt"), cell.config)
    except config_lib.ConfigError:  # results of a run that was there before
        return None
    read = read_result(path.parent)
    return read[0] if read and read[0].get("step") == cell.config.train.train_steps else None


def read_result(folder: files.AnyPath) -> tuple[dict, dict] | None:
    """result.json and summary.json in the folder eval of a cell that has ended.

    None where one is missing or damaged: a cell that is evaluated again has no summary meanwhile,
    and a damaged one has to be.
    """
    found = []
    for name in ("result.json", "summary.json"):
        try:
            found.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            return None
    return tuple(found) if all(read and isinstance(read, dict) for read in found) else None


def parse_seeds(parts: list[str]) -> list[int]:
    """["1-3", "7"] -> [1, 2, 3, 7]."""
    seeds = []
    for part in parts:
        match = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise config_lib.ConfigError(
                f"seeds={','.join(parts)}: {part!r} is neither a seed nor a range such as 1-5."
            )
        found = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(found) > 10_000:
            raise config_lib.ConfigError(f"seeds={part.strip()} are {len(found):,}: name less.")
        seeds += found
    if len(set(seeds)) < len(seeds):
        raise config_lib.ConfigError(f"seeds={','.join(parts)} names a seed twice.")
    return seeds


def _row_settings(texts: list[str]) -> dict[str, dict[str, str]]:
    """["fixed:confidence=0.5"] -> {"fixed": {"confidence": "0.5"}}."""
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+):(\w+)=(.*)", text)
        if not match or match[1] not in ROWS:
            raise config_lib.ConfigError(
                f"row_setting={text} is not of the form row:flag=value with a row of "
                f"{', '.join(ROWS)}."
            )
        settings.setdefault(match[1], {})[match[2]] = match[3]
    return settings
