"""Alarms: what a row of metrics shows of a run that goes wrong, and what to try.

An alarm is a pure function of what was `Seen` at a log line: a message of one line, or None where
all is well. Each sounds once a run; `Alarms` remembers which have.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

# Few examples pass a confidence threshold while the model is new. The cap is for long runs.
GRACE_SHARE, GRACE_STEPS = 0.1, 5000
# Below one example in a thousand, most batches of the usual sizes (100 to 1,000) have none.
MASK_RATE_NEAR_ZERO = 0.001
# A threshold that lets 99% pass within the grace period does not select.
MASK_RATE_NEAR_ONE = 0.99
# By a quarter of a run, one that works has long left chance, and predicts every class.
JUDGED_SHARE = 0.25
# With class-mismatched unlabeled data most weights may rightly sit at the minimum; not nearly all.
SHARE_AT_BOUND = 0.9
# Beyond this, a faster input pipeline shortens a run noticeably.
INPUT_WAIT = 0.2
# Seconds that a wait is measured over; within less, one hiccup of the machine is a large share.
INPUT_WAIT_WINDOW = 5.0
# A message stays one line with a thousand classes too.
CLASSES_NAMED = 10


@dataclasses.dataclass(frozen=True)
class Facts:
    """What does not change over a run.

    Attributes:
      train_steps: its length.
      confidence: the threshold of the method's mask; None or 0 if it has none, so that every
        unlabeled example takes part by design.
      minimum, maximum: the bounds of the example weights.
      validation_counts: validation examples of each class, [C].
      class_names: one for each class.
    """

    train_steps: int
    confidence: float | None
    minimum: float
    maximum: float
    validation_counts: np.ndarray
    class_names: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A row of metrics.jsonl with what an alarm needs beside it.

    Attributes:
      row: the metrics, by name, and "step".
      facts: of the run.
      never_predicted: the classes that "validation/classes_never_predicted" counts.
      first: no earlier row has a mask rate.
    """

    row: Mapping[str, float]
    facts: Facts
    never_predicted: Sequence[int] = ()
    first: bool = False

    @property
    def early(self) -> bool:
        """Whether the step lies in the grace period."""
        return self.row["step"] <= min(GRACE_SHARE * self.facts.train_steps, GRACE_STEPS)

    @property
    def judged(self) -> bool:
        """Whether the run is long enough on its way to be judged by its validation error."""
        return self.row["step"] >= JUDGED_SHARE * self.facts.train_steps


def never_predicted(validation_counts: np.ndarray, predicted_counts: np.ndarray) -> list[int]:
    """The classes that have examples [C] of which none was predicted, whichever it was [C]."""
    return np.flatnonzero((validation_counts > 0) & (predicted_counts == 0)).tolist()


def mask_rate_near_zero(seen: Seen) -> str | None:
    """Hardly any unlabeled example takes part after the grace period."""
    rate = seen.row.get("train/mask_rate")
    if not seen.facts.confidence or rate is None or seen.early or rate >= MASK_RATE_NEAR_ZERO:
        return None
    return (
        f"the mask rate is {rate:.2g}: hardly any unlabeled example passes "
        f"--confidence={seen.facts.confidence:g} and takes part. Try a lower one, or another "
        "--learning_rate where the accuracy on labeled examples is low too."
    )


def mask_rate_near_one(seen: Seen) -> str | None:
    """Nearly every unlabeled example takes part within the grace period already.

    Where no row falls into that, the first one is taken, if it comes early in the run.
    """
    rate = seen.row.get("train/mask_rate")
    early = seen.early or (seen.first and not seen.judged)
    if not seen.facts.confidence or rate is None or not early or rate <= MASK_RATE_NEAR_ONE:
        return None
    return (
        f"the mask rate is {rate:.3f} so early: nearly every pseudo-label passes "
        f"--confidence={seen.facts.confidence:g}, right or wrong. Try a higher one."
    )


def accuracy_at_chance(seen: Seen) -> str | None:
    """The validation error is no lower than that of always guessing the most frequent class."""
    error = seen.row.get("validation/error")
    if error is None or not seen.judged:
        return None
    counts = seen.facts.validation_counts
    chance = 100.0 * (1.0 - counts.max() / counts.sum())
    if error < chance or chance == 0:  # examples of one class tell nothing
        return None
    return (
        f"the validation error of {error:.1f}% is no better than always guessing one class "
        f"({chance:.1f}%). Try another --learning_rate, or a lower --batch_norm_momentum in a "
        "short run; look at the labels and at --normalization. If the supervised loss is low, the "
        "labeled examples are learned by heart: more of them are needed."
    )


def class_never_predicted(seen: Seen) -> str | None:
    """A class of the validation examples is predicted for none of them."""
    if not seen.judged or not seen.row.get("validation/classes_never_predicted"):
        return None
    names = [seen.facts.class_names[c] for c in seen.never_predicted[:CLASSES_NAMED]]
    classes = ", ".join(names)
    if len(seen.never_predicted) > CLASSES_NAMED:
        classes += f" and {len(seen.never_predicted) - CLASSES_NAMED} more"
    return (
        f"no validation example is predicted to be of class {classes}. See that enough labeled "
        "examples are; try a higher --confidence or a lower --unsupervised_weight, so that "
        "pseudo-labels of other classes do not take its place."
    )


def weights_at_minimum(seen: Seen) -> str | None:
    """Nearly all example weights sit at their lower bound, once nearly all have moved."""
    share = _share_at(seen, "minimum")
    if share is None:
        return None
    silent = ", so that their examples no longer take part" if seen.facts.minimum == 0 else ""
    return (
        f"{share:.0%} of the example weights sit at --weight_min={seen.facts.minimum:g}{silent}. "
        "Try more validation examples, a lower --weight_lr, a larger --damping or a higher "
        "--weight_min."
    )


def weights_at_maximum(seen: Seen) -> str | None:
    """Nearly all example weights sit at their upper bound, once nearly all have moved."""
    share = _share_at(seen, "maximum")
    if share is None:
        return None
    return (
        f"{share:.0%} of the example weights sit at --weight_max={seen.facts.maximum:g}, where "
        "they no longer tell examples apart. Try a lower --weight_lr or a higher --weight_max."
    )


def weight_steps_skipped(seen: Seen) -> str | None:
    """A weight step was left out since its linear system could not be solved."""
    skipped = seen.row.get("weights/skipped_steps", 0)
    if not skipped:
        return None
    return (
        f"{skipped} weight steps were skipped so far: the last layer's system could not be solved. "
        "A larger --damping makes it better conditioned."
    )


def input_is_slow(seen: Seen) -> str | None:
    """Training waits for its batches, after the grace period."""
    wait, window = (seen.row.get(f"time/{name}", 0.0) for name in ("input_wait", "window_s"))
    if seen.early or wait <= INPUT_WAIT or window < INPUT_WAIT_WINDOW:
        return None
    return (
        f"{wait:.0%} of the time went into waiting for batches: the input is slower than the "
        "model. Try more CPU cores, or a cheaper augmentation."
    )


def _share_at(seen: Seen, bound: str) -> float | None:
    """The share of weights at a bound where it is nearly all, and nearly all have moved."""
    share = seen.row.get(f"weights/share_at_{bound}", 0.0)
    moved = seen.row.get("weights/share_updated", 0.0)
    return share if min(share, moved) >= SHARE_AT_BOUND else None


ALARMS: tuple[Callable[[Seen], str | None], ...] = (
    mask_rate_near_zero,
    mask_rate_near_one,
    accuracy_at_chance,
    class_never_predicted,
    weights_at_minimum,
    weights_at_maximum,
    weight_steps_skipped,
    input_is_slow,
)


class Alarms:
    """Sounds each alarm once.

    Args:
      facts: of the run.
      rows: of its metrics so far, in a run that resumes: their alarms have been heard.
    """

    def __init__(self, facts: Facts, rows: Sequence[Mapping[str, float]] = ()):
        self._facts = facts
        self._silent = list(ALARMS)
        self._mask_rate_seen = False
        for row in rows:
            self.check(row)

    def check(self, row: Mapping[str, float], never_predicted: Sequence[int] = ()) -> list[str]:
        """The messages of the alarms that sound at this row for the first time."""
        seen = Seen(row, self._facts, never_predicted, first=not self._mask_rate_seen)
        self._mask_rate_seen |= "train/mask_rate" in row
        sounded = {alarm: message for alarm in self._silent if (message := alarm(seen))}
        self._silent = [alarm for alarm in self._silent if alarm not in sounded]
        return [f"At step {row['step']} {message}" for message in sounded.values()]
