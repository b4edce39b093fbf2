"""Temperature, conformal p-values and thresholds, batches, prediction sets, decisions.

That the promises hold on average is in ``theory/test_conformal.py``; here are the definitions, counted out.
"""

from __future__ import annotations

import json
from fractions import Fraction
from math import ceil, comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import beta, false_discovery_control

from maple.decisions.conformal import (
    LOG_TEMPERATURE_DEVIATION,
    MIN_CLASS_IMAGES,
    TEMPERATURE_RANGE,
    Calibration,
    benjamini_hochberg,
    can_flag,
    conformal_p_values,
    conformal_threshold,
    false_alarm_interval,
    fit_odds,
    fit_pool,
    fit_softmax_temperature,
    fit_temperature,
    min_calibration_images,
    min_labelled_images,
    pool,
    prediction_sets,
    raise_odds,
    true_class_scores,
)
from maple.errors import DataError, UsageError
from maple.files import load_arrays, save_arrays
from maple.stats.gaussians import log_posterior
from maple.stats.metrics import calibration_floor, expected_calibration_error


def sampled_labels(rng, d2, weights, cluster_to_class, temperature):
    """Labels drawn from the posterior itself: at that temperature it is calibrated by construction."""
    posterior = np.exp(log_posterior(d2, weights, cluster_to_class, temperature))
    return (posterior.cumsum(axis=1) > rng.uniform(size=(len(d2), 1))).argmax(axis=1)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0, 500.0])
def test_planted_temperature_is_recovered(rng, temperature):
    clusters = np.array([0, 0, 1, 2])
    weights = np.log([0.2, 0.1, 0.3, 0.4])
    d2 = rng.chisquare(4, size=(8000, 4)) * temperature
    labels = sampled_labels(rng, d2, weights, clusters, temperature)
    assert fit_temperature(d2, labels, weights, clusters) == pytest.approx(temperature, rel=0.1)


def test_temperature_minimises_the_stated_loss(rng):
    clusters, weights = np.array([0, 1, 1]), np.log([0.5, 0.25, 0.25])
    d2 = rng.chisquare(3, size=(60, 3)) * 4
    labels = rng.integers(0, 2, size=60)

    def loss(t):
        nll = -log_posterior(d2, weights, clusters, t)[np.arange(60), labels].sum()
        return nll + np.log(t) ** 2 / (2 * LOG_TEMPERATURE_DEVIATION**2)

    best = loss(fit_temperature(d2, labels, weights, clusters))
    assert best <= min(loss(t) for t in np.geomspace(*TEMPERATURE_RANGE, 4000)) + 1e-9


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e5])
def test_temperature_when_all_are_right_or_wrong(right, scale):
    d2 = scale * np.array([[0.0, 30.0], [25.0, 1.0]] * 50)
    labels = np.array([0, 1] * 50) if right else np.array([1, 0] * 50)
    temperature = fit_temperature(d2, labels, np.log([0.5, 0.5]), np.arange(2))
    assert TEMPERATURE_RANGE[0] <= temperature <= TEMPERATURE_RANGE[1]
    loss = [-log_posterior(d2, np.zeros(2), np.arange(2), t)[np.arange(100), labels].mean() for t in (1, temperature)]
    assert loss[1] <= loss[0] + 1e-9


def test_confident_and_right_images_do_not_drive_the_temperature_to_zero():
    d2 = np.array([[0.0, 40.0], [40.0, 0.0]] * 500)
    assert fit_temperature(d2, np.array([0, 1] * 500), np.log([0.5, 0.5]), np.arange(2)) > 0.3


def test_images_of_unknown_classes_are_left_out(rng):
    d2 = rng.chisquare(3, size=(300, 3))
    labels = rng.integers(0, 2, size=300)
    clusters, weights = np.array([0, 1, 3]), np.zeros(3)  # class 2 has no cluster
    padded = np.concatenate([labels, [-1, 2, 9]])
    expected = fit_temperature(d2, labels, weights, clusters)
    assert fit_temperature(np.vstack([d2, d2[:3]]), padded, weights, clusters) == expected
    with pytest.raises(DataError, match="no validation image"):
        fit_temperature(d2, np.full(300, -1), weights, clusters)


# ------------------------------------------------------------------------------------------------------ two experts

POOL_CLUSTERS, POOL_WEIGHTS = np.array([0, 0, 1, 2]), np.log([0.2, 0.1, 0.3, 0.4])


def two_experts(rng, n, temperature, weight):
    """Distances (n, 4), log class probabilities (n, 3), and labels drawn from the pool of both."""
    d2 = rng.chisquare(4, size=(n, 4)) * temperature
    network = log_softmax(2 * rng.normal(size=(n, 3)), axis=1)
    pooled = pool(log_posterior(d2, POOL_WEIGHTS, POOL_CLUSTERS, temperature), network, weight)
    return d2, network, (pooled + rng.gumbel(size=(n, 3))).argmax(axis=1)


def total_loss(log_probabilities, labels):
    return -log_probabilities[np.arange(len(labels)), labels].sum()


def test_pool_is_the_normalised_weighted_product(rng):
    one, other = (log_softmax(rng.normal(size=(6, 3)), axis=1) for _ in range(2))
    for weight in (0.0, 0.3, 2.0):
        products = [[np.exp(a) * np.exp(b) ** weight for a, b in zip(*row)] for row in zip(one, other)]
        expected = [[p / sum(row) for p in row] for row in products]
        np.testing.assert_allclose(np.exp(pool(one, other, weight)), expected, rtol=1e-12)
    assert np.isfinite(pool(np.array([[-9e4, 0.0]]), np.array([[0.0, -9e4]]), 0.5)).all()


def test_odds_are_raised_and_others_keep_their_proportions(rng):
    logs = log_softmax(3 * rng.normal(size=(50, 4)), axis=1)
    for exponent in (0.2, 0.7, 1.0):
        raised = np.exp(raise_odds(logs, exponent))
        for before, after in zip(np.exp(logs), raised):
            first = before.argmax()
            assert after.argmax() == first and after.sum() == pytest.approx(1)
            odds = (before[first] / (1 - before[first])) ** exponent
            assert after[first] == pytest.approx(odds / (1 + odds))
            others = np.arange(4) != first
            np.testing.assert_allclose(after[others] / after[others].sum(), before[others] / before[others].sum())


def test_of_two_first_classes_the_one_that_is_named_gains():
    tied = np.log([[0.4, 0.4, 0.2]])
    first, second = (np.exp(raise_odds(tied, 0.5, np.array([i])))[0] for i in (0, 1))
    assert first[0] == pytest.approx(second[1]) and first[1] == pytest.approx(second[0]) and first[0] > 0.4 > first[1]
    np.testing.assert_array_equal(np.exp(raise_odds(tied, 0.5))[0], first)


def test_odds_of_what_is_certain_stay_finite():
    sure = np.array([[0.0, -np.inf, -np.inf], [0.0, -800.0, -np.inf], [-np.log(2), -np.log(2), -np.inf]])
    raised = raise_odds(sure, 0.5)
    np.testing.assert_allclose(raised, [[0, -np.inf, -np.inf], [0, -400, -np.inf], [*sure[2]]], atol=1e-12)
    np.testing.assert_array_equal(raise_odds(np.zeros((2, 1)), 0.5), np.zeros((2, 1)))  # one class


@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (4.0, 0.5), (7.0, 2.0), (30.0, 0.3)])
def test_planted_pool_is_recovered(rng, temperature, weight):
    d2, network, labels = two_experts(rng, 8000, temperature, weight)
    found = fit_pool(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS, network)
    assert found[:2] == (pytest.approx(temperature, rel=0.1), pytest.approx(weight, rel=0.1))
    assert 0.9 < found[2] <= 1  # they are as sure as they should be

    def posterior(t, a):
        return pool(log_posterior(d2, POOL_WEIGHTS, POOL_CLUSTERS, t), network, a)

    # Wilks: twice the gain over the truth is chi-square distributed with two degrees of freedom.
    gain = total_loss(posterior(temperature, weight), labels) - total_loss(posterior(*found[:2]), labels)
    assert -5 < gain < 0.5 * 13.8  # the doubt is worth less than 5; exceeded once in a thousand


@pytest.mark.parametrize("exponent", [0.3, 0.7, 1.0])
def test_planted_exponent_is_recovered(rng, exponent):
    logs = log_softmax(3 * rng.normal(size=(20000, 4)), axis=1)
    labels = (raise_odds(logs, exponent) + rng.gumbel(size=logs.shape)).argmax(axis=1)
    assert fit_odds(logs, labels) == pytest.approx(exponent, rel=0.05)
    right = raise_odds(logs, fit_odds(logs, labels))
    confidence, correct = np.exp(right.max(axis=1)), right.argmax(axis=1) == labels
    assert expected_calibration_error(confidence, correct) < 2 * calibration_floor(confidence)


def test_nobody_is_made_surer_than_they_are(rng):
    logs = log_softmax(rng.normal(size=(5000, 3)), axis=1)
    labels = (4 * logs + rng.gumbel(size=logs.shape)).argmax(axis=1)  # right more often than they say
    assert fit_odds(logs, labels) == 1
    assert fit_odds(np.zeros((5, 1)), np.zeros(5, int)) == 1  # one class


def test_gaussians_alone_have_an_exponent_too(rng):
    d2 = rng.chisquare(4, size=(8000, 4)) * 3.0
    posterior = log_posterior(d2, POOL_WEIGHTS, POOL_CLUSTERS, 3.0)
    labels = (posterior + rng.gumbel(size=posterior.shape)).argmax(axis=1)
    temperature, weight, exponent = fit_pool(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS)
    assert temperature == fit_temperature(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS) and weight == 0
    assert exponent == fit_odds(log_posterior(d2, POOL_WEIGHTS, POOL_CLUSTERS, temperature), labels)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 6.0])
def test_planted_temperature_of_a_softmax_is_recovered(rng, temperature):
    logits = 2 * rng.normal(size=(8000, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    network = log_softmax(temperature * logits, axis=1)
    found = fit_softmax_temperature(network, labels)
    assert found == pytest.approx(temperature, rel=0.1)
    unknown = np.r_[labels, np.full(500, -1)]
    assert fit_softmax_temperature(np.vstack([network, network[:500]]), unknown) == found


@pytest.mark.parametrize("informed", ["both", "Gaussians", "network"])
def test_pool_is_as_likely_as_either_expert(rng, informed):
    """Classes are equally frequent here: at an infinite temperature the Gaussians then say nothing at all."""
    d2, network = rng.chisquare(4, size=(1500, 3)) * 5, log_softmax(3 * rng.normal(size=(1500, 3)), axis=1)
    weights, clusters = np.log(np.full(3, 1 / 3)), np.arange(3)
    truth = np.zeros((1500, 3))
    if informed != "network":
        truth += -d2 / 4
    if informed != "Gaussians":
        truth += network / 2
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(axis=1)
    temperature, weight, _ = fit_pool(d2, labels, weights, clusters, network)
    pooled = total_loss(pool(log_posterior(d2, weights, clusters, temperature), network, weight), labels)
    alone = fit_temperature(d2, labels, weights, clusters)
    gaussians = total_loss(log_posterior(d2, weights, clusters, alone), labels)
    softmax = total_loss(log_softmax(network / fit_softmax_temperature(network, labels), axis=1), labels)
    doubt = [
        (np.log(t) / LOG_TEMPERATURE_DEVIATION) ** 2 / 2 + a**2 / 2 for t, a in ((temperature, weight), (alone, 0))
    ]
    assert pooled + doubt[0] <= gaussians + doubt[1] + 1e-9
    assert pooled <= softmax + 5  # what doubt about the temperature may cost, of about 1500
    if informed == "both":
        assert pooled < min(gaussians, softmax) - 50


def test_a_network_that_knows_nothing_has_no_weight(rng):
    d2, network, labels = two_experts(rng, 4000, 3.0, 0.0)
    temperature, weight, _ = fit_pool(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS, network)
    assert temperature == pytest.approx(3.0, rel=0.1)
    assert 0 <= weight < 0.05
    _, weight, _ = fit_pool(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS, -network)  # nor has one that is always wrong
    assert 0 <= weight < 0.05


def test_pool_leaves_images_of_unknown_classes_out(rng):
    d2, network, labels = two_experts(rng, 400, 4.0, 1.0)
    expected = fit_pool(d2, labels, POOL_WEIGHTS, POOL_CLUSTERS, network)
    assert expected[1] > 0.5
    more = np.vstack([d2, d2[:200]]), np.r_[labels, np.full(200, -1)], np.vstack([network, network[:200]])
    assert fit_pool(more[0], more[1], POOL_WEIGHTS, POOL_CLUSTERS, more[2]) == expected
    with pytest.raises(DataError, match="no validation image"):
        fit_pool(d2, np.full(400, -1), POOL_WEIGHTS, POOL_CLUSTERS, network)


# ------------------------------------------------------------------------------------------ p-values and thresholds

RATES = st.one_of(st.floats(1e-3, 0.999), st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7]), st.just(1 / 3))
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


@pytest.mark.parametrize("rate", ["1/2", "1/4", "1/10", "1/3", "7/8"])
@pytest.mark.parametrize("confidence", ["1/2", "3/4", "9/10", "7/8", "1/10"])
def test_threshold_with_confidence_equals_exact_counting(rate, confidence):
    rate, confidence = Fraction(rate), Fraction(confidence)
    for n in range(26):
        allowed = [k for k in range(n) if exact_beta_cdf(k, n, rate) >= confidence]
        expected = n - 1 - max(allowed) if allowed else np.inf
        assert conformal_threshold(np.arange(n), float(rate), float(confidence)) == expected
        assert (n >= min_calibration_images(float(rate), float(confidence))) == bool(allowed)


@pytest.mark.parametrize("n", [59, 1_000, 30_011, 1_000_000])
@pytest.mark.parametrize("confidence", [None, 0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("rate", [0.01, 0.05, 0.3, 0.9])
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
    assert false_alarm_interval(18, 0.05) == (0, 0)


@pytest.mark.parametrize("rate", [0, 1, -0.1, 1.5, float("nan")])
def test_bad_rates(rate):
    for ask in (
        lambda: conformal_threshold([1.0], rate),
        lambda: min_calibration_images(rate),
        lambda: Calibration.empty(2).decide(rate),
        lambda: false_alarm_interval(10, rate),
    ):
        with pytest.raises(UsageError, match=r"false-alarm rate .*such as 0\.05"):
            ask()
    with pytest.raises(UsageError, match=r"confidence .*such as 0\.95"):
        conformal_threshold([1.0], 0.05, rate)
    with pytest.raises(UsageError, match="share"):
        false_alarm_interval(10, 0.05, share=rate)
    for ask in (lambda: benjamini_hochberg([0.5], rate), lambda: can_flag(9, 9, rate)):
        with pytest.raises(UsageError, match=r"false-discovery rate .*such as 0\.1"):
            ask()
    with pytest.raises(UsageError, match=r"coverage .*such as 0\.9"):
        prediction_sets(np.zeros((1, 2)), [0.5], rate)


def test_bad_scores():
    with pytest.raises(DataError, match="1 of 2 calibration scores are NaN"):
        conformal_p_values([1.0], [np.nan, 2.0])
    with pytest.raises(DataError, match="1 of 2 calibration scores are NaN"):
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
    with pytest.raises(UsageError, match=r"1 of 2 p-values are NaN.* calibrate with"):
        benjamini_hochberg([0.5, np.nan], 0.1)
    with pytest.raises(UsageError, match="not scores"):
        benjamini_hochberg([0.5, 12.0], 0.1)


# -------------------------------------------------------------------------------------------------- prediction sets


def log_probabilities(rng: np.random.Generator, n: int, n_classes: int = 4) -> np.ndarray:
    return np.log(rng.dirichlet(np.full(n_classes, 0.5), size=n))


@pytest.mark.parametrize("coverage", [0.01, 0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 9, 19, 99, 150])
def test_sets_equal_their_definition(rng, n, coverage):
    learned, new = np.sort(rng.exponential(size=n)), log_probabilities(rng, 50)
    rank = ceil((n + 1) * Fraction(str(coverage)))
    limit = learned[rank - 1] if rank <= n else np.inf
    sets = prediction_sets(new, rng.permutation(learned), coverage)
    for row, found in zip(new, sets, strict=True):
        expected = [-value <= limit for value in row]
        expected[int(np.argmax(row))] = True
        assert found.tolist() == expected


@given(seed=st.integers(0, 99), coverages=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)))
def test_sets_grow_with_coverage_and_are_never_empty(seed, coverages):
    rng = np.random.default_rng(seed)
    new, learned = log_probabilities(rng, 20), rng.exponential(size=30)
    small, large = (prediction_sets(new, learned, coverage) for coverage in sorted(coverages))
    assert (small <= large).all()
    assert small[np.arange(20), new.argmax(axis=1)].all()


def test_sets_hold_all_classes_where_calibration_images_are_too_few(rng):
    new = np.vstack([log_probabilities(rng, 5), [[0.0, -np.inf, -np.inf, -np.inf]]])
    assert prediction_sets(new, rng.exponential(size=8), 0.9).all()
    assert not prediction_sets(new, rng.exponential(size=9), 0.9).all()
    for coverage in (0.05, 0.5, 2 / 3, 0.9, 0.95, 0.99, 0.999, 0.7 + 0.1):
        least = min_labelled_images(coverage)
        assert not prediction_sets(new, np.zeros(least), coverage).all()
        assert least == 1 or prediction_sets(new, np.zeros(least - 1), coverage).all()
    assert prediction_sets(new[:0], [1.0], 0.9).shape == (0, 4)
    with pytest.raises(DataError, match=r"labelled calibration images.*calibrate with labels"):
        prediction_sets(new, [], 0.9)


def test_true_class_scores_leave_out_unknown_classes(rng):
    logs, labels = log_probabilities(rng, 6), np.array([3, -1, 0, 4, 1, 1])
    expected = [-logs[0, 3], -logs[2, 0], -logs[4, 1], -logs[5, 1]]
    np.testing.assert_array_equal(true_class_scores(logs, labels), expected)
    np.testing.assert_array_equal(true_class_scores(torch.tensor(logs), torch.tensor(labels)), expected)
    assert not np.signbit(true_class_scores([[0.0, -np.inf]], [0]))[0]
    assert true_class_scores([[0.0, -np.inf]], [1])[0] == np.inf
    assert true_class_scores(logs, np.full(6, -1)).shape == (0,)


# -------------------------------------------------------------------------------------------------------- decisions


def uneven_calibration(rng: np.random.Generator, counts: list[int], ties: bool = False) -> Calibration:
    """Classes of these sizes, each with a scale of its own, in random order."""
    class_ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    scores = (1 + class_ids) * rng.chisquare(4, size=len(class_ids))
    return Calibration(scores.round() if ties else scores, class_ids, len(counts))


def test_one_threshold_for_all_images_unless_asked(rng):
    calibration = uneven_calibration(rng, [300, 200, 0])
    scores, class_ids = rng.chisquare(4, size=50) * 3, rng.integers(0, 3, size=50)
    for confidence in (None, 0.9):
        decision = calibration.decide(0.1, confidence)
        threshold = conformal_threshold(calibration.scores, 0.1, confidence)
        np.testing.assert_array_equal(decision.thresholds, np.full(3, threshold))
        np.testing.assert_array_equal(decision.is_ood(scores, class_ids), scores > threshold)
        np.testing.assert_array_equal(
            decision.p_values(scores, class_ids), conformal_p_values(scores, calibration.scores)
        )
        assert decision.n_images == 500 and decision.n_own_thresholds == 0


@pytest.mark.parametrize(("small", "pooled"), [([99, 99], True), ([5, 4], True), ([5, 3], False), ([0, 0], False)])
def test_groups_per_class(rng, small, pooled):
    """Classes with enough images stand alone, the others together, or with all where even together they cannot flag."""
    counts = [MIN_CLASS_IMAGES, 250, *small]
    calibration = uneven_calibration(rng, counts)
    decision = calibration.decide(0.1, per_class=True)
    rest = np.isin(calibration.class_ids, [2, 3]) if pooled else np.ones(sum(counts), dtype=bool)
    members = [calibration.class_ids == 0, calibration.class_ids == 1, rest, rest]
    new = rng.chisquare(4, size=40) * 3
    for c, rows in enumerate(members):
        own = calibration.scores[rows]
        assert decision.thresholds[c] == conformal_threshold(own, 0.1)
        p_values = decision.p_values(new, np.full(40, c))
        np.testing.assert_array_equal(p_values, conformal_p_values(new, own))
    mixed = rng.integers(0, 4, size=40)
    expected = [decision.p_values(new[i : i + 1], mixed[i : i + 1])[0] for i in range(40)]
    np.testing.assert_array_equal(decision.p_values(new, mixed), expected)
    assert decision.n_own_thresholds == 2


def test_rare_levels_need_more_images_per_class(rng):
    calibration = uneven_calibration(rng, [300, 250, 1000])  # 299 images are the least for 1 % with 95 % confidence
    decision = calibration.decide(0.01, 0.95, per_class=True)
    assert (decision.group_of_class > 0).tolist() == [True, False, True]
    assert decision.thresholds[0] == calibration.scores[calibration.class_ids == 0].max()
    assert decision.thresholds[1] == conformal_threshold(calibration.scores, 0.01, 0.95)


@given(
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(0, 250), min_size=1, max_size=5),
    false_alarm=RATES,
    per_class=st.booleans(),
)
def test_flagged_exactly_where_the_p_value_is_at_most_the_level(seed, counts, false_alarm, per_class):
    rng = np.random.default_rng(seed)
    decision = uneven_calibration(rng, counts, ties=True).decide(false_alarm, per_class=per_class)
    class_ids = rng.integers(0, len(counts), size=100)
    scores = np.r_[rng.integers(0, 40, size=99), np.inf]
    flagged = decision.is_ood(scores, class_ids)
    if sum(counts):
        np.testing.assert_array_equal(flagged, decision.p_values(scores, class_ids) <= false_alarm)
    else:
        assert not flagged.any() and np.isnan(decision.p_values(scores, class_ids)).all()


@given(seed=st.integers(0, 9), per_class=st.booleans(), confidence=st.sampled_from([None, 0.5, 0.95]))
def test_order_of_calibration_images_does_not_matter(seed, per_class, confidence):
    rng = np.random.default_rng(seed)
    calibration = uneven_calibration(rng, [150, 30, 200])
    order = rng.permutation(len(calibration))
    shuffled = Calibration(calibration.scores[order], calibration.class_ids[order], 3)
    one, other = (c.decide(0.1, confidence, per_class) for c in (calibration, shuffled))
    new, class_ids = rng.chisquare(4, size=30) * 3, rng.integers(0, 3, size=30)
    np.testing.assert_array_equal(one.thresholds, other.thresholds)
    np.testing.assert_array_equal(one.p_values(new, class_ids), other.p_values(new, class_ids))


@pytest.mark.parametrize("per_class", [False, True])
def test_nothing_is_flagged_without_calibration(per_class):
    decision = Calibration.empty(3).decide(per_class=per_class)
    assert (decision.thresholds == np.inf).all() and decision.thresholds.shape == (3,)
    assert np.isnan(decision.p_values([1.0, np.inf], [0, 2])).all()
    assert decision.is_ood([1.0, np.inf], [0, 2]).tolist() == [False, False]
    assert decision.is_ood([], []).shape == decision.p_values([], []).shape == (0,)
    assert "there are none" in decision.sentence()


def test_tensors_serve_as_arrays(rng):
    calibration = uneven_calibration(rng, [120, 150])
    same = Calibration(torch.tensor(calibration.scores), torch.tensor(calibration.class_ids), 2)
    one, other = (c.decide(per_class=True) for c in (calibration, same))
    new, class_ids = rng.chisquare(4, size=20), rng.integers(0, 2, size=20)
    found = other.p_values(torch.tensor(new), torch.tensor(class_ids))
    np.testing.assert_array_equal(found, one.p_values(new, class_ids))


def test_calibration_survives_a_file(tmp_path, rng):
    for calibration in (uneven_calibration(rng, [120, 9]), Calibration.empty(2)):
        save_arrays(tmp_path / "c.safetensors", calibration.to_arrays(), {})
        again = Calibration.from_arrays(load_arrays(tmp_path / "c.safetensors")[0])
        assert again.n_classes == 2 and type(again.n_classes) is int
        for name, array in calibration.to_arrays().items():
            np.testing.assert_array_equal(again.to_arrays()[name], array)
            assert again.to_arrays()[name].dtype == array.dtype


def test_bad_images_are_refused(rng):
    with pytest.raises(UsageError, match="one of each per image"):
        Calibration(np.zeros(3), np.zeros(2, dtype=int), 2)
    with pytest.raises(UsageError, match="between 0 and 1: give the predicted class"):
        Calibration(np.zeros(3), np.array([0, 1, 2]), 2)
    with pytest.raises(DataError, match="1 of 2 scores are NaN"):
        Calibration(np.array([np.nan, 1.0]), np.array([0, 1]), 2)
    decision = uneven_calibration(rng, [30, 40]).decide()
    for ask in (decision.is_ood, decision.p_values):
        with pytest.raises(UsageError, match="between 0 and 1"):
            ask([1.0], [-1])
        with pytest.raises(UsageError, match="one of each"):
            ask([1.0, 2.0], [0])
        with pytest.raises(DataError, match="1 of 1 scores are NaN"):
            ask([np.nan], [0])


@pytest.mark.parametrize(
    ("confidence", "per_class", "kind"),
    [
        (None, False, "marginal"),
        (0.95, False, "confidence"),
        (None, True, "marginal per class"),
        (0.95, True, "confidence per class"),
    ],
)
def test_description_is_plain(rng, confidence, per_class, kind):
    decision = uneven_calibration(rng, [400, 30, 0]).decide(0.05, confidence, per_class)
    found = decision.describe()
    assert found == json.loads(json.dumps(found, allow_nan=False))
    levels = {"kind": kind, "false_alarm": 0.05, "confidence": confidence, "per_class": per_class}
    assert found.items() >= (levels | {"n_calibration": 430, "n_own_thresholds": int(per_class)}).items()
    if per_class:
        assert found["thresholds"] == decision.thresholds.tolist()
    else:
        assert found["threshold"] == decision.thresholds[0]
    nothing = Calibration.empty(2).decide(per_class=per_class).describe()
    assert nothing["thresholds"] == [None, None] if per_class else nothing["threshold"] is None


@pytest.mark.parametrize(
    ("counts", "options", "sentence"),
    [
        (
            [600, 400],
            {},
            "flags at most 5 % of in-distribution images on average over calibration sets "
            "(1,000 calibration images; 90 % of such sets flag 3.9 to 6.2 %)",
        ),
        (
            [600, 400],
            {"confidence": 0.95},
            "flags at most 5 % of in-distribution images with 95 % confidence in this calibration set "
            "(1,000 calibration images; 90 % of such sets flag 2.9 to 5.0 %)",
        ),
        (
            [600, 400],
            {"per_class": True},
            "flags at most 5 % of in-distribution images of each predicted class on average over calibration sets "
            "(1,000 calibration images; every class has its own threshold)",
        ),
        (
            [600, 60, 50],
            {"per_class": True},
            "flags at most 5 % of in-distribution images of each predicted class on average over calibration sets "
            "(710 calibration images; own thresholds for 1 of 3 classes, the others share one)",
        ),
        (
            [600, 10],
            {"per_class": True, "confidence": 0.9},
            "flags at most 5 % of in-distribution images of each predicted class with 90 % confidence in this "
            "calibration set (610 calibration images; own thresholds for 1 of 2 classes, the others have too few "
            "images and use that of all, without a promise of their own)",
        ),
        (
            [60, 50],
            {"per_class": True, "false_alarm": 0.1},
            "flags at most 10 % of in-distribution images on average over calibration sets "
            "(110 calibration images; 90 % of such sets flag 5.7 to 14.9 %; "
            "no class has enough images for its own threshold)",
        ),
        (
            [10, 5],
            {},
            "flags nothing: this false-alarm rate takes at least 19 calibration images, and there are 15",
        ),
    ],
)
def test_sentences(rng, counts, options, sentence):
    assert uneven_calibration(rng, counts).decide(**options).sentence() == sentence


@pytest.mark.parametrize(
    ("counts", "options", "known"),
    [
        ([600, 400], {}, ["known images", "known images"]),
        ([600, 400], {"per_class": True}, ["known images called a", "known images called b"]),
        ([600, 60], {"per_class": True}, ["known images called a", "known images of the classes without a threshold"]),
        ([600, 10], {"per_class": True}, ["known images called a", "known images"]),  # too few: all serve
        ([60, 50], {"per_class": True}, ["known images", "known images"]),
    ],
)
def test_p_values_speak_of_the_images_they_come_from(rng, counts, options, known):
    decision = uneven_calibration(rng, counts).decide(**options)
    found = decision.known_images(["a", "b"])
    assert [words.removesuffix(" of their own") for words in found] == known
