r"""Writes near copies of a few training images, to see what they do to a pool of unlabeled ones.

    python -m experiments.near_copies --dataset=digits --count=1000 --output=/tmp/copies.npz
    python -m experiments.uda_cifar --flagfile=experiments/flagfiles/digits/uda.flags \
        --unlabeled_data=npz:/tmp/copies.npz --unlabeled_mismatch=0.4 --model_dir=/tmp/run

A pool that was collected from the Web holds the same picture many times, not bit for bit. Here
--originals images, drawn by --seed, are copied in turn until there are --count: each copy is moved
by up to a pixel either way (the rim repeats) and has noise of --noise gray levels. The file gives
them a class of their own, "near copy", so that a run with --unlabeled_mismatch, their share of the
pool, takes them for strangers: nothing trains on that, and sweeps and reports tell how well low
weights find them.
"""

import math

import numpy as np
from absl import flags

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib, files

shared_flags.define()
_ORIGINALS = flags.DEFINE_integer("originals", 10, "Images that are copied.", lower_bound=1)
_COUNT = flags.DEFINE_integer("count", None, "Copies in all.", required=True, lower_bound=1)
_NOISE = flags.DEFINE_float(
    "noise", 4.0, "Standard deviation of the noise, in gray levels of 255.", lower_bound=0
)
_OUTPUT = flags.DEFINE_string("output", None, "File to write, .npz.", required=True)


def main() -> None:
    config = shared_flags.to_config()
    output = shared_flags.output_file(_OUTPUT)
    if output.suffix != ".npz":
        raise config_lib.ConfigError(f"--output={output}: name a file that ends in .npz.")
    if not math.isfinite(_NOISE.value):
        raise config_lib.ConfigError(f"--noise={_NOISE.value}: name a number of gray levels.")
    from experiments import launch
    from ssl_influence.data import duplicates, rows

    source, *_ = launch.load_data(config)
    if not source.is_image:
        raise config_lib.ConfigError(
            f"--dataset={config.data.dataset} has no images, which near copies are made of."
        )
    if len(source.labels) < _ORIGINALS.value:
        raise config_lib.ConfigError(
            f"--originals={_ORIGINALS.value}: there are {len(source.labels)} training images."
        )
    random = np.random.default_rng(config.train.seed)
    ids = random.permutation(len(source.labels))[: min(_ORIGINALS.value, _COUNT.value)]
    originals = rows.take(source.inputs, ids)
    try:
        copies = duplicates.near_copies(originals, _COUNT.value, _NOISE.value, random)
    except MemoryError as error:
        raise config_lib.ConfigError(
            f"--count={_COUNT.value}: so many do not fit into memory: name less."
        ) from error
    try:
        with files.replacing(output) as temporary, temporary.open("wb") as file:
            np.savez_compressed(
                file,
                unlabeled_images=copies,
                unlabeled_labels=np.zeros(len(copies), np.int64),
                class_names=np.array(["near copy"]),
            )
    except OSError as error:
        raise config_lib.ConfigError(
            f"--output={output} cannot be written ({error.strerror}): name another file."
        ) from error
    print(f"wrote {len(copies)} near copies of the examples {', '.join(map(str, sorted(ids)))}.")


if __name__ == "__main__":
    command.run(main)
