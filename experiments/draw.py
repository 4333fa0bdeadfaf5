"""Draws a run: validation error and loss curves, and the histogram of its example weights.

    python -m experiments.draw --model_dir=/tmp/run

Writes curve.png and weights.png into the run's directory.
"""

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib

shared_flags.define_model_dir()


def main() -> None:
    from ssl_influence.reporting import figures

    model_dir = shared_flags.model_dir()
    for draw, name in ((figures.curve, "curve.png"), (figures.weight_histogram, "weights.png")):
        try:
            draw(model_dir, model_dir / name)
        except FileNotFoundError as error:
            raise config_lib.ConfigError(f"{error} Train there first.") from error
        print(f"wrote {model_dir / name}")


if __name__ == "__main__":
    command.run(main)
