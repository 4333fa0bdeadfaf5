"""Which unlabeled examples are likely to be mislabeled by the model, or of another kind."""

import csv
import io

import numpy as np

from ssl_influence.reporting.weights_report import contents as contents_lib

LEAST = 24  # suspects that a small pool may have, a page of them


def least_updates(updates: np.ndarray) -> int:
    """How often a weight must have moved to count: half the median of those that did, at least 1.

    Args:
      updates: int [n].
    """
    moved = updates[updates > 0]
    return max(1, int(np.median(moved) / 2)) if len(moved) else 1


def rank(contents: contents_lib.Contents) -> np.ndarray:
    """Suspects, the most suspicious one first, as places in the arrays of `contents`, int64 [k].

    They are the examples whose weight lies below its start after `least_updates`, the one that the
    model is least confident about first, at most a tenth of all (or LEAST, if that is more); where
    nothing is predicted, and where it is equally confident, the lower weight comes first, and then
    the smaller id. There is none where no weights were learned.

    That order finds more wrong pseudo-labels and strangers than one by weight, see the studies of
    spoiled pools in BUILD_NOTES.md.
    """
    weights, predictions = contents.weights, contents.predictions
    if not contents.learned:
        return np.zeros(0, np.int64)
    # As float32 holds it: examples at the start are at just that.
    low = weights.weight < float(np.float32(weights.initial))
    found = np.flatnonzero(low & (weights.updates >= least_updates(weights.updates)))
    confidence = np.zeros(len(found)) if predictions is None else predictions.confidence[found]
    ranked = found[np.lexsort((weights.example_id[found], weights.weight[found], confidence))]
    return ranked[: max(LEAST, len(weights.weight) // 10)]


def to_csv(contents: contents_lib.Contents, ranked: np.ndarray) -> str:
    """Suspects as CSV, in their order.

    Columns: example_id, weight, updates, pseudo_label, confidence, label, name. Numbers read back
    as the same ones. Classes are by name; the label is `stranger` where an example is known to be
    of no class of the task, and empty where nothing is known. The name is that in the dataset, such
    as a file's path or a row, by which experiments.inspect_data calls it in examples.csv.
    """
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(
        ["example_id", "weight", "updates", "pseudo_label", "confidence", "label", "name"]
    )
    for place in ranked.tolist():
        identity, label = int(weights.example_id[place]), int(pool.label[place])
        predicted, confidence = "", ""
        if predictions is not None:
            predicted = pool.class_names[predictions.pseudo_label[place]]
            confidence = repr(float(predictions.confidence[place]))
        truth = pool.class_names[label] if label >= 0 else ""
        if pool.stranger[place]:
            truth = "stranger"
        name = str(identity) if pool.names is None else pool.names[place]
        weight, updates = repr(float(weights.weight[place])), int(weights.updates[place])
        writer.writerow([identity, weight, updates, predicted, confidence, truth, name])
    return written.getvalue()
