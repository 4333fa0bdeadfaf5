"""Points in the plane, see `ssl_influence.data.synthetic`."""

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names, synthetic


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """Training and test part are drawn in turn with the dataset's seed.

    There are as many training rows as leave exactly synthetic.UNLABELED beside labels + validation.
    """
    random, draw = np.random.RandomState(name.seed), synthetic.SHAPES[name.source].draw
    sizes = {
        examples.TRAIN: name.labels + name.validation + synthetic.UNLABELED,
        examples.TEST: synthetic.TEST,
    }
    parts = {}
    for part, size in sizes.items():
        inputs, labels = draw(size, random)
        parts[part] = examples.Examples(inputs.astype(np.float32), labels.astype(np.int32))
    return examples.Collection(name.source, ["0", "1"], parts)
