"""Evaluates every checkpoint of a run on its test and validation examples.

    python -m experiments.evaluate --model_dir=/tmp/run

Writes eval/results.jsonl (a line for each checkpoint and split) and eval/summary.json (last, best
and medians of the last 1, 10, 20 and 50 checkpoints) beside the checkpoints, for the weights
themselves (raw) and their moving average (ema), and prints a table. Report the last or a median:
"best" is chosen on the very examples it is measured on. Checkpoints that are there because the run
was stopped between two regular ones are left out. The run's own settings are read from its
flags.txt.
"""

from absl import flags

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib

shared_flags.define_model_dir()
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Where TFDS datasets are now, if they were moved."
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", config_lib.EVALUATION_BATCH_SIZE, "Examples a batch.", lower_bound=1
)


def main() -> None:
    model_dir = shared_flags.model_dir()
    if not (model_dir / "flags.txt").exists():
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} holds no flags.txt: name the directory of a run (of a "
            "comparison, one of the folders in it)."
        )
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    if _DATA_DIR.value:
        config = config.replace(data={"data_dir": _DATA_DIR.value})
    from experiments import launch
    from ssl_influence.data import splits
    from ssl_influence.reporting import tables

    built = launch.build(config)
    splits.check(splits.read(model_dir / "split.json"), built.manifest)
    print(tables.evaluation(launch.evaluate(built, model_dir, _BATCH_SIZE.value)))


if __name__ == "__main__":
    command.run(main)
