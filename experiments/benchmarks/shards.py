"""A host's part of the work where the example weights of 10^9 examples are divided over 32 hosts.

A simulation, of one host: training keeps the whole table on every worker. Examples are divided
into 64 ranges of ids, each a table of its own and a file of its own; a host of 32 holds 2 of them,
one of 16 holds 4. A batch takes as many of each range (--unlabeled_batch_size is of all hosts).

Rows: "read" (what a theta step looks up: lambda of the host's examples), "weight_step" (all that
M-Adam needs of these is read, the rows of the whole batch are moved, as every host does, and the
host's written back), "save" and "restore" of the host's ranges, and "restore_of_16" by a host of
half as many. "bytes" are what the host sends to the others in that step, or its files. Needs 4 GB
of memory and 2 of disk.
"""

import pathlib
import tempfile
from collections.abc import Sequence

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

EXAMPLES = 10**9
RANGES = 64
HOSTS = 32

CASES = ("host",)
RATIOS = {"restore_of_16_over_32": timing.Ratio("restore_of_16", "restore")}
DEFAULTS = {"unlabeled_batch_size": "4096"}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for weights that are not each example's own, or another optimizer."""
    weights = config.weights
    if (weights.weighting, weights.optimizer) != ("per_example", "m_adam"):
        raise config_lib.ConfigError(
            f"weighting={weights.weighting} with weight_optimizer={weights.optimizer}: this suite "
            "divides the table of per_example and m_adam."
        )
    if config.data.unlabeled_batch_size % RANGES:
        raise config_lib.ConfigError(
            f"unlabeled_batch_size={config.data.unlabeled_batch_size} is no multiple of the "
            f"{RANGES} ranges."
        )


class Ranges:
    """The tables of some ranges of ids, of all the ranges that there are.

    Args:
      held: the numbers of the ranges, ascending.
      size: examples a range.
      weights: settings of the tables.
    """

    def __init__(self, held: Sequence[int], size: int, weights: config_lib.WeightConfig):
        from ssl_influence import training

        self.size = size
        self.tables = {number: training.make_example_weights(weights, size) for number in held}

    def read(self, ids, *, to_move: bool = False):
        """The rows of those of the ids [B], of all ranges, that lie in these; by ascending id."""
        import tensorflow as tf

        parts = []
        for number, table in self.tables.items():
            mine = tf.boolean_mask(ids, ids // self.size == number)
            rows = table.read(mine - number * self.size, to_move=to_move)
            parts.append(rows._replace(ids=rows.ids + number * self.size))
        return gathered(parts)

    def write(self, rows) -> None:
        """Puts back what lies in these ranges of the rows of a batch."""
        import tensorflow as tf

        for number, table in self.tables.items():
            mine = rows.ids // self.size == number
            table.write(
                rows._replace(
                    ids=tf.boolean_mask(rows.ids, mine) - number * self.size,
                    values=tuple(tf.boolean_mask(held, mine) for held in rows.values),
                    updates=tf.boolean_mask(rows.updates, mine),
                )
            )

    def save(self, folder: pathlib.Path) -> int:
        """Writes a file for each range; returns their bytes."""
        import tensorflow as tf

        for number, table in self.tables.items():
            tf.train.Checkpoint(table=table).write(str(folder / f"range-{number}"))
        return sum(
            path.stat().st_size
            for number in self.tables
            for path in folder.glob(f"range-{number}.*")
        )

    def restore(self, folder: pathlib.Path) -> None:
        """Reads the files of these ranges, whoever wrote them."""
        import tensorflow as tf

        for number, table in self.tables.items():
            status = tf.train.Checkpoint(table=table).read(str(folder / f"range-{number}"))
            status.assert_consumed()


def gathered(parts: Sequence):
    """The rows of several ranges, or hosts, in the order of their ids."""
    import tensorflow as tf

    return parts[0]._replace(
        ids=tf.concat([part.ids for part in parts], 0),
        values=tuple(tf.concat(held, 0) for held in zip(*(p.values for p in parts), strict=True)),
        updates=tf.concat([part.updates for part in parts], 0),
    )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a host; `repeats` of each."""
    import numpy as np
    import tensorflow as tf

    a_host = RANGES // HOSTS
    held, size = range(a_host), EXAMPLES // RANGES
    host = Ranges(held, size, config.weights)
    rng = np.random.default_rng(0)
    of_range = config.data.unlabeled_batch_size // RANGES
    drawn = rng.integers(size, size=[RANGES, of_range]) + size * np.arange(RANGES)[:, None]
    ids = tf.constant(drawn.ravel())
    gradients = tf.constant(rng.normal(size=len(ids)), tf.float32)
    # Rows of the other hosts, as they would arrive.
    mine = host.read(ids, to_move=True)
    others = [mine._replace(ids=mine.ids + number * a_host * size) for number in range(HOSTS)]
    batch = gathered(others)
    table = host.tables[0]

    def weight_step():
        rows = host.read(ids, to_move=True)
        host.write(table.moved(gathered([rows, *others[1:]]), batch.ids, gradients))

    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        calls = {
            "read": lambda: host.read(ids),
            "weight_step": weight_step,
            "save": lambda: host.save(place),
        }
        rows = timing.interleaved(calls, repeats, warmup=1)
        rows["save"]["bytes"] = host.save(place)
        for number in held:  # those of another host, as it would have written them
            ours, theirs = f"range-{number}.", f"range-{number + a_host}."
            for path in list(place.glob(f"{ours}*")):
                path.with_name(path.name.replace(ours, theirs)).hardlink_to(path)
        rows |= timing.interleaved({"restore": lambda: host.restore(place)}, repeats, warmup=1)
        half = Ranges(range(2 * a_host), size, config.weights)
        rows |= timing.interleaved(
            {"restore_of_16": lambda: half.restore(place)}, repeats, warmup=1
        )
    rows["read"]["bytes"] = _bytes(host.read(ids))
    rows["weight_step"]["bytes"] = _bytes(mine)
    rows["host"] = {"peak_memory_bytes": timing.peak_memory()}
    return rows


def _bytes(rows) -> int:
    return sum(int(held.shape[0]) * held.dtype.size for held in (*rows.values, rows.ids))
