"""Conformal p-values and thresholds, and Benjamini-Hochberg: the definitions, counted out.

That the rates hold on average is in ``theory/test_conformal.py``.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, false_discovery_control

from maple.decisions.conformal import (
    benjamini_hochberg,
    can_flag,
    conformal_p_values,
    conformal_threshold,
    count_allowed,
    false_alarm_interval,
    flagging_levels,
    min_calibration_images,
)
from maple.errors import DataError, UsageError

RATES = st.one_of(st.floats(1e-3, 0.999), st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7]), st.just(1 / 3))
FRACTIONS = st.fractions("1/20", "19/20", max_denominator=20)
CONFIDENCES = st.one_of(st.none(), st.floats(0.01, 0.999), st.sampled_from([0.5, 0.9, 0.95, 0.99]))


def test_p_values_equal_counting(rng):
    calibration = rng.integers(0, 10, size=40).astype(float)  # many ties
    scores = rng.integers(-2, 13, size=100).astype(float)
    expected = [(1 + sum(c >= s for c in calibration)) / 41 for s in scores]
    np.testing.assert_array_equal(conformal_p_values(scores, calibration), expected)
    assert conformal_p_values(np.inf, calibration) == 1 / 41
    assert (conformal_p_values(scores, []) == 1).all()


@given(
    calibration=st.lists(st.integers(0, 6), max_size=60),
    scores=st.lists(st.integers(-1, 8), min_size=1, max_size=20),
    false_alarm=RATES,
)
def test_threshold_and_p_value_decide_alike(calibration, scores, false_alarm):
    threshold = conformal_threshold(calibration, false_alarm)
    p_values = conformal_p_values(np.array(scores, dtype=float), calibration)
    np.testing.assert_array_equal(np.array(scores) > threshold, p_values <= false_alarm)
    assert (threshold == np.inf) == (len(calibration) < min_calibration_images(false_alarm))


@given(n=st.integers(1, 500), k=st.integers(1, 500))
def test_threshold_is_exact_at_every_attainable_rate(n, k):
    k = min(k, n)
    calibration = np.arange(n, dtype=float)
    scores = np.arange(-1, n + 1, dtype=float)
    rate = k / (n + 1)  # exactly a p-value
    flagged = scores > conformal_threshold(calibration, rate)
    np.testing.assert_array_equal(flagged, conformal_p_values(scores, calibration) <= rate)


def exact_beta_cdf(k: int, n: int, rate: Fraction) -> Fraction:
    """P(Beta(k + 1, n - k) <= rate) = P(Binomial(n, rate) > k), without rounding."""
    return sum((comb(n, j) * rate**j * (1 - rate) ** (n - j) for j in range(k + 1, n + 1)), Fraction(0))


@given(n=st.integers(0, 25), rate=FRACTIONS, confidence=FRACTIONS)
def test_threshold_with_confidence_equals_exact_counting(n, rate, confidence):
    allowed = [k for k in range(n) if exact_beta_cdf(k, n, rate) >= confidence]
    expected = n - 1 - max(allowed) if allowed else np.inf
    assert conformal_threshold(np.arange(n), float(rate), float(confidence)) == expected
    assert (n >= min_calibration_images(float(rate), float(confidence))) == bool(allowed)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 30_000) | st.sampled_from([59, 1_000_000]),
    rate=st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    confidence=st.sampled_from([None, 0.05, 0.5, 0.95, 0.999]),
)
def test_threshold_allows_as_many_above_as_scipy_says(n, rate, confidence):
    threshold = conformal_threshold(np.arange(n), rate, confidence)
    if threshold == np.inf:
        assert n < min_calibration_images(rate, confidence)
        k = -1
    else:
        k = n - 1 - int(threshold)
        found = beta(k + 1, n - k)
        assert found.mean() <= rate if confidence is None else found.cdf(rate) >= confidence
    if k + 1 < n:  # and one more would be too many
        more = beta(k + 2, n - k - 1)
        assert more.mean() > rate if confidence is None else more.cdf(rate) < confidence


@pytest.mark.parametrize(
    ("rate", "confidence", "n"),
    [(0.5, None, 1), (0.05, None, 19), (0.01, None, 99), (1 / 3, None, 2), (0.3, None, 3), (1e-6, None, 999_999)]
    + [(0.5, 0.5, 1), (0.5, 0.75, 2), (0.05, 0.95, 59), (0.01, 0.95, 299), (0.01, 0.99, 459), (0.9, 0.5, 1)],
)
def test_min_calibration_images(rate, confidence, n):
    assert min_calibration_images(rate, confidence) == n
    assert conformal_threshold(np.arange(n), rate, confidence) == n - 1
    assert conformal_threshold(np.arange(n - 1), rate, confidence) == np.inf


@given(
    scores=st.lists(st.floats(-5, 5), max_size=80),
    rates=st.tuples(RATES, RATES),
    confidences=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)),
    seed=st.integers(0, 9),
)
def test_threshold_is_monotone_in_both_levels_and_knows_no_order(scores, rates, confidences, seed):
    (low, high), (unsure, sure) = sorted(rates), sorted(confidences)
    assert conformal_threshold(scores, low) >= conformal_threshold(scores, high)
    assert conformal_threshold(scores, low, sure) >= conformal_threshold(scores, high, sure)
    assert conformal_threshold(scores, low, sure) >= conformal_threshold(scores, low, unsure)
    shuffled = np.random.default_rng(seed).permutation(scores)
    assert conformal_threshold(shuffled, low, sure) == conformal_threshold(scores, low, sure)


@given(scores=st.lists(st.integers(-20, 20), min_size=1, max_size=60), rate=RATES, confidence=CONFIDENCES)
def test_an_increasing_map_of_all_scores_changes_no_decision(scores, rate, confidence):
    scores, new = np.array(scores, dtype=float), np.arange(-21.0, 22.0)
    moved = np.exp(new / 3) > conformal_threshold(np.exp(scores / 3), rate, confidence)
    np.testing.assert_array_equal(moved, new > conformal_threshold(scores, rate, confidence))
    np.testing.assert_array_equal(
        conformal_p_values(np.exp(new / 3), np.exp(scores / 3)), conformal_p_values(new, scores)
    )


def test_interval_is_the_beta_distribution():
    assert false_alarm_interval(1000, 0.05) == pytest.approx(beta(50, 951).ppf([0.05, 0.95]))
    k = 1000 - 1 - int(conformal_threshold(np.arange(1000), 0.05, 0.9))
    found = false_alarm_interval(1000, 0.05, 0.9, share=0.8)
    assert found == pytest.approx(beta(k + 1, 1000 - k).ppf([0.1, 0.9]))
    assert found[1] <= 0.05  # 90 % of the sets lie below the upper end, and 90 % keep the level
    assert false_alarm_interval(19, 0.05) == pytest.approx(beta(1, 19).ppf([0.05, 0.95]))  # none above the threshold
    assert false_alarm_interval(18, 0.05) == (0, 0)


@pytest.mark.parametrize("rate", [0, 1, -0.1, 1.5, float("nan")])
def test_bad_rates(rate):
    for ask in (
        lambda: conformal_threshold([1.0], rate),
        lambda: min_calibration_images(rate),
        lambda: false_alarm_interval(10, rate),
    ):
        with pytest.raises(UsageError, match="false-alarm rate"):
            ask()
    with pytest.raises(UsageError, match="confidence"):
        conformal_threshold([1.0], 0.05, rate)
    with pytest.raises(UsageError, match="share"):
        false_alarm_interval(10, 0.05, share=rate)
    for ask in (lambda: benjamini_hochberg([0.5], rate), lambda: can_flag(9, 9, rate)):
        with pytest.raises(UsageError, match="false-discovery rate"):
            ask()


@pytest.mark.parametrize("confidence", [None, 0.95])
def test_rates_that_no_number_of_images_attains(confidence):
    expected = 1e9 - 1 if confidence is None else np.log(0.05) / np.log1p(-1e-9)
    assert min_calibration_images(1e-9, confidence) == pytest.approx(expected, rel=1e-9, abs=1)
    for rate in (1e-16, 1e-30, 5e-324):
        with pytest.raises(UsageError, match="false-alarm rate"):
            min_calibration_images(rate, confidence)


def test_bad_scores():
    with pytest.raises(DataError, match="NaN"):
        conformal_p_values([1.0], [np.nan, 2.0])
    with pytest.raises(DataError, match="NaN"):
        conformal_threshold([np.nan, 2.0], 0.05)


# ---------------------------------------------------------------------------------------------------------- batches


@given(st.lists(st.floats(0, 1), max_size=60), st.floats(0.01, 0.99))
def test_benjamini_hochberg_equals_scipy(p_values, fdr):
    adjusted = false_discovery_control(p_values) if p_values else np.empty(0)
    clear = np.abs(adjusted - fdr) > 1e-9 * fdr  # where rounding does not decide
    np.testing.assert_array_equal(benjamini_hochberg(p_values, fdr)[clear], (adjusted <= fdr)[clear])


@given(n=st.integers(0, 300), ranks=st.lists(st.integers(1, 301), min_size=1, max_size=80), percent=st.integers(1, 99))
def test_benjamini_hochberg_is_exact_on_the_grid_of_conformal_p_values(n, ranks, percent):
    ranks, m, fdr = sorted(min(rank, n + 1) for rank in ranks), len(ranks), Fraction(percent, 100)
    below = [k for k in range(1, m + 1) if Fraction(ranks[k - 1], n + 1) <= fdr * k / m]
    flagged = benjamini_hochberg(np.array(ranks) / (n + 1), percent / 100)
    assert flagged.sum() == (max(below) if below else 0)
    assert flagged[: flagged.sum()].all()


@pytest.mark.parametrize("percent", [1, 5, 7, 10, 20, 30])
def test_benjamini_hochberg_flags_what_lies_exactly_on_its_line(percent):
    n_on_line = 0
    for m in range(1, 41):
        for k in range(1, m + 1):
            rank = Fraction(percent * k * 1000, 100 * m)
            if rank.denominator == 1:
                n_on_line += 1
                p_values = np.r_[np.full(k, int(rank) / 1000), np.ones(m - k)]  # of 999 calibration images
                assert benjamini_hochberg(p_values, percent / 100)[:k].all(), (m, k)
    assert n_on_line > 100


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.01, 0.9), st.integers(0, 9))
def test_benjamini_hochberg_is_monotone_and_knows_no_order(p_values, fdr, seed):
    flagged = benjamini_hochberg(p_values, fdr)
    assert (flagged <= benjamini_hochberg(p_values, fdr + 0.05)).all()
    order = np.random.default_rng(seed).permutation(len(p_values))
    np.testing.assert_array_equal(benjamini_hochberg(np.array(p_values)[order], fdr), flagged[order])


@given(n=st.integers(0, 400), m=st.integers(1, 60), k=st.integers(1, 60), percent=st.integers(1, 99))
def test_can_flag_says_what_benjamini_hochberg_does(n, m, k, percent):
    k = min(k, m)
    most_unusual = np.r_[np.full(k, 1 / (n + 1)), np.ones(m - k)]  # the smallest p-values there can be
    assert can_flag(n, m, percent / 100, k) == (benjamini_hochberg(most_unusual, percent / 100)[:k].all())
    assert can_flag(n, m, percent / 100, k) == (n + 1 >= m / (Fraction(percent, 100) * k))


def test_batches_at_the_edges():
    assert benjamini_hochberg([], 0.1).shape == (0,)
    assert can_flag(0, 0, 0.1)
    assert benjamini_hochberg([0.0, 1.0], 0.1).tolist() == [True, False]
    with pytest.raises(UsageError, match="NaN"):
        benjamini_hochberg([0.5, np.nan], 0.1)
    for value in (12.0, 1.001, -0.001):
        with pytest.raises(UsageError, match="p-values"):
            benjamini_hochberg([0.5, value], 0.1)


@pytest.mark.parametrize("n", [1, 20, 99])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_flagging_levels_are_the_least_rates_that_flag(n, confidence):
    levels = flagging_levels(n, confidence)
    assert len(levels) == n + 1 and levels[-1] == np.inf and (np.diff(levels) > 0).all()
    for k, level in enumerate(levels[:-1]):
        assert count_allowed(n, min(level * (1 + 1e-9), 1 - 1e-12), confidence) >= k
        assert count_allowed(n, level * (1 - 1e-6), confidence) < k
