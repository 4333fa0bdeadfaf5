r"""Texts to the token ids of BERT's WordPiece vocabularies, as TensorFlow operations.

The ids are those of google-research/bert, tokenization.py (BasicTokenizer, then WordpieceTokenizer
with words of up to 200 characters), with two exceptions. Characters newer than Unicode 13, the
version of TensorFlow's lower-casing, have no case. Bytes that are not UTF-8 make their word [UNK]
instead of being dropped.

The ready-made BERT tokenizers of tensorflow_text give other ids: they fold case (ß becomes ss, a
final ς becomes σ), treat control characters as spaces and count a word's length in bytes. Of them
only the search for the pieces of a word is used here.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

from ssl_influence import config as config_lib

PAD, UNK, CLS, SEP = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MAX_WORD_LENGTH = 200  # In characters; longer words are [UNK].

# Cc but for \t, \n and \r; Cf; the replacement character.
_DROPPED = r"[\x00-\x08\x0B\x0C\x0E-\x1F\x7F-\x{9F}\p{Cf}\x{FFFD}]+"
# Zs but for the space, and the separators of lines and paragraphs, where Python's split also cuts.
_WIDE_SPACES = r"[\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]+"
_PUNCTUATION = r"!-/:-@\[-`{-~\p{P}"
_CJK = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}"
    r"\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}\x{2F800}-\x{2FA1F}"
)
_WORDS_BY_THEMSELVES = f"[{_PUNCTUATION}{_CJK}]"


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """What a tokenizer is made of.

    Attributes:
      vocabulary: the tokens in the order of their ids, SPECIAL_TOKENS among them; a piece that
        continues a word begins with "##".
      lower_case: words are put in lower case and lose their accents (Unicode's NFD without Mn).
      sequence_length: L, tokens that a text is cut or filled up to, [CLS] and [SEP] among them.
      keep_end: which end of a text that is too long stays: "right" (its last L - 2 pieces, as in
        UDA) or "left".

    Raises:
      ConfigError: for a vocabulary without a special token, with an empty one or with one twice,
        for a sequence_length below 3 or another keep_end.
    """

    vocabulary: tuple[str, ...]
    lower_case: bool
    sequence_length: int
    keep_end: str

    def __post_init__(self):
        missing = [token for token in SPECIAL_TOKENS if token not in self.vocabulary]
        if missing:
            raise config_lib.ConfigError(
                f"The vocabulary of {len(self.vocabulary)} tokens lacks {', '.join(missing)}: use "
                "that of a BERT encoder, in the order of its ids."
            )
        token, count = Counter(self.vocabulary).most_common(1)[0]
        if count > 1 or "" in self.vocabulary:
            problem = f"{token!r} {count} times" if count > 1 else "an empty token"
            raise config_lib.ConfigError(
                f"The vocabulary holds {problem}: give each token once, in the order of the ids."
            )
        if self.sequence_length < 3:
            raise config_lib.ConfigError(
                f"sequence_length={self.sequence_length} leaves no room for a word between [CLS] "
                "and [SEP]: use at least 3."
            )
        if self.keep_end not in config_lib.KEPT_ENDS:
            raise config_lib.ConfigError(
                f"keep_end={self.keep_end} is none of {', '.join(config_lib.KEPT_ENDS)}."
            )

    def token_id(self, token: str) -> int:
        """The id of a token of the vocabulary."""
        return self.vocabulary.index(token)


class Tokenizer:
    """Texts to words to token ids, eagerly, in tf.data, in a tf.function and in a SavedModel.

    A process that loads such a SavedModel must have imported tensorflow_text.

    Raises:
      ConfigError: tensorflow_text is not installed.
    """

    def __init__(self, spec: TokenizerSpec):
        self.spec = spec
        self._wordpiece = _tensorflow_text().FastWordpieceTokenizer(
            list(spec.vocabulary),
            token_out_type=tf.int32,
            unknown_token=UNK,
            max_bytes_per_word=4 * MAX_WORD_LENGTH,
            no_pretokenization=True,
        )

    def words(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """The words of each text, normalized, punctuation and CJK characters apart.

        Args:
          texts: string [B], UTF-8.

        Returns:
          string [B, (words)].
        """
        texts = tf.strings.regex_replace(tf.convert_to_tensor(texts, tf.string), _DROPPED, "")
        texts = tf.strings.regex_replace(texts, _WIDE_SPACES, " ")
        if self.spec.lower_case:
            # Lower-casing follows the locale of the process: under Turkish, I becomes dotless.
            texts = tf.strings.regex_replace(texts, "[Iİ]", "i")
            texts = tf.strings.lower(texts, encoding="utf-8")
            texts = _tensorflow_text().normalize_utf8(texts, "NFD")
            texts = tf.strings.regex_replace(texts, r"\p{Mn}+", "")
        return tf.strings.split(tf.strings.regex_replace(texts, _WORDS_BY_THEMSELVES, r" \0 "))

    def encode(self, texts: tf.Tensor) -> tf.Tensor:
        """Token ids of texts, string [B]: `encode_words` of their `words`, int32 [B, L]."""
        return self.encode_words(self.words(texts))

    def encode_words(self, words: tf.RaggedTensor) -> tf.Tensor:
        """Token ids: [CLS], the pieces of the words, [SEP], filled up with [PAD].

        Args:
          words: string [B, (words)], as `words` makes them.

        Returns:
          int32 [B, L]. A text without words is [CLS] [SEP].
        """
        spec = self.spec
        room = spec.sequence_length - 2
        kept = slice(-room, None) if spec.keep_end == "right" else slice(room)
        # Each word has at least one piece: no more of them can be kept.
        pieces = self._pieces(words[:, kept])[:, kept]
        ids = pieces.to_tensor(spec.token_id(PAD), shape=[None, spec.sequence_length - 1])
        after_last = (
            tf.range(spec.sequence_length - 1, dtype=tf.int64)
            == (pieces.row_lengths()[:, tf.newaxis])
        )
        ids = tf.where(after_last, spec.token_id(SEP), ids)
        return tf.pad(ids, [[0, 0], [1, 0]], constant_values=spec.token_id(CLS))

    def lengths(self, texts: tf.Tensor) -> tf.Tensor:
        """Tokens of whole texts, string [B], with [CLS] and [SEP], before they are cut: [B]."""
        return self._pieces(self.words(texts)).row_lengths() + 2

    def _pieces(self, words: tf.RaggedTensor) -> tf.RaggedTensor:
        """int32 [B, (pieces)] of all words."""
        # No word is "[UNK]" as brackets are words by themselves, but the search finds it whole.
        words = words.with_flat_values(
            tf.where(
                tf.strings.length(words.flat_values, "UTF8_CHAR") > MAX_WORD_LENGTH,
                UNK,
                words.flat_values,
            )
        )
        return self._wordpiece.tokenize(words).merge_dims(1, 2)


def decode(spec: TokenizerSpec, ids: Sequence[int]) -> str:
    """The words that token ids stand for, by single spaces, for people to read.

    [CLS], [SEP] and [PAD] are left out; a piece that continues a word whose beginning was cut off
    keeps its "##".
    """
    words = []
    for token in (spec.vocabulary[i] for i in ids):
        if token.startswith("##") and words:
            words[-1] += token[2:]
        elif token not in (CLS, SEP, PAD):
            words.append(token)
    return " ".join(words)


def _tensorflow_text():
    try:
        import tensorflow_text
    except ImportError as error:
        raise config_lib.ConfigError(
            "Tokenizing texts needs tensorflow_text: "
            'pip install --use-pep517 -c third_party/constraints.txt -e ".[text]".'
        ) from error
    return tensorflow_text
