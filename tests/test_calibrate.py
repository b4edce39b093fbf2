"""Temperature, conformal p-values and thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.calibrate import (
    LOG_TEMPERATURE_DEVIATION,
    TEMPERATURE_RANGE,
    conformal_p_values,
    conformal_threshold,
    fit_temperature,
    min_calibration_images,
)
from maple.errors import DataError, UsageError
from maple.gaussian import log_posterior


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
    false_alarm=st.one_of(
        st.floats(1e-3, 1.0), st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0]), st.just(1 / 3)
    ),
)
def test_threshold_and_p_value_decide_alike(calibration, scores, false_alarm):
    threshold = conformal_threshold(calibration, false_alarm)
    p_values = conformal_p_values(np.array(scores, dtype=float), calibration)
    np.testing.assert_array_equal(np.array(scores) > threshold, p_values <= false_alarm)
    assert (threshold == np.inf) == (len(calibration) < min_calibration_images(false_alarm))


@given(n=st.integers(0, 500), k=st.integers(1, 500))
def test_threshold_is_exact_at_every_attainable_rate(n, k):
    k = min(k, n + 1)
    calibration = np.arange(n, dtype=float)
    scores = np.arange(-1, n + 1, dtype=float)
    rate = k / (n + 1)  # exactly a p-value
    flagged = scores > conformal_threshold(calibration, rate)
    np.testing.assert_array_equal(flagged, conformal_p_values(scores, calibration) <= rate)


@pytest.mark.parametrize(("rate", "n"), [(0.5, 1), (0.05, 19), (0.01, 99), (1 / 3, 2), (1.0, 0), (0.3, 3)])
def test_min_calibration_images(rate, n):
    assert min_calibration_images(rate) == n


def test_bad_rates_and_scores():
    for rate in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="false-alarm rate"):
            conformal_threshold([1.0], rate)
    with pytest.raises(DataError, match="1 of 2 calibration scores are NaN"):
        conformal_p_values([1.0], [np.nan, 2.0])
