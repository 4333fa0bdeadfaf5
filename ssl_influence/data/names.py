"""The name of a dataset and of its split, `source.seed@labels-validation`."""

import dataclasses
import re
from collections.abc import Mapping

from ssl_influence import config

_NAME = re.compile(
    r"(?P<source>.+)\.(?P<seed>[0-9]{1,18})@(?P<labels>[0-9]{1,18})-(?P<validation>[0-9]{1,18})",
    re.DOTALL,
)
_MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """Which data, and how its training part is split.

    Attributes:
      source: where the examples come from; may hold dots, slashes and `@`.
      seed: of the split (and of the points themselves where the source is synthetic).
      labels: number of labeled examples.
      validation: number of validation examples.
    """

    source: str
    seed: int
    labels: int
    validation: int

    def __post_init__(self):
        if not self.source:
            raise config.ConfigError(f"dataset={str(self)!r} names no source before its ending.")
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise config.ConfigError(
                f"dataset={str(self)!r} is not UTF-8, in which settings are written down: rename "
                "the file or folder, or make a symbolic link to it."
            ) from error
        if not 0 <= self.seed <= _MAX_SEED:
            raise config.ConfigError(
                f"dataset={str(self)!r}: the seed {self.seed} must lie in [0, {_MAX_SEED}]."
            )
        if self.labels < 1:
            raise config.ConfigError(
                f"dataset={str(self)!r}: {self.labels} labeled examples, there must be at least 1."
            )
        if self.validation < 0:
            raise config.ConfigError(
                f"dataset={str(self)!r}: {self.validation} validation examples, "
                "there must be at least 0."
            )

    def __str__(self):
        return f"{self.source}.{self.seed}@{self.labels}-{self.validation}"


def ending(text: str) -> str:
    """`seed@labels-validation` of a full name: how data are split, wherever they lie."""
    return text.rpartition(".")[2]


def parse(text: str, endings: Mapping[str, str]) -> DatasetName | None:
    """`source.seed@labels-validation`, parsed from the right; None if it is not of this form.

    Args:
      text: the name. The source may hold any character.
      endings: bare source -> the ending it takes.

    Raises:
      ConfigError: a number in it cannot work.
    """
    match = _NAME.fullmatch(text)
    if match is None and text in endings:
        match = _NAME.fullmatch(text + endings[text])
    if match is None:
        return None
    numbers = {key: int(match[key]) for key in ("seed", "labels", "validation")}
    return DatasetName(source=match["source"], **numbers)
