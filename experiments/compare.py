"""Supervised, fixed and per-example weights on images, on the same split, seed and settings.

    python -m experiments.compare --flagfile=experiments/flagfiles/quickstart.flags
    --model_dir=/tmp/digits

Each row is a run of its own under --model_dir and prints its last test error, raw and averaged, and
how well low weights mark wrong pseudo-labels. With --seeds=1-5 the rows are repeated on five splits
and means, standard deviations and paired differences printed.
"""

from experiments import command, comparison

comparison.define_flags({"dataset": "cifar10.1@250-1024"})


def main() -> int:
    return 0 if comparison.main("experiments.compare") else command.STOPPED


if __name__ == "__main__":
    command.run(main)
