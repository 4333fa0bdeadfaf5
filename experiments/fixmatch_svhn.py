r"""FixMatch with per-example weights on SVHN, as in the paper.

The paper's experiment (WRN-28-2, CTAugment, 250 labels, 1,048,576 steps of 64 + 448 images; meant
for GPUs, of which the paper's took two of 16 GB; error 2.63 +- 0.23 in its Table 1 against 2.77 +-
0.73 for FixMatch with one fixed weight):

    python -m experiments.fixmatch_svhn \
        --flagfile=experiments/flagfiles/paper/fixmatch_svhn_250.flags \
        --data_dir=/data/tfds --model_dir=/tmp/fixmatch_svhn_250

As the authors' release does it: experiments/flagfiles/published_code/fixmatch_svhn_250.flags.

Running the same command again resumes. SIGTERM saves and exits.
"""

from experiments import command, one_run

one_run.define_flags(
    {"method": "fixmatch", "strong_view": "ctaugment", "dataset": "svhn_cropped.1@250-1024"}
)


def main() -> int:
    return one_run.main("experiments.fixmatch_svhn")


if __name__ == "__main__":
    command.run(main)
