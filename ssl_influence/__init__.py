"""Semi-supervised learning with one learned weight for each unlabeled example.

The public names below are imported on first use, so `import ssl_influence` itself loads no
TensorFlow.
"""

import importlib

_PUBLIC = {
    "BilevelTrainer": "training",
    "Config": "config",
    "ConfigError": "config",
    "ExampleWeights": "example_weights",
    "HeadRows": "head_rows",
    "MAdam": "optimizers",
    "MethodOutput": "methods.base",
    "UDA": "methods.uda",
    "PseudoLabel": "methods.pseudo_label",
    "Supervised": "methods.supervised",
}

_PACKAGES = ("influence", "per_example")

__version__ = "0.1.0"
__all__ = sorted([*_PUBLIC, *_PACKAGES])


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
