"""T-Means: held-out likelihoods against densities written out by hand, and data with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from clusters import spherical_blobs
from maple.stats.clustering.tmeans import TMeans, held_out_gain, tied_log_likelihood


def test_tied_likelihood_equals_the_densities_written_out_by_hand(rng):
    points, held_out = rng.standard_normal((60, 4)) * [1, 2, 3, 4], rng.standard_normal((25, 4))
    labels = np.arange(60) % 3
    labels[:15] = 0
    means = np.stack([points[labels == j].mean(axis=0) for j in range(3)])
    covariance = (points - means[labels]).T @ (points - means[labels]) / 60
    expected = [
        max(
            math.log(np.mean(labels == j)) + stats.multivariate_normal(means[j], covariance).logpdf(x) for j in range(3)
        )
        for x in held_out
    ]
    found = tied_log_likelihood(points, labels, held_out, floor=1e-9) - 2 * math.log(2 * math.pi)
    assert_allclose(found, np.mean(expected), rtol=1e-10)


@pytest.mark.parametrize(("n", "n_components"), [(400, 4), (30, 3), (9, 1)])  # one per ten points at most
def test_the_gain_is_the_difference_of_likelihoods_in_the_principal_components(n, n_components, rng):
    points = rng.standard_normal((n + 200, 8)) * np.geomspace(9, 0.3, 8)
    points, held_out, labels = points[:n] + 3, points[n:] + 3, np.arange(n) % 2
    components = PCA(0.95 if n == 400 else n_components, svd_solver="full").fit(points)
    assert components.n_components_ == n_components
    z, z_held_out = components.transform(points), components.transform(held_out)
    split, unsplit = (tied_log_likelihood(z, clusters, z_held_out, 0.0) for clusters in (labels, 0 * labels))
    assert_allclose(held_out_gain(points, labels, held_out), split - unsplit, rtol=1e-6)


def test_halves_of_a_gaussian_lose_what_theory_says(rng):
    """-log 2 - log(1 - 2 / pi) / 2 = -0.187 per image, whatever the covariance."""
    points, held_out = rng.standard_normal((2, 40_000, 3)) * [5.0, 1.0, 1.0]
    gain = held_out_gain(points, (points[:, 0] > 0).astype(int), held_out)
    assert_allclose(gain, -math.log(2) - math.log(1 - 2 / math.pi) / 2, atol=0.02)  # four deviations of the mean


def test_the_gain_does_not_depend_on_units_or_axes(rng, monkeypatch):
    monkeypatch.setattr("maple.stats.clustering.tmeans.EXPLAINED_VARIANCE", 1.0)
    points, origins = spherical_blobs(np.array([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]), [300, 300], rng)
    linear = rng.standard_normal((3, 3)) * [1, 10, 100]
    plain, mapped = (
        held_out_gain(x[:400], origins[:400], x[400:]) for x in (points, (points @ linear).astype(np.float64) + 7)
    )
    assert plain > 0
    assert_allclose(mapped, plain, rtol=1e-8)


def test_points_without_variance_gain_nothing():
    assert held_out_gain(np.zeros((4, 2)), np.array([0, 0, 1, 1]), np.ones((3, 2))) == 0


def test_t_means_finds_elongated_clusters_in_many_dimensions(rng):
    shape = np.geomspace(6.0, 0.5, 64)
    points, origins = spherical_blobs(
        np.stack([np.zeros(64), 6 * np.eye(64)[0], 6 * np.eye(64)[1]]), [150, 100, 50], rng
    )
    assert adjusted_rand_score(origins, TMeans(random_state=0).fit(points * shape).labels_) > 0.98
