"""Seeds of the initializers of a model, all derived from one."""

from collections.abc import Iterator

import numpy as np


def initializer_seeds(seed: int) -> Iterator[int]:
    """An endless stream of 31-bit seeds, one for each initializer, in the order of the layers.

    An initializer without its own seed draws from TensorFlow's global generator, so that its values
    depend on what else the program built before. NumPy keeps `SeedSequence` stable over versions.
    """
    index = 0
    while True:
        yield int(np.random.SeedSequence((seed, index)).generate_state(1)[0] >> 1)
        index += 1
