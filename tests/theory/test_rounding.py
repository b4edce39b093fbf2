"""Rounding: float32 next to float64 within its bound, huge offsets, extreme values, no NaN out of finite numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import logsumexp

from clusters import moments_of, within_covariance
from maple.decisions.probability import Probability
from maple.detectors.maple import MapleDetector
from maple.stats.arrays import normalise
from maple.stats.gaussians import FARTHEST, fit_gaussians, log_posterior, squared_distances
from maple.types import Outputs
from theory_data import SEEDS, draw_clusters

UNIT = 2.0**-24  # rounding of float32


def rounding_bound(gaussians, embeddings: np.ndarray) -> np.ndarray:
    """How far float32 products may move the projection of each embedding (N,).

    A dot product of D terms is off by at most (D + 1) u sum |e_d W_dk| to first order (Higham 2002, 3.1), u being the
    rounding of a number; rounding the matrix to float32 is one of these terms. Norms over all K components.
    """
    dim = embeddings.shape[1]
    return (dim + 2) * UNIT * np.linalg.norm(np.abs(embeddings) @ np.abs(gaussians.matrix), axis=1)


@given(SEEDS, st.floats(-6, 6), st.floats(0, 3))
def test_float32_scores_stay_within_their_bound_over_12_orders_of_magnitude(seed, power, offset):
    """Of the square roots: |d32 - d64| is at most the distance by which the projection moved."""
    embeddings, labels = draw_clusters(seed)
    embeddings = (10**power * (embeddings + offset)).astype(np.float32)
    gaussians = fit_gaussians(moments_of(embeddings, labels))
    assert gaussians.float32  # near their mean: products are in float32
    new = np.concatenate([embeddings[:40], embeddings[:40] * np.float32(1e3)])
    single, double = (np.sqrt(gaussians.squared_distances(x)) for x in (new, new.astype(np.float64)))
    assert (np.abs(single - double) <= rounding_bound(gaussians, new.astype(np.float64))[:, None] + 1e-7).all()
    assert np.abs(single - double)[:40].max() < 1e-3  # what float32_suffices promises for typical images


@given(SEEDS, st.sampled_from([1e5, -1e6, 1e6]))
def test_float64_takes_over_where_float32_does_not_suffice(seed, offset):
    embeddings, labels = draw_clusters(seed)
    far = (embeddings + offset).astype(np.float32)
    gaussians = fit_gaussians(moments_of(far, labels))
    assert not gaussians.float32
    np.testing.assert_array_equal(gaussians.squared_distances(far), gaussians.squared_distances(far.astype(np.float64)))


@given(SEEDS, st.sampled_from([1e6, -1e6]))
def test_a_mean_of_a_million_and_a_variance_of_one(seed, offset):
    """Distances and covariance are those around 0, though squares are a million million times the variance."""
    rng = np.random.default_rng(seed)
    labels = np.arange(400) % 4
    near = np.round(rng.normal(size=(400, 5)) + 2 * rng.normal(size=(4, 5))[labels], 6)
    whole = moments_of(near + offset, labels)
    halves = moments_of(near[:7] + offset, labels[:7]) + moments_of(near[7:] + offset, labels[7:])
    expected = fit_gaussians(moments_of(near, labels)).squared_distances(near)
    for moments in (whole, halves):
        np.testing.assert_allclose(moments.within_covariance, within_covariance(near, labels), atol=1e-8)
        found = fit_gaussians(moments).squared_distances(near + offset)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_finite_embedding_has_finite_scores_and_probabilities(dtype, exponent):
    embeddings, labels = draw_clusters(5)
    detector = MapleDetector(norm_exponent=exponent).fit(Outputs(embeddings.astype(dtype), labels=labels))
    largest = np.finfo(dtype).max
    sizes = np.array([largest, np.sqrt(largest), 1e20, 1e-20, np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal])
    extreme = (sizes[:, None] * np.sign(embeddings[:6])).astype(dtype)
    found = detector.describe(Outputs(extreme))
    for name in found.available_scores:
        assert np.isfinite(found.score_named(name)).all(), name
    for temperature in (0.01, 1.0, 100.0):
        logs = Probability(temperature=temperature, odds_exponent=0.5, frequency_share=0.01).log_probabilities(found)
        np.testing.assert_allclose(logsumexp(logs, axis=1), 0, atol=1e-6)
    assert (found.typicality >= 0).all() and (found.uncertainty <= 1).all()


def test_lengths_beyond_the_range_of_squares_are_normalised():
    """e / ||e|| of a float64 vector whose squares overflow or vanish is a unit vector, not 0."""
    directions = normalise(np.random.default_rng(0).normal(size=(8, 5)))
    sizes = 10.0 ** np.array([-300, -200, -160, -20, 20, 160, 200, 300])
    np.testing.assert_allclose(normalise(directions * sizes[:, None]), directions, rtol=1e-12)


@given(SEEDS, st.floats(0, 300))
def test_posterior_is_a_distribution_at_any_distance(seed, power):
    rng = np.random.default_rng(seed)
    d2 = np.minimum(10**power * rng.uniform(0.1, 10, (10, 4)), FARTHEST)
    for temperature in (0.01, 1.0, 50.0):
        logs = log_posterior(d2, np.log(rng.dirichlet(np.ones(4))), np.array([0, 1, 1, 2]), temperature)
        assert not np.isnan(logs).any()
        np.testing.assert_allclose(np.exp(logs).sum(1), 1)


@given(SEEDS, st.floats(0.01, 100), st.floats(0, 1), st.floats(0.02, 1), st.floats(0, 0.5))
@example(0, 1.0, 0.5, 0.5, 5e-324)
def test_probabilities_sum_to_one_whatever_logits_and_distances(seed, temperature, weight, exponent, share):
    rng = np.random.default_rng(seed)
    logits = 10.0 ** rng.uniform(-3, 30, (12, 4)) * rng.choice([-1, 1], (12, 4))
    found = SimpleNamespace(
        squared_distances=10.0 ** rng.uniform(-3, 250, (12, 4)),
        log_weights=np.log(rng.dirichlet(np.ones(4))),
        cluster_to_class=np.array([0, 1, 1, 2]),
        class_log_priors=np.log(rng.dirichlet(np.ones(3))),
        logits=logits,
        log_softmax=np.log(rng.dirichlet(np.ones(3), 12)) * rng.choice([1, 1e6], (12, 1)),
    )
    probability = Probability(
        temperature=temperature, network_weight=weight, gaussian_weight=1 - weight, odds_exponent=exponent,
        frequency_share=share, prior_weight=0.1,
    )  # fmt: skip
    logs = probability.log_probabilities(found)
    assert not np.isnan(logs).any() and (logs <= 1e-9).all()
    np.testing.assert_allclose(np.exp(logs).sum(1), 1, rtol=1e-6)


@given(SEEDS, st.floats(0, 6))
def test_expanded_distances_are_those_of_the_difference(seed, power):
    """||z||^2 - 2 z c' + ||c||^2 cancels where both are far from 0: by at most a few roundings of ||z||^2 + ||c||^2."""
    rng = np.random.default_rng(seed)
    centroids = 10**power * rng.normal(size=(4, 6))
    points = centroids[rng.integers(0, 4, 50)] + rng.normal(size=(50, 6))
    exact = ((points[:, None] - centroids) ** 2).sum(2)
    size = (points**2).sum(1)[:, None] + (centroids**2).sum(1)
    assert (np.abs(squared_distances(points, centroids) - exact) <= 20 * np.finfo(np.float64).eps * size).all()
