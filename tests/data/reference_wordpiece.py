"""BERT's tokenization of one text, in plain Python, to compare with.

Written from what google-research/bert, tokenization.py, does.
"""

import re
import unicodedata

# First and last code points of the blocks of CJK ideographs.
CJK = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
ASCII_SYMBOLS = frozenset(map(chr, range(33, 127))) - frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


def _cleaned(char):
    category = unicodedata.category(char)
    if char in "\t\n\r" or category == "Zs":
        return " "
    if category in ("Cc", "Cf") or char == "\ufffd":
        return ""
    if any(first <= ord(char) <= last for first, last in CJK):
        return f" {char} "
    return char


def _without_accents(word):
    decomposed = unicodedata.normalize("NFD", word.lower())
    return "".join(char for char in decomposed if unicodedata.category(char) != "Mn")


def _alone(char):
    return char in ASCII_SYMBOLS or unicodedata.category(char).startswith("P")


def words(text, lower_case):
    """The normalized words of a str."""
    found = "".join(map(_cleaned, text)).split()
    if lower_case:
        found = map(_without_accents, found)
    return "".join(f" {c} " if _alone(c) else c for c in " ".join(found)).split()


def pieces(word, vocabulary):
    """The tokens of a word: the longest that fits, again and again; [UNK] if that fails."""
    rest, found = word, []
    while rest:
        mark = "##" if found else ""
        fitting = [n for n in range(1, len(rest) + 1) if mark + rest[:n] in vocabulary]
        if not fitting or len(word) > 200:
            return ["[UNK]"]
        found.append(mark + rest[: fitting[-1]])
        rest = rest[fitting[-1] :]
    return found


def encode(text, vocabulary, lower_case, length, keep_end="right"):
    """Token ids [length] of a str; `vocabulary` maps a token to its id."""
    body = [piece for word in words(text, lower_case) for piece in pieces(word, vocabulary)]
    body = body[-(length - 2) :] if keep_end == "right" else body[: length - 2]
    tokens = ["[CLS]", *body, "[SEP]"]
    return [vocabulary[token] for token in tokens + ["[PAD]"] * (length - len(tokens))]


def read_vocabulary(path):
    """The tokens of a vocab.txt in the order of their lines."""
    return tuple(re.findall(r"[^\n]+", path.read_text(encoding="utf-8")))
