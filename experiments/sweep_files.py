"""Sweep files: what a study trains, as the product of a few named axes and seeds.

A sweep file is JSON:

    {
      "title": "UDA on digits, one fixed weight and one for each example",
      "flags": {"flagfile": "experiments/flagfiles/digits/uda.flags"},
      "axes": {
        "weighting": ["fixed", "per_example"],
        "labels": {"20": {"dataset": "digits.1@20-200"}, "40": {"dataset": "digits.1@40-200"}}
      },
      "seeds": "1-3",
      "columns": ["labels"],
      "baseline": {"weighting": "fixed"}
    }

| key | meaning |
|---|---|
| title | what tables and figures are called |
| flags | flag -> value of every cell; values as JSON has them, a list for flags that take one |
| axes | name -> its choices: a list of values of the flag of that name, or label -> flags |
| seeds | of split and run alike, as "1-3" or [1, 2, 7] |
| skip | combinations that are not trained: [{axis: label or [labels]}, ...] |
| columns | axes that are columns of the table; the others are rows. None: one column |
| baseline | {axis: label}, which the other labels of that axis are compared with, seed by seed |
| split, weights | what is tabulated: errors on test or validation, of ema or raw |
| statistic | last, best, or median_K of the last K = 1, 10, 20, 50 checkpoints |
| paper | label -> ... -> {"mean", "std"}: numbers to stand beside ours, by the labels of the axes |
| figure | {"kind": "curves"}, {"kind": "lines", "x": axis} or {"kind": "dots"}: `studies.Study` |

Later flags win: those of the file, then those of each axis in turn. In a value, {axis} stands for
the label of that axis, as in "experiments/flagfiles/digits/{method}.flags".
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import comparison, flags as shared_flags
from ssl_influence import config as config_lib, files
from ssl_influence.data import sources
from ssl_influence.reporting import studies

Flags = Mapping[str, Any]

_log = logging.getLogger("ssl_influence")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep file, checked.

    Attributes:
      study: the axes and how they are tabulated and drawn.
      flags: of every cell.
      choices: axis -> label -> flags.
      seeds: of each combination.
      text: the file.
    """

    study: studies.Study
    flags: Flags
    choices: Mapping[str, Mapping[str, Flags]]
    seeds: tuple[int, ...]
    text: str


def read(path: files.AnyPath) -> Sweep:
    """Reads and checks a sweep file.

    Raises:
      ConfigError: it cannot be read, or says what a sweep cannot be; names the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        contents = json.loads(text, object_pairs_hook=_without_repeats)
    except OSError as error:
        raise config_lib.ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise config_lib.ConfigError(f"{path} is no JSON: {error}.") from error
    try:
        return _parse(contents, text)
    except config_lib.ConfigError as error:
        raise config_lib.ConfigError(f"{path}: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} stands there twice")
    return dict(pairs)


def _parse(contents: Any, text: str) -> Sweep:
    kinds = {
        "title": str,
        "flags": dict,
        "axes": dict,
        "seeds": (str, list),
        "skip": list,
        "columns": list,
        "baseline": dict,
        "split": str,
        "weights": str,
        "statistic": str,
        "paper": dict,
        "figure": dict,
    }
    config_lib.require(isinstance(contents, dict), "a sweep is a JSON object.")
    for key, value in contents.items():
        config_lib.require(key in kinds, f"{key!r} is not one of {', '.join(kinds)}.")
        config_lib.require(
            isinstance(value, kinds[key]), f"{key}={json.dumps(value)} is of the wrong kind."
        )
    for key in ("title", "axes"):
        config_lib.require(bool(contents.get(key)), f"{key} is missing.")
    config_lib.require(
        contents["title"].isprintable(), f"title={json.dumps(contents['title'])} is to be a line."
    )
    _check_flags("flags", contents.get("flags", {}))
    choices = {axis: _choices(axis, given) for axis, given in contents["axes"].items()}
    figure = contents.get("figure", {})
    named = (*contents.get("columns", ()), *(figure[key] for key in ("kind", "x") if key in figure))
    config_lib.require(
        all(isinstance(name, str) for name in named), "columns and figure name axes by text."
    )
    baseline = contents.get("baseline")
    seeds = contents.get("seeds", "1")
    parts = seeds.split(",") if isinstance(seeds, str) else list(map(str, seeds))
    study = studies.Study(
        title=contents["title"],
        axes={axis: tuple(labels) for axis, labels in choices.items()},
        skip=tuple(_as_skip(one) for one in contents.get("skip", ())),
        columns=tuple(contents.get("columns", ())),
        baseline=baseline and {axis: _text(label) for axis, label in baseline.items()},
        figure=contents.get("figure"),
        paper=contents.get("paper", {}),
        **{key: contents[key] for key in ("split", "weights", "statistic") if key in contents},
    )
    return Sweep(study, contents.get("flags", {}), choices, parse_seeds(parts), text)


def parse_seeds(parts: Sequence[str]) -> tuple[int, ...]:
    """("1-3", "7") -> (1, 2, 3, 7).

    Raises:
      ConfigError: there are none, or what is there is neither a seed nor a range.
    """
    found = tuple(comparison.parse_seeds(list(parts)))
    config_lib.require(bool(found), "seeds=: name one or more, as 1-3.")
    return found


def _choices(axis: str, given: Any) -> dict[str, Flags]:
    config_lib.require(
        isinstance(given, list | dict) and bool(given),
        f"axes: {axis!r} needs a list of values of --{axis}, or labels with their flags.",
    )
    config_lib.require(axis != "seed", "axes: seeds have a key of their own, seeds.")
    choices = given if isinstance(given, dict) else {_text(value): {axis: value} for value in given}
    config_lib.require(len(choices) == len(given), f"axes: {axis!r} names a value twice.")
    for label, flags in choices.items():
        config_lib.require(
            re.fullmatch(r"[\w.+-]+", label) is not None and label.strip(".") != "",
            f"axes: {axis!r} has the label {label!r}, which is to name a folder: letters, digits "
            "and . _ + - alone.",
        )
        config_lib.require(
            len(label) <= 200 and re.fullmatch(r"sweep\.json|job-[0-9]+\.log", label) is None,
            f"axes: {axis!r} has the label {label!r}, which is too long for a folder, or the name "
            "of a file of the sweep's own.",
        )
        config_lib.require(
            isinstance(flags, dict), f"axes: {label!r} of {axis!r} needs an object of flags."
        )
        _check_flags(f"axes: {label!r} of {axis!r}", flags)
    return choices


def _check_flags(key: str, flags: Flags) -> None:
    for name, value in flags.items():
        config_lib.require(name != "seed", f"{key}: seeds have a key of their own, seeds.")
        for one in value if isinstance(value, list) else [value]:
            config_lib.require(
                isinstance(one, str | int | float),
                f"{key}: {name}={json.dumps(value)} is no value of a flag.",
            )


def _as_skip(one: Any) -> dict[str, tuple[str, ...]]:
    config_lib.require(
        isinstance(one, dict) and bool(one), f"skip: {json.dumps(one)} names no axis."
    )
    return {
        axis: tuple(map(_text, labels if isinstance(labels, list) else [labels]))
        for axis, labels in one.items()
    }


def cells(
    sweep: Sweep,
    model_dir: files.AnyPath,
    *,
    seeds: Sequence[int] | None = None,
    only: Mapping[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
) -> list[comparison.Cell]:
    """What a sweep trains, seed by seed, each in <model_dir>/<label>/.../seed-<s>.

    Args:
      sweep: the file.
      model_dir: of the sweep.
      seeds: instead of the file's.
      only: axis -> the labels that are kept.
      settings: "flag=value" for all cells, which win.

    Raises:
      ConfigError: an axis or label that there is not, or settings that cannot work.
    """
    planned = []
    for labels in sweep.study.combinations(only):
        row = "/".join(labels)
        by_axis = dict(zip(sweep.study.axes, labels, strict=True))
        of_axes = [sweep.choices[axis][label] for axis, label in by_axis.items()]
        arguments = [
            _with_labels(argument, by_axis)
            for each in (sweep.flags, *of_axes)
            for argument in _arguments(each)
        ]
        arguments += [f"--{setting}" for setting in settings]
        config = shared_flags.read_arguments(arguments, f"The cell {row}")
        planned.append((row, tuple(by_axis.items()), config))
    found = []
    for seed in sweep.seeds if seeds is None else seeds:
        for row, labels, config in planned:
            config = _with_seed(config, seed)
            folder = model_dir / row / f"seed-{seed}"
            found.append(comparison.Cell(row, seed, config, folder, labels))
    return found


def _with_seed(config: config_lib.Config, seed: int) -> config_lib.Config:
    """The same run on another seed, of split and run alike."""
    name = dataclasses.replace(sources.parse_name(config.data.dataset), seed=seed)
    return config.replace(data={"dataset": str(name)}, train={"seed": seed})


def _arguments(flags: Flags) -> list[str]:
    """{"depth": 10, "flip": False} -> ["--depth=10", "--flip=false"]."""
    found = []
    for name, value in flags.items():
        if name == "flagfile" and isinstance(value, list):
            found += [f"--flagfile={path}" for path in value]
        elif isinstance(value, list):
            found.append(f"--{name}={','.join(map(_text, value))}")
        else:
            found.append(f"--{name}={_text(value)}")
    return found


def _with_labels(argument: str, by_axis: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: by_axis.get(match[1], match[0]), argument)


def _text(value: Any) -> str:
    config_lib.require(
        isinstance(value, str | int | float), f"{json.dumps(value)} is no value of a flag."
    )
    return str(value).lower() if isinstance(value, bool) else str(value)


def record(sweep: Sweep, model_dir: files.AnyPath) -> None:
    """Writes sweep.json, by which the directory's cells are tabulated.

    Raises:
      ConfigError: the directory cannot be written.
    """
    path = model_dir / "sweep.json"
    try:
        with files.os_errors(model_dir):
            model_dir.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text(encoding="utf-8") != sweep.text:
                files.write_atomically(path, sweep.text)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} cannot be written ({error.strerror}): name another."
        ) from error


def results(sweep: Sweep, model_dir: files.AnyPath) -> dict[studies.Labels, dict[int, dict]]:
    """What cells ended with, also of seeds that the file does not name.

    Returns:
      Combination -> seed -> {"summary": eval/summary.json, and what eval/result.json holds}.

    Raises:
      ConfigError: cells differ in more than what the sweep's file says.
    """
    found, folders = {}, {}
    for labels, by_seed in paths(sweep, model_dir, "eval/result.json").items():
        for seed, path in by_seed.items():
            read = comparison.read_result(path.parent)
            if read is not None:
                result, summary = read
                found.setdefault(labels, {})[seed] = {**result, "summary": summary}
                folders[path.parents[1]] = labels
    _check_alike(sweep, model_dir, folders)
    return found


def _check_alike(
    sweep: Sweep, model_dir: files.AnyPath, folders: Mapping[files.AnyPath, studies.Labels]
) -> None:
    """Raises ConfigError where cells, by their folder, do not differ as the file says.

    Settings in which any cell departs from the file, as --setting has it, are to be the same in
    all.
    """
    configs = {
        folder: _with_seed(shared_flags.read_flagfile(folder / "flags.txt"), 0)
        for folder in folders
    }
    expected = {}
    try:
        for cell in cells(sweep, model_dir, seeds=[0]):
            expected[tuple(label for _, label in cell.labels)] = cell.config
    except config_lib.ConfigError as error:
        _log.warning(
            "Cells are compared with others of their row, and not with the file: %s", error
        )
    departures = set()
    for folder, config in configs.items():
        planned = expected.setdefault(folders[folder], config)
        departures.update(shared_flags.differing(planned, config))
    for flag in sorted(departures):
        held = {
            folder: shared_flags.value(config, flag)
            for folder, config in configs.items()
            if shared_flags.has(config, flag)
        }
        first = next(iter(held), None)
        for folder, value in held.items():
            config_lib.require(
                value == held[first],
                f"{first} was trained with --{flag}={held[first]} and {folder} with {value}, and "
                "the sweep's file does not say so: move one away, or train it anew elsewhere.",
            )


def paths(
    sweep: Sweep, model_dir: files.AnyPath, name: str
) -> dict[studies.Labels, dict[int, files.AnyPath]]:
    """Combination -> seed -> a file of that name, of the cells that have one."""
    found: dict[studies.Labels, dict[int, files.AnyPath]] = {}
    for labels in sweep.study.combinations():
        for folder in sorted(model_dir.joinpath(*labels).glob("seed-*")):
            seed = re.fullmatch(r"seed-([0-9]+)", folder.name)
            if seed and (folder / name).exists():
                found.setdefault(labels, {})[int(seed[1])] = folder / name
    return found
