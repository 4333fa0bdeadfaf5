"""BERT's forward pass (Devlin et al. 2018, post-norm Transformer) in NumPy and float64.

Weights go by the canonical names of third_party/bert/names.py. Nothing here is shared with the
library, nor with the Model Garden.
"""

import math

import numpy as np


def encode(weights, sizes, ids, mask):
    """The encoder's outputs, with every token of type 0 and no dropout.

    Args:
      weights: arrays by canonical names; kernels [in, out].
      sizes: at least num_layers, num_heads and gelu ("erf" or "tanh").
      ids: int [B, L].
      mask: [B, L], 1 where a token is and 0 where padding is. Rows need at least one token.

    Returns:
      The last layer [B, L, H], and the pooled first token [B, H] or None without a pooler.
    """
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    ids, mask = np.asarray(ids), np.asarray(mask, bool)
    batch, length = ids.shape
    x = w["embeddings/word"][ids] + w["embeddings/position"][:length] + w["embeddings/type"][0]
    x = _norm(x, w, "embeddings/norm")
    for i in range(sizes["num_layers"]):
        layer = f"layer_{i}"
        x = _norm(
            x + _attention(x, mask, w, f"{layer}/attention", sizes["num_heads"]),
            w,
            f"{layer}/attention/norm",
        )
        inner = _gelu(_dense(x, w, f"{layer}/intermediate"), sizes["gelu"])
        x = _norm(x + _dense(inner, w, f"{layer}/output"), w, f"{layer}/norm")
    pooled = np.tanh(_dense(x[:, 0], w, "pooler")) if "pooler/kernel" in w else None
    return x, pooled


def _dense(x, w, name):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def _norm(x, w, name):
    centered = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-12)
    return centered / deviation * w[f"{name}/gamma"] + w[f"{name}/beta"]


def _attention(x, mask, w, name, heads):
    batch, length, hidden = x.shape

    def per_head(part):  # [B, heads, L, H / heads]
        projected = _dense(x, w, f"{name}/{part}")
        return projected.reshape(batch, length, heads, hidden // heads).transpose(0, 2, 1, 3)

    query, key, value = per_head("query"), per_head("key"), per_head("value")
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(hidden // heads)
    scores = np.where(mask[:, None, None, :], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = (shares @ value).transpose(0, 2, 1, 3).reshape(batch, length, hidden)
    return _dense(mixed, w, f"{name}/output")


def _gelu(x, form):
    if form == "erf":
        return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
    if form == "tanh":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"gelu is {form!r}.")
