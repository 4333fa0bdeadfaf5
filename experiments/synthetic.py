r"""The paper's synthetic experiments: two_moons, circles and linear (Figures 1 and 3), on a CPU.

    python -m experiments.synthetic --dataset=two_moons --model_dir=/tmp/moons

10 labeled, 30 validation and 1,000 unlabeled points, pseudo-labels, two hidden layers of 100 ReLU,
Adam. Trains supervised, fixed and per-example weights on the same points, prints their test errors
and how well low weights mark wrong pseudo-labels, and draws the boundaries that were learned, with
the points shaded by their weights: boundaries.png, at --draw_steps, and boundaries.gif, at every
checkpoint (about a minute on two cores).

Over many seeds it prints means, standard deviations and paired differences instead:

    python -m experiments.synthetic --flagfile=experiments/flagfiles/studies/synthetic.flags \
        --dataset=two_moons --model_dir=/tmp/moons20
"""

from absl import flags

from experiments import command, comparison, flags as shared_flags
from ssl_influence import config as config_lib
from ssl_influence.data import sources, synthetic

comparison.define_flags(
    {
        "dataset": "two_moons.1@10-30",
        "model": "mlp",
        "method": "pseudo_label",
        "confidence": 0.0,
        "ramp_up": 0.0,
        "optimizer": "adam",
        "schedule": "constant",
        "learning_rate": 0.003,
        "weight_decay": 0.0,
        "ema_decay": 0.99,
        "labeled_batch_size": 10,
        "unlabeled_batch_size": 1000,
        "validation_batch_size": 30,
        "inner_steps": 1,
        "weight_lr": 0.2,
        "train_steps": 300,
        "log_every": 20,
        "eval_every": 20,
        "checkpoint_every": 20,
    }
)
_DRAW_STEPS = flags.DEFINE_list(
    "draw_steps",
    [],
    "Steps to draw in boundaries.png, multiples of --checkpoint_every (default: the first, the "
    "last and one between).",
)
_DRAWN = {"per_example": "per-example weights", "supervised": "supervised"}


def main() -> int:
    name = sources.parse_name(shared_flags.to_config().data.dataset)
    if name.source not in synthetic.SHAPES:
        raise config_lib.ConfigError(
            f"dataset={name} is not one of {', '.join(synthetic.SHAPES)}; experiments.compare "
            "compares on images."
        )
    steps = _draw_steps()
    cells = comparison.main("experiments.synthetic")
    if not cells:
        return command.STOPPED
    directories = {cell.row: cell.model_dir for cell in cells}
    if flags.FLAGS.seeds or not directories.keys() >= _DRAWN.keys():
        return 0
    from experiments import launch
    from ssl_influence.reporting import boundaries

    built = launch.build(next(cell.config for cell in cells if cell.row == "per_example"))
    history = boundaries.read(
        name.source.replace("_", " ").capitalize(),
        built.source,
        built.split,
        synthetic.SHAPES[name.source].side,
        built.trainer.model,
        {label: directories[row] for row, label in _DRAWN.items()},
    )
    model_dir = shared_flags.model_dir()
    boundaries.panels([history], model_dir / "boundaries.png", steps)
    boundaries.animation([history], model_dir / "boundaries.gif")
    print(f"wrote {model_dir / 'boundaries.png'} and {model_dir / 'boundaries.gif'}")
    return 0


def _draw_steps() -> list[int] | None:
    """--draw_steps.

    Raises:
      ConfigError: one of them has no checkpoint.
    """
    train = shared_flags.to_config().train
    saved = {*range(train.checkpoint_every, train.train_steps, train.checkpoint_every)}
    saved = set(sorted({*saved, train.train_steps})[-train.keep_checkpoints :])
    steps = shared_flags.parse_numbers("draw_steps", _DRAW_STEPS.value)
    for step in steps:
        if step not in saved:
            raise config_lib.ConfigError(
                f"draw_steps={','.join(_DRAW_STEPS.value)}: there is no checkpoint at step {step} "
                f"of {train.train_steps} with checkpoint_every={train.checkpoint_every} and "
                f"keep_checkpoints={train.keep_checkpoints}."
            )
    return sorted(steps) or None


if __name__ == "__main__":
    command.run(main)
