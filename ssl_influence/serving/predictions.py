"""Predictions for many inputs, as the rows of a table."""

import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from ssl_influence import config, serving
from ssl_influence.data import inputs as inputs_lib
from ssl_influence.serving import classifier as classifier_lib

_COLUMNS = ("input", "class", "probability")

_log = logging.getLogger("ssl_influence")


def table(
    classifier: classifier_lib.Classifier,
    batches: Iterable[tuple[Sequence[str], np.ndarray]],
    file_format: str = "csv",
    top: int | None = None,
) -> Iterator[str]:
    """The text of a table with a row for each input, a batch at a time.

    Numbers are written so that they read back as the same float32. "csv" has a header, and the
    columns input, class, probability and one for each class, by its name; or, with `top`, class_2,
    probability_2, class_3, ... "json" has a line {"input", "class", "probability", "probabilities":
    {class: probability, ...}} for each input, with `top` of the most probable ones alone, in
    descending order.

    Of texts, how many are empty or too long to be read whole is logged at the end.

    Args:
      classifier: makes the predictions.
      batches: (names, inputs as `classifier.inputs` says), as `reading.batches` gives them.
      file_format: one of serving.FORMATS.
      top: how many of the most probable classes are named; None gives all, in their own order.

    Raises:
      ConfigError: there is no such format, or fewer classes than `top`; a class has the name of
        another column.
    """
    if file_format not in serving.FORMATS:
        raise config.ConfigError(
            f"format={file_format!r} is not one of {', '.join(serving.FORMATS)}."
        )
    class_names = classifier.spec.class_names
    if top is not None and not 1 <= top <= len(class_names):
        raise config.ConfigError(
            f"top={top} is out of range: the model has {len(class_names)} classes."
        )
    if classifier.spec.tokenizer is not None:
        batches = _measured(classifier.spec, batches)
    if file_format == "json":
        return _json(classifier, batches, top)
    clashing = set(_COLUMNS) & set(class_names)
    if top is None and clashing:
        raise config.ConfigError(
            f"The class {sorted(clashing)[0]!r} has the name of another column of the table: use "
            "--format=json."
        )
    return _csv(classifier, batches, top)


def _measured(
    spec: inputs_lib.InputSpec, batches: Iterable[tuple[Sequence[str], np.ndarray]]
) -> Iterator[tuple[Sequence[str], np.ndarray]]:
    """The batches of texts; then logs how many have no word, and how many are cut."""
    total = empty = cut = 0
    length = spec.tokenizer.sequence_length
    for names, texts in batches:
        lengths = spec.built_tokenizer.lengths(tf.constant(texts)).numpy()
        total += len(texts)
        empty += np.count_nonzero(lengths == 2)  # [CLS] and [SEP]
        cut += np.count_nonzero(lengths > length)
        yield names, texts
    if empty or cut:
        _log.warning(
            "Of %d texts %d have no word, and %d are cut to %d tokens, their %s end kept.",
            total,
            empty,
            cut,
            length,
            spec.tokenizer.keep_end,
        )


def _csv(classifier, batches, top):
    class_names = classifier.spec.class_names
    header = [*_COLUMNS]
    for rank in range(2, 1 + (top or 0)):
        header += [f"class_{rank}", f"probability_{rank}"]
    if top is None:
        header += class_names
    rows = [header]  # Not written before there is a prediction to write.
    for names, best, order, texts in _predicted(classifier, batches, top):
        for row, name in enumerate(names):
            cells = [name, class_names[best[row]], texts[row][best[row]]]
            if top is None:
                cells += texts[row]
            else:
                for c in order[row][1:]:
                    cells += [class_names[c], texts[row][c]]
            rows.append(cells)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        yield text.getvalue()
        rows = []


def _json(classifier, batches, top):
    class_names = classifier.spec.class_names
    for names, best, order, texts in _predicted(classifier, batches, top):
        lines = []
        for row, name in enumerate(names):
            probability = [float(text) for text in texts[row]]
            line = {
                "input": name,
                "class": class_names[best[row]],
                "probability": probability[best[row]],
                "probabilities": {class_names[c]: probability[c] for c in order[row]},
            }
            lines.append(json.dumps(line) + "\n")
        yield "".join(lines)


def _predicted(classifier, batches, top):
    """(names, class predicted [B], classes shown [B][K], texts of probabilities [B][C])."""
    for names, inputs in batches:
        probabilities, best = (x.numpy() for x in classifier.predict(tf.constant(inputs)))
        order = np.broadcast_to(np.arange(probabilities.shape[1]), probabilities.shape)
        if top is not None:
            ranked = probabilities.copy()
            ranked[np.arange(len(best)), best] = np.inf  # Also where another rounds to the same.
            order = np.argsort(-ranked, axis=1, kind="stable")[:, :top]
        yield names, best.tolist(), order.tolist(), probabilities.astype(str).tolist()
