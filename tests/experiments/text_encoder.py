"""A BERT encoder of random weights and a small set of texts, as users have them in files."""

import json
import pathlib

import numpy as np

POSITIONS, HIDDEN, INNER, HEADS = 40, 16, 24, 2
_GOOD = ("good", "great", "funny", "moving", "superb", "clever", "warm", "brilliant")
_BAD = ("bad", "awful", "boring", "dull", "poor", "stupid", "cold", "terrible")
_OTHER = (
    *("the", "a", "and", "of", "it", "is", "was", "film", "movie", "story", "actor", "plot"),
    *("music", "scene", "end", "very", "quite", "so", "in", "with", "we", "saw", "night"),
)
VOCABULARY = (
    *("[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(".", ",", "!", "?", "<", ">", "/"),
    *("##s", "##ly", "##er", "##ing", "cafe", "好", "电", "影", "ש", "ف"),
    *_GOOD,
    *_BAD,
    *_OTHER,
)
# What reviews on the Web hold besides words.
ODD_TEXTS = {
    "long": "good film and a moving story " * 2_000,  # 12,000 words.
    "long word": "great" * 2_000,
    "empty": "",
    "spaces": " \u3000\u00a0  ",
    "emoji": "good 👍🏽 film 👩‍👩‍👧 🎬",
    "chinese": "好电影，我喜欢。",
    "arabic": "فيلم جيد جدا",
    "hebrew": "סרט טוב מאוד \u202eשלום\u202c",
    "accents": "Très BON café, naïve e\u0301 ﬁlm",
    "controls": "bad\x01\x1b[31m film\x7f\x85 end\ufffd",
    "markup": "<br /><br />good &amp; great",
}


def write_encoder(folder, vocabulary=VOCABULARY, lower_case=True, seed=0, num_layers=2):
    """Writes an encoder in Hugging Face's format, and returns its folder."""
    from safetensors.numpy import save_file

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}

    def draw(name, *shape, mean=0.0, scale=0.3):
        tensors[name] = (mean + scale * random.normal(size=shape)).astype(np.float32)

    def dense(name, units_in, units_out):
        draw(f"{name}.weight", units_out, units_in)
        draw(f"{name}.bias", units_out)

    def norm(name):
        draw(f"{name}.weight", HIDDEN, mean=1.0, scale=0.1)
        draw(f"{name}.bias", HIDDEN, scale=0.1)

    for kind, size in (("word", len(vocabulary)), ("position", POSITIONS), ("token_type", 2)):
        draw(f"bert.embeddings.{kind}_embeddings.weight", size, HIDDEN)
    norm("bert.embeddings.LayerNorm")
    for i in range(num_layers):
        layer = f"bert.encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            dense(f"{layer}.attention.{part}", HIDDEN, HIDDEN)
        norm(f"{layer}.attention.output.LayerNorm")
        dense(f"{layer}.intermediate.dense", HIDDEN, INNER)
        dense(f"{layer}.output.dense", INNER, HIDDEN)
        norm(f"{layer}.output.LayerNorm")
    dense("bert.pooler.dense", HIDDEN, HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    sizes = {
        "model_type": "bert",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower_case}))
    (folder / "vocab.txt").write_text("\n".join([*vocabulary, ""]), encoding="utf-8", newline="\n")
    return folder


def rows_of_texts(odd=True):
    """(text, label or "", part) of 60 labeled, 60 unlabeled and 20 test texts, all different.

    With `odd` some of each part are ODD_TEXTS.
    """
    random = np.random.default_rng(0)
    rows = []
    for i in range(140):
        label = ("bad", "good")[i % 2]
        words = [
            *random.choice(_GOOD if i % 2 else _BAD, 3),
            *random.choice(_OTHER, random.integers(2, 14)),
        ]
        text = f"{' '.join(random.permutation(words))} {i}!"
        part = "train" if i < 60 else "unlabeled" if i < 120 else "test"
        rows.append((text, "" if part == "unlabeled" else label, part))
    if odd:
        for i, text in enumerate(ODD_TEXTS.values()):
            for at in (i, 60 + i, 120 + i):
                rows[at] = (f"{text}{'.' * (at // 60)}", *rows[at][1:])
    return rows


def write_texts(path, rows=None):
    """Writes a table of texts, and returns its path."""
    rows = rows_of_texts() if rows is None else rows
    lines = ["\t".join(row) for row in (("text", "label", "part"), *rows)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8", newline="\n")
    return path
