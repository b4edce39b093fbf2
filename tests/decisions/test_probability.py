"""Class probabilities: planted parameters are recovered, and the record does what the functions do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import log_softmax

from maple.decisions.probability import (
    _LOG_TEMPERATURE_DEVIATION,
    _TEMPERATURE_RANGE,
    Probability,
    class_probabilities,
    fit_odds,
    fit_pool,
    fit_softmax_temperature,
    fit_temperature,
    pool,
    raise_odds,
)
from maple.errors import DataError, UsageError
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
        return nll + np.log(t) ** 2 / (2 * _LOG_TEMPERATURE_DEVIATION**2)

    best = loss(fit_temperature(d2, labels, weights, clusters))
    assert best <= min(loss(t) for t in np.geomspace(*_TEMPERATURE_RANGE, 4000)) + 1e-9


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e5])
def test_temperature_when_all_are_right_or_wrong(right, scale):
    d2 = scale * np.array([[0.0, 30.0], [25.0, 1.0]] * 50)
    labels = np.array([0, 1] * 50) if right else np.array([1, 0] * 50)
    temperature = fit_temperature(d2, labels, np.log([0.5, 0.5]), np.arange(2))
    assert _TEMPERATURE_RANGE[0] <= temperature <= _TEMPERATURE_RANGE[1]
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
    with pytest.raises(DataError, match="validation image"):
        fit_temperature(d2, np.full(300, -1), weights, clusters)


# ------------------------------------------------------------------------------------------ Gaussians and network

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
        (np.log(t) / _LOG_TEMPERATURE_DEVIATION) ** 2 / 2 + a**2 / 2 for t, a in ((temperature, weight), (alone, 0))
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
    with pytest.raises(DataError, match="validation image"):
        fit_pool(d2, np.full(400, -1), POOL_WEIGHTS, POOL_CLUSTERS, network)


# ------------------------------------------------------------------------------------------------------ clusters


def test_class_probabilities_by_loops(rng):
    logits = rng.normal(size=(7, 5)).astype(np.float32)
    mapping = np.array([2, 0, 1, 0, 2])
    exponentials = np.exp(logits.astype(np.float64))
    soft = exponentials / exponentials.sum(1, keepdims=True)
    for rule, reduce in (("sum", sum), ("max", max)):
        expected = [[reduce(row[m] for m in range(5) if mapping[m] == c) for c in range(3)] for row in soft]
        np.testing.assert_allclose(class_probabilities(logits, mapping, rule), expected, rtol=1e-10)


def test_summing_does_not_make_split_classes_look_hard():
    # Class 0 has 0.6 in all, but each of its five children only 0.12, less than the 0.4 of class 1.
    probabilities = np.array([[0.12] * 5 + [0.4]])
    mapping = np.array([0] * 5 + [1])
    assert class_probabilities(np.log(probabilities), mapping, "sum").argmax(1) == 0
    assert class_probabilities(np.log(probabilities), mapping, "max").argmax(1) == 1


# ------------------------------------------------------------------------------------------------------- the record


@pytest.fixture
def found(rng):
    """What a detector says of 400 images, and their labels; the head has a column for each cluster."""
    d2, network, labels = two_experts(rng, 400, 4.0, 1.0)
    logits = np.log(np.array([0.5, 0.5, 1, 1])) + network[:, POOL_CLUSTERS]  # both clusters of class 0 share it
    described = SimpleNamespace(
        squared_distances=d2,
        log_weights=POOL_WEIGHTS,
        cluster_to_class=POOL_CLUSTERS,
        logits=logits,
        log_softmax=network,
    )
    return described, labels


def test_the_record_is_fitted_by_the_functions(found):
    described, labels = found
    fitted = Probability(class_rule="max").fit(described, labels)
    expected = fit_pool(described.squared_distances, labels, POOL_WEIGHTS, POOL_CLUSTERS, described.log_softmax)
    assert (fitted.temperature, fitted.network_weight, fitted.odds_exponent) == expected
    assert fitted.softmax_temperature == fit_softmax_temperature(described.log_softmax, labels)
    assert fitted.class_rule == "max"


def test_without_logits_the_gaussians_stand_alone(found):
    described, labels = found
    described.logits = None
    fitted = Probability(softmax_temperature=3.0).fit(described, labels)
    assert fitted.network_weight == 0 and fitted.softmax_temperature == 3
    expected = log_posterior(described.squared_distances, POOL_WEIGHTS, POOL_CLUSTERS, fitted.temperature)
    np.testing.assert_array_equal(fitted.log_pooled(described), expected)
    with pytest.raises(UsageError, match="logits"):
        fitted.network_probabilities(described)


def test_log_probabilities_are_the_raised_pool(found):
    described, _ = found
    record = Probability(temperature=3.0, network_weight=0.7, odds_exponent=0.5)
    alone = log_posterior(described.squared_distances, POOL_WEIGHTS, POOL_CLUSTERS, 3.0)
    pooled = pool(alone, described.log_softmax, 0.7)
    np.testing.assert_array_equal(record.log_pooled(described), pooled)
    np.testing.assert_array_equal(record.log_probabilities(described), raise_odds(pooled, 0.5))
    np.testing.assert_allclose(record.network_probabilities(described), np.exp(described.log_softmax), rtol=1e-12)


def test_the_network_is_calibrated_on_the_classes_of_its_head(found):
    described, labels = found
    known = labels < 2
    described.log_softmax = log_softmax(np.where(np.arange(3) < 2, described.log_softmax, -np.inf), axis=1)
    fitted = Probability().fit(described, labels)
    expected = fit_softmax_temperature(described.log_softmax[known][:, :2], labels[known])
    assert fitted.softmax_temperature == expected
    only_new = Probability(softmax_temperature=3.0).fit(described, np.full(400, 2))
    assert only_new.softmax_temperature == 3


def test_the_record_survives_plain_values_of_old_and_new_runs():
    record = Probability(2.0, 0.5, 0.8, 1.5, "max")
    values = record.to_dict()
    assert Probability.from_dict({**values, "class_names": ["a"]}) == record
    del values["odds_exponent"]
    assert Probability.from_dict(values) == replace(record, odds_exponent=1.0)
