"""TF-IDF word replacement against the published formulas, computed text by text in NumPy."""

import math
import random

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config as config_lib
from ssl_influence.augment import text

CORPUS = [
    line.split()
    for line in (
        "the film was good",
        "the film was bad and the end was bad",
        "the the the",
        "good acting in the good film",
        "",
        "zebra zebra the film the film",
    )
]
VOCABULARY = sorted({word for words in CORPUS for word in words})
SEED = tf.constant([3, 14], tf.int64)


def ragged(texts):
    return tf.ragged.constant(texts, tf.string, ragged_rank=1)


def as_bytes(texts):
    return [[word.encode() for word in words] for words in texts]


STATISTICS = text.TfIdf.of([as_bytes(CORPUS)])


def idf(word):
    return math.log(len(CORPUS) / sum(word in words for words in CORPUS))


def score(word, words):
    return words.count(word) / len(words) * idf(word)


def replacement_probabilities(words, probability):
    scores = np.array([score(word, words) for word in words])
    says_little = scores.max() - scores
    return np.minimum(probability * len(words) * says_little / says_little.sum(), 1)


def drawn_probabilities():
    scores = [sum(score(v, words) for words in CORPUS if words) for v in VOCABULARY]
    says_little = max(scores) - np.array(scores)
    return says_little / says_little.sum()


@pytest.mark.parametrize("probability", [0.3, 0.7, 1.0])
def test_probabilities_are_those_of_the_formulas(probability):
    texts = [words for words in CORPUS if len(set(words)) > 1]
    found = STATISTICS.replacement_probabilities(ragged(texts), probability)
    expected = [replacement_probabilities(words, probability) for words in texts]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-12)
    np.testing.assert_allclose(
        np.diff(STATISTICS.cumulative, prepend=0), drawn_probabilities(), atol=1e-12
    )
    if probability == 0.3:  # Where nothing is cut at 1 the mean is what was asked for.
        np.testing.assert_allclose([p.mean() for p in expected], 0.3)
    else:
        assert max(map(max, expected)) == 1


def test_frequencies_of_all_outcomes_over_many_draws():
    words, copies, seeds = CORPUS[1], 1000, 20
    replace = tf.function(STATISTICS.replace)
    batch = ragged([words] * copies)
    seen = np.zeros([len(words), len(VOCABULARY)])
    for seed in range(seeds):
        outcome = replace(batch, tf.constant([7, seed], tf.int64), 0.3).to_tensor().numpy()
        ids = np.searchsorted(np.array(VOCABULARY, "S"), outcome.astype("S"))
        for i, column in enumerate(ids.T):
            seen[i] += np.bincount(column, minlength=len(VOCABULARY))
    replaced = replacement_probabilities(words, 0.3)[:, None]
    stays = np.array([[word == v for v in VOCABULARY] for word in words])
    expected = replaced * drawn_probabilities() + (1 - replaced) * stays
    draws = copies * seeds
    spread = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(seen / draws - expected) <= 4 * spread + 1e-12).all()


def test_rare_words_stay_and_the_word_that_says_most_always_does():
    words = ["the", "film", "was", "zebra"]
    outcome = STATISTICS.replace(ragged([words] * 2000), SEED, 0.5).to_tensor().numpy()
    the, film, was, zebra = (outcome == np.array(words, "S")).mean(0)
    assert the < film < was < zebra == 1


@pytest.mark.parametrize("probability", [0.7, 1.0])
def test_texts_that_offer_no_choice_stay(probability):
    texts = [[], ["film"], ["zebra", "zebra"], ["acting", "end", "in"], ["unheard"], []]
    assert STATISTICS.replace(ragged(texts), SEED, probability).to_list() == as_bytes(texts)
    no_text = STATISTICS.replace(ragged(texts)[:0], SEED, probability)
    assert no_text.shape.as_list() == [0, None]


def test_nothing_is_replaced_with_probability_zero():
    assert STATISTICS.replace(ragged(CORPUS), SEED, 0.0).to_list() == as_bytes(CORPUS)


def test_words_of_another_corpus_stay_and_do_not_count():
    words = ["the", "film", "was", "zebra"]
    mixed = ["new", "the", "new", "film", "was", "zebra", "newer"]
    # The word before an unknown one is the last of the vocabulary.
    texts = [["zebra", "the", "zebra"], mixed, ["new", "the"]]
    found = STATISTICS.replacement_probabilities(ragged(texts), 0.3).numpy()
    np.testing.assert_allclose(found[[4, 6, 7, 8]], replacement_probabilities(words, 0.3))
    np.testing.assert_allclose(found[:3], replacement_probabilities(texts[0], 0.3))
    assert not found[[3, 5, 9, 10, 11]].any()


def test_a_corpus_whose_words_all_say_equally_much_offers_all_of_them():
    statistics = text.TfIdf.of([[[b"a", b"b"], [b"b", b"a"]]])
    np.testing.assert_array_equal(statistics.cumulative, [0.5, 1.0])


def test_statistics_do_not_depend_on_the_order_or_the_batches():
    shuffled = random.Random(0).sample(CORPUS, len(CORPUS))
    others = [
        [ragged(CORPUS)],
        (ragged(shuffled[i : i + 2]) for i in range(0, 6, 2)),
        ([words] for words in as_bytes(reversed(CORPUS))),
    ]
    for statistics in map(text.TfIdf.of, others):
        for name in ("vocabulary", "idf", "cumulative"):
            expected = getattr(STATISTICS, name).numpy()
            np.testing.assert_array_equal(getattr(statistics, name), expected)
    assert STATISTICS.vocabulary.numpy().tolist() == [word.encode() for word in VOCABULARY]


def test_the_words_are_sorted_by_their_bytes():
    statistics = text.TfIdf.of([[["é".encode(), b"z", b"\xff", b"Z", b"a"]]])
    assert statistics.vocabulary.numpy().tolist() == [b"Z", b"a", b"z", "é".encode(), b"\xff"]


def test_draws_are_a_function_of_the_seed_in_every_place():
    batch = ragged(CORPUS * 20)
    eager = STATISTICS.replace(batch, SEED, 0.7).to_list()
    assert eager == STATISTICS.replace(batch, SEED, 0.7).to_list()
    assert eager == tf.function(STATISTICS.replace)(batch, SEED, 0.7).to_list()
    assert eager != STATISTICS.replace(batch, SEED + 1, 0.7).to_list()
    assert list(map(len, eager)) == list(map(len, CORPUS * 20))
    mapped = tf.data.Dataset.from_tensors(batch).map(lambda b: STATISTICS.replace(b, SEED, 0.7))
    assert [words.to_list() for words in mapped] == [eager]


def test_a_corpus_without_words_is_refused():
    with pytest.raises(config_lib.ConfigError, match="no words in the 2 texts"):
        text.TfIdf.of([[[], []]])
