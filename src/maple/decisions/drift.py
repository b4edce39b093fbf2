"""Tests for drift of new images away from the calibration images, by scores alone: for one batch and for streams.

No drift means that new images are *exchangeable* with the calibration images: drawn from the same distribution, in no
particular order. All tests here are exact under that hypothesis, for any score, any distribution and any number of
calibration images. n calibration images represent their distribution only approximately, hence:

- p-values of new images against one calibration set are **not** independent: all share its sampling error. A one-sample
  test of these p-values against the uniform distribution takes that error for drift, and a martingale that bets on them
  grows without bound. Both get worse with every new image.
- :func:`compare_scores`, for one batch, therefore compares two samples (Kolmogorov-Smirnov), and compares the number of
  flagged images with its beta-binomial distribution, which accounts for the uncertainty of the threshold.
- :class:`StreamMonitor`, for streams monitored continuously, ranks each image among the calibration images *and* all
  earlier images of the stream. Those p-values are independent and uniform, and betting against them gains nothing.

Letters for shapes: N new images, n calibration images, B bets.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import beta as beta_function
from scipy.stats import betabinom, ks_2samp

from maple.decisions.conformal import check_rate, conformal_threshold, count_allowed
from maple.errors import RunError, UsageError
from maple.stats.arrays import check_values

# ------------------------------------------------------------------------------------------------------- one batch


@dataclass(frozen=True)
class Comparison:
    """New scores against calibration scores: two tests and one verdict, at the nominal rate ``level``.

    Both tests have the same null hypothesis, so one of them suffices to reject it, with a Bonferroni correction for two
    tests (Holm's step-down would decide the same). The share flagged detects a few images that are far out, which
    hardly change the distribution; Kolmogorov-Smirnov detects shifts of the bulk in either direction.
    """

    n_images: int
    n_calibration: int
    threshold: float
    n_flagged: int
    expected_share: float  # (k + 1) / (n + 1): at most the false-alarm rate, whose next lower attainable value it is
    likely_shares: tuple[float, float]  # in 95 of 100 batches without drift, the share flagged lies in this range
    share_p_value: float
    ks_statistic: float
    ks_p_value: float
    scores_rose: bool  # where the two distributions differ most, the new scores are the higher ones
    level: float

    @property
    def share_flagged(self) -> float:
        return self.n_flagged / self.n_images

    @property
    def p_value(self) -> float:
        """Of both tests together: at most ``level`` in at most a share ``level`` of the batches without drift."""
        return min(1.0, 2 * min(self.share_p_value, self.ks_p_value))

    @property
    def drift(self) -> bool:
        return self.p_value <= self.level


def compare_scores(
    scores: ArrayLike, calibration_scores: ArrayLike, false_alarm: float = 0.05, level: float = 0.01
) -> Comparison:
    """Test whether a batch of new scores (N,) is exchangeable with the calibration scores (n,), in any order.

    Ties are allowed: they can only make both p-values larger.

    >>> rng = np.random.default_rng(0)
    >>> calibration = rng.normal(size=500)
    >>> same, shifted = rng.normal(size=300), rng.normal(0.5, size=300)
    >>> compare_scores(same, calibration).drift, compare_scores(shifted, calibration).drift
    (False, True)
    """
    check_rate(level, "level", 0.01)
    scores, calibration = check_values(scores, "scores"), check_values(calibration_scores, "calibration_scores")
    threshold = conformal_threshold(calibration, false_alarm)
    n_flagged = int((scores > threshold).sum())
    n_allowed = count_allowed(len(calibration), false_alarm)
    chances = flagged_distribution(len(scores), len(calibration), n_allowed)
    low, high = np.searchsorted(np.cumsum(chances), (0.025, 0.975))
    statistic, ks_p_value, scores_rose = kolmogorov_smirnov(scores, calibration)
    return Comparison(
        n_images=len(scores),
        n_calibration=len(calibration),
        threshold=threshold,
        n_flagged=n_flagged,
        expected_share=(n_allowed + 1) / (len(calibration) + 1),
        likely_shares=(float(low / len(scores)), float(min(high, len(scores)) / len(scores))),
        share_p_value=float(min(chances[n_flagged:].sum(), 1.0)),
        ks_statistic=statistic,
        ks_p_value=ks_p_value,
        scores_rose=scores_rose,
        level=level,
    )


def kolmogorov_smirnov(scores: ArrayLike, calibration_scores: ArrayLike) -> tuple[float, float, bool]:
    """D, its p-value, and whether the new scores are higher where the distributions differ most.

        D = max over s of |F_new(s) - F_calibration(s)|

    for the two empirical distribution functions. It is a two-sample test, since both samples are finite: a one-sample
    test of conformal p-values against the uniform distribution is the same statistic with F_calibration taken for the
    truth, and rejects without drift, nearly always once there are many more new images than calibration images.

    >>> kolmogorov_smirnov([4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0])[0]
    0.75
    """
    with warnings.catch_warnings():  # SciPy warns when it falls back from the exact to the asymptotic p-value
        warnings.filterwarnings("ignore", message=".*(?:Switching to|Exact)", category=RuntimeWarning)
        result = ks_2samp(scores, calibration_scores)
    return float(result.statistic), float(result.pvalue), bool(result.statistic_sign < 0)


def flagged_distribution(n_images: int, n_calibration: int, n_allowed: int) -> np.ndarray:
    """P(j of N new images are flagged), j = 0..N, without drift (N + 1,).

    The threshold is the (k + 1)-th largest of n calibration scores. The chance that a new score is above it differs
    from one calibration set to the next as Beta(k + 1, n - k), for any continuous distribution of scores; given that
    chance, images are flagged independently. Together this is the beta-binomial distribution

        P(j) = C(N, j) B(j + k + 1, N - j + n - k) / B(k + 1, n - k),

    wider than the binomial one, whatever the number of new images. With ties fewer are flagged.

    >>> flagged_distribution(1, 99, 4)
    array([0.95, 0.05])
    """
    if n_allowed < 0:  # the threshold is infinite
        return np.concatenate([[1.0], np.zeros(n_images)])
    return betabinom.pmf(np.arange(n_images + 1), n_images, n_allowed + 1, n_calibration - n_allowed)


# --------------------------------------------------------------------------------------------------------- streams

# Bets are beta densities with these parameters, in all combinations: p-values concentrate at 0 (the scores rose), at 1
# (they fell), at both ends or in the middle (their spread grew or shrank).
_SHAPES = np.array([0.5, 1.0, 2.0])
_UNIFORM = 4  # index among the nine of Beta(1, 1), which bets nothing
_STRENGTHS = (1.0, 0.25)  # stakes: under weak drift a small stake grows where a large one is lost
_N_BETS = len(_STRENGTHS) * (len(_SHAPES) ** 2 - 1)
# Half of the capital is never at risk, the rest is spread evenly over the bets.
_PRIOR = np.concatenate([[0.5], np.full(_N_BETS, 0.5 / _N_BETS)])
_EDGE = 2.0**-53  # keeps p-values off 0 and 1, where a density may be infinite
_STATE = ("calibration_scores", "scores", "log_wealth", "capital", "level", "seed")


class StreamMonitor:
    """Monitor a stream of scores for drift, with a probability of at most ``level`` of any false alarm.

    A conformal test martingale (Vovk et al.): from wealth 1, bet on each new p-value before it is seen, at odds that
    are fair without drift. The wealth W is then a martingale, and Ville's inequality bounds its whole path,

        P(W_t >= 1 / level for any t) <= level,

    so the test may be read after every image and stopped at any time. Under drift the wealth grows exponentially.
    P-values come from :func:`online_p_values`, bets from :func:`beta_bets`; :func:`grow` redistributes the capital.

    Attributes after t images: ``scores_`` (t,), ``log_wealth_`` (t,) natural logarithm, ``capital_`` (B,) shares of the
    wealth in each bet, ``alarm_at_`` the index of the image that raised the alarm, or None. The alarm follows the
    change by as many images as the evidence takes. At the level of 1 %, with 500 calibration images and after 1,000
    images without drift, simulations take in the median 125 images when all scores rise by half a standard deviation,
    80 when one image in ten is far out, and 5 when all are. The alarm is permanent: after drift, calibrate again and
    start a new stream. Memory is 16 bytes per image.

    >>> rng = np.random.default_rng(0)
    >>> monitor = StreamMonitor(rng.normal(size=500))
    >>> _ = monitor.update(rng.normal(size=1000))
    >>> print(monitor.alarm_at_)
    None
    >>> _ = monitor.update(rng.normal(1, size=100))  # the scores rise by one standard deviation
    >>> monitor.alarm_at_
    1032
    """

    def __init__(self, calibration_scores: ArrayLike, level: float = 0.01, seed: int = 0) -> None:
        check_rate(level, "level", 0.01)
        if seed < 0:
            raise UsageError(f"seed {seed}: give a whole number from 0")
        self.calibration_scores = np.sort(check_values(calibration_scores, "calibration_scores"))
        self.level, self.seed = level, seed
        self.scores_ = np.empty(0)
        self.log_wealth_ = np.empty(0)
        self.capital_ = _PRIOR
        self._pool = self.calibration_scores  # sorted scores of all images so far

    def __len__(self) -> int:
        return len(self.scores_)

    @property
    def alarm_log_wealth(self) -> float:
        """The logarithm of the wealth at which there is an alarm."""
        return -math.log(self.level)

    @property
    def max_log_wealth_(self) -> float:
        """The largest log wealth so far, w; exp(-w) is an anytime-valid p-value of the whole stream."""
        return float(self.log_wealth_.max(initial=0.0))

    @property
    def alarm_at_(self) -> int | None:
        above = self.log_wealth_ >= self.alarm_log_wealth
        return int(above.argmax()) if above.any() else None

    def update(self, scores: ArrayLike) -> np.ndarray:
        """Add the next scores (N,), in order; their online p-values (N,).

        The wealth does not depend on how the stream is cut into updates, to the last bit.
        """
        new = check_values(scores, "scores", may_be_empty=True)
        p_values = online_p_values(new, self._pool, _tie_breakers(self.seed, len(self), len(new)))
        growth, self.capital_ = grow(self.capital_, beta_bets(p_values), len(self))
        last = self.log_wealth_[-1:] if len(self) else np.zeros(1)
        self.log_wealth_ = np.concatenate([self.log_wealth_, np.cumsum(np.concatenate([last, growth]))[1:]])
        self.scores_ = np.concatenate([self.scores_, new])
        ordered = np.sort(new)
        self._pool = np.insert(self._pool, np.searchsorted(self._pool, ordered), ordered)
        return p_values

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The state, to continue later."""
        values = (self.calibration_scores, self.scores_, self.log_wealth_, self.capital_, [self.level], [self.seed])
        return dict(zip(_STATE, map(np.asarray, values)))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> StreamMonitor:
        """The monitor that :meth:`to_arrays` described."""
        if missing := [name for name in _STATE if name not in arrays]:
            raise RunError(f"the state of the stream lacks {', '.join(missing)}: start a new one")
        if arrays["capital"].shape != _PRIOR.shape or arrays["log_wealth"].shape != arrays["scores"].shape:
            raise RunError("the state of the stream is inconsistent: start a new one")
        monitor = cls(arrays["calibration_scores"], float(arrays["level"][0]), int(arrays["seed"][0]))
        monitor.scores_, monitor.log_wealth_ = arrays["scores"], arrays["log_wealth"]
        monitor.capital_ = arrays["capital"]
        monitor._pool = np.sort(np.concatenate([monitor.calibration_scores, monitor.scores_]))
        return monitor


def online_p_values(scores: np.ndarray, pool: np.ndarray, tie_breakers: np.ndarray) -> np.ndarray:
    """Smoothed conformal p-values of scores (N,), each ranked among the sorted ``pool`` and the scores before it.

        p_t = (#{earlier scores > s_t} + u_t #{scores = s_t, itself included}) / (#{earlier scores} + 1)

    with ``tie_breakers`` u uniform on (0, 1]. For exchangeable scores the rank of the next score among all so far is
    uniform and independent of all earlier ranks; smoothing makes p exactly uniform, ties or not.

    >>> online_p_values(np.array([9.0, 9.0]), np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.5]))
    array([0.125, 0.2  ])
    """
    n_before = len(pool) + np.arange(len(scores))
    below, equal = count_earlier(scores)
    left, right = (np.searchsorted(pool, scores, side) for side in ("left", "right"))
    n_equal = equal + right - left
    n_above = n_before - (below + left) - n_equal
    return np.clip((n_above + tie_breakers * (n_equal + 1)) / (n_before + 1), _EDGE, 1 - _EDGE)


def count_earlier(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each value (N,): how many of those before it are smaller, and how many are equal to it.

    As in a merge sort, blocks of 1, 2, 4, .. values meet their neighbours: each value of a right block is searched in
    its sorted left block, in all pairs of blocks at once. O(N log² N), without a loop over values.

    >>> [counts.tolist() for counts in count_earlier(np.array([5, 3, 5, 4]))]
    [[0, 0, 1, 1], [0, 0, 1, 0]]
    """
    ranks = np.unique(values, return_inverse=True)[1]
    below, up_to = np.zeros((2, len(values)), dtype=np.int64)
    width = 1
    while width < len(values):
        pair, is_right = np.divmod(np.arange(len(values)) // width, 2)
        right = is_right.astype(bool)
        keys = pair * len(values) + ranks  # pairs of blocks one after the other, in each the order of the values
        ordered = np.sort(keys[~right])
        start = pair[right] * width  # of the left block of the same pair, which is full
        below[right] += np.searchsorted(ordered, keys[right], "left") - start
        up_to[right] += np.searchsorted(ordered, keys[right], "right") - start
        width *= 2
    return below, up_to - below


def beta_bets(p_values: np.ndarray) -> np.ndarray:
    """The return of one unit in each bet: (N, B). Every column has mean 1 over uniform p-values.

    The first column bets nothing. The others are 1 + c (f(p) - 1): a stake c of 1 or 1/4 on a beta density f. Only
    operations that IEEE rounds correctly are used, so the result does not depend on how a stream is cut.
    """
    rising = _powers(p_values)[:, :, None] * _powers(1 - p_values)[:, None, :]  # (N, 3, 3)
    densities = (rising / beta_function(_SHAPES[:, None], _SHAPES)).reshape(-1, len(_SHAPES) ** 2)
    gains = np.delete(densities, _UNIFORM, axis=1) - 1
    return np.concatenate([np.ones((len(gains), 1)), *(1 + stake * gains for stake in _STRENGTHS)], axis=1)


def _powers(p: np.ndarray) -> np.ndarray:
    """p^(a - 1) for the three shapes a: (N, 3)."""
    return np.stack([1 / np.sqrt(p), np.ones_like(p), p], axis=1)


def grow(capital: np.ndarray, bets: np.ndarray, n_before: int) -> tuple[np.ndarray, np.ndarray]:
    """Log growth of the wealth with each image (N,), and the shares of the wealth in each bet (B,) afterwards.

    Before image t, the share J_t = 1 / (t + 1) of the capital is redistributed, half of it to no bet. (With a constant
    J and linear bets this is Vovk's simple jumper.) Capital is thus always available when drift begins, and moves
    become rare enough that waiting is cheap: the capital in no bet alone is worth

        W_t >= 1/2 (1 - J_1 / 2) .. (1 - J_t / 2) >= 1 / (2 sqrt(t + 1)),

    so after a million images without drift the alarm is less than 8 nats further away than at first. No parameter is
    tuned.
    """
    growth = np.empty(len(bets))
    for i, bet in enumerate(bets):
        jump = 1 / (n_before + i + 2)
        capital = ((1 - jump) * capital + jump * _PRIOR) * bet
        total = float(capital.sum())
        growth[i] = math.log(total)
        capital /= total
    return growth, capital


def _tie_breakers(seed: int, start: int, n: int) -> np.ndarray:
    """The next n of a sequence of random numbers in (0, 1], given by the seed."""
    return 1 - np.random.Generator(np.random.PCG64(seed).advance(start)).random(n)
