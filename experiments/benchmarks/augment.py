"""Images a second of the weak and strong views on one core, beside Pillow; and what training waits.

Rows: weak and strong (`ssl_influence.augment.policies` on a batch of unlabeled images, the strong
view as --strong_view has it), the other strong views by their names, CTAugment with the rates that
it starts with, and each of these by Pillow (for which the package pillow is needed), all in a
process that is pinned to one core; and training, steps through `Pipeline.train_dataset` on all
cores, with the share of the time that they wait for input.
"""

import functools
import os
import random
import time

import numpy as np

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

CASES = ("images", "training")

RATIOS = {
    f"{row}_pillow_over_library": timing.Ratio(f"{row}_pillow", row)
    for row in ("weak", "strong", *config_lib.STRONG_VIEWS)
}

EXAMPLES, LABELED, VALIDATION = 5_000, 250, 1_000
STEPS_PER_REPEAT = 4


def check(config: config_lib.Config) -> None:
    """Every setting will do."""


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case, on images of noise, uint8 32 x 32 x 3."""
    return _images(config, repeats) if case == "images" else _training(config, repeats)


def _images(config, repeats):
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import tensorflow as tf

    from ssl_influence.augment import ctaugment, policies

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    count, rng = config.data.unlabeled_batch_size, random.Random(0)
    images = np.random.default_rng(0).integers(0, 256, [count, 32, 32, 3], np.uint8)

    def library(view, augment):
        batch, rates = tf.constant(images), ctaugment.initial_rates()
        # Traced at once, or else TensorFlow warns of so many functions of the same code.
        make = tf.function(
            lambda draw: policies.views(
                batch, tf.stack([0, draw]), (view,), augment, True, rates=rates
            )
        ).get_concrete_function(tf.TensorSpec([], tf.int32))
        return lambda: make(tf.constant(rng.randrange(2**31)))[view].numpy()

    # The others' own settings are not those of --strong_view.
    shared = {
        name: getattr(config.augment, name) for name in ("flip", "shift", "cutout", "normalization")
    }
    settings = {"strong": config.augment} | {
        name: config_lib.AugmentConfig(strong=name, **shared)
        for name in config_lib.STRONG_VIEWS
        if name != config.augment.strong
    }
    calls = {"weak": library("weak", config.augment)}
    calls |= {row: library("strong", augment) for row, augment in settings.items()}
    try:
        from experiments.benchmarks import pillow_policy
    except ImportError:
        print("Pillow is not installed, so its rows are missing: pip install pillow.", flush=True)
    else:
        calls["weak_pillow"] = lambda: pillow_policy.weak(images, rng, config.augment)
        for row, augment in settings.items():
            calls[f"{row}_pillow"] = functools.partial(pillow_policy.strong, images, rng, augment)
    rows = timing.interleaved(calls, repeats)
    for row in rows.values():
        row["images_per_s"] = count / row["median_s"]
    return rows


def _training(config, repeats):
    from experiments import launch
    from experiments.benchmarks import steps
    from ssl_influence.data import examples, splits

    rng, classes = np.random.default_rng(0), steps.NUM_CLASSES
    images = rng.integers(0, 256, [EXAMPLES, *steps.IMAGE_SHAPE], np.uint8)
    labels = (np.arange(EXAMPLES) % classes).astype(np.int32)
    source = examples.Source(
        name="noise",
        inputs=images,
        labels=labels,
        test_inputs=images[:classes],
        test_labels=labels[:classes],
        class_names=[str(index) for index in range(classes)],
        flip=True,
    )
    split = splits.make(labels, classes, labeled=LABELED, validation=VALIDATION, seed=1)
    pipeline, trainer = launch.assemble(config, source, split)
    warmup, count = 2, STEPS_PER_REPEAT * repeats
    batches = iter(pipeline.train_dataset(0, warmup + count))
    for _ in range(warmup):
        steps.wait(trainer.theta_step(next(batches)))
    waited, begin = 0.0, time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - start
        steps.wait(trainer.theta_step(batch))
    total = time.perf_counter() - begin
    return {"training": {"steps": count, "mean_s": total / count, "wait_share": waited / total}}
