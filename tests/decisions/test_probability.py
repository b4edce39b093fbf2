"""The record of class probabilities does what the functions do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import log_softmax

from maple.decisions.pool import mix_frequencies, pool, raise_odds, weigh_network
from maple.decisions.pool_fit import (
    choose_gaussians,
    choose_network,
    choose_odds,
    choose_share,
    fit_softmax_temperature,
)
from maple.decisions.probability import Probability
from maple.errors import DataError, UsageError
from maple.stats.gaussians import log_posterior

CLUSTERS, WEIGHTS, PRIORS = np.array([0, 0, 1, 2]), np.log([0.2, 0.1, 0.3, 0.4]), np.log([0.3, 0.3, 0.4])


@pytest.fixture
def found(rng):
    """What a detector says of 400 images, and their labels; the head has a column for each cluster."""
    d2 = rng.chisquare(4, size=(400, 4)) * 4
    network = log_softmax(2 * rng.normal(size=(400, 3)), axis=1)
    pooled = pool(log_posterior(d2, WEIGHTS, CLUSTERS, 4.0), network, 0.5, 0.5)
    labels = (2 * pooled + PRIORS + rng.gumbel(size=(400, 3))).argmax(axis=1)
    logits = np.log(np.array([0.5, 0.5, 1, 1])) + network[:, CLUSTERS]  # both clusters of class 0 share it
    described = SimpleNamespace(
        squared_distances=d2,
        log_weights=WEIGHTS,
        cluster_to_class=CLUSTERS,
        logits=logits,
        log_softmax=network,
        class_log_priors=PRIORS,
    )
    return described, labels


def test_the_record_is_fitted_by_the_functions(found):
    described, labels = found
    fitted = Probability(class_rule="max").fit(described, labels)
    network = described.log_softmax
    temperature, frequencies = choose_gaussians(described.squared_distances, labels, WEIGHTS, CLUSTERS, PRIORS)
    softmax_temperature = fit_softmax_temperature(network, labels)
    weight, prior_weight = choose_network(network, PRIORS, labels, softmax_temperature)
    gaussians = log_posterior(described.squared_distances, WEIGHTS, CLUSTERS, temperature)
    gaussians = mix_frequencies(gaussians, PRIORS, frequencies)
    calibrated = weigh_network(network, PRIORS, weight, prior_weight)
    share = choose_share(gaussians, calibrated, labels)
    assert 0 < share < 1
    pooled = pool(gaussians, calibrated, 1 - share, share)
    np.testing.assert_allclose(fitted.log_pooled(described), pooled, atol=1e-12)
    assert fitted == Probability(
        temperature,
        (1 - share) * weight,
        choose_odds(fitted.log_pooled(described), labels),
        softmax_temperature,
        "max",
        share,
        (1 - share) * prior_weight,
        frequencies,
    )


def test_frequencies_that_the_network_lacks_are_added(found, rng):
    described, _ = found
    described.class_log_priors = np.log([0.9, 0.09, 0.01])
    labels = (described.log_softmax + described.class_log_priors + rng.gumbel(size=(400, 3))).argmax(axis=1)
    fitted = Probability().fit(described, labels)
    assert fitted.prior_weight > 0.5 and fitted.gaussian_weight < 0.2
    loss = {
        name: -values[np.arange(400), labels].mean()
        for name, values in (
            ("maple", fitted.log_probabilities(described)),
            ("softmax", log_softmax(described.log_softmax / fitted.softmax_temperature, axis=1)),
        )
    }
    assert loss["maple"] < loss["softmax"] - 0.1


def test_images_of_unknown_classes_are_left_out(found):
    described, labels = found
    expected = Probability().fit(described, labels)
    more = SimpleNamespace(**vars(described))
    for name in ("squared_distances", "log_softmax", "logits"):
        setattr(more, name, np.vstack([getattr(described, name), getattr(described, name)[:100]]))
    assert Probability().fit(more, np.r_[labels, np.full(100, -1)]) == expected
    with pytest.raises(DataError, match="validation image"):
        Probability().fit(described, np.full(400, -1))


def test_without_logits_the_gaussians_stand_alone(found):
    described, labels = found
    described.logits = None
    fitted = Probability(softmax_temperature=3.0, network_weight=0.4, gaussian_weight=0.5).fit(described, labels)
    assert (fitted.network_weight, fitted.gaussian_weight, fitted.softmax_temperature) == (0, 1, 3)
    expected = log_posterior(described.squared_distances, WEIGHTS, CLUSTERS, fitted.temperature)
    expected = mix_frequencies(expected, PRIORS, fitted.frequency_share)
    np.testing.assert_array_equal(fitted.log_pooled(described), expected)
    with pytest.raises(UsageError, match="logits"):
        fitted.network_probabilities(described)


def test_log_probabilities_are_the_raised_pool(found):
    described, _ = found
    weights = {"network_weight": 0.7, "gaussian_weight": 0.6, "prior_weight": 0.2, "frequency_share": 0.1}
    record = Probability(3.0, odds_exponent=0.5, **weights)
    alone = log_posterior(described.squared_distances, WEIGHTS, CLUSTERS, 3.0)
    alone = np.log(0.9 * np.exp(alone) + 0.1 * np.exp(PRIORS))
    pooled = log_softmax(0.6 * alone + 0.7 * described.log_softmax + 0.2 * PRIORS, axis=1)
    np.testing.assert_allclose(record.log_pooled(described), pooled, atol=1e-12)
    np.testing.assert_allclose(record.log_probabilities(described), raise_odds(pooled, 0.5), atol=1e-12)
    np.testing.assert_allclose(record.network_probabilities(described), np.exp(described.log_softmax), rtol=1e-12)


def test_the_network_is_calibrated_on_the_classes_of_its_head(found):
    described, labels = found
    known = labels < 2
    described.log_softmax = log_softmax(np.where(np.arange(3) < 2, described.log_softmax, -np.inf), axis=1)
    fitted = Probability().fit(described, labels)
    expected = fit_softmax_temperature(described.log_softmax[known][:, :2], labels[known])
    assert fitted.softmax_temperature == expected
    before = Probability(1.0, 0.25, 1.0, 3.0, "sum", 0.2, 0.1)
    only_new = before.fit(described, np.full(400, 2))
    changed = {name: getattr(only_new, name) for name in ("temperature", "frequency_share", "odds_exponent")}
    assert only_new == replace(before, **changed)


def test_the_record_survives_plain_values():
    record = Probability(2.0, 0.5, 0.8, 1.5, "max", 0.3, 0.2, 0.1)
    values = record.to_dict()
    assert Probability.from_dict({**values, "class_names": ["a"]}) == record


def test_without_a_fit_the_posterior_of_the_gaussians_is_the_probability(found):
    described, _ = found
    expected = log_posterior(described.squared_distances, WEIGHTS, CLUSTERS)
    np.testing.assert_allclose(Probability().log_probabilities(described), expected, rtol=1e-12)
