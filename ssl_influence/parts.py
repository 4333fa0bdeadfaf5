"""Forward passes over part of the rows at a time, and their gradients, for little memory.

The rows that do not fit are run in parts without keeping activations. What is made of all outputs
together, whatever it is, is differentiated by these outputs; then each part is run again, and its
share of the gradient added up (gradient accumulation that is exact for losses that look at all
rows, such as those with training signal annealing or MixUp). The price is one forward pass more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Outputs = tuple[tf.Tensor, tf.Tensor]
Run = Callable[[Any, tf.Tensor], Outputs]
Gradient = tf.Tensor | tf.IndexedSlices


class Recorded:
    """What `PassesInParts.forward` ran with a gradient, for `PassesInParts.gradients`.

    Attributes:
      outputs: (features, logits) of each pass, in turn.
    """

    def __init__(self):
        self.outputs: list[Outputs] = []
        self.inputs: list[list[tuple[Any, tf.Tensor]]] = []


class PassesInParts:
    """A function of rows, run over at most so many of them at once.

    One part begins when the one before has ended, or else all would lie in memory together.
    """

    def __init__(self, run: Run, rows: int, variables: Sequence[tf.Variable]):
        """Runs nothing.

        Args:
          run: (inputs: a nest of tensors [B, ...], key int64 [2]) -> (features [B, D],
            logits [B, C]), row by row but for what it draws by the key.
          rows: the most rows at once.
          variables: what gradients are taken by.
        """
        self._rows = rows
        self._variables = list(variables)
        # As functions, so that a graph holds the model twice and not once for each part.
        self._run = tf.function(run, autograph=False)

        def gradient(inputs, key, feature_gradient, logit_gradient):
            with tf.GradientTape() as tape:
                outputs = run(inputs, key)
            return tape.gradient(
                outputs,
                self._variables,
                output_gradients=[feature_gradient, logit_gradient],
                unconnected_gradients="zero",
            )

        self._gradient = tf.function(gradient, autograph=False)

    def forward(self, inputs: Any, key: tf.Tensor, recorded: Recorded | None = None) -> Outputs:
        """run(inputs), in parts; draws differ from those of all rows at once.

        Args:
          inputs: a nest of tensors [B, ...] with B known.
          key: int64 [2]; each part has one of its own made of it.
          recorded: takes the pass in, if its gradient will be asked for.
        """
        size = tf.nest.flatten(inputs)[0].shape[0]
        count = -(-size // self._rows)
        sizes = [len(part) for part in np.array_split(np.arange(size), count)]
        split = [tf.split(tensor, sizes) for tensor in tf.nest.flatten(inputs)]
        parts, outputs = [], []
        for number, tensors in enumerate(zip(*split, strict=True)):
            part = tf.nest.pack_sequence_as(inputs, tensors)
            # A key has the dtype of what is folded into it.
            data = tf.constant(number, key.dtype)
            part_key = tf.random.experimental.stateless_fold_in(key, data, alg="philox")
            parts.append((part, part_key))
            outputs.append(self._run(_after(outputs[-1:], part), part_key))
        features, logits = (tf.concat(pieces, 0) for pieces in zip(*outputs, strict=True))
        if recorded is not None:
            recorded.inputs.append(parts)
            recorded.outputs.append((features, logits))
        return features, logits

    def gradients(
        self, recorded: Recorded, output_gradients: Sequence[tuple[tf.Tensor, tf.Tensor]]
    ) -> list[list[Gradient]]:
        """The gradient by each variable, as few terms, which are to be added up.

        Dense ones are summed as they come; of sparse ones there is one for each part.

        Args:
          recorded: the passes.
          output_gradients: what is differentiated, by the outputs of each pass.
        """
        dense: list[tf.Tensor | None] = [None] * len(self._variables)
        sparse: list[list[tf.IndexedSlices]] = [[] for _ in self._variables]
        before = []
        for parts, gradients in zip(recorded.inputs, output_gradients, strict=True):
            sizes = [tf.nest.flatten(part)[0].shape[0] for part, _ in parts]
            pieces = zip(*(tf.split(gradient, sizes) for gradient in gradients), strict=True)
            for (part, key), (of_features, of_logits) in zip(parts, pieces, strict=True):
                found = self._gradient(_after(before, part), key, of_features, of_logits)
                for number, gradient in enumerate(found):
                    if isinstance(gradient, tf.IndexedSlices):
                        sparse[number].append(gradient)
                    elif dense[number] is None:
                        dense[number] = gradient
                    else:
                        dense[number] += gradient
                before = [total for total in dense if total is not None] or found
        return [
            [*slices, *([] if total is None else [total])]
            for slices, total in zip(sparse, dense, strict=True)
        ]


def _after(earlier: Any, inputs: Any) -> Any:
    """The inputs, once everything earlier has been computed."""
    with tf.control_dependencies(tf.nest.flatten(earlier, expand_composites=True)):
        return tf.nest.map_structure(tf.identity, inputs)
