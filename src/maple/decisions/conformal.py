"""What validation and calibration images teach: probabilities; p-values, thresholds and sets that keep a promise.

Class probabilities are fitted on *validation* images; p-values, thresholds and prediction sets come from *calibration*
images, which may not have chosen anything else: only then do the stated rates hold. They hold for any score and any
distribution, as long as new in-distribution images are drawn like the calibration images.

From n calibration scores there are three promises about false alarms, in-distribution images that are flagged:

- marginal: the expected rate, over calibration sets and images, is at most ``false_alarm``. The rate of one calibration
  set varies around it as a beta distribution and exceeds it about half of the time (:func:`false_alarm_interval`);
- with ``confidence``: the rate of all but a share 1 - confidence of the calibration sets is at most ``false_alarm``;
- over a batch, :func:`benjamini_hochberg`: the expected share of false alarms among the flagged is at most ``fdr``.

:class:`Calibration` holds what the calibration images taught, :class:`Decision` decides with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite, log, log1p, log10
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize, minimize_scalar
from scipy.special import betainc, betaincinv, logsumexp

from maple.errors import DataError, UsageError
from maple.stats.gaussians import as_array, log_posterior
from maple.text import percent

TEMPERATURE_RANGE = (1e-3, 1e6)
# Deviation of the prior on log T: within a factor of ten of 1. It weighs as much as one image, hence it decides only
# where the images say nothing.
LOG_TEMPERATURE_DEVIATION = log(10)
LOG_EXPONENT_DEVIATION = log(2)  # of that on the logarithm of the exponent of odds
SMALLEST_EXPONENT = 0.05
LOWEST = -1e300  # of log probabilities that are subtracted from others
# A predicted class with fewer calibration images has no threshold of its own: at 100, a false-alarm rate of 5 % varies
# between 2 and 9 % from one calibration set to the next.
MIN_CLASS_IMAGES = 100
# Rounding decides nothing: conformal p-values lie on a grid, often exactly on the line of Benjamini and Hochberg, and
# the beta distribution is known to so many digits.
ROUNDING = 1e-12


# ------------------------------------------------------------------------------------------------------ temperature


def fit_temperature(
    squared_distances: np.ndarray, labels: np.ndarray, log_weights: np.ndarray, cluster_to_class: np.ndarray
) -> float:
    """The temperature T of the class posterior with the least negative log-likelihood on validation images.

    ``squared_distances`` (N, M), ``labels`` (N,) class ids, ``log_weights`` and ``cluster_to_class`` (M,) as for
    :func:`maple.stats.gaussians.log_posterior`. Images of unknown classes (-1, or without a cluster) are left out.
    Minimises

        sum over images of -log p(label | e, T) + (log T)² / 2 s²,  s = log 10

    in log T. The last term is worth less than one image; it keeps T finite where all images are right (the likelihood
    alone wants T = 0) or none is (T = infinity). Logits work too: a softmax is the case d² = -2 logits, weights 0.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(20000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # exactly softmax-distributed
    >>> bool(abs(fit_temperature(-2 * 5 * logits, labels, np.zeros(3), np.arange(3)) - 5) < 0.2)
    True
    """
    labels = as_array(labels)
    known = np.isin(labels, cluster_to_class)
    if not known.any():
        raise DataError("no validation image has a label among the known classes, which a temperature needs: add some")
    squared_distances, labels = as_array(squared_distances)[known], labels[known]
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        posterior = log_posterior(squared_distances, log_weights, cluster_to_class, np.exp(log_temperature))
        return float(-posterior[rows, labels].sum() + (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2 / 2)

    # A grid finds the valley, whatever the scale of the distances; Brent finds its floor.
    grid = np.log(np.geomspace(*TEMPERATURE_RANGE, num=28))
    best = int(np.argmin([loss(point) for point in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))


def fit_softmax_temperature(log_softmax: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of a network's own log class probabilities (N, C) (Guo et al. 2017): the case d² = -2 log p."""
    n_classes = log_softmax.shape[1]
    return fit_temperature(-2 * log_softmax, labels, np.zeros(n_classes), np.arange(n_classes))


def fit_pool(
    squared_distances: np.ndarray,
    labels: np.ndarray,
    log_weights: np.ndarray,
    cluster_to_class: np.ndarray,
    log_softmax: np.ndarray | None = None,
) -> tuple[float, float, float]:
    """Temperature T of the Gaussians, weight a of the network's own probabilities and exponent b of the odds.

    As :func:`fit_temperature`, with ``log_softmax`` (N, C) log class probabilities of the network, where there is one;
    else a is 0. T and a are those of the least negative log-likelihood on validation images of their :func:`pool`, a at
    least 0. Starts from the Gaussians alone (a = 0), so that the pool is never less likely than they are. Then
    :func:`fit_odds` finds b.
    """
    known = np.isin(labels, cluster_to_class)
    alone = fit_temperature(squared_distances, labels, log_weights, cluster_to_class)
    squared_distances, labels = as_array(squared_distances)[known], as_array(labels)[known]
    if log_softmax is None:
        return alone, 0.0, fit_odds(log_posterior(squared_distances, log_weights, cluster_to_class, alone), labels)
    network, rows = as_array(log_softmax)[known], np.arange(len(labels))

    def logs(log_temperature: float, weight: float) -> np.ndarray:
        posterior = log_posterior(squared_distances, log_weights, cluster_to_class, np.exp(log_temperature))
        return pool(posterior, network, max(weight, 0.0))

    def loss(parameters: np.ndarray) -> float:
        # One image's worth of doubt about both keeps them finite where all images are right.
        doubt = (parameters[0] / LOG_TEMPERATURE_DEVIATION) ** 2 / 2 + parameters[1] ** 2 / 2
        return float(-logs(*parameters)[rows, labels].sum() + doubt)

    start = np.array([[np.log(alone), 0.0], [np.log(alone) + 0.7, 0.5], [np.log(alone) + 1.5, 1.0]])
    found = minimize(loss, start[0], method="Nelder-Mead", options={"initial_simplex": start, "xatol": 1e-4}).x
    temperature, weight = float(np.clip(np.exp(found[0]), *TEMPERATURE_RANGE)), max(float(found[1]), 0.0)
    return temperature, weight, fit_odds(logs(log(temperature), weight), labels)


def fit_odds(log_probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The exponent b of :func:`raise_odds`, at most 1: how sure of the first class validation images allow one to be.

    With z the log odds of the first class, it is right with probability 1 / (1 + exp(-b z)): b has the least negative
    log-likelihood of that, and one image's worth of doubt. It is 1 unless that pays for one more number by the Bayesian
    information criterion, log(N) / 2: with few images, chance would decide. Probabilities (N, C) in logs, labels (N,).

    >>> rng = np.random.default_rng(0)
    >>> logs = np.log(rng.dirichlet(np.ones(3), size=20000))
    >>> labels = (raise_odds(logs, 0.7) + rng.gumbel(size=logs.shape)).argmax(axis=1)
    >>> bool(abs(fit_odds(logs, labels) - 0.7) < 0.05)
    True
    """
    if log_probabilities.shape[1] == 1:
        return 1.0
    odds = _log_odds(log_probabilities)[0]
    signs = np.where(log_probabilities.argmax(axis=1) == labels, 1.0, -1.0)

    def loss(log_exponent: float) -> float:
        doubt = (log_exponent / LOG_EXPONENT_DEVIATION) ** 2 / 2
        return float(np.logaddexp(0, -signs * np.exp(log_exponent) * odds[:, 0]).sum() + doubt)

    found = minimize_scalar(loss, bounds=(log(SMALLEST_EXPONENT), 0.0), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x)) if loss(0.0) - found.fun > log(max(len(labels), 1)) / 2 else 1.0


def _log_odds(log_probabilities: np.ndarray, first: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Log odds (N, 1) of the first class against all others, log probability (N, 1) of these, which it is (N, C)."""
    first = (log_probabilities.argmax(axis=1) if first is None else first)[:, None]  # (N, 1)
    is_first = np.arange(log_probabilities.shape[1]) == first  # (N, C)
    rest = logsumexp(np.where(is_first, -np.inf, log_probabilities), axis=1, keepdims=True)  # (N, 1)
    rest = np.maximum(rest, LOWEST)
    return np.take_along_axis(log_probabilities, first, 1) - rest, rest, is_first


def pool(log_posterior: np.ndarray, log_softmax: np.ndarray, weight: float) -> np.ndarray:
    """Log class probabilities (N, C) of two experts that look at the same image: a logarithmic opinion pool.

    log p(c) = log p_Gaussians(c) + weight log p_network(c), normalised.

    A network may lack classes, which came to the Gaussians later: -inf in ``log_softmax``. Let O be those that it has.
    By the law of total probability,

        p(c) = p_Gaussians(O) pool(c | O)  for c in O,    p(c) = p_Gaussians(c)  for all others:

    the network has a say in which of its own classes an image belongs to, and none in whether it is one of them.

    >>> np.exp(pool(np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]]), 1.0)).round(3)
    array([[0.9, 0.1]])
    >>> np.exp(pool(np.log([[0.2, 0.2, 0.6]]), np.array([[np.log(0.9), np.log(0.1), -np.inf]]), 1.0)).round(3)
    array([[0.36, 0.04, 0.6 ]])
    """
    known = ~np.isneginf(log_softmax).any(axis=0)  # (C,)
    if not known.all():
        logs = log_posterior.copy()
        inside = logsumexp(logs[:, known], axis=1, keepdims=True)  # (N, 1) log p_Gaussians(O)
        logs[:, known] = inside + pool(logs[:, known], log_softmax[:, known], weight)
        return logs
    pooled = log_posterior + weight * log_softmax
    return pooled - logsumexp(pooled, axis=1, keepdims=True)


def raise_odds(log_probabilities: np.ndarray, exponent: float, first: np.ndarray | None = None) -> np.ndarray:
    """Log class probabilities (N, C) with the odds of the most probable class against all others to a power.

    ``first`` (N,) says which class that is, where several are as probable; of these, it is the one that gains.

    A temperature changes how sure one is of the first class and how the others compare by one number. With p the
    largest probability of an image, here

        p' / (1 - p') = (p / (1 - p)) ** exponent,

    and the others keep their proportions. Below 1, what was nearly certain becomes less so, and what was less probable
    than not becomes more so; the most probable class remains the same (above 1 it need not).

    >>> np.exp(raise_odds(np.log([[0.8, 0.15, 0.05]]), 0.5)).round(3)
    array([[0.667, 0.25 , 0.083]])
    """
    if exponent == 1 or log_probabilities.shape[1] == 1:
        return log_probabilities
    odds, rest, is_first = _log_odds(log_probabilities, first)
    odds = exponent * odds
    return np.where(is_first, -np.logaddexp(0, -odds), log_probabilities - rest - np.logaddexp(0, odds))


# ------------------------------------------------------------------------------------------ p-values and thresholds


def conformal_p_values(scores: ArrayLike, calibration_scores: ArrayLike) -> np.ndarray:
    """p = (1 + #{calibration scores >= score}) / (n + 1): small where few in-distribution images score as high.

    For an image exchangeable with the n calibration images, P(p <= a) <= a, whatever the score and its distribution.

    >>> conformal_p_values([0.5, 2.0, 9.0], [1.0, 2.0, 3.0])
    array([1.  , 0.75, 0.25])
    """
    return _p_values(as_array(scores), _sorted_scores(calibration_scores))


def conformal_threshold(calibration_scores: ArrayLike, false_alarm: float, confidence: float | None = None) -> float:
    """The threshold above which an image is flagged, so that in-distribution images are flagged at most so often.

    It is the (k + 1)-th largest of the n calibration scores, so that k of them lie above. The false-alarm rate that
    such a threshold turns out to have is distributed over calibration sets as

        rate ~ Beta(k + 1, n - k),  mean (k + 1) / (n + 1)

    for continuous scores, and is smaller with ties. Without ``confidence``, k is the largest number whose mean rate is
    at most ``false_alarm``: ``score > threshold`` is then exactly where the p-value is at most ``false_alarm``. With
    it, k is the largest number for which P(rate <= false_alarm) >= confidence.

    Infinite (nothing is out-of-distribution) when there are too few calibration images for so small a rate:
    see :func:`min_calibration_images`.

    >>> conformal_threshold([3.0, 1.0, 2.0, 4.0], false_alarm=0.4)
    3.0
    >>> conformal_threshold(np.arange(1000.0), 0.05), conformal_threshold(np.arange(1000.0), 0.05, confidence=0.95)
    (950.0, 961.0)
    """
    ordered = _sorted_scores(calibration_scores)
    k = count_allowed(len(ordered), false_alarm, confidence)
    return float(ordered[len(ordered) - 1 - k]) if k >= 0 else float("inf")


def min_calibration_images(false_alarm: float, confidence: float | None = None) -> int:
    """The least number of calibration images with which an image can be called out-of-distribution at all.

    >>> min_calibration_images(0.05), min_calibration_images(0.05, confidence=0.95)
    (19, 59)
    """
    _check_rates(false_alarm, confidence)
    # No calibration score lies above the threshold: 1 / (n + 1) <= a, or 1 - (1 - a)^n >= confidence.
    guess = 1 / false_alarm - 1 if confidence is None else log1p(-confidence) / log1p(-false_alarm)
    numbers = range(ceil(guess) + 2)  # rounding moves the guess by one at most
    return bisect_left(numbers, True, key=lambda n: count_allowed(n, false_alarm, confidence) >= 0)


def false_alarm_interval(
    n_images: int, false_alarm: float, confidence: float | None = None, share: float = 0.9
) -> tuple[float, float]:
    """Between which false-alarm rates the central ``share`` of all calibration sets of ``n_images`` images lies.

    These are quantiles of the beta distribution of :func:`conformal_threshold`: rates over endlessly many new images.
    (0, 0) where there are too few calibration images to flag anything.

    >>> low, high = false_alarm_interval(1000, 0.05)
    >>> print(f"{low:.3f} to {high:.3f}")
    0.039 to 0.062
    """
    _check_rate(share, "share", 0.9)
    k = count_allowed(n_images, false_alarm, confidence)
    if k < 0:
        return 0.0, 0.0
    low, high = betaincinv(k + 1, n_images - k, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _p_values(scores: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    n_at_least = len(ordered) - np.searchsorted(ordered, scores, side="left")
    return (1 + n_at_least) / (len(ordered) + 1)


def count_allowed(n: int, false_alarm: float, confidence: float | None = None) -> int:
    """How many of n calibration scores may lie above the threshold, to the last bit; -1 where even 0 are too many.

    >>> count_allowed(99, 0.05), count_allowed(98, 0.05), count_allowed(10, 0.05)
    (4, 3, -1)
    """
    _check_rates(false_alarm, confidence)
    if confidence is not None:  # P(rate <= false_alarm) falls with k: the last k before it falls too low
        least = confidence * (1 - ROUNDING)
        return bisect_left(range(n), True, key=lambda k: bool(betainc(k + 1, n - k, false_alarm) < least)) - 1
    k = floor(false_alarm * (n + 1))  # one too many, which the loop takes back unless rounding already did
    while k >= 0 and (1 + k) / (n + 1) > false_alarm:
        k -= 1
    return k


def _sorted_scores(scores: ArrayLike) -> np.ndarray:
    ordered = np.sort(as_array(scores).astype(np.float64))
    if len(ordered) and np.isnan(ordered[-1]):  # NaN sorts last
        raise DataError(f"{int(np.isnan(ordered).sum())} of {len(ordered)} calibration scores are NaN: leave them out")
    return ordered


def _check_rates(false_alarm: float, confidence: float | None) -> None:
    _check_rate(false_alarm, "false-alarm rate", 0.05)
    if confidence is not None:
        _check_rate(confidence, "confidence", 0.95)


def _check_rate(rate: float, what: str, example: float) -> None:
    if not 0 < rate < 1:
        raise UsageError(f"{what} {rate}: give a share between 0 and 1, such as {example}")


# ---------------------------------------------------------------------------------------------------------- batches


def benjamini_hochberg(p_values: ArrayLike, fdr: float) -> np.ndarray:
    """Which of m images to flag (m,), so that at most a share ``fdr`` of those flagged is in-distribution on average.

    With p_(1) <= ... <= p_(m), the largest k with p_(k) <= fdr k / m counts: the k images of smallest p-value are
    flagged. For conformal p-values that share one calibration set, whose images are exchangeable with the
    in-distribution images of the batch, the expected share of these among the flagged (the false-discovery rate, 0
    where none is flagged) is at most fdr m0 / m, m0 of the m images being in-distribution (Bates et al., 2023: such
    p-values are positively dependent).

    >>> benjamini_hochberg([0.01, 0.9, 0.03, 0.2], fdr=0.1)
    array([ True, False,  True, False])
    """
    p = as_array(p_values).astype(np.float64)
    _check_rate(fdr, "false-discovery rate", 0.1)
    if np.isnan(p).any():
        raise UsageError(
            f"{int(np.isnan(p).sum())} of {len(p)} p-values are NaN, since nothing was calibrated: "
            "calibrate with in-distribution images first"
        )
    if not ((p >= 0) & (p <= 1)).all():
        raise UsageError("p-values lie between 0 and 1, and these do not: give p-values, not scores")
    ordered = np.sort(p)
    below = np.flatnonzero(ordered <= _line(np.arange(1, len(p) + 1), len(p), fdr))
    return p <= ordered[below[-1]] if len(below) else np.zeros(len(p), dtype=bool)


def can_flag(n_calibration: int, n_images: int, fdr: float, n_flagged: int = 1) -> bool:
    """Whether :func:`benjamini_hochberg` could flag ``n_flagged`` of ``n_images`` images, however unusual they are.

    No conformal p-value is below 1 / (n + 1), so that it takes n + 1 >= m / (fdr k) calibration images to flag k of m.

    >>> can_flag(999, 100, fdr=0.1), can_flag(998, 100, fdr=0.1), can_flag(998, 100, fdr=0.1, n_flagged=2)
    (True, False, True)
    """
    _check_rate(fdr, "false-discovery rate", 0.1)
    return n_images == 0 or bool(1 / (n_calibration + 1) <= _line(n_flagged, n_images, fdr))


def _line(k: Any, m: int, fdr: float) -> Any:
    """fdr k / m, with room for rounding."""
    return fdr * k / m * (1 + ROUNDING)


# -------------------------------------------------------------------------------------------------- prediction sets


def true_class_scores(log_probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """-log p of the true class of each labelled image (n_labelled,): what :func:`prediction_sets` learns from.

    ``log_probabilities`` (N, C), ``labels`` (N,) class ids; images of unknown classes (-1, or none of the C) are left
    out.

    >>> true_class_scores(np.log([[0.5, 0.5], [0.2, 0.8]]), [-1, 1]).round(3)
    array([0.223])
    """
    log_probabilities, labels = as_array(log_probabilities), as_array(labels)
    known = np.flatnonzero((labels >= 0) & (labels < log_probabilities.shape[1]))
    return 0.0 - log_probabilities[known, labels[known]].astype(np.float64)


def prediction_sets(log_probabilities: ArrayLike, set_scores: ArrayLike, coverage: float) -> np.ndarray:
    """Which classes an image may belong to (N, C), bool: the true one is among them with probability ``coverage``.

    Class c is in the set where -log p_c is at most the r-th smallest of the n ``set_scores`` of calibration images
    (:func:`true_class_scores`), r = ceil((n + 1) coverage). An image exchangeable with them has its true class in the
    set with a probability of at least ``coverage``, and of at most 1 / (n + 1) more for continuous scores. All classes
    are in where n is too small (r > n). The most probable class is always in: that can only raise coverage, and no
    set is empty.

    >>> prediction_sets(np.log([[0.9, 0.06, 0.04], [0.5, 0.3, 0.2]]), -np.log([0.9, 0.8, 0.4, 0.3]), coverage=0.75)
    array([[ True, False, False],
           [ True,  True, False]])
    """
    _check_rate(coverage, "coverage", 0.9)
    ordered = _sorted_scores(set_scores)
    if len(ordered) == 0:
        raise DataError("prediction sets need labelled calibration images, and there are none: calibrate with labels")
    log_probabilities = as_array(log_probabilities)  # (N, C)
    rank = _covering_rank(len(ordered), coverage)
    sets = -log_probabilities <= (ordered[rank - 1] if rank <= len(ordered) else np.inf)
    sets[np.arange(len(sets)), log_probabilities.argmax(axis=1)] = True
    return sets


def min_labelled_images(coverage: float) -> int:
    """The least number of labelled calibration images with which :func:`prediction_sets` can leave any class out.

    >>> min_labelled_images(0.95), min_labelled_images(0.9), min_labelled_images(0.999)
    (19, 9, 999)
    """
    _check_rate(coverage, "coverage", 0.9)
    n = max(floor(coverage / (1 - coverage)) - 1, 1)  # one too few, as below
    while _covering_rank(n, coverage) > n:
        n += 1
    return n


def _covering_rank(n: int, coverage: float) -> int:
    """The least r with r / (n + 1) >= coverage, to the last bit; at most n + 1."""
    rank = max(ceil(coverage * (n + 1)) - 1, 1)  # one too few, which the loop makes up for unless rounding already did
    while rank / (n + 1) < coverage:
        rank += 1
    return rank


# -------------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, eq=False)
class Calibration:
    """What calibration images teach; :meth:`decide` turns it into decisions at any level, without seeing them again.

    ``set_scores`` come from the labelled ones (:func:`true_class_scores`); labels are needed for nothing else.

    >>> calibration = Calibration(np.arange(1000.0), np.zeros(1000, dtype=int), n_classes=2)
    >>> decision = calibration.decide(false_alarm=0.05)
    >>> decision.is_ood([949.5, 950.5], [0, 1])
    array([False,  True])
    >>> print(decision.sentence())
    flags at most 5 % of in-distribution images on average over calibration sets (1,000 calibration images; 90 % of such
    sets flag 3.9 to 6.2 %)
    """

    scores: np.ndarray  # (n,)
    class_ids: np.ndarray  # (n,) int64: the *predicted* class of each calibration image
    n_classes: int
    set_scores: np.ndarray = field(default_factory=lambda: np.empty(0))  # (n_labelled,)

    def __post_init__(self) -> None:
        _check_images(self.scores, self.class_ids, self.n_classes)

    @staticmethod
    def empty(n_classes: int) -> Calibration:
        """Nothing learned: p-values are NaN, and nothing is flagged."""
        return Calibration(np.empty(0), np.empty(0, dtype=np.int64), n_classes)

    def __len__(self) -> int:
        return len(self.scores)

    def decide(self, false_alarm: float = 0.05, confidence: float | None = None, per_class: bool = False) -> Decision:
        """The decision for a false-alarm rate: see :func:`conformal_threshold` for ``confidence``.

        ``per_class`` makes the promise for each *predicted* class by itself (Mondrian conformal prediction), instead of
        for all images taken together, among whom those of one class may be flagged far more often. A class with enough
        calibration images, ``MIN_CLASS_IMAGES`` and :func:`min_calibration_images`, has its own threshold and p-values.
        All other classes share those of their images: the promise then holds on average over these classes, as often as
        they occur among the calibration images. Where even these images are too few to flag anything, all calibration
        images serve, and nothing is promised for these classes beyond what ``per_class=False`` promises for all.
        """
        needed = min_calibration_images(false_alarm, confidence)
        scores, class_ids = as_array(self.scores), as_array(self.class_ids).astype(np.int64)
        counts = np.bincount(class_ids, minlength=self.n_classes)  # (C,)
        own = (counts >= max(needed, MIN_CLASS_IMAGES)) & per_class
        shared = scores[~own[class_ids]] if counts[~own].sum() >= needed else scores
        by_class = np.split(scores[np.argsort(class_ids, kind="stable")], np.cumsum(counts)[:-1])
        groups = tuple(_sorted_scores(s) for s in (shared, *(by_class[c] for c in np.flatnonzero(own))))
        thresholds = np.array([conformal_threshold(group, false_alarm, confidence) for group in groups])
        group_of_class = np.where(own, np.cumsum(own), 0)
        return Decision(
            false_alarm=false_alarm,
            confidence=confidence,
            per_class=per_class,
            n_images=len(self),
            thresholds=thresholds[group_of_class],
            group_of_class=group_of_class,
            group_scores=groups,
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All there is, by name."""
        return {
            "scores": as_array(self.scores).astype(np.float64),
            "class_ids": as_array(self.class_ids).astype(np.int64),
            "n_classes": np.array([self.n_classes]),
            "set_scores": as_array(self.set_scores).astype(np.float64),
        }

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> Calibration:
        """The inverse of :meth:`to_arrays`."""
        return Calibration(arrays["scores"], arrays["class_ids"], arrays["n_classes"].item(), arrays["set_scores"])


@dataclass(frozen=True, eq=False)
class Decision:
    """In or out of distribution at one level, and the promise that goes with it; made by :meth:`Calibration.decide`.

    Each predicted class belongs to a group of calibration images: group 0 is shared, any other is one class's own.
    Threshold and p-value of an image come from the same group, so that without ``confidence`` an image is flagged
    exactly where its p-value is at most ``false_alarm``. Without calibration images p-values are NaN; with too few,
    thresholds are infinite and nothing is flagged.
    """

    false_alarm: float
    confidence: float | None
    per_class: bool
    n_images: int  # calibration images
    thresholds: np.ndarray  # (C,) score above which an image predicted as this class is flagged
    group_of_class: np.ndarray  # (C,) int64
    group_scores: tuple[np.ndarray, ...]  # calibration scores of each group, sorted

    @property
    def kind(self) -> str:
        """'marginal' or 'confidence', each possibly 'per class'."""
        kind = "marginal" if self.confidence is None else "confidence"
        return f"{kind} per class" if self.per_class else kind

    @property
    def min_images(self) -> int:
        """The least number of calibration images with which an image can be flagged at this level."""
        return min_calibration_images(self.false_alarm, self.confidence)

    @property
    def can_flag_any(self) -> bool:
        """Whether there are so many."""
        return self.n_images >= self.min_images

    @property
    def n_own_thresholds(self) -> int:
        """How many classes have their own threshold."""
        return int((self.group_of_class > 0).sum())

    def p_values(self, scores: ArrayLike, class_ids: ArrayLike) -> np.ndarray:
        """The conformal p-value of each image (N,), given its score and predicted class; NaN without calibration."""
        scores, class_ids = _check_images(scores, class_ids, len(self.thresholds))
        p = np.full(len(scores), np.nan)
        groups = self.group_of_class[class_ids]  # (N,)
        order = np.argsort(groups, kind="stable")
        ends = np.cumsum(np.bincount(groups, minlength=len(self.group_scores)))
        for rows, ordered in zip(np.split(order, ends[:-1]), self.group_scores, strict=True):
            if len(rows) and len(ordered):
                p[rows] = _p_values(scores[rows], ordered)
        return p

    def is_ood(self, scores: ArrayLike, class_ids: ArrayLike) -> np.ndarray:
        """Whether each image is flagged as out-of-distribution (N,), given its score and predicted class."""
        scores, class_ids = _check_images(scores, class_ids, len(self.thresholds))
        return scores > self.thresholds[class_ids]

    def known_images(self, class_names: Sequence[str]) -> list[str]:
        """Of which known images the p-values of each predicted class speak (C,), in words."""
        if not self.n_own_thresholds:
            return ["known images"] * len(class_names)
        pooled = len(self.group_scores[0]) < self.n_images
        others = "known images of the classes without a threshold of their own" if pooled else "known images"
        return [f"known images called {name}" if own else others for name, own in zip(class_names, self.group_of_class)]

    def describe(self) -> dict[str, Any]:
        """Level, kind and thresholds as plain values, for files; an infinite threshold is None."""
        thresholds = [float(t) if isfinite(t) else None for t in self.thresholds]
        return {
            "kind": self.kind,
            "false_alarm": self.false_alarm,
            "confidence": self.confidence,
            "per_class": self.per_class,
            "n_calibration": self.n_images,
            "n_own_thresholds": self.n_own_thresholds,
            **({"thresholds": thresholds} if self.per_class else {"threshold": thresholds[0]}),
        }

    def sentence(self) -> str:
        """The promise in one plain sentence, without its full stop."""
        if not self.can_flag_any:
            found = f"there are {self.n_images:,}" if self.n_images else "there are none"
            needed = f"at least {self.min_images:,} calibration images"
            return f"flags nothing: this false-alarm rate takes {needed}, and {found}"
        of = "in-distribution images of each predicted class" if self.n_own_thresholds else "in-distribution images"
        how = "on average over calibration sets"
        if self.confidence is not None:
            how = f"with {percent(self.confidence, exact=True)} confidence in this calibration set"
        promise = f"flags at most {percent(self.false_alarm, exact=True)} of {of} {how}"
        return f"{promise} ({self.n_images:,} calibration images; {self._detail()})"

    def _detail(self) -> str:
        own, n_classes = self.n_own_thresholds, len(self.thresholds)
        if own == n_classes:
            return "every class has its own threshold"
        if own:
            pooled = len(self.group_scores[0]) < self.n_images
            others = (
                "share one" if pooled else "have too few images and use that of all, without a promise of their own"
            )
            return f"own thresholds for {own} of {n_classes} classes, the others {others}"
        low, high = false_alarm_interval(self.n_images, self.false_alarm, self.confidence, share=0.9)
        digits = max(0, 1 - floor(log10(100 * (high - low))))
        spread = f"90 % of such sets flag {100 * low:.{digits}f} to {100 * high:.{digits}f} %"
        return f"{spread}; no class has enough images for its own threshold" if self.per_class else spread


def _check_images(scores: ArrayLike, class_ids: ArrayLike, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (N,) and predicted classes (N,) as arrays, or an error."""
    scores, class_ids = as_array(scores), as_array(class_ids)
    if scores.shape != class_ids.shape or scores.ndim != 1:
        raise UsageError(
            f"scores of shape {scores.shape} and class ids of shape {class_ids.shape}: give one of each per image"
        )
    if np.isnan(scores).any():
        raise DataError(f"{int(np.isnan(scores).sum())} of {len(scores)} scores are NaN: leave those images out")
    if len(class_ids) and not (class_ids.min() >= 0 and class_ids.max() < n_classes):
        raise UsageError(f"class ids must lie between 0 and {n_classes - 1}: give the predicted class of each image")
    return scores, class_ids.astype(np.int64)
