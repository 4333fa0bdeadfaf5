"""From a `MethodConfig` to an SSL base algorithm."""

from ssl_influence import config
from ssl_influence.methods import base, pseudo_label, supervised, uda


def build(method_config: config.MethodConfig, num_classes: int, train_steps: int) -> base.Method:
    """The method that `method_config` describes.

    Args:
      method_config: which method, and its constants.
      num_classes: C.
      train_steps: length of the run, over which training signal annealing runs.

    Raises:
      ConfigError: for a method without a builder, or a setting asked of a method that has none.
    """
    name = method_config.name
    if name == "uda":
        return uda.UDA(
            num_classes=num_classes,
            train_steps=train_steps,
            confidence=method_config.confidence,
            temperature=method_config.temperature,
            unsupervised_weight=method_config.unsupervised_weight,
            tsa=method_config.tsa,
            target_forward=method_config.target_forward,
        )
    if method_config.target_forward != "joint":
        raise config.ConfigError(
            f"target_forward={method_config.target_forward!r} needs a view that gives the target "
            f"alone, and method {name} has none: use target_forward=joint."
        )
    if method_config.tsa != "none":
        raise config.ConfigError(
            f"tsa={method_config.tsa!r} belongs to method uda: use tsa=none with method {name}."
        )
    if name == "pseudo_label":
        return pseudo_label.PseudoLabel(
            confidence=method_config.confidence,
            unsupervised_weight=method_config.unsupervised_weight,
        )
    if name == "supervised":
        return supervised.Supervised()
    raise config.ConfigError(f"method={name!r} has no builder: use {', '.join(config.METHODS)}.")
