"""Algebra of class probabilities, against loops and limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax

from maple.decisions.pool import class_probabilities, mix_frequencies, pool, raise_odds, weigh_network


def test_pool_is_the_normalised_weighted_product(rng):
    one, other = (log_softmax(rng.normal(size=(6, 3)), axis=1) for _ in range(2))
    for weight in (0.0, 0.3, 2.0):
        products = [[np.exp(a) * np.exp(b) ** weight for a, b in zip(*row)] for row in zip(one, other)]
        expected = [[p / sum(row) for p in row] for row in products]
        np.testing.assert_allclose(np.exp(pool(one, other, weight)), expected, rtol=1e-12)
        np.testing.assert_allclose(np.exp(pool(other, one, 1.0, weight)), expected, rtol=1e-12)
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


@settings(max_examples=50, deadline=None)
@given(arrays(np.float64, (3, 4), elements=st.floats(-30, 0)), st.floats(0, 1))
def test_a_pool_of_two_equal_models_is_that_model(logs, share):
    """External Bayesianity needs weights that sum to 1: frequencies of classes, which both contain, count once."""
    model = log_softmax(logs, axis=1)
    np.testing.assert_allclose(pool(model, model, 1 - share, share), model, atol=1e-10)


def test_without_weight_of_the_gaussians_only_the_network_decides(rng):
    network = log_softmax(rng.normal(size=(6, 3)), axis=1)
    pooled = pool(np.full((6, 3), -np.inf), network, 0.5, 0.0)
    np.testing.assert_allclose(pooled, log_softmax(0.5 * network, axis=1), rtol=1e-12)


def test_the_network_never_moves_probability_to_or_from_classes_without_a_column(rng):
    gaussians = log_softmax(rng.normal(size=(6, 4)), axis=1)
    network = log_softmax(np.where(np.arange(4) < 3, rng.normal(size=(6, 4)), -np.inf), axis=1)
    for weights in ((0.7, 0.3), (0.5, 0.0), (2.0, 1.0)):
        pooled = pool(gaussians, network, *weights)
        np.testing.assert_array_equal(pooled[:, 3], gaussians[:, 3])
        np.testing.assert_allclose(np.exp(pooled).sum(axis=1), 1)


def test_frequencies_of_classes_are_restored(rng):
    """A posterior for balanced classes times their frequencies is the posterior for these frequencies."""
    likelihoods, priors = rng.uniform(size=(8, 3)), np.array([0.7, 0.2, 0.1])
    balanced, natural = (np.log(x / x.sum(axis=1, keepdims=True)) for x in (likelihoods, likelihoods * priors))
    np.testing.assert_allclose(weigh_network(balanced, np.log(priors), 1.0, 1.0), natural, rtol=1e-12)
    np.testing.assert_allclose(weigh_network(balanced, np.log(priors), 1.0, 0.0), balanced, rtol=1e-12)


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


@given(arrays(np.float64, (5, 4), elements=st.floats(-500, 500)), st.floats(0, 1))
def test_frequencies_are_mixed_in(logits, share):
    logs, priors = log_softmax(logits, axis=1), np.array([0.5, 0.3, 0.2, 0.0])
    with np.errstate(divide="ignore"):
        mixed = np.exp(mix_frequencies(logs, np.log(7 * priors), share))  # frequencies need not sum to 1
    for row, before in zip(mixed, np.exp(logs)):
        np.testing.assert_allclose(row, [(1 - share) * p + share * q for p, q in zip(before, priors)], atol=1e-12)
        assert row.sum() == pytest.approx(1)


def test_a_class_without_clusters_has_no_probability(rng):
    found = class_probabilities(rng.normal(size=(4, 3)), np.array([2, 0, 2]))
    assert found.shape == (4, 3) and not found[:, 1].any()
    np.testing.assert_allclose(found.sum(axis=1), 1)
