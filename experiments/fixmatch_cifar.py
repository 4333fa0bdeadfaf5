r"""FixMatch with per-example weights on images: CIFAR-10 as in the paper, or any other dataset.

The paper's experiment (WRN-28-2, CTAugment, 250 labels, 1,048,576 steps of 64 + 448 images; meant
for GPUs, of which the paper's took two of 16 GB; error 5.05 +- 0.12 in its Table 1 against 5.23 +-
0.28 for FixMatch with one fixed weight):

    python -m experiments.fixmatch_cifar \
        --flagfile=experiments/flagfiles/paper/fixmatch_cifar10_250.flags \
        --data_dir=/data/tfds --model_dir=/tmp/fixmatch_cifar10_250

The same binary on scikit-learn's digits, minutes on two CPU cores:

    python -m experiments.fixmatch_cifar --flagfile=experiments/flagfiles/digits/fixmatch.flags \
        --model_dir=/tmp/run

As the authors' release does it: experiments/flagfiles/published_code/fixmatch_cifar10_250.flags.

Running the same command again resumes. SIGTERM saves and exits.
"""

from experiments import command, one_run

one_run.define_flags(
    {"method": "fixmatch", "strong_view": "ctaugment", "dataset": "cifar10.1@250-1024"}
)


def main() -> int:
    return one_run.main("experiments.fixmatch_cifar")


if __name__ == "__main__":
    command.run(main)
