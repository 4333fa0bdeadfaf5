"""How well example weights rank the unlabeled examples: do low ones mark wrong pseudo-labels?"""

import numpy as np
from sklearn import metrics


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve: how often a positive has a higher score than a negative.

    This is the Mann-Whitney statistic over all pairs of a positive and a negative, in which a tie
    counts one half.

    Args:
      score: finite, float [n].
      positive: bool [n].

    Returns:
      In [0, 1]; 0.5 where the scores are all equal; NaN where all or none are positive.

    Raises:
      ValueError: a score is NaN or infinite, or the lengths differ.
    """
    positive = np.asarray(positive, bool)
    if len(score) != len(positive):
        raise ValueError(f"{len(score)} scores beside {len(positive)} marks of positives.")
    if not np.isfinite(score).all():
        raise ValueError("A score is NaN or infinite: such rows cannot be ranked.")
    if positive.all() or not positive.any():
        return float("nan")
    return float(metrics.roc_auc_score(positive, score))


def wrong_side_auroc(score: np.ndarray, pseudo_label: np.ndarray, label: np.ndarray) -> float:
    """How well a low weight marks the examples whose pseudo-label is wrong.

    The paper says of its synthetic sets that the examples that are "down-weighted the most are near
    but on the wrong side of the learned decision boundary" (section "Synthetic Experiments"). Here
    is the part of it that says wrong: the chance that of two unlabeled examples, one on the wrong
    side and one on the right side, the wrong one has the lower weight. 0.5 says nothing (equal
    weights), 1 is perfect.

    Args:
      score: lambda of unlabeled examples, or what else is to be low where they are wrong, [n].
      pseudo_label: the class the model predicts for them, int [n].
      label: the true class, int [n]; rows of unknown label (-1) are left out.

    Returns:
      In [0, 1]; NaN where no pseudo-label, or each one, is wrong.
    """
    label = np.asarray(label)
    known = label >= 0
    wrong = np.asarray(pseudo_label) != label
    return auroc(-np.asarray(score)[known], wrong[known])
