"""The weights of a BERT encoder: their canonical names, and the names other projects store them by.

Canonical names, for i from 0; kernels are [in, out] and attention heads lie side by side:

    embeddings/{word,position,type}  embeddings/norm/{gamma,beta}
    layer_{i}/attention/{query,key,value,output}/{kernel,bias}
    layer_{i}/attention/norm/{gamma,beta}
    layer_{i}/{intermediate,output}/{kernel,bias}  layer_{i}/norm/{gamma,beta}
    pooler/{kernel,bias}

README.md says where each name was read.
"""

import re
from collections.abc import Mapping

POOLER = ("pooler/kernel", "pooler/bias")

# Canonical module: its name in Google's first release, its name in the Model Garden's encoder.
_EMBEDDINGS = {
    "embeddings/word": ("embeddings/word_embeddings", "_embedding_layer"),
    "embeddings/position": ("embeddings/position_embeddings", "_position_embedding_layer"),
    "embeddings/type": ("embeddings/token_type_embeddings", "_type_embedding_layer"),
}
_OUTSIDE_LAYERS = {
    "embeddings/norm": ("embeddings/LayerNorm", "_embedding_norm_layer"),
    "pooler": ("pooler/dense", "_pooler_layer"),
}
_IN_LAYER = {
    "attention/query": ("attention/self/query", "_attention_layer/_query_dense"),
    "attention/key": ("attention/self/key", "_attention_layer/_key_dense"),
    "attention/value": ("attention/self/value", "_attention_layer/_value_dense"),
    "attention/output": ("attention/output/dense", "_attention_layer/_output_dense"),
    "attention/norm": ("attention/output/LayerNorm", "_attention_layer_norm"),
    "intermediate": ("intermediate/dense", "_intermediate_dense"),
    "output": ("output/dense", "_output_dense"),
    "norm": ("output/LayerNorm", "_output_layer_norm"),
}
# The functional encoder numbers its layers: these four, then the Transformer's, then the pooler.
_NUMBERED = ("embeddings/word", "embeddings/position", "embeddings/type", "embeddings/norm")
_TORCH_LEAVES = {
    "kernel": ("weight",),
    "bias": ("bias",),
    "gamma": ("weight", "gamma"),
    "beta": ("bias", "beta"),
}


def shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, the pooler's included, by its canonical name.

    Args:
      sizes: vocab_size, hidden_size, num_layers, inner_size, max_positions, type_vocab_size.
    """
    hidden, inner = sizes["hidden_size"], sizes["inner_size"]
    result: dict[str, tuple[int, ...]] = {
        "embeddings/word": (sizes["vocab_size"], hidden),
        "embeddings/position": (sizes["max_positions"], hidden),
        "embeddings/type": (sizes["type_vocab_size"], hidden),
    }

    def norm(module: str) -> None:
        result.update({f"{module}/gamma": (hidden,), f"{module}/beta": (hidden,)})

    def dense(module: str, inputs: int, outputs: int) -> None:
        result.update({f"{module}/kernel": (inputs, outputs), f"{module}/bias": (outputs,)})

    norm("embeddings/norm")
    for i in range(sizes["num_layers"]):
        for part in ("query", "key", "value", "output"):
            dense(f"layer_{i}/attention/{part}", hidden, hidden)
        norm(f"layer_{i}/attention/norm")
        dense(f"layer_{i}/intermediate", hidden, inner)
        dense(f"layer_{i}/output", inner, hidden)
        norm(f"layer_{i}/norm")
    dense("pooler", hidden, hidden)
    return result


def google(name: str) -> tuple[str, ...]:
    """The names of a weight in Google's TF1 release, without the leading `bert/`."""
    if name in _EMBEDDINGS:
        return (_EMBEDDINGS[name][0],)
    layer, module, leaf = _parts(name)
    if layer is None:
        return (f"{_OUTSIDE_LAYERS[module][0]}/{leaf}",)
    return (f"encoder/layer_{layer}/{_IN_LAYER[module][0]}/{leaf}",)


def hugging_face(name: str) -> tuple[str, ...]:
    """The names of a weight in Hugging Face's releases, without the leading `bert.`.

    They are Google's with dots, and the leaf names of PyTorch or, in the oldest, of TensorFlow.
    """
    (stored,) = google(name)
    stem, leaf = (stored, None) if name in _EMBEDDINGS else stored.rsplit("/", 1)
    stem = re.sub(r"layer_(\d+)", r"layer.\1", stem).replace("/", ".")
    return tuple(f"{stem}.{alias}" for alias in (_TORCH_LEAVES[leaf] if leaf else ("weight",)))


def garden(name: str) -> tuple[str, ...]:
    """The names of a weight below the Model Garden's `BertEncoderV2`."""
    if name in _EMBEDDINGS:
        return (f"{_EMBEDDINGS[name][1]}/embeddings",)
    layer, module, leaf = _parts(name)
    if layer is None:
        return (f"{_OUTSIDE_LAYERS[module][1]}/{leaf}",)
    return (f"_transformer_layers/{layer}/{_IN_LAYER[module][1]}/{leaf}",)


def garden_numbered(name: str, num_layers: int) -> tuple[str, ...]:
    """The names of a weight below the Model Garden's functional `BertEncoder`, old and new."""
    if name in _EMBEDDINGS:
        return (f"layer_with_weights-{_NUMBERED.index(name)}/embeddings",)
    layer, module, leaf = _parts(name)
    if module in _NUMBERED:
        return (f"layer_with_weights-{_NUMBERED.index(module)}/{leaf}",)
    if layer is None:
        return (f"layer_with_weights-{len(_NUMBERED) + num_layers}/{leaf}",)
    stem = f"layer_with_weights-{len(_NUMBERED) + layer}"
    now = f"{stem}/{_IN_LAYER[module][1]}/{leaf}"
    if module == "attention/output":  # the released checkpoints, which are of 2020
        return (now, f"{stem}/_attention_output_dense/{leaf}")
    return (now,)


def _parts(name: str) -> tuple[int | None, str, str]:
    """The layer (None outside of them), the module and the leaf of a canonical name."""
    module, leaf = name.rsplit("/", 1)
    match = re.fullmatch(r"layer_(\d+)/(.+)", module)
    return (int(match[1]), match[2], leaf) if match else (None, module, leaf)
