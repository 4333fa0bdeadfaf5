"""Trains the rows of a comparison on one split and seed, and tabulates their test errors."""

from absl import flags

from experiments import flags as shared_flags
from ssl_influence import config as config_lib

flags.disclaim_key_flags()

ROWS = {
    "supervised": {
        "method": {"name": "supervised", "tsa": "none"},
        "weights": {"weighting": "fixed"},
    },
    "fixed": {"weights": {"weighting": "fixed"}},
    "single": {"weights": {"weighting": "single"}},
    "per_example": {"weights": {"weighting": "per_example"}},
}


def define_flags(defaults: dict) -> None:
    """The shared flags, --model_dir and --rows."""
    shared_flags.define(defaults)
    shared_flags.define_model_dir()
    flags.DEFINE_list(
        "rows", ["supervised", "fixed", "per_example"], f"Rows to train, of {', '.join(ROWS)}."
    )


def main(program: str) -> None:
    """Trains, or resumes, each row under --model_dir, evaluates it and prints the table."""
    model_dir, rows = shared_flags.model_dir(), flags.FLAGS.rows
    unknown = [row for row in rows if row not in ROWS]
    if unknown or not rows:
        raise config_lib.ConfigError(f"rows={','.join(rows)}: choose among {', '.join(ROWS)}.")
    config = shared_flags.to_config()
    if config.method.name == "supervised":
        raise config_lib.ConfigError(
            "method=supervised leaves nothing to compare: name the method of the other rows."
        )
    from experiments import launch
    from ssl_influence.reporting import tables

    results = {}
    for row in rows:
        print(f"\n{row}:", flush=True)
        built = launch.build(config.replace(**ROWS[row]))
        if not launch.train(built, model_dir / row, program):
            return
        results[row] = launch.evaluate(built, model_dir / row)["test"]
    print(f"{config.data.dataset}, seed {config.train.seed}, {config.train.train_steps} steps:")
    print(tables.comparison(results))
