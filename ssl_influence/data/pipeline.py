"""Batches as a pure function of (seed, step): there is no iterator state to save or to lose.

Every role (labeled, unlabeled, validation) is an endless sequence: epoch after epoch, each a
permutation of its ids of its own. The batch at step k holds places k B to (k + 1) B - 1 of it, so
that an epoch holds each id exactly once, a batch may end one epoch and begin the next, and any step
can be computed without those before it. Augmentation draws from (seed, step) as well; that of
CTAugment also from the rates that were in force at the last step that was a multiple of its
interval, of which the augmenter holds a snapshot.
"""

import collections
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures

import numpy as np
import tensorflow as tf

from ssl_influence import config, graphs
from ssl_influence.augment import ctaugment, per_image, policies, text as text_lib
from ssl_influence.data import (
    examples,
    inputs as inputs_lib,
    paraphrases as paraphrases_lib,
    rows,
    splits,
    tokens,
)

Batch = dict[str, dict[str, tf.Tensor]]

# Indices of the streams of random numbers: a run's batches depend on them, so only append.
_TRAIN, _FRESH, _VALIDATION = range(3)
_LABELED_ORDER, _UNLABELED_ORDER, _LABELED_VIEWS, _UNLABELED_VIEWS, _VALIDATION_ORDER = range(5)
_PROBES = 5

# Batches that threads make at once where tf.data does not.
_MADE_AHEAD = min(os.cpu_count() or 1, 8)

_log = logging.getLogger(__name__)


class Pipeline:
    """The batches of a run.

    A labeled role smaller than its batch is repeated within it, as is usual with few labels. An
    unlabeled or validation role smaller than its batch is the whole batch: see the attributes.

    Attributes:
      spec: what the model takes.
      labeled_batch_size: B_l.
      unlabeled_batch_size: B_u, at most the number of unlabeled examples.
      validation_batch_size: B_v, at most the number of validation examples.
      paraphrases_sha256: of the paraphrases that strong views come from; None where they do not.
    """

    def __init__(
        self,
        source: examples.Source,
        split: splits.Split,
        data_config: config.DataConfig,
        augment_config: config.AugmentConfig,
        *,
        seed: int,
        views: tuple[str, ...],
        labeled_view: str = "weak",
        augmenter: ctaugment.CTAugment | None = None,
        tokenizer: tokens.TokenizerSpec | None = None,
    ):
        """Puts examples that are in memory into TensorFlow's, on the CPU.

        Args:
          source: the examples.
          split: their roles.
          data_config: gives the batch sizes.
          augment_config: how the views of images and texts are made; vectors are left as they are.
          seed: of the order of the examples and of their augmentation.
          views: of the unlabeled inputs, the keys of their batches: "weak", "strong", or further
            copies with draws of their own, "weak_2", "strong_3", ...
          labeled_view: of the labeled inputs.
          augmenter: the state of CTAugment; needed, and used, if `augment_config` names it and the
            views of images include a strong one.
          tokenizer: of texts, what makes token ids of them.

        Raises:
          ConfigError: views of unlabeled examples are asked for, and there are none; a view has no
            such name; strong views are to be made as those of another kind of inputs, or by a file
            of paraphrases that does not fit.
          ValueError: CTAugment is asked for without an augmenter.
        """
        for name in views:
            policies.view_index(name)
        if views and not len(split.unlabeled):
            raise config.ConfigError(
                f"The dataset {source.name} has no unlabeled example left beside "
                f"{len(split.labeled)} labeled and {len(split.validation)} validation examples: "
                "ask for fewer of these."
            )
        self._is_image = source.is_image
        self.spec = inputs_lib.of(source, augment_config, tokenizer)
        self._strong_text, self.paraphrases_sha256 = None, None
        if any(map(policies.is_strong, views)):
            _check_kind_of_views(augment_config.strong, source)
            if tokenizer is not None:
                self._strong_text, self.paraphrases_sha256 = _strong_texts(
                    source, split, augment_config, self.spec.built_tokenizer
                )
        self._flip = source.flip
        self._augment = augment_config
        self._views = tuple(views)
        self._labeled_view = labeled_view
        self._augmenter = None
        if uses_ctaugment(augment_config, (*views, labeled_view), is_image=source.is_image):
            if augmenter is None:
                raise ValueError("strong='ctaugment' needs its state: pass augmenter.")
            if min(source.inputs.shape[1:3]) < 5:
                raise config.ConfigError(
                    f"strong_view=ctaugment blurs over 5 x 5 pixels, and images of {source.name} "
                    f"are {source.inputs.shape[1]} x {source.inputs.shape[2]}: use another."
                )
            self._augmenter = augmenter
        if source.is_image:
            if augment_config.shift is not None:
                per_image.check_shift(augment_config.shift, *source.inputs.shape[1:3])
            # Cutout and pixels from outside are 0 after normalization, as in UDA's code.
            self._fill = self.spec.zero_level
        self._test_size = len(source.test_labels)
        self._validation_size = len(split.validation)
        self.labeled_batch_size = data_config.labeled_batch_size
        self.unlabeled_batch_size = _at_most(
            "unlabeled", data_config.unlabeled_batch_size, len(split.unlabeled)
        )
        self.validation_batch_size = _at_most(
            "validation", data_config.validation_batch_size, len(split.validation)
        )
        # Eager tensors, which traced functions take by reference: no graph holds a copy of them.
        with tf.device("/cpu:0"):
            self._read = _reader(source.inputs)
            self._labels = tf.constant(source.labels)
            self._read_test = _reader(source.test_inputs)
            self._test_labels = tf.constant(source.test_labels)
            self._ids = {role: tf.constant(getattr(split, role), tf.int64) for role in splits.ROLES}
            self._seed = tf.constant([seed, 0], tf.int64)
        self._lazy, self._lazy_test = (
            isinstance(inputs, rows.LazyImages) for inputs in (source.inputs, source.test_inputs)
        )
        self._train, self._fresh = (
            _composed(
                functools.partial(self._training_ids, stream),
                self._read,
                functools.partial(self._training_batch, stream),
                lazy=self._lazy,
            )
            for stream in (_TRAIN, _FRESH)
        )
        self._evaluation = {}
        self._validation = _composed(
            self._validation_ids, self._read, self._validation_batch, lazy=self._lazy
        )

    def train_batch(self, step: int | tf.Tensor) -> Batch:
        """The training batch of a step.

        May be called in a tf.function and in tf.data, unless inputs are lazy.

        Args:
          step: int64 scalar.

        Returns:
          {"labeled": {"inputs": float32 [B_l, ...], "label": int32 [B_l], "example_id": int64 [B_l]
          }, "unlabeled": {a view: float32 [B_u, ...], ..., "label": int32 [B_u], the truth or -1,
          "example_id": int64 [B_u]}}. Labeled images are of `labeled_view`. With CTAugment also
          "probe": {"inputs": float32 [B_l, ...], "label": int32 [B_l], "slots": int32 [B_l, S]},
          the labeled images as `ctaugment.probe` makes them, and strong views are drawn by the
          augmenter's snapshot.
        """
        return self._train(*self._state(step))

    def fresh_batch(self, step: int | tf.Tensor) -> Batch:
        """As `train_batch`, from a stream of examples and augmentations of its own, unprobed."""
        return self._fresh(*self._state(step))

    def validation_batch(self, step: int | tf.Tensor) -> dict[str, tf.Tensor]:
        """Validation examples without augmentation.

        Args:
          step: int64 scalar. Consecutive values visit each example once an epoch.

        Returns:
          {"inputs": float32 [B_v, ...], "label": int32 [B_v], "example_id": int64 [B_v]}.

        Raises:
          ConfigError: there is no validation example.
        """
        if not self._validation_size:
            raise config.ConfigError(
                "The dataset was split without validation examples, and a validation batch is "
                "needed: ask for some at the end of its name, for example cifar10.1@250-1024."
            )
        return self._validation(tf.cast(step, tf.int64))

    def train_dataset(self, start_step: int, stop_step: int) -> Iterable[Batch]:
        """The training batches of steps start_step to stop_step - 1, made ahead of their use.

        With CTAugment, a snapshot of its rates is taken whenever the batch of a step that is a
        multiple of the interval is asked for: train on each batch before asking for the next. A run
        that starts within an interval goes on with the snapshot that its checkpoint holds.

        Args:
          start_step: the first.
          stop_step: the last and one.

        Returns:
          A tf.data.Dataset; where inputs are lazy, batches that threads make; with CTAugment an
          iterator, since nothing may be made ahead across a snapshot.

        Raises:
          ConfigError: while it is gone through, a lazy input cannot be read.
        """
        if self._augmenter is not None:
            return self._adapting_batches(start_step, stop_step)
        if self._lazy:
            return _InThreads(self.train_batch, range(start_step, stop_step))
        return _dataset(self.train_batch, start_step, stop_step)

    def weight_step_dataset(
        self, start_step: int, stop_step: int, *, fresh: bool = False
    ) -> tf.data.Dataset:
        """What `validation_batch`, or `fresh_batch`, gives for each of these weight steps.

        Not where inputs are lazy.
        """
        batch = self.fresh_batch if fresh else self.validation_batch
        return _dataset(batch, start_step, stop_step)

    def _adapting_batches(self, start_step: int, stop_step: int) -> Iterator[Batch]:
        interval = self._augment.ctaugment_interval
        while start_step < stop_step:
            if start_step % interval == 0:
                self._augmenter.take_snapshot()
            end = min(stop_step, start_step - start_step % interval + interval)
            # The value: the variable may change while batches are made.
            rates = self._augmenter.snapshot.read_value()
            # Not tf.data, which prepares a pipeline anew, for seconds, after every snapshot.
            yield from _InThreads(lambda k, r=rates: self._train(k, r), range(start_step, end))
            start_step = end

    def evaluation_batches(self, role: str, batch_size: int) -> Iterable[dict[str, tf.Tensor]]:
        """All examples of a role once, in the order of their ids, without augmentation.

        Args:
          role: "validation", "unlabeled" or "test".
          batch_size: B, but for a role that has fewer examples; the last batch is filled up with
            zeros.

        Returns:
          {"inputs": float32 [B, ...], "label": int32 [B], "example_id": int64 [B] (the row
          in its part of the source), "mask": bool [B], false where filled up}.
        """
        if role not in ("validation", "unlabeled", "test"):
            raise ValueError(f"role={role!r} is not one of validation, unlabeled, test.")
        is_test = role == "test"
        size = self._test_size if is_test else self._ids[role].shape[0]
        batch_size = min(batch_size, max(size, 1))
        labels = self._test_labels if is_test else self._labels

        def draw(index):
            place = index * batch_size + tf.range(batch_size, dtype=tf.int64)
            mask = place < size
            place = tf.where(mask, place, 0)
            return {role: place if is_test else tf.gather(self._ids[role], place), "mask": mask}

        def finish(drawn, inputs, index):
            mask, found = drawn["mask"], _rows(drawn[role], inputs[role], labels)
            found["inputs"] = self.spec.normalize(found["inputs"])
            filled = {
                name: tf.where(_expand(mask, value), value, tf.zeros_like(value))
                for name, value in found.items()
            }
            return {**filled, "mask": mask}

        read, lazy = self._read, self._lazy
        if is_test:
            read, lazy = self._read_test, self._lazy_test
        key = role, batch_size
        if key not in self._evaluation:  # not traced anew for every evaluation
            self._evaluation[key] = _composed(draw, read, finish, lazy=lazy)
        batch = self._evaluation[key]
        count = -(-size // batch_size)
        if lazy:
            return _InThreads(batch, range(count))
        return _dataset(batch, 0, count)

    def _state(self, step: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
        """What the batch of a step is a function of, beside the seed."""
        step = tf.cast(step, tf.int64)
        return (step,) if self._augmenter is None else (step, self._augmenter.snapshot.read_value())

    def _training_ids(
        self, stream: int, step: tf.Tensor, rates: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        return {
            "labeled": self._draw("labeled", self.labeled_batch_size, stream, _LABELED_ORDER, step),
            "unlabeled": self._draw(
                "unlabeled", self.unlabeled_batch_size, stream, _UNLABELED_ORDER, step
            ),
        }

    def _training_batch(
        self,
        stream: int,
        ids: Mapping[str, tf.Tensor],
        inputs: Mapping[str, tf.Tensor],
        step: tf.Tensor,
        rates: tf.Tensor | None = None,
    ) -> Batch:
        batch = {}
        for role, purpose, names in (
            ("labeled", _LABELED_VIEWS, (self._labeled_view,)),
            ("unlabeled", _UNLABELED_VIEWS, self._views),
        ):
            found = _rows(ids[role], inputs[role], self._labels)
            seed = self._stream_seed(stream, purpose, step)
            made = self._make_views(found.pop("inputs"), ids[role], seed, names, rates)
            batch[role] = {**made, **found}
        batch["labeled"]["inputs"] = batch["labeled"].pop(self._labeled_view)
        if rates is not None and stream == _TRAIN:
            seed = self._stream_seed(stream, _PROBES, step)
            probes, slots = self._probe(inputs["labeled"], seed)
            label = batch["labeled"]["label"]
            batch["probe"] = {"inputs": probes, "label": label, "slots": slots}
        return batch

    def _probe(self, images: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        flip, shift = policies.weak_settings(self._augment, self._flip, images.shape[1])
        probes, slots = ctaugment.probe(images, seed, self._augment, flip=flip, shift=shift)
        return self.spec.normalize(probes), slots

    def _validation_ids(self, step: tf.Tensor) -> dict[str, tf.Tensor]:
        size = self.validation_batch_size
        return {"validation": self._draw("validation", size, _VALIDATION, _VALIDATION_ORDER, step)}

    def _validation_batch(
        self, ids: Mapping[str, tf.Tensor], inputs: Mapping[str, tf.Tensor], step: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        found = _rows(ids["validation"], inputs["validation"], self._labels)
        return {**found, "inputs": self.spec.normalize(found["inputs"])}

    def _draw(
        self, role: str, batch_size: int, stream: int, purpose: int, step: tf.Tensor
    ) -> tf.Tensor:
        seed = self._stream_seed(stream, purpose)
        places = shuffled_places(self._ids[role].shape[0], batch_size, seed, step)
        return tf.gather(self._ids[role], places)

    def _make_views(
        self,
        inputs: tf.Tensor,
        ids: tf.Tensor,
        seed: tf.Tensor,
        names: tuple[str, ...],
        rates: tf.Tensor | None = None,
    ) -> Mapping[str, tf.Tensor]:
        if self._strong_text is not None:
            plain = self.spec.normalize(inputs)
            return {
                name: self._strong_text(inputs, ids, _fold_in(seed, policies.view_index(name)))
                if policies.is_strong(name)
                else plain
                for name in names
            }
        if not self._is_image:
            made = self.spec.normalize(inputs)
            return {name: made for name in names}
        made = policies.views(
            inputs, seed, names, self._augment, self._flip, fill=self._fill, rates=rates
        )
        return {name: self.spec.normalize(view) for name, view in made.items()}

    def _stream_seed(self, stream: int, purpose: int, step: tf.Tensor | None = None) -> tf.Tensor:
        seed = _fold_in(_fold_in(self._seed, stream), purpose)
        return seed if step is None else _fold_in(seed, step)


def _reader(inputs: rows.Rows) -> Callable[[tf.Tensor], tf.Tensor]:
    """What maps ids [B] to inputs [B, ...], in a graph unless they are lazy."""
    if isinstance(inputs, np.ndarray):
        held = tf.constant(inputs, tf.string if inputs.dtype == object else None)
        return lambda ids: tf.gather(held, ids)
    return lambda ids: tf.constant(inputs.read(ids.numpy()))


def _check_kind_of_views(strong: str, source: examples.Source) -> None:
    """Raises ConfigError where strong views are made as those of other inputs."""
    of_texts = strong in config.TEXT_VIEWS
    if source.kind == "text" and not of_texts:
        raise config.ConfigError(
            f"strong_view={strong} is for images, and {source.name} holds texts: use "
            f"{' or '.join(config.TEXT_VIEWS)}."
        )
    if source.kind != "text" and of_texts:
        raise config.ConfigError(
            f"strong_view={strong} is for texts, and {source.name} holds {source.kind}s: "
            + (f"use {' or '.join(config.STRONG_VIEWS)}." if source.is_image else "leave it out.")
        )


def _strong_texts(
    source: examples.Source,
    split: splits.Split,
    augment_config: config.AugmentConfig,
    tokenizer: tokens.Tokenizer,
) -> tuple[Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor], str | None]:
    """What makes strong views of texts, and the digest of the paraphrases it has, if any.

    It is (texts string [B], ids [B], seed int64 [2]) -> token ids int32 [B, L].
    """
    if augment_config.strong == "paraphrases":
        held = paraphrases_lib.read(augment_config.paraphrases, source.inputs, split.unlabeled)
        with tf.device("/cpu:0"):
            texts, starts = tf.constant(held.texts, tf.string), tf.constant(held.starts)
        digest = rows.digest(np.array(held.texts, object), held.starts)
        pick = functools.partial(paraphrases_lib.pick, texts, starts)
        return lambda texts, ids, seed: tokenizer.encode(pick(ids, seed)), digest
    unlabeled = source.inputs[split.unlabeled]
    _log.info("Counting the words of %d unlabeled texts for tf_idf.", len(unlabeled))
    corpus = (tokenizer.words(tf.constant(part, tf.string)) for part in rows.in_turn(unlabeled))
    statistics = text_lib.TfIdf.of(corpus)
    probability = augment_config.tf_idf_probability

    def replaced(texts, ids, seed):
        words = statistics.replace(tokenizer.words(texts), seed, probability)
        return tokenizer.encode_words(words)

    return replaced, None


def _composed(
    draw: Callable, read: Callable[[tf.Tensor], tf.Tensor], finish: Callable, *, lazy: bool
) -> Callable:
    """finish(ids, inputs, ...), ids = draw(...), inputs = read(...), as one graph, on the CPU.

    Of lazy inputs, two graphs between which Python reads. Not one graph that calls Python
    (tf.numpy_function): its threads would wait for the interpreter while that ends, for ever.

    Args:
      draw: (step, ...) -> {role: ids [B], and perhaps "mask"}.
      read: see `_reader`.
      finish: (what `draw` gave, {role: inputs}, step, ...) -> the batch.
      lazy: whether inputs are read by Python.
    """
    graph = functools.partial(tf.function, autograph=False)
    first, second = (graph(draw), graph(finish)) if lazy else (draw, finish)

    def whole(step, *rest):
        with tf.device("/cpu:0"):
            drawn = first(step, *rest)
            inputs = {role: read(ids) for role, ids in drawn.items() if role != "mask"}
            return second(drawn, inputs, step, *rest)

    return whole if lazy else graph(whole)


def _dataset(make: Callable[[tf.Tensor], Batch], start: int, stop: int) -> tf.data.Dataset:
    """make(step) of each step in turn, made ahead of its use.

    tf.data does not tune how many at a time: the thread that does so sleeps for up to a minute at a
    time, and an iterator that is given up before its end waits for it, so that a run which was
    asked to stop would only end then.
    """
    make = graphs.as_written(make)
    batches = tf.data.Dataset.range(start, stop).map(make, _MADE_AHEAD, deterministic=True)
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)


def _rows(ids: tf.Tensor, inputs: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
    return {"inputs": inputs, "label": tf.gather(labels, ids), "example_id": ids}


class _InThreads:
    """make(step) of each step in turn, made by threads ahead of its use; re-iterable."""

    def __init__(self, make: Callable[[tf.Tensor], Batch], steps: Iterable[int]):
        self._make, self._steps = make, steps

    def __iter__(self) -> Iterator[Batch]:
        with futures.ThreadPoolExecutor(_MADE_AHEAD, "batches") as pool:
            yield from _made_ahead(pool, self._make, self._steps)


def _made_ahead(
    pool: futures.Executor, make: Callable[[tf.Tensor], Batch], steps: Iterable[int]
) -> Iterator[Batch]:
    """make(step) for each step, in order, some of them at once and ahead of their use."""
    waiting = collections.deque()
    try:
        for step in steps:
            waiting.append(pool.submit(make, tf.constant(step, tf.int64)))
            if len(waiting) > _MADE_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for batch in waiting:
            batch.cancel()


def uses_ctaugment(
    augment_config: config.AugmentConfig, views: tuple[str, ...], *, is_image: bool
) -> bool:
    """Whether a `Pipeline` with these settings needs a CTAugment."""
    return is_image and augment_config.strong == "ctaugment" and any(map(policies.is_strong, views))


def shuffled_places(size: int, batch_size: int, seed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Places step * B to (step + 1) * B - 1 of an endless sequence of permutations of range(size).

    Args:
      size: n, 0 only if batch_size is.
      batch_size: B.
      seed: int64 [2].
      step: int64 scalar.

    Returns:
      int64 [B], each in [0, n).
    """
    if batch_size == 0:
        return tf.zeros([0], tf.int64)
    position = step * batch_size + tf.range(batch_size, dtype=tf.int64)
    epoch = position // size
    # tf.random.experimental.index_shuffle would take the epoch as a seed, but the op under it uses
    # only the low 8 bits of each word of its seed: epochs 256 apart would be the same permutation.
    # Hence three hashed words an epoch.
    words = tf.map_fn(
        lambda e: tf.random.stateless_uniform(
            [3], _fold_in(seed, e), None, None, tf.int32, alg="philox"
        ),
        epoch[0] + tf.range(1 + -(-(batch_size - 1) // size), dtype=tf.int64),
        fn_output_signature=tf.TensorSpec([3], tf.int32),
    )
    return tf.raw_ops.RandomIndexShuffle(
        index=position % size,
        seed=tf.gather(words, epoch - epoch[0]),
        max_index=tf.constant(size - 1, tf.int64),
        rounds=4,
    )


def _at_most(role: str, batch_size: int, size: int) -> int:
    if batch_size > size:
        _log.info(
            "There are %d %s examples: their batch holds all of them, not %d.",
            size,
            role,
            batch_size,
        )
    return min(batch_size, size)


def _fold_in(seed: tf.Tensor, data: int | tf.Tensor) -> tf.Tensor:
    """A new int64 [2] seed. Philox by name: the default depends on the device."""
    return tf.random.experimental.stateless_fold_in(seed, tf.cast(data, tf.int64), alg="philox")


def _expand(mask: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The mask [B] with as many axes as the value, to broadcast against it."""
    return tf.reshape(mask, [-1] + [1] * (value.shape.rank - 1))
