"""From a `MethodConfig` to an SSL base algorithm."""

from ssl_influence import config
from ssl_influence.methods import (
    base,
    fixmatch,
    mean_teacher,
    mixmatch,
    pseudo_label,
    remixmatch,
    supervised,
    uda,
    vat,
)


def build(
    method_config: config.MethodConfig,
    num_classes: int,
    train_steps: int,
    *,
    feature_size: int,
    seed: int,
) -> base.Method:
    """The method that `method_config` describes.

    Args:
      method_config: which method, and its settings.
      num_classes: C.
      train_steps: length of the run, over which schedules run.
      feature_size: D, of the model's features.
      seed: of what a method draws at random.

    Raises:
      ConfigError: for a method without a builder.
    """
    name, settings = method_config.name, method_config.settings()
    if name == "supervised":
        return supervised.Supervised()
    if name == "pseudo_label":
        return pseudo_label.PseudoLabel(train_steps, **settings)
    if name == "mean_teacher":
        return mean_teacher.MeanTeacher(train_steps, **settings)
    if name == "vat":
        for own in ("radius", "probe", "iterations"):
            settings[own] = settings.pop(f"vat_{own}")
        return vat.VAT(train_steps, seed, **settings)
    if name == "mixmatch":
        return mixmatch.MixMatch(train_steps, seed, **settings)
    if name == "remixmatch":
        return remixmatch.ReMixMatch(num_classes, feature_size, train_steps, seed, **settings)
    if name == "uda":
        return uda.UDA(num_classes, train_steps, **settings)
    if name == "fixmatch":
        return fixmatch.FixMatch(**settings)
    raise config.ConfigError(f"method={name!r} has no builder: use {', '.join(config.METHODS)}.")
