"""The strong view of a text: words that say little are replaced by others that say little.

TF-IDF word replacement (Xie et al., arXiv:1904.12848, section 2.2 and appendix; as published in
github.com/google-research/uda, text/augmentation/word_level_augment.py). In a corpus of N texts,
with c(w, x) the times that the word w stands in the text x, and |x| the words of x:

    idf(w) = log(N / number of texts with w)
    s(w, x) = c(w, x) / |x| idf(w)               how much w says in x
    S(w) = sum over the texts x of s(w, x)       how much w says in the corpus
    P(word i of x is replaced) = min(1, p |x| d_i / sum_j d_j),   d_i = max_j s(w_j, x) - s(w_i, x)
    P(the replacement is v) = D(v) / sum_v' D(v'),                D(v) = max_v' S(v') - S(v)

So p is the share of words that are replaced, on average, as long as no probability is cut at 1. The
word of a text that says most always stays; a text of one word, or of words that all say equally
much, stays as it is. A word may be replaced by itself.

Departures from the published code:

- Every batch draws anew; there, one augmented copy was written to disk, and replacements came from
  a list of as many draws as there are words in the vocabulary, drawn anew when it was used up.
- Words that the corpus does not have, which cannot be scored, stay and do not count: |x|, sums and
  maxima are over the others. There, they raise an error.
- If all words of the corpus say equally much, every replacement is as likely as another. There,
  that divides by zero.
- Where nothing can be replaced the probabilities are 0; there, 0/0, with the same outcome.
- S is summed in integers of 2^-64, and does not depend on the order of the texts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from ssl_influence import config as config_lib

_ONE = 1 << 64


class TfIdf:
    """The scores of a corpus' words, as TensorFlow constants, and the replacement they direct.

    Attributes:
      vocabulary: the words, sorted by their bytes, string [V].
      idf: float64 [V].
      cumulative: the probability that a replacement is this word or one before it, float64 [V].
    """

    def __init__(self, vocabulary: Sequence[bytes], idf: np.ndarray, scores: np.ndarray):
        """Takes the sorted words [V], their idf [V], and S [V], as in the module's formulas."""
        says_little = np.max(scores) - scores
        if not says_little.any():
            says_little = np.ones(len(scores))
        cumulative = np.cumsum(says_little)
        self.vocabulary = tf.constant(vocabulary, tf.string)
        self.idf = tf.constant(idf, tf.float64)
        # Ends with ones, not nearly ones: the last words may have probability 0.
        self.cumulative = tf.constant(cumulative / cumulative[-1], tf.float64)
        ids = tf.range(len(vocabulary), dtype=tf.int64)
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(self.vocabulary, ids), default_value=-1
        )

    @classmethod
    def of(cls, words_batches: Iterable[tf.RaggedTensor | list[list[bytes]]]) -> "TfIdf":
        """The statistics of a corpus, in one pass; memory grows with the vocabulary only.

        They depend on the texts, not on their order or how they are batched.

        Args:
          words_batches: the words of the texts, string [B, (words)] each.

        Raises:
          ConfigError: there are no words.
        """
        num_texts, texts_with, shares = 0, defaultdict(int), defaultdict(int)
        for batch in words_batches:
            for words in _rows(batch):
                num_texts += 1
                for word, count in Counter(words).items():
                    texts_with[word] += 1
                    shares[word] += count * _ONE // len(words)
        if not shares:
            raise config_lib.ConfigError(
                f"tf_idf finds no words in the {num_texts} texts of the corpus: give texts, or "
                "another strong_view."
            )
        vocabulary = sorted(shares)
        idf = np.log(num_texts / np.array([texts_with[word] for word in vocabulary]))
        return cls(vocabulary, idf, idf * np.array([shares[word] / _ONE for word in vocabulary]))

    def replacement_probabilities(self, words: tf.RaggedTensor, probability: float) -> tf.Tensor:
        """The probability that each word is replaced.

        Args:
          words: string [B, (words)].
          probability: p, of the words of a text on average.

        Returns:
          float64 [n], of the n words of all texts in turn.
        """
        texts, num_texts = words.value_rowids(), words.nrows()
        ids = self._ids.lookup(words.flat_values)
        known = ids >= 0
        word_of_text = texts * (tf.size(self.idf, tf.int64) + 1) + ids
        _, place, counts = tf.unique_with_counts(word_of_text)
        # 1 / |x| is common to the words of a text and cancels.
        scores = tf.cast(tf.gather(counts, place), tf.float64) * tf.gather(
            self.idf, tf.maximum(ids, 0)
        )
        scores = tf.where(known, scores, 0.0)  # None is below 0: the maximum stays.

        def over_text(reduce, values):
            return tf.gather(reduce(values, texts, num_texts), texts)

        says_little = tf.where(known, over_text(tf.math.unsorted_segment_max, scores) - scores, 0.0)
        length = over_text(tf.math.unsorted_segment_sum, tf.cast(known, tf.float64))
        total = over_text(tf.math.unsorted_segment_sum, says_little)
        return tf.minimum(tf.math.divide_no_nan(probability * length * says_little, total), 1.0)

    def replace(
        self, words: tf.RaggedTensor, seed: tf.Tensor, probability: float
    ) -> tf.RaggedTensor:
        """Texts of the same numbers of words, some replaced.

        Args:
          words: string [B, (words)].
          seed: int64 [2]; the draws are a function of it and of the place in the batch.
          probability: p, of the words of a text on average.

        Returns:
          string [B, (words)].
        """
        replaced = self.replacement_probabilities(words, probability)
        which, by = tf.unstack(
            tf.random.stateless_uniform(
                [2, tf.size(replaced)], seed, dtype=tf.float64, alg="philox"
            )
        )
        drawn = tf.gather(self.vocabulary, tf.searchsorted(self.cumulative, by, side="right"))
        return words.with_flat_values(tf.where(which < replaced, drawn, words.flat_values))


def _rows(batch: tf.RaggedTensor | list[list[bytes]]) -> list[list[bytes]]:
    return batch.to_list() if isinstance(batch, tf.RaggedTensor) else batch
