"""The paper's synthetic experiments: two_moons, circles and linear (Figures 1 and 3), on a CPU.

    python -m experiments.synthetic --dataset=two_moons --model_dir=/tmp/moons

10 labeled, 30 validation and 1,000 unlabeled points, pseudo-labels, two hidden layers of 100 ReLU,
Adam.
Trains supervised, fixed and per-example weights on the same points and prints their test errors
(under a minute on two cores).
"""

from experiments import command, comparison

comparison.define_flags(
    {
        "dataset": "two_moons.1@10-30",
        "model": "mlp",
        "method": "pseudo_label",
        "confidence": 0.0,
        "optimizer": "adam",
        "schedule": "constant",
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "ema_decay": 0.99,
        "labeled_batch_size": 10,
        "unlabeled_batch_size": 1000,
        "validation_batch_size": 30,
        "inner_steps": 1,
        "weight_lr": 0.05,
        "train_steps": 300,
        "log_every": 20,
        "eval_every": 20,
        "checkpoint_every": 100,
    }
)


def main() -> None:
    comparison.main("experiments.synthetic")


if __name__ == "__main__":
    command.run(main)
