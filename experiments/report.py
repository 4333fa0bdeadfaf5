"""Reports on a run, as a page on the weights that it learned, or on a sweep, as table and figure.

    python -m experiments.report --model_dir=/tmp/run --html=/tmp/report.html

The page shows how the run went, how its example weights are distributed and came to be so, and the
examples behind them: the most down- and up-weighted ones, all of them by weight, confidence or
class, and those that may be mislabeled or of no class, also as CSV. Where the data have labels for
the unlabeled examples it compares weights with these. It is one file that loads nothing. The run
may be finished or in training.

The run's data are read as they were for training; --dataset and --data_dir say where they lie now.
Predictions are those of the newest checkpoint (--checkpoint), by the moving average of the
network's weights (--weights=raw: by these themselves), without augmentation. A page of 10,000
photographs of 32 x 32 pixels takes about 7 MB.

    python -m experiments.report --model_dir=/tmp/sweep --format=markdown --figure=/tmp/figure.png

tabulates the cells of a sweep that have ended so far: mean and standard deviation over the seeds of
the errors that the sweep file asks for (--split, --weights, --statistic in its place), differences
from its baseline, and how well low weights mark bad examples. --format=cells is a CSV line for each
cell with every statistic. --figure draws what the file asks for, as PNG or PDF.
"""

import pathlib

from absl import flags

from experiments import command, flags as shared_flags, sweep_tables, trained
from ssl_influence import config as config_lib, files
from ssl_influence.reporting import studies, weights_report

trained.define_flags()
_HTML = flags.DEFINE_string("html", None, "The page to write.")
_SUSPECTS_CSV = flags.DEFINE_string(
    "suspects_csv",
    None,
    "Also write the page's list of suspects as CSV: example_id, weight, updates, pseudo_label, "
    "confidence, label, name.",
)
_MAX_EXAMPLES = flags.DEFINE_integer(
    "max_examples",
    weights_report.DEFAULT_MAX_EXAMPLES,
    "How many pictures or texts are in the page; of more unlabeled examples, those of the lowest "
    "and of the highest weights and some between.",
    lower_bound=3,
)
shared_flags.define_moved_data()
_FORMAT = flags.DEFINE_enum("format", "text", sweep_tables.LAYOUTS, "Of a sweep's table.")
_SPLIT = flags.DEFINE_enum("split", None, ("test", "validation"), "Of the errors of a sweep.")
_STATISTIC = flags.DEFINE_enum(
    "statistic",
    None,
    studies.STATISTICS,
    "Of a sweep's errors: of the last or the best checkpoint, or the median of the last ones.",
)
_FIGURE = flags.DEFINE_string("figure", None, "Draw a sweep's figure there, .png or .pdf.")
_OF_SWEEPS = ("format", "split", "statistic", "figure")
_OF_RUNS = ("html", "suspects_csv", "max_examples", "checkpoint", "data_dir", "dataset")
for _name in ("html", "suspects_csv", "figure"):
    flags.register_validator(_name, lambda path: path != "", "name a file")


def main() -> None:
    model_dir = shared_flags.model_dir()
    of_sweep = (model_dir / "sweep.json").exists()
    for name in _OF_RUNS if of_sweep else _OF_SWEEPS:
        if flags.FLAGS[name].present:
            kind, other = ("sweep", "run") if of_sweep else ("run", "sweep")
            raise config_lib.ConfigError(
                f"--{name} is of a report on a {other}, and --model_dir={model_dir} holds a {kind}."
            )
    if of_sweep:
        _report_sweep(model_dir)
        return
    html, suspects_csv = (shared_flags.output_file(flag) for flag in (_HTML, _SUSPECTS_CSV))
    if html is None:
        raise config_lib.ConfigError("Name the page to write: --html=FILE.")
    if suspects_csv is not None and html.resolve() == suspects_csv.resolve():
        raise config_lib.ConfigError(f"--suspects_csv={html} is the page itself: name another.")
    _write_page(model_dir, html, suspects_csv)


def _report_sweep(model_dir: files.AnyPath) -> None:
    figure = shared_flags.output_file(_FIGURE)
    if figure is not None and figure.suffix.lower() not in (".png", ".pdf"):
        raise config_lib.ConfigError(f"--figure={figure}: name a file that ends in .png or .pdf.")
    asked = {"split": _SPLIT.value, "statistic": _STATISTIC.value}
    if flags.FLAGS["weights"].present:
        asked["weights"] = flags.FLAGS.weights
    given = {name: value for name, value in asked.items() if value is not None}
    print(sweep_tables.tabulate(model_dir, _FORMAT.value, given))
    if figure is not None:
        try:
            sweep_tables.draw(model_dir, figure, given)
        except OSError as error:
            raise config_lib.ConfigError(
                f"--figure={figure} cannot be written ({error.strerror}): name another file."
            ) from error
        print(f"\nwrote {figure}")


def _write_page(
    model_dir: files.AnyPath, html: pathlib.Path, suspects_csv: pathlib.Path | None
) -> None:
    for name in ("flags.txt", "split.json"):
        shared_flags.require_of_run(model_dir, name)
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    config = shared_flags.with_moved_data(config)
    from experiments import weights_report as gathering

    try:
        gathering.write(
            model_dir,
            config,
            html,
            step=flags.FLAGS.checkpoint,
            weights=flags.FLAGS.weights,
            max_examples=_MAX_EXAMPLES.value,
            suspects_csv=suspects_csv,
        )
    except OSError as error:
        raise config_lib.ConfigError(
            f"{error.filename or html} cannot be read or written ({error.strerror}): name another."
        ) from error
    for path in (html, suspects_csv):
        if path is not None:
            print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    command.run(main)
