"""What the binaries that use a trained model share: their flags, and loading it."""

from typing import TYPE_CHECKING

from absl import flags

from experiments import flags as shared_flags
from ssl_influence import config as config_lib, serving

if TYPE_CHECKING:
    from ssl_influence.serving import classifier as classifier_lib

flags.disclaim_key_flags()


def define_flags() -> None:
    """--model_dir, --checkpoint and --weights."""
    shared_flags.define_model_dir()
    flags.DEFINE_integer(
        "checkpoint", None, "Step of the checkpoint (default: the newest).", lower_bound=0
    )
    flags.DEFINE_enum(
        "weights",
        "ema",
        serving.WEIGHTS,
        "The moving average of the weights, which papers report, or the weights themselves.",
    )


def load() -> tuple["classifier_lib.Classifier", config_lib.Config]:
    """The classifier that the flags name, and the settings it was trained with."""
    model_dir = shared_flags.model_dir()
    shared_flags.require_of_run(model_dir, "flags.txt")
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    from ssl_influence.serving import classifier as classifier_lib

    values = flags.FLAGS
    classifier = classifier_lib.load(
        model_dir, config, step=values.checkpoint, weights=values.weights
    )
    return classifier, config
