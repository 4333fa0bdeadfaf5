"""Says what a dataset and its split hold, before hours are spent on them, and draws it.

    python -m experiments.inspect_data --dataset=folder:/data/birds.1@40-100 --output=/tmp/birds

Takes the flags of a training run (or its --flagfile) and reads the data as the run would. Prints
how many examples there are of each class and role, what could not be read, the range of the values
and exact copies among the examples; of texts with --model=bert also how many are cut, and views of
some as the model reads them. With --output it also writes

    samples.png         images of each class and role
    augmentations.png   weak and strong views, as these flags make them
    summary.json        what was printed
    examples.csv        every example: its id, name, role, class and, if it has exact copies, the
                        number of their group; of texts also how they begin. Those of the test part
                        have ids of their own, from 0
"""

import csv
import json
import pathlib
from typing import Any

import numpy as np
from absl import flags

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib, files
from ssl_influence.data import duplicates, examples, paraphrases, splits

shared_flags.define()
_OUTPUT = flags.DEFINE_string(
    "output", None, "Directory for pictures and tables (default: they are not made)."
)
flags.register_validator("output", lambda path: path != "", "name a directory, or . for this one")

# How much is printed: lines about skipped examples, channels, classes, texts of a class, texts with
# their views, letters.
_SKIPPED, _CHANNELS, _CLASSES, _TEXTS, _VIEWS, _LETTERS = 5, 10, 20, 2, 3, 100
_WRITTEN_LETTERS = 200  # of each text, in examples.csv


def main() -> None:
    config = shared_flags.to_config()
    output = None if _OUTPUT.value is None else pathlib.Path(_OUTPUT.value).expanduser()
    if output is not None:
        _make_directory(output)

    from experiments import launch
    from ssl_influence.reporting import samples

    source, split, name, config = launch.load_data(config)
    values = _values(source)
    print(_headline(str(name), source))
    print(_roles(source, split))
    print(_printed_values(values, "channel" if source.is_image else "column"), flush=True)
    if source.kind == "text":
        print("\n".join(_some_texts(source, config.train.seed)))
        if config.model.name == "bert":
            print("\n".join(_tokens(source, split, config)), flush=True)
    if not isinstance(source.inputs, np.ndarray):
        print("reading each image once, to find copies ...", flush=True)
    report = duplicates.find(source, split)
    print("copies: " + "\n  ".join(duplicates.describe(report, source)))
    for line in duplicates.alarms(report, source):
        print(f"WARNING: {line}")
    if output is None:
        return

    summary = _summary(str(name), source, split, values, report)
    files.write_atomically(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    with files.replacing(output / "examples.csv") as temporary:
        _write_examples(temporary, source, split, report)
    written = ["summary.json", "examples.csv"]
    if source.is_image:
        seed = config.train.seed
        samples.draw_classes(source, split, output / "samples.png", title=str(name), seed=seed)
        samples.draw_views(source, split, config, output / "augmentations.png", title=str(name))
        written += ["samples.png", "augmentations.png"]
    for file in written:
        print(f"wrote {output / file}")


def _make_directory(output: pathlib.Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--output={output} cannot be written ({error.strerror}): name a directory."
        ) from error


def _headline(name: str, source: examples.Source) -> str:
    kind = {"image": "images", "vector": "vectors", "text": "texts"}[source.kind]
    shape = " x ".join(map(str, source.inputs.shape[1:]))
    place = "in memory" if isinstance(source.inputs, np.ndarray) else "read when they are needed"
    return (
        f"{name}: {kind}{shape and f' of {shape}'}, {place}\n"
        f"{len(source.labels)} training examples, {len(source.test_labels)} test examples, "
        f"{source.num_classes} classes"
    )


def _roles(source: examples.Source, split: splits.Split) -> str:
    """The table of classes by role, and what was skipped."""
    table = splits.describe(
        split, source.labels, source.class_names, source.strangers, source.test_labels
    )
    more = ["..."] if len(source.skipped) > _SKIPPED else []
    skipped = [
        f"skipped since they could not be read: {len(source.skipped)}",
        *source.skipped[:_SKIPPED],
        *more,
    ]
    return f"\n{table}\n\n" + "\n  ".join(skipped)


def _values(source: examples.Source) -> dict[str, Any]:
    """What the inputs of training examples hold, as JSON values.

    Of images and vectors {"minimum", "maximum", "mean", "std": a list by channel}; of texts
    {"letters", "words": {"minimum", "median", "95%", "maximum"}, "empty": how many}.
    """
    from ssl_influence.data import inputs as inputs_lib

    if source.kind == "image":
        counts = inputs_lib.level_counts(source.inputs)
        mean, std = inputs_lib.moments_of(counts)
        levels = [np.flatnonzero(channel) for channel in counts]
        low, high = ([int(channel[end]) for channel in levels] for end in (0, -1))
        return {"minimum": low, "maximum": high, "mean": mean.tolist(), "std": std.tolist()}
    if source.kind == "vector":
        vectors = source.inputs
        return {
            "minimum": vectors.min(axis=0).tolist(),
            "maximum": vectors.max(axis=0).tolist(),
            "mean": vectors.mean(axis=0, dtype=np.float64).tolist(),
            "std": vectors.std(axis=0, dtype=np.float64).tolist(),
        }
    lengths = {
        "letters": [len(text) for text in source.inputs],
        "words": [len(text.split()) for text in source.inputs],
    }
    quantiles = {"minimum": 0, "median": 50, "95%": 95, "maximum": 100}
    return {
        **{
            unit: {
                name: int(np.percentile(numbers, percent, method="lower"))
                for name, percent in quantiles.items()
            }
            for unit, numbers in lengths.items()
        },
        "empty": lengths["words"].count(0),
    }


def _printed_values(values: dict[str, Any], axis: str) -> str:
    from ssl_influence.reporting import tables

    if "letters" in values:
        units = ("letters", "words")
        table = tables.render(
            ["a text's", *values["letters"]],
            [[unit, *map(str, values[unit].values())] for unit in units],
        )
        return f"\n{table}\nempty texts: {values['empty']}\n"
    columns = list(zip(*values.values(), strict=True))
    table = tables.render(
        [axis, *values],
        [
            [str(channel), *(f"{value:.4g}" for value in column)]
            for channel, column in enumerate(columns[:_CHANNELS])
        ],
    )
    more = f"\n... {len(columns)} {axis}s" if len(columns) > _CHANNELS else ""
    return f"\n{table}{more}\n"


def _some_texts(source: examples.Source, seed: int) -> list[str]:
    """Some texts of each class, drawn by the seed, one a line."""
    from ssl_influence.reporting import samples

    random = np.random.Generator(np.random.PCG64(seed))
    lines = []
    for c, name in [*enumerate(source.class_names[:_CLASSES]), (-1, "unknown")]:
        for row in random.permutation(np.flatnonzero(source.labels == c))[:_TEXTS]:
            text = " ".join(source.inputs[row].split())
            lines.append(f"{name}: {samples.shortened(text, _LETTERS)}")
    return [*lines, ""]


def _tokens(source: examples.Source, split: splits.Split, config: config_lib.Config) -> list[str]:
    """How many texts are cut, and views of the first unlabeled ones that a run would read."""
    import tensorflow as tf

    from experiments import encoders
    from ssl_influence.data import pipeline as pipeline_lib, rows, tokens
    from ssl_influence.reporting import samples

    _, spec = encoders.load(config.model)
    tokenizer = tokens.Tokenizer(spec)
    lengths = np.concatenate(
        [tokenizer.lengths(tf.constant(part, tf.string)) for part in rows.in_turn(source.inputs)]
    )
    cut = np.mean(lengths > spec.sequence_length)
    lines = [
        f"tokens of a text: median {int(np.median(lengths))}, at most {lengths.max()}; "
        f"{cut:.1%} are cut to {spec.sequence_length}, their {spec.keep_end} end kept"
    ]
    seed, views = config.train.seed, ("weak",)
    if config.augment.strong in config_lib.TEXT_VIEWS:
        views = ("weak", "strong")
    if len(split.unlabeled):
        pipeline = pipeline_lib.Pipeline(
            source, split, config.data, config.augment, seed=seed, views=views, tokenizer=spec
        )
        batch = pipeline.train_batch(0)["unlabeled"]
        for place, row in enumerate(batch["example_id"].numpy()[:_VIEWS]):
            text = " ".join(source.inputs[row].split())
            lines.append(f"example {row}: {samples.shortened(text, _LETTERS)}")
            for name in views:
                read = tokens.decode(spec, batch[name][place].numpy())
                lines.append(f"  {name}: {samples.shortened(read, _LETTERS)}")
    return [*lines, ""]


def _summary(
    name: str,
    source: examples.Source,
    split: splits.Split,
    values: dict[str, Any],
    report: duplicates.Report,
) -> dict[str, Any]:
    """All that is printed, as JSON values."""
    counts = splits.class_counts(
        split, source.labels, source.class_names, source.strangers, source.test_labels
    )
    return {
        "dataset": name,
        "kind": source.kind,
        "shape": list(source.inputs.shape[1:]),
        "classes": source.class_names,
        "training_examples": len(source.labels),
        "test_examples": len(source.test_labels),
        "counts": [
            {"class": row, **dict(zip(duplicates.ROLES, by_role, strict=True))}
            for row, by_role in counts
        ],
        "in_both": {f"{a}, {b}": count for (a, b), count in split.overlaps.items()},
        "skipped": list(source.skipped),
        "values": values,
        "copies": {
            "groups": report.num_groups,
            "examples": len(report.places),
            "of_role_in_role": {f"{a}, {b}": n for (a, b), n in report.counts.items() if n},
            "groups_with_different_labels": len(report.contradictory),
        },
        "warnings": duplicates.alarms(report, source),
    }


def _write_examples(
    path: pathlib.Path, source: examples.Source, split: splits.Split, report: duplicates.Report
) -> None:
    """Writes examples.csv."""
    size = len(source.labels)
    labels = np.concatenate([source.labels, source.test_labels])
    has_role = {role: np.isin(np.arange(size), getattr(split, role)) for role in splits.ROLES}
    group = dict(zip(report.places.tolist(), report.group.tolist(), strict=True))
    # Names of files are bytes that need not be UTF-8: they are written as they are.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = ["example_id", "name", "role", "label", "group"]
        writer.writerow([*header, "text"] if source.kind == "text" else header)
        for place, label in enumerate(labels.tolist()):
            if place < size:
                row, name, inputs = place, source.row_name(place), source.inputs
                role = "+".join(role for role, rows in has_role.items() if rows[place])
            else:
                row, role, inputs = place - size, "test", source.test_inputs
                name = str(row) if source.test_names is None else source.test_names[row]
            class_name = source.class_names[label] if label >= 0 else ""
            cells = [row, name, role, class_name, group.get(place, "")]
            if source.kind == "text":
                cells.append(paraphrases.one_line(inputs[row])[:_WRITTEN_LETTERS])
            writer.writerow(cells)


if __name__ == "__main__":
    command.run(main)
