r"""UDA with per-example weights on images: CIFAR-10 as in the paper, or any other image dataset.

The paper's experiment (WRN-28-2, 250 labels, 400,000 steps; meant for a GPU, error 5.53 +- 0.17 in
its Table 1 against 8.76 +- 0.90 for UDA with one fixed weight):

    python -m experiments.uda_cifar --flagfile=experiments/flagfiles/paper/uda_cifar10_250.flags \
        --data_dir=/data/tfds --model_dir=/tmp/uda_cifar10_250

The same binary on scikit-learn's digits, minutes on two CPU cores:

    python -m experiments.uda_cifar --flagfile=experiments/flagfiles/quickstart.flags \
        --model_dir=/tmp/run

Running the same command again resumes. SIGTERM saves and exits.
"""

from experiments import command, one_run

one_run.define_flags({"dataset": "cifar10.1@250-1024"})


def main() -> int:
    return one_run.main("experiments.uda_cifar")


if __name__ == "__main__":
    command.run(main)
