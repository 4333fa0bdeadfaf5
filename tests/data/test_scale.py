"""A million examples: a split, its manifest and the first batch within seconds, in flat memory."""

import time
import tracemalloc

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names, pipeline, rows, splits

SIZE = 1_000_000


def test_a_million_examples_start_within_seconds_and_in_flat_memory(tmp_path):
    began = time.process_time()
    paths = rows.Strings(f"train/{i % 1000:04d}/{i:08d}.jpg" for i in range(SIZE))
    tracemalloc.start()
    lazy = rows.LazyImages(SIZE, (8, 8, 3), lambda row: np.full((8, 8, 3), row % 251, np.uint8), "")
    labels = (np.arange(SIZE) % 1000).astype(np.int32)
    few = rows.select(lazy, np.arange(100))
    class_names = [str(c) for c in range(1000)]
    source = examples.Source(
        "many", lazy, labels, few, labels[:100], class_names, False, names=paths
    )
    name = names.DatasetName("many", 1, 10_000, 5_000)
    split = splits.draw(source, name, config.DataConfig())
    splits.write(splits.manifest(split, name, source), tmp_path / "split.json")
    augment = config.AugmentConfig()
    built = pipeline.Pipeline(source, split, config.DataConfig(), augment, seed=1, views=("weak",))
    batch = next(iter(built.train_dataset(0, 2)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    ids = batch["unlabeled"]["example_id"].numpy()
    assert batch["unlabeled"]["weak"].shape == (320, 8, 8, 3) and len(np.unique(ids)) == 320
    assert len(split.unlabeled) == SIZE - 15_000
    np.testing.assert_array_equal(np.bincount(labels[split.labeled]), 10)
    # Labels take 4 bytes each, ids 8 and once more in a tensor; the images would take 192.
    assert held < 40 * SIZE
    assert time.process_time() - began < 60  # 12 s where nothing else runs
