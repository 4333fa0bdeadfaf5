"""Gathers what the HTML report on a run's weights is about."""

import contextlib
import dataclasses
import itertools
import logging
import pathlib

import numpy as np

from experiments import flags as shared_flags, launch
from ssl_influence import checkpoints, config as config_lib, files, metrics
from ssl_influence.data import examples, rows, splits
from ssl_influence.reporting.weights_report import contents as contents_lib, page, suspects
from ssl_influence.serving import classifier as classifier_lib

_log = logging.getLogger("ssl_influence")


def write(
    model_dir: files.AnyPath,
    config: config_lib.Config,
    output: pathlib.Path,
    *,
    step: int | None,
    weights: str,
    max_examples: int,
    suspects_csv: pathlib.Path | None = None,
) -> None:
    """Writes the page about a run, and its suspects as CSV where that is asked for.

    Args:
      model_dir: the run's directory.
      config: its settings, with its data where they lie now.
      output: the page.
      step: of the weights and of the checkpoint that predicts; None: the newest.
      weights: which weights of the network predict, "ema" or "raw".
      max_examples: see `page.render`.
      suspects_csv: see `suspects.to_csv`.

    Raises:
      ConfigError: there is nothing to report, or the data are not the run's.
      CheckpointError: the checkpoint cannot be read.
      OSError: a file cannot be written.
    """
    with contextlib.ExitStack() as written:
        places = {}
        for path in filter(None, (output, suspects_csv)):
            places[path] = written.enter_context(files.replacing(path))
            places[path].touch()  # fails now rather than after minutes of predicting
        contents = gather(model_dir, config, step, weights)
        if suspects_csv is not None:
            # Names of files need not be UTF-8: their bytes stay what they are.
            table = _suspects(contents, suspects_csv).encode("utf-8", "surrogateescape")
            places[suspects_csv].write_bytes(table)
        places[output].write_text(page.render(contents, max_examples), encoding="utf-8")


def _suspects(contents: contents_lib.Contents, path: pathlib.Path) -> str:
    if not contents.learned:
        raise config_lib.ConfigError(
            f"--suspects_csv={path}: suspects are found by example weights that moved, and "
            f"{contents.name} has none: leave the flag out."
        )
    return suspects.to_csv(contents, suspects.rank(contents))


def gather(
    model_dir: files.AnyPath, config: config_lib.Config, step: int | None, weights: str
) -> contents_lib.Contents:
    """Reads the run, and predicts for its unlabeled examples.

    Raises: see `write`.
    """
    shown = metrics.read_metrics(model_dir / "metrics.jsonl")
    tables = {
        checkpoints.step_of(path.stem): path for path in model_dir.glob("weights/weights-*.csv")
    }
    if not shown and not tables:
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} holds neither metrics nor weights: train there first."
        )
    found = checkpoints.list_checkpoints(model_dir / "checkpoints")
    if step is not None and step not in tables:
        there = ", ".join(map(str, sorted(tables))) or "none"
        raise config_lib.ConfigError(
            f"--checkpoint={step}: there are no weights of that step. There are: {there}."
        )
    name = model_dir.resolve().name if files.is_local(model_dir) else model_dir.name
    contents = contents_lib.Contents(
        name=name,
        description=_description(config),
        settings=_settings(config),
        weighting=config.weights.weighting,
        train_steps=config.train.train_steps,
        metrics=[row for row in shown if step is None or row["step"] <= step],
        reached=max([*tables, *(row["step"] for row in shown)]),
        evaluation=[
            row for row in _evaluation(model_dir, config) if step is None or row["step"] <= step
        ],
    )
    if not tables:
        return contents
    if step is None:
        # A run that is being trained writes its weights after the checkpoint.
        step = max(tables.keys() & found.keys(), default=max(tables))
    read = _read_weights({s: path for s, path in sorted(tables.items()) if s <= step}, config)
    source, pool = _read_pool(model_dir, config, read.example_id)
    predictions = None
    if step in found:
        model = classifier_lib.load(model_dir, config, step=step, weights=weights)
        predictions = _predict(model, source.inputs, read.example_id, step, weights, config)
    return dataclasses.replace(contents, weights=read, pool=pool, predictions=predictions)


def _description(config: config_lib.Config) -> str:
    method, weights, train = config.method.name, config.weights.weighting, config.train
    named = {"per_example": "per-example weights", "single": "one learned weight"}
    return (
        f"{config.data.dataset}, {method} with {named.get(weights, 'a fixed weight')}, "
        f"{config.model.name}, {train.train_steps:,} steps, seed {train.seed}"
    )


def _settings(config: config_lib.Config) -> list[tuple[str, str]]:
    """What tells runs from one another, by the names of flags."""
    names = (
        *("dataset", "known_classes", "unlabeled_mismatch", "unlabeled_data"),
        *("model", "method", "weighting", "train_steps", "seed"),
        *("weight_init", "weight_lr", "weight_min", "weight_max", "weight_warmup_steps"),
        "weights_from",
        *("inner_steps", "influence_params", "inverse_hessian", "confidence", "ema_decay"),
        *("labeled_batch_size", "unlabeled_batch_size", "validation_batch_size"),
    )
    values = [(name, shared_flags.value(config, name)) for name in names]
    return [
        (name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value))
        for name, value in values
        if value not in (None, ())
    ]


def _evaluation(model_dir: files.AnyPath, config: config_lib.Config) -> list[dict]:
    """The rows of eval/results.jsonl, if they are of this run."""
    record = model_dir / "eval" / "flags.txt"
    if not record.exists():
        return []
    try:
        shared_flags.check_resumable(record, config)
    except config_lib.ConfigError as error:
        _log.warning("eval/ is left out, it is of another run: %s", error)
        return []
    return metrics.read_metrics(model_dir / "eval" / "results.jsonl")


def _read_weights(
    tables: dict[int, files.AnyPath], config: config_lib.Config
) -> contents_lib.Weights:
    """The weights in files by ascending step.

    Raises:
      ConfigError: one cannot be read, is empty, is of other examples, or holds what is no number.
    """
    history = {}
    for step, path in tables.items():
        try:
            ids, weight, updates = checkpoints.read_weights(path)
        except FileNotFoundError:  # training deletes it with its checkpoint
            continue
        history[step] = (ids, weight, updates)
        if not len(ids):
            raise config_lib.ConfigError(f"{path} holds no unlabeled example to report on.")
        if not np.isfinite(weight).all():
            raise config_lib.ConfigError(
                f"{path} holds a weight that is no finite number: mend it."
            )
    if not history:
        raise config_lib.ConfigError("All files of weights were deleted meanwhile: try again.")
    newest = max(history)
    ids, weight, updates = history[newest]
    for step, (others, _, _) in history.items():
        if not np.array_equal(ids, others):
            raise config_lib.ConfigError(
                f"{tables[step]} and {tables[newest]} are of other examples: remove the one that "
                "is not of this run."
            )
    settings = config.weights
    return contents_lib.Weights(
        step=newest,
        example_id=ids,
        weight=weight,
        updates=updates,
        history={step: held[1] for step, held in history.items()},
        initial=settings.initial,
        minimum=settings.minimum,
        maximum=settings.maximum,
    )


def _read_pool(
    model_dir: files.AnyPath, config: config_lib.Config, ids: np.ndarray
) -> tuple[examples.Source, contents_lib.Pool]:
    """The data of the run, and what is known of its unlabeled examples.

    Raises:
      ConfigError: they cannot be had, or are not those that the run began with.
    """
    source, split, name, config = launch.load_data(config)
    before = splits.read(model_dir / "split.json")
    paraphrases = before.get("paraphrases_sha256")
    digests = {"paraphrases_sha256": paraphrases} if paraphrases else {}
    splits.check(before, splits.manifest(split, name, source, config.data, digests))
    if not np.array_equal(ids, split.unlabeled):
        raise config_lib.ConfigError(
            f"The weights in {model_dir / 'weights'} are not of the unlabeled examples that "
            "split.json names: remove what is not of this run."
        )
    stranger = np.zeros(len(ids), bool) if source.strangers is None else source.strangers[ids]
    pool = contents_lib.Pool(
        kind=source.kind,
        class_names=source.class_names,
        inputs=source.inputs,
        label=source.labels[ids],
        stranger=stranger,
        names=None if source.names is None else [source.names[row] for row in ids.tolist()],
    )
    return source, pool


def _predict(
    model: classifier_lib.Classifier,
    inputs: rows.Rows,
    ids: np.ndarray,
    step: int,
    weights: str,
    config: config_lib.Config,
) -> contents_lib.Predictions:
    import tensorflow as tf

    classes, confidences = [], []
    together = config.train.evaluation_batch_size
    for start in itertools.count(0, together):
        batch = ids[start : start + together]
        if not len(batch):
            break
        probabilities, predicted = model.predict(tf.constant(rows.take(inputs, batch)))
        classes.append(predicted.numpy())
        confidences.append(probabilities.numpy().max(axis=1))
    confidence = np.concatenate(confidences)
    if not np.isfinite(confidence).all():
        raise config_lib.ConfigError(
            f"The model of step {step} gives probabilities that are no numbers: name another "
            "--checkpoint."
        )
    return contents_lib.Predictions(step, weights, np.concatenate(classes), confidence)
