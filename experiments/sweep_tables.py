"""What a sweep has come to: its table, its figure, and one line for each cell."""

import dataclasses
from collections.abc import Mapping

from experiments import sweep_files
from ssl_influence import config as config_lib, files
from ssl_influence.reporting import studies

LAYOUTS = (*studies.FORMATS, "cells")


def tabulate(model_dir: files.AnyPath, layout: str, asked: Mapping[str, str]) -> str:
    """The table of a sweep's finished cells, and under it how well weights mark bad examples.

    Args:
      model_dir: of the sweep, with its sweep.json.
      layout: one of LAYOUTS. "text" and "markdown" come with a title and notes; "cells" is a CSV
        line for each cell with all statistics.
      asked: split, weights or statistic in place of the sweep's own, see `studies.Study`.

    Raises:
      ConfigError: no cell has ended, or none was evaluated on that split.
    """
    sweep = sweep_files.read(model_dir / "sweep.json")
    study = dataclasses.replace(sweep.study, **asked)
    results = sweep_files.results(sweep, model_dir)
    if not results:
        raise config_lib.ConfigError(
            f"{model_dir}: no cell of the sweep has ended yet: train with experiments.sweep."
        )
    cells = [cell for by_seed in results.values() for cell in by_seed.values()]
    if not all(study.split in cell["summary"] for cell in cells):
        raise config_lib.ConfigError(f"split={study.split}: cells were not evaluated on it.")
    if layout == "cells":
        return studies.render(*studies.tidy(study, results), "csv")
    table = studies.render(*studies.table(study, results), layout)
    if layout not in ("text", "markdown"):
        return table
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    of = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    parts = [f"{study.title}, {of}: {study.what()}", table]
    parts += [note for note in [_short_of_checkpoints(study, cells)] if note]
    marks = studies.measures(study, results)
    if marks is not None:
        parts += [
            "How well low weights, and low confidences, mark examples (0.5 says nothing; of how "
            "many seeds):"
        ]
        parts += [studies.render(*marks, layout)]
    return "\n\n".join(parts)


def _short_of_checkpoints(study: studies.Study, cells: list[dict]) -> str | None:
    window = int(study.statistic.rpartition("_")[2]) if "_" in study.statistic else 1
    fewest = min(cell["summary"][study.split]["checkpoints"] for cell in cells)
    if fewest >= window:
        return None
    return f"Some cells have only {fewest} checkpoints, of which the median is then."


def draw(model_dir: files.AnyPath, path: files.AnyPath, asked: Mapping[str, str]) -> None:
    """Draws the figure that a sweep file asks for, as PNG or PDF by the path's ending.

    Args:
      model_dir: of the sweep, with its sweep.json.
      path: of the figure.
      asked: as of `tabulate`. Curves are of the validation error, whatever it says.

    Raises:
      ConfigError: it asks for none, or there is nothing to draw yet.
    """
    from ssl_influence import metrics as metrics_lib
    from ssl_influence.reporting import figures, study_figures

    sweep = sweep_files.read(model_dir / "sweep.json")
    study = dataclasses.replace(sweep.study, **asked)
    if study.figure is None:
        raise config_lib.ConfigError(
            'The sweep asks for no figure: add one to its file, as "figure": {"kind": "curves"}, '
            "and run experiments.sweep again, which trains nothing."
        )
    if study.figure["kind"] != "curves":
        kind = {"lines": study_figures.lines, "dots": study_figures.dots}[study.figure["kind"]]
        figure = kind(study, sweep_files.results(sweep, model_dir))
    else:
        paths = sweep_files.paths(sweep, model_dir, "metrics.jsonl")
        metrics = {
            labels: {seed: metrics_lib.read_metrics(path) for seed, path in by_seed.items()}
            for labels, by_seed in paths.items()
        }
        figure = study_figures.curves(study, metrics)
    if figure is None:
        raise config_lib.ConfigError(f"{model_dir} has nothing to draw yet: train first.")
    figures.save(figure, path)
