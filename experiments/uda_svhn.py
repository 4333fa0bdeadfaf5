r"""UDA with per-example weights on SVHN, as in the paper.

The paper's experiment (WRN-28-2, 250 labels, 400,000 steps of 64 + 320 images; meant for a GPU, of
which the paper's took one of 16 GB; error 2.45 +- 0.08 in its Table 1 against 2.76 +- 0.17 for UDA
with one fixed weight):

    python -m experiments.uda_svhn --flagfile=experiments/flagfiles/paper/uda_svhn_250.flags \
        --data_dir=/data/tfds --model_dir=/tmp/uda_svhn_250

Running the same command again resumes. SIGTERM saves and exits.
"""

from experiments import command, one_run

one_run.define_flags({"dataset": "svhn_cropped.1@250-1024"})


def main() -> int:
    return one_run.main("experiments.uda_svhn")


if __name__ == "__main__":
    command.run(main)
