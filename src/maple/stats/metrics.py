"""Metrics of classes, probabilities and scores: pure functions on arrays; torch tensors are accepted.

Two families. *Classification*: predictions for N labelled images. *Detection*: separation of out-of-distribution (OOD)
from in-distribution (IND) images by a score that is higher for OOD images; these functions take the scores of both sets
and are invariant under increasing transforms. Empty and NaN input is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from maple.errors import DataError, UsageError
from maple.stats.arrays import PROBABILITY_SLACK, check_ids, check_lengths, check_unit, check_values


def _check_correct(values: Any) -> np.ndarray:
    """Whether each image was classified correctly, as booleans."""
    array = check_values(values, "correct")
    if not np.isin(array, (0.0, 1.0)).all():
        raise DataError("correct holds values other than 0 and 1: give whether each image is classified correctly")
    return array.astype(bool)


def _check_level(level: float, name: str) -> None:
    if not 0 < level <= 1:
        raise UsageError(f"{name} is {level}: give a share above 0 and at most 1")


def accuracy(predicted: Any, labels: Any) -> float:
    """Share of images whose predicted class is their label: ``mean(predicted == label)``.

    Both are *class* ids (N,): map cluster ids to classes first.

    >>> accuracy([0, 1, 2, 2], [0, 1, 1, 2])
    0.75
    """
    predicted, labels = check_ids(predicted, "predicted"), check_ids(labels, "labels")
    check_lengths(predicted=predicted, labels=labels)
    return float((predicted == labels).mean())


def confusion_matrix(labels: Any, predicted: Any, n_classes: int) -> np.ndarray:
    """Counts (C, C): entry (i, j) is the number of images of class i predicted as j.

    >>> confusion_matrix([0, 0, 1, 2], [0, 1, 1, 2], 3)
    array([[1, 1, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """
    from sklearn import metrics

    labels = check_ids(labels, "labels", n_classes)
    predicted = check_ids(predicted, "predicted", n_classes)
    check_lengths(labels=labels, predicted=predicted)
    return metrics.confusion_matrix(labels, predicted, labels=np.arange(n_classes))


def per_class_accuracy(confusion: Any) -> np.ndarray:
    """Share of each class's images that were classified correctly (C,); NaN for classes without images.

    >>> per_class_accuracy([[3, 1], [0, 0]])
    array([0.75,  nan])
    """
    counts = check_values(confusion, "confusion", ndim=2)  # (C, C)
    totals = counts.sum(axis=1)
    return np.divide(np.diag(counts), totals, out=np.full(len(totals), np.nan), where=totals > 0)


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Accuracy against confidence in B bins of equal width; NaN in empty bins."""

    edges: np.ndarray  # (B + 1,) from 0 to 1
    count: np.ndarray  # (B,) images per bin
    accuracy: np.ndarray  # (B,)
    confidence: np.ndarray  # (B,) mean confidence


def reliability_curve(confidence: Any, correct: Any, bins: int = 15) -> ReliabilityCurve:
    """Accuracy and mean confidence in exactly ``bins`` bins (0, 1/B], (1/B, 2/B], .., the first with 0 as well.

    >>> curve = reliability_curve([0.2, 0.5, 0.9, 1.0], [0, 1, 1, 1], bins=2)
    >>> curve.count, curve.accuracy, curve.confidence
    (array([2, 2]), array([0.5, 1. ]), array([0.35, 0.95]))
    """
    if bins < 1:
        raise UsageError(f"bins is {bins}: give at least 1")
    confidence, correct = check_unit(confidence, "confidence"), _check_correct(correct)
    check_lengths(confidence=confidence, correct=correct)
    index = bin_index(confidence, bins)
    count = np.bincount(index, minlength=bins)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(index, weights=values, minlength=bins)
        return np.divide(total, count, out=np.full(bins, np.nan), where=count > 0)

    return ReliabilityCurve(_bin_edges(bins), count, mean(correct), mean(confidence))


def bin_index(confidence: np.ndarray, bins: int) -> np.ndarray:
    """The bin (N,) of each confidence in [0, 1] (N,).

    >>> bin_index(np.array([0.0, 0.5, 0.51]), 2)
    array([0, 0, 1])
    """
    return np.maximum(np.searchsorted(_bin_edges(bins), confidence, side="left") - 1, 0)  # edge i closes bin i - 1


def _bin_edges(bins: int) -> np.ndarray:
    return np.linspace(0.0, 1.0, bins + 1)


def expected_calibration_error(confidence: Any, correct: Any, bins: int = 15) -> float:
    """Expected calibration error: ``sum_b n_b / N |acc(b) - conf(b)|`` over bins of equal width.

    >>> round(expected_calibration_error([0.2, 0.5, 0.9, 1.0], [0, 1, 1, 1], bins=2), 12)
    0.1
    """
    curve = reliability_curve(confidence, correct, bins)
    gaps = np.abs(curve.accuracy - curve.confidence)
    return float(np.nansum(curve.count * gaps) / curve.count.sum())


def calibration_floor(confidence: Any, bins: int = 15, draws: int = 100, seed: int = 0) -> float:
    """The expected ECE of these confidences under perfect calibration.

    In a finite sample the accuracy of a bin differs from its confidence by chance, and absolute differences do not
    average out: perfectly calibrated confidences have an ECE above 0.

    >>> round(calibration_floor(np.full(10_000, 0.8)), 3)  # sqrt(2 p (1 - p) / (pi n)) = 0.0032
    0.003
    """
    confidence = np.sort(check_unit(confidence, "confidence"))  # independent of the order of the images
    right = np.random.default_rng(seed).random((draws, len(confidence))) < confidence  # (draws, N)
    return float(np.mean([expected_calibration_error(confidence, row, bins) for row in right]))


def wilson_interval(share: Any, n: Any, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    r"""The 95 % interval of Wilson for shares measured on ``n`` images each.

    .. math:: \frac{p + z^2/2n \pm z \sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}

    >>> low, high = wilson_interval([0.8, 1.0], [10, 10])
    >>> low.round(3).tolist(), high.round(3).tolist()
    ([0.49, 0.722], [0.943, 1.0])
    """
    p, n = np.asarray(share, dtype=np.float64), np.asarray(n, dtype=np.float64)
    middle, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)


def negative_log_likelihood(probabilities: Any, labels: Any, *, log: bool = False) -> float:
    """Minus the mean log-probability of the true class: ``-1/N sum_n log p[n, y_n]``.

    With ``log=True`` the input holds logarithms, which keeps tiny probabilities finite. Rows need not sum to one: with
    the log chi-square tail per class this is the paper's NLL of P_MD. It is infinite if a true class has probability 0.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.1, 0.9]], [0, 1]), 4)
    0.3993
    >>> negative_log_likelihood([[-2000.0, -1.0]], [0], log=True)
    2000.0
    """
    name = "log-probabilities" if log else "probabilities"
    table = check_values(probabilities, name, ndim=2) if log else check_unit(probabilities, name, ndim=2)  # (N, C)
    labels = check_ids(labels, "labels", table.shape[1])
    check_lengths(**{name: table, "labels": labels})
    chosen = table[np.arange(len(labels)), labels]  # (N,)
    if log and (above := int((chosen > PROBABILITY_SLACK).sum())):
        raise DataError(f"{name} holds {above} values above 0: give logarithms of probabilities, not logits")
    with np.errstate(divide="ignore"):
        return 0.0 - float(np.mean(chosen if log else np.log(chosen)))  # 0 - 0 avoids -0.0


def brier_score(probabilities: Any, labels: Any) -> float:
    """Squared error of the probability vector: ``1/N sum_n sum_c (p[n, c] - 1[y_n = c])^2``, from 0 to 2.

    >>> round(brier_score([[0.5, 0.5], [0.1, 0.9]], [0, 1]), 12)
    0.26
    """
    table = check_unit(probabilities, "probabilities", ndim=2)  # (N, C)
    labels = check_ids(labels, "labels", table.shape[1])
    check_lengths(probabilities=table, labels=labels)
    # Expanded to avoid a one-hot matrix: sum_c p_c^2 - 2 p_y + 1.
    return float(np.mean((table**2).sum(axis=1) - 2 * table[np.arange(len(labels)), labels] + 1))


def accuracy_above(confidence: Any, correct: Any, level: float) -> tuple[float, float]:
    """Accuracy of the images whose confidence is above ``level``, and their share of all images.

    The accuracy is NaN if no image is above ``level``.

    >>> accuracy_above([0.95, 0.85, 0.6, 0.3], [1, 1, 0, 0], level=0.5)
    (0.6666666666666666, 0.75)
    """
    confidence, correct = check_values(confidence, "confidence"), _check_correct(correct)
    check_lengths(confidence=confidence, correct=correct)
    kept = confidence > level
    return (float(correct[kept].mean()) if kept.any() else math.nan), float(kept.mean())


def coverage_curve(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    """Shares k / N of the most confident images, and the accuracy among them, (N,) each.

    Ties are averaged over all orders, so that the order in the arrays does not matter. Any score that ranks images
    can serve as confidence.

    >>> share, accuracy = coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1])
    >>> share, accuracy.round(2)
    (array([0.25, 0.5 , 0.75, 1.  ]), array([1.  , 1.  , 0.67, 0.75]))
    """
    confidence, correct = check_values(confidence, "confidence"), _check_correct(correct)
    check_lengths(confidence=confidence, correct=correct)
    _, group = np.unique(-confidence, return_inverse=True)  # groups of ties, most confident first
    ends = np.cumsum(np.bincount(group))
    errors = np.cumsum(np.bincount(group, weights=~correct))
    kept = np.arange(1, len(confidence) + 1)
    expected = np.interp(kept, np.r_[0, ends], np.r_[0.0, errors])  # errors are spread evenly over a tie
    return kept / len(confidence), 1 - expected / kept


def spaced_rows(n: int, points: int) -> np.ndarray:
    """Indices of at most ``points`` of n rows, evenly spaced, including the first and the last.

    >>> spaced_rows(3, 9), spaced_rows(9, 3)
    (array([0, 1, 2]), array([0, 4, 8]))
    """
    return np.unique(np.linspace(0, n - 1, min(n, points)).round().astype(int))


def coverage_at(share: Any, accuracy: Any, error: float) -> float:
    """The largest share of images that can be kept with at most this error rate; 0 if there is none.

    >>> coverage_at(*coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), error=0.25)
    1.0
    >>> coverage_at(*coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), error=0.1)
    0.5
    """
    _check_level(error, "error")
    good = np.asarray(share)[np.asarray(accuracy) >= 1 - error - 1e-12]
    return float(good.max(initial=0.0))


def aurc(confidence: Any, correct: Any) -> float:
    """Area under the risk-coverage curve: the error among the k most confident images, averaged over k = 1..N.

    ``1/N sum_k errors(k) / k``; see :func:`coverage_curve`.

    >>> round(aurc([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), 4)
    0.1458
    """
    return float(1 - coverage_curve(confidence, correct)[1].mean())


def _check_scores(ind_scores: Any, ood_scores: Any) -> tuple[np.ndarray, np.ndarray]:
    return check_values(ind_scores, "ind_scores"), check_values(ood_scores, "ood_scores")


def auroc(ind_scores: Any, ood_scores: Any) -> float:
    """Probability that an OOD image scores higher than an IND image, ties counting half.

    ``1/(n m) sum_ij 1[o_j > i_i] + 1/2 1[o_j = i_i]``: the area under the ROC curve, in O(n log n). Counting pairs
    instead of summing areas gives bit-identical values to detectors that rank images alike.

    >>> auroc([0.0, 1.0, 2.0], [1.0, 3.0])
    0.75
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    ind = np.sort(ind)
    below, up_to = np.searchsorted(ind, ood, side="left"), np.searchsorted(ind, ood, side="right")
    return float((below + up_to).mean() / (2 * len(ind)))


def _pooled(ind: np.ndarray, ood: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which images are OOD, the rank of each score, and the distinct scores, ascending.

    Ranks replace scores because scikit-learn rejects infinite ones.
    """
    distinct, ranks = np.unique(np.concatenate([ind, ood]), return_inverse=True)
    return np.repeat([False, True], [len(ind), len(ood)]), ranks, distinct


def roc_curve(ind_scores: Any, ood_scores: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of IND flagged, share of OOD flagged, and the threshold, from nothing flagged to everything.

    One point per distinct score t, where ``score >= t`` is flagged, after the point (0, 0) at t = infinity.

    >>> roc_curve([0.0, 1.0], [1.0, 2.0])
    (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]), array([inf,  2.,  1.,  0.]))
    """
    from sklearn import metrics

    is_ood, ranks, distinct = _pooled(*_check_scores(ind_scores, ood_scores))
    ind_flagged, ood_flagged, _ = metrics.roc_curve(is_ood, ranks, drop_intermediate=False)
    return ind_flagged, ood_flagged, np.r_[np.inf, distinct[::-1]]


def aupr_out(ind_scores: Any, ood_scores: Any) -> float:
    """Area under the precision-recall curve with OOD as the positive class, as average precision.

    ``sum_k (R_k - R_{k-1}) P_k`` over the distinct thresholds, falling; depends on the sizes of the two sets.

    >>> round(aupr_out([0.0, 1.0, 2.0], [1.0, 3.0]), 4)
    0.75
    """
    from sklearn import metrics

    is_ood, ranks, _ = _pooled(*_check_scores(ind_scores, ood_scores))
    return float(metrics.average_precision_score(is_ood, ranks))


def aupr_in(ind_scores: Any, ood_scores: Any) -> float:
    """Area under the precision-recall curve with IND as the positive class: :func:`aupr_out` of negated, swapped sets.

    >>> round(aupr_in([0.0, 1.0, 2.0], [1.0, 3.0]), 4)
    0.8056
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    return aupr_out(-ood, -ind)


def fpr95_ood_positive(ind_scores: Any, ood_scores: Any, *, level: float = 0.95) -> float:
    """Share of IND images flagged when (at least) 95 % of the OOD images are caught: OOD is the positive class.

    ``P(ind >= t)`` with t the largest threshold such that ``P(ood >= t) >= level``: the convention of OpenOOD,
    pytorch-ood and torch-uncertainty. Not comparable with `fpr95_ind_positive`.

    >>> fpr95_ood_positive([0.0, 1.0, 2.0, 3.0], [2.5, 3.5, 4.5])
    0.25
    """
    _check_level(level, "level")
    ind, ood = _check_scores(ind_scores, ood_scores)
    caught = max(1, math.ceil(level * len(ood) - 1e-9))  # 1e-9: 0.55 * 100 rounds to just above 55
    threshold = np.sort(ood)[len(ood) - caught]
    return float((ind >= threshold).mean())


def fpr95_ind_positive(ind_scores: Any, ood_scores: Any, *, level: float = 0.95) -> float:
    """Share of OOD images accepted when (at least) 95 % of the IND images are accepted: IND is the positive class.

    ``P(ood <= t)`` with t the smallest threshold such that ``P(ind <= t) >= level``: the convention of NINCO and
    Mahalanobis++. Not comparable with `fpr95_ood_positive`.

    >>> round(fpr95_ind_positive([0.0, 1.0, 2.0, 3.0], [2.5, 3.5, 4.5]), 4)
    0.3333
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    return fpr95_ood_positive(-ood, -ind, level=level)


def mean_and_deviation(values: Any) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over runs; the deviation of a single run is NaN.

    >>> mean_and_deviation([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    array = check_values(values, "values")
    return float(array.mean()), (float(array.std(ddof=1)) if len(array) > 1 else math.nan)


def format_spread(values: Any, digits: int = 3) -> str:
    """Mean and standard deviation as text, for tables.

    >>> format_spread([0.90, 0.92, 0.94]), format_spread([0.9])
    ('0.920 ± 0.020', '0.900')
    """
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f}" if math.isnan(deviation) else f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def add_floor(text: str, floors: Any, digits: int = 3) -> str:
    """The text of an ECE with the mean of :func:`calibration_floor` in brackets; as it is where that is not known.

    >>> add_floor("0.091", [0.064]), add_floor("0.091", []), add_floor("0.091", [math.nan])
    ('0.091 (0.064)', '0.091', '0.091')
    """
    known = len(floors) > 0 and not any(map(math.isnan, floors))
    return f"{text} ({sum(floors) / len(floors):.{digits}f})" if known else text
