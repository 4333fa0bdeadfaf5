import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies

from ssl_influence.reporting import ranking

ROWS = strategies.lists(
    strategies.tuples(strategies.integers(-3, 3), strategies.booleans()), min_size=1, max_size=30
)


def over_pairs(score, positive):
    """The share of (positive, negative) pairs in the right order, ties half, by counting."""
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, is_positive in zip(score, positive, strict=True)
        if is_positive
        for b, other in zip(score, positive, strict=True)
        if not other
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS)
def test_auroc_counts_pairs_and_ties_half(rows):
    score, positive = (np.array(column) for column in zip(*rows, strict=True))
    expected = over_pairs(score, positive)
    # Dividing by 3 gives scores that are no round numbers in binary.
    for scaled in (score, score / 3, (score / 3).astype(np.float32)):
        found = ranking.auroc(scaled, positive)
        np.testing.assert_allclose(found, expected, atol=1e-12, equal_nan=True)


def test_scores_that_differ_by_less_than_float_printing_shows_are_no_tie():
    score = np.array([1.0, np.nextafter(1.0, 2.0)])
    assert ranking.auroc(score, np.array([False, True])) == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("positive", [[True, True], [False, False], []])
def test_auroc_of_one_class_is_nan_without_a_warning(positive):
    assert math.isnan(ranking.auroc(np.zeros(len(positive)), np.array(positive, bool)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_have_no_rank_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        ranking.auroc(np.array([0.0, bad]), np.array([True, False]))


def test_scores_and_marks_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 scores beside 2"):
        ranking.auroc(np.zeros(3), np.array([True, False]))


def test_low_weights_on_the_wrong_side_rank_perfectly_and_high_ones_not_at_all():
    pseudo_label, label = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 0, 2])
    wrong_is_light = np.array([1.0, 0.1, 0.8, 0.0, 2.0])
    assert ranking.wrong_side_auroc(wrong_is_light, pseudo_label, label) == 1.0
    assert ranking.wrong_side_auroc(-wrong_is_light, pseudo_label, label) == 0.0


def test_equal_weights_say_nothing():
    assert (
        ranking.wrong_side_auroc(np.ones(4), np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])) == 0.5
    )


def test_rows_of_unknown_label_are_left_out():
    weight, pseudo_label = np.array([1.0, 0.5, 0.7, 0.0]), np.array([0, 1, 1, 1])
    # By the two known rows alone the wrong one is lighter; the unknown ones would say otherwise.
    assert ranking.wrong_side_auroc(weight, pseudo_label, np.array([0, -1, 0, -1])) == 1.0
    assert math.isnan(ranking.wrong_side_auroc(weight, pseudo_label, np.full(4, -1)))
