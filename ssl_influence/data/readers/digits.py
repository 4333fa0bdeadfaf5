"""scikit-learn's handwritten digits, which come with the package: nothing is downloaded."""

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images as images_lib, names


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """1,797 handwritten digits, 8x8, scaled from 0..16 to 0..255.

    The set has no test part of its own. Every fourth row of each class, in the order of the file,
    is the test part here: it depends on no seed, so that numbers of different splits compare.
    """
    from sklearn import datasets

    raw = datasets.load_digits()
    images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = raw.target.astype(np.int32)
    is_test = np.zeros(len(labels), bool)
    for c in np.unique(labels):
        is_test[np.flatnonzero(labels == c)[3::4]] = True
    return examples.Collection(
        name=name.source,
        class_names=[str(c) for c in raw.target_names],
        parts={
            part: examples.Examples(images_lib.fit(images[chosen], settings), labels[chosen])
            for part, chosen in ((examples.TRAIN, ~is_test), (examples.TEST, is_test))
        },
    )
