"""From a pretrained encoder's place, or a run that began with it, to the library's value."""

import logging

from ssl_influence import config as config_lib, files
from ssl_influence.data import inputs, tokens
from ssl_influence.models import bert
from third_party.bert import pretrained

_log = logging.getLogger("ssl_influence")


def load(model_config: config_lib.ModelConfig) -> tuple[bert.Encoder, tokens.TokenizerSpec]:
    """The encoder that `model_config` names, and how texts become its tokens.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        found = pretrained.read(model_config.encoder)
    except pretrained.PretrainedError as error:
        raise config_lib.ConfigError(str(error)) from error
    lower_case = found.lower_case if model_config.lower_case is None else model_config.lower_case
    if lower_case != found.lower_case:
        _log.warning(
            "lower_case=%s is not what the encoder %s was trained with: leave it out unless you "
            "mean it.",
            lower_case,
            model_config.encoder,
        )
    encoder = bert.Encoder(bert.Sizes(**found.sizes), found.weights, found.sha256)
    spec = tokens.TokenizerSpec(
        vocabulary=tuple(found.vocabulary),
        lower_case=lower_case,
        sequence_length=model_config.sequence_length,
        keep_end=model_config.keep_end,
    )
    return encoder, spec


def of(model_dir: files.AnyPath) -> tuple[bert.Encoder, tokens.TokenizerSpec]:
    """The encoder of a run that has begun, without weights, and how texts become its tokens.

    Raises:
      ConfigError: the directory does not say.
    """
    sizes, sha256 = bert.read(model_dir / "encoder.json")
    spec = inputs.read(model_dir / "inputs.json").tokenizer
    if spec is None:
        raise config_lib.ConfigError(
            f"{model_dir / 'inputs.json'} has no vocabulary, and the run is one of texts: put back "
            "the file that the run wrote."
        )
    return bert.Encoder(sizes, None, sha256), spec
