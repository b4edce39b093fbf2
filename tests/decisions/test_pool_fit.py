"""Fits of class probabilities: planted parameters are recovered, and no choice is worse than the scaled softmax."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from maple.decisions.pool import pool, raise_odds, weigh_network
from maple.decisions.pool_fit import (
    LOG_TEMPERATURE_DEVIATION,
    TEMPERATURE_RANGE,
    choose_gaussians,
    choose_network,
    choose_odds,
    choose_share,
    fit_network,
    fit_odds,
    fit_share,
    fit_softmax_temperature,
    fit_temperature,
    folds,
    losses,
)
from maple.errors import DataError
from maple.stats.gaussians import log_posterior
from maple.stats.metrics import calibration_floor, expected_calibration_error


def draw(rng, logs):
    """Labels (N,) drawn from log probabilities (N, C)."""
    return (logs + rng.gumbel(size=logs.shape)).argmax(axis=1)


def two_models(rng, n, n_classes=3):
    """Log probabilities (n, C) of two independent models."""
    return (log_softmax(2 * rng.normal(size=(n, n_classes)), axis=1) for _ in range(2))


# ------------------------------------------------------------------------------------------------------ temperatures


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
    with pytest.raises(DataError, match="validation image"):
        fit_temperature(d2, np.full(300, -1), weights, clusters)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 6.0])
def test_planted_temperature_of_a_softmax_is_recovered(rng, temperature):
    logits = 2 * rng.normal(size=(8000, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    network = log_softmax(temperature * logits, axis=1)
    found = fit_softmax_temperature(network, labels)
    assert found == pytest.approx(temperature, rel=0.1)
    unknown = np.r_[labels, np.full(500, -1)]
    assert fit_softmax_temperature(np.vstack([network, network[:500]]), unknown) == found


# --------------------------------------------------------------------------------------------------------- gaussians

FREQUENCIES = np.log([0.6, 0.3, 0.1])


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_planted_share_of_frequencies_is_recovered(rng, share):
    """Labels of some images have nothing to do with their embeddings."""
    logits = 4 * rng.normal(size=(8000, 3))
    mixed = np.log((1 - share) * np.exp(log_softmax(logits, axis=1)) + share * np.exp(FREQUENCIES))
    found = choose_gaussians(-2 * 7 * logits, draw(rng, mixed), np.zeros(3), np.arange(3), FREQUENCIES)
    assert found == pytest.approx((7, share), rel=0.25)


def test_gaussians_that_are_right_are_left_alone(rng):
    chosen = []
    for _ in range(20):
        logits = 3 * rng.normal(size=(300, 3))
        labels = draw(rng, log_softmax(logits, axis=1))
        temperature, share = choose_gaussians(-2 * logits, labels, np.zeros(3), np.arange(3), FREQUENCIES)
        chosen.append(share)
        if not share:
            assert temperature == fit_temperature(-2 * logits, labels, np.zeros(3), np.arange(3))
    assert np.mean(np.array(chosen) == 0) > 0.6 and max(chosen) < 0.1


def test_few_impossible_images_do_not_spoil_the_others(rng):
    """One label in fifty is wrong: a temperature alone makes all images unsure."""
    logits = 12 * rng.normal(size=(2000, 3))
    labels = logits.argmax(axis=1)
    labels[::50] = (labels[::50] + 1) % 3
    arguments = (-2 * logits, labels, np.zeros(3), np.arange(3))
    alone = fit_temperature(*arguments)
    temperature, share = choose_gaussians(*arguments, np.log(np.full(3, 1 / 3)))
    assert temperature < alone / 2 and share == pytest.approx(0.03, abs=0.01)  # a third of it is the right class


# ---------------------------------------------------------------------------------------------------- share, network


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_planted_share_is_recovered(rng, share):
    one, other = two_models(rng, 8000)
    labels = draw(rng, pool(one, other, 1 - share, share))
    assert fit_share(one, other, labels) == pytest.approx(share, abs=0.05)
    assert choose_share(one, other, labels) == (0.0 if share == 0 else fit_share(one, other, labels))


def test_share_is_the_minimum_of_the_stated_loss(rng):
    one, other = two_models(rng, 40)
    labels = draw(rng, pool(one, other, 0.5, 0.5))

    def loss(share):
        return losses(pool(one, other, 1 - share, share), labels).sum() + share**2 / 2

    assert loss(fit_share(one, other, labels)) <= min(loss(s) for s in np.linspace(0, 1, 1001)) + 1e-6


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_at_the_end_of_its_range_is_exact(rng, share):
    """0 is the network alone, for which the Gaussians need not be computed."""
    right = log_softmax(2 * rng.normal(size=(200, 3)), axis=1)
    wrong, labels = log_softmax(-right, axis=1), right.argmax(axis=1)
    assert fit_share(*((right, wrong) if share else (wrong, right)), labels) == share


@pytest.mark.parametrize("prior_weight", [0.0, 0.6, 1.0])
def test_planted_weights_of_the_network_are_recovered(rng, prior_weight):
    network, log_priors = log_softmax(3 * rng.normal(size=(8000, 4)), axis=1), np.log([0.6, 0.3, 0.08, 0.02])
    labels = draw(rng, weigh_network(network, log_priors, 0.5, prior_weight))
    weight, found = fit_network(network, log_priors, labels, fit_softmax_temperature(network, labels))
    assert weight == pytest.approx(0.5, rel=0.1) and found == pytest.approx(prior_weight, abs=0.06)


def test_frequencies_have_no_weight_where_classes_are_balanced_or_learned(rng):
    network = log_softmax(3 * rng.normal(size=(500, 3)), axis=1)
    labels = draw(rng, network)
    temperature = fit_softmax_temperature(network, labels)
    assert choose_network(network, np.log(np.full(3, 1 / 3)), labels, temperature) == (1 / temperature, 0.0)
    learned = [choose_network(network, np.log([0.8, 0.1, 0.1]), draw(rng, network), temperature)[1] for _ in range(10)]
    assert np.mean(learned) < 0.05


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.floats(0, 8), st.floats(0, 8))
def test_every_choice_is_at_least_as_likely_as_the_scaled_softmax_on_held_out_images(seed, n, sure, surer):
    """With any data: labels need not follow either model, and there may be fewer images than folds or classes."""
    rng = np.random.default_rng(seed)
    gaussians, network = (log_softmax(s * rng.normal(size=(n, 5)), axis=1) for s in (sure, surer))
    labels, log_priors = rng.choice(5, n, p=[0.6, 0.2, 0.1, 0.06, 0.04]), np.log([0.6, 0.2, 0.1, 0.06, 0.04])
    temperature = fit_softmax_temperature(network, labels)
    reference = losses(weigh_network(network, log_priors, 1 / temperature, 0.0), labels).sum()
    weights = choose_network(network, log_priors, labels, temperature)
    if weights != (1 / temperature, 0.0):
        held_out = sum(
            losses(weigh_network(network[rows], log_priors, *fitted), labels[rows]).sum()
            for others, rows in folds(labels)
            for fitted in [fit_network(network[others], log_priors, labels[others], temperature)]
        )
        assert held_out < reference
    calibrated = weigh_network(network, log_priors, *weights)
    if share := choose_share(gaussians, calibrated, labels):
        held_out = sum(
            losses(pool(gaussians[rows], calibrated[rows], 1 - fitted, fitted), labels[rows]).sum()
            for others, rows in folds(labels)
            for fitted in [fit_share(gaussians[others], calibrated[others], labels[others])]
        )
        assert held_out < losses(calibrated, labels).sum()
    assert 0 <= share <= 1 and 0 <= weights[1] <= 1 and weights[0] > 0


def test_few_images_leave_the_softmax_at_its_temperature(rng):
    """The Gaussians know nothing: of a hundred sets of forty images, few give them a share, and a small one."""
    shares = []
    for _ in range(100):
        gaussians, network = two_models(rng, 40)
        shares.append(choose_share(gaussians, network, draw(rng, network)))
    assert np.mean(np.array(shares) > 0) < 0.2 and np.mean(shares) < 0.04


@pytest.mark.parametrize("informed", ["both", "Gaussians", "network"])
def test_the_pool_is_as_likely_as_either_model(rng, informed):
    gaussians, network = two_models(rng, 3000)
    weights = {"both": (0.5, 0.5), "Gaussians": (0.0, 1.0), "network": (1.0, 0.0)}[informed]
    labels = draw(rng, pool(gaussians, network, *weights))
    share = fit_share(gaussians, network, labels)
    pooled = losses(pool(gaussians, network, 1 - share, share), labels).sum()
    alone = min(losses(model, labels).sum() for model in (gaussians, network))
    assert pooled <= alone + 0.5  # the prior, which weighs one image
    if informed == "both":
        assert pooled < alone - 50


# ---------------------------------------------------------------------------------------------------------- exponent


@pytest.mark.parametrize("exponent", [0.3, 0.7, 1.0])
def test_planted_exponent_is_recovered(rng, exponent):
    logs = log_softmax(3 * rng.normal(size=(20000, 4)), axis=1)
    labels = (raise_odds(logs, exponent) + rng.gumbel(size=logs.shape)).argmax(axis=1)
    assert fit_odds(logs, labels) == pytest.approx(exponent, rel=0.05)
    right = raise_odds(logs, fit_odds(logs, labels))
    confidence, correct = np.exp(right.max(axis=1)), right.argmax(axis=1) == labels
    assert expected_calibration_error(confidence, correct) < 2 * calibration_floor(confidence)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_exponent_is_the_minimum_of_the_stated_loss(rng, n_classes):
    """Few images: the prior decides as much as one of them."""
    logs = log_softmax(4 * rng.normal(size=(6, n_classes)), axis=1)
    labels = np.r_[logs.argmin(axis=1)[:2], logs.argmax(axis=1)[2:]]
    right, p = labels == logs.argmax(axis=1), np.exp(logs.max(axis=1))

    def loss(exponent):
        odds = (p / (1 - p)) ** exponent
        return -np.log(np.where(right, odds, 1) / (1 + odds)).sum() + (np.log(exponent) / np.log(2)) ** 2 / 2

    exponents = np.geomspace(0.05, 1, 4000)
    best = exponents[np.argmin([loss(each) for each in exponents])]
    assert 0.06 < best < 0.9
    assert fit_odds(logs, labels) == pytest.approx(best, rel=2e-3)


def test_the_exponent_goes_down_to_a_twentieth(rng):
    """Of a model that is very sure and hardly better than chance."""
    logs = log_softmax(300 * rng.normal(size=(3000, 2)), axis=1)
    labels = draw(rng, raise_odds(logs, 0.06))
    assert fit_odds(logs, labels) == pytest.approx(0.06, rel=0.1)
    assert fit_odds(logs, draw(rng, 1e-6 * logs)) == pytest.approx(0.05, rel=0.01)


def test_nobody_is_made_surer_than_they_are(rng):
    logs = log_softmax(rng.normal(size=(5000, 3)), axis=1)
    labels = (4 * logs + rng.gumbel(size=logs.shape)).argmax(axis=1)  # right more often than they say
    assert fit_odds(logs, labels) == 1
    assert fit_odds(np.zeros((5, 1)), np.zeros(5, int)) == 1  # one class


def test_an_exponent_is_chosen_where_the_first_class_is_too_sure(rng):
    logs = log_softmax(3 * rng.normal(size=(4000, 4)), axis=1)
    assert choose_odds(logs, draw(rng, raise_odds(logs, 0.6))) == pytest.approx(0.6, rel=0.1)
    assert choose_odds(logs, draw(rng, logs)) > 0.95


def test_an_exponent_that_held_out_images_do_not_support_is_left_out():
    """Few images with the right probabilities: a fit finds an exponent in every other sample, mostly by chance."""
    kept = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logs = log_softmax(2 * rng.normal(size=(40, 3)), axis=1)
        labels = draw(rng, logs)
        fitted, chosen = fit_odds(logs, labels), choose_odds(logs, labels)
        assert chosen in (fitted, 1.0)
        if fitted < 1:
            kept.append(chosen < 1)
    assert len(kept) > 5 and np.mean(kept) < 0.5


# -------------------------------------------------------------------------------------------------- cross-validation


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60))
def test_each_image_is_held_out_once_and_classes_are_dealt_out_evenly(labels):
    labels = np.array(labels, dtype=np.int64)
    parts = list(folds(labels))
    assert len(parts) == 10
    np.testing.assert_array_equal(np.sort(np.concatenate([rows for _, rows in parts])), np.arange(len(labels)))
    for others, rows in parts:
        np.testing.assert_array_equal(np.sort(np.concatenate([others, rows])), np.arange(len(labels)))
    for label in np.unique(labels):
        counts = [(labels[rows] == label).sum() for _, rows in parts]
        assert max(counts) - min(counts) <= 1
