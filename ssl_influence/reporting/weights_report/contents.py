"""What the page is about, as values: whoever asks for it has read the run."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ssl_influence.data import rows


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The example weights of a run. Entry i of every array is of one example.

    Attributes:
      step: that they are of.
      example_id: int64 [n], n >= 1.
      weight: lambda, float64 [n], finite.
      updates: how often each moved, int64 [n].
      history: step -> lambda [n], by ascending step; the last one is of `step`.
      initial: where all started, unless the run began with weights of another one.
      minimum, maximum: their bounds; the maximum is None where there is none.
    """

    step: int
    example_id: np.ndarray
    weight: np.ndarray
    updates: np.ndarray
    history: Mapping[int, np.ndarray]
    initial: float = 1.0
    minimum: float = 0.0
    maximum: float | None = None

    @property
    def at_bounds(self) -> dict[str, np.ndarray]:
        """The name of each bound -> bool [n], the examples that lie on it."""
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        # Lambda is projected to the bounds as they are in float32.
        return {
            name: self.weight.astype(np.float32) == np.float32(bound)
            for name, bound in bounds.items()
            if bound is not None
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The unlabeled examples that the weights are of, in their order.

    Attributes:
      kind: "image", "vector" or "text".
      class_names: of the task.
      inputs: those of all examples by id, as in `examples.Source`.
      label: the truth, int32 [n], -1 where it is unknown or no class of the task.
      stranger: bool [n], examples known to be of no class of the task.
      names: what each is called, such as its file's path [n]; None: by its id.
    """

    kind: str
    class_names: Sequence[str]
    inputs: rows.Rows
    label: np.ndarray
    stranger: np.ndarray
    names: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """What a checkpoint's model says of the unlabeled examples, without augmentation.

    Attributes:
      step: of the checkpoint.
      weights: "ema" or "raw", of which the model is.
      pseudo_label: the most probable class, int [n].
      confidence: its probability, float32 [n], finite.
    """

    step: int
    weights: str
    pseudo_label: np.ndarray
    confidence: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Contents:
    """A run.

    Attributes:
      name: of its directory.
      description: what run it is, in a line.
      settings: what is worth knowing of its settings, (name, value) in order.
      weighting: "per_example", "single" or "fixed".
      train_steps: after which it is finished.
      metrics: rows of metrics.jsonl by ascending step.
      evaluation: rows of eval/results.jsonl.
      reached: the newest step of the run, which the page may be of an earlier one of.
      weights: None where none were written yet; `pool` is None just then.
      predictions: None where there is no checkpoint to predict by.
    """

    name: str
    description: str
    settings: Sequence[tuple[str, str]]
    weighting: str
    train_steps: int
    metrics: Sequence[Mapping[str, float]]
    evaluation: Sequence[Mapping[str, float | str]] = ()
    reached: int = 0
    weights: Weights | None = None
    pool: Pool | None = None
    predictions: Predictions | None = None

    @property
    def learned(self) -> bool:
        """Whether examples have weights of their own, some of which have moved."""
        moved = self.weights is not None and bool(self.weights.updates.any())
        return moved and self.weighting == "per_example"
