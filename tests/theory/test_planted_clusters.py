"""X-, G- and T-Means recover clusters that were planted, and find none where there are none."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from maple.stats.clustering.gmeans import GMeans
from maple.stats.clustering.tmeans import TMeans
from maple.stats.clustering.xmeans import XMeans

pytestmark = pytest.mark.slow
ALL = pytest.mark.parametrize("estimator", [XMeans, GMeans, TMeans])


def separated_centers(n_clusters: int, dimension: int, distance: float, rng: np.random.Generator) -> np.ndarray:
    """Random centres (k, D), no two of them nearer than ``distance``."""
    while True:
        centers = rng.uniform(-1.5 * distance, 1.5 * distance, (n_clusters, dimension))
        gaps = np.linalg.norm(centers[:, None] - centers, axis=2)[~np.eye(n_clusters, dtype=bool)]
        if (gaps >= distance).all():
            return centers


@pytest.mark.parametrize("dimension", [2, 5, 64])
@pytest.mark.parametrize("n_clusters", [1, 2, 3, 4, 5])
@ALL
def test_planted_clusters_are_recovered(estimator, n_clusters, dimension):
    for seed in range(3):
        rng = np.random.default_rng([seed, n_clusters, dimension])
        centers = separated_centers(n_clusters, dimension, 12.0, rng)
        sizes = rng.integers(100, 300, n_clusters)
        origins = rng.permutation(np.repeat(np.arange(n_clusters), sizes))
        points = (centers[origins] + rng.standard_normal((len(origins), dimension))).astype(np.float32)
        model = estimator(random_state=seed).fit(points)
        assert model.n_clusters_ == n_clusters
        assert adjusted_rand_score(origins, model.labels_) > 0.99


@pytest.mark.parametrize(("n", "dimension"), [(30, 2), (1_000, 2), (100, 100), (1_000, 100)])
@ALL
def test_one_gaussian_stays_one_cluster(estimator, n, dimension):
    for seed in range(10):
        points = np.random.default_rng(seed).standard_normal((n, dimension)).astype(np.float32)
        assert estimator(random_state=seed).fit(points).n_clusters_ == 1


def test_g_means_keeps_its_significance():
    """A Gaussian of any covariance is cut at most as often as ``significance`` says."""
    n_cut = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        points = rng.standard_normal((200, 20)) @ rng.standard_normal((20, 20))
        n_cut += GMeans(max_clusters=2, significance=0.1, n_init=1, random_state=seed).fit(points).n_clusters_ == 2
    assert n_cut <= 20  # of 100: binomial tail of 0.001 at 0.1


def test_t_means_leaves_gaussians_of_any_covariance_whole():
    """Halves of a Gaussian lose 0.19 per image. With a deviation of about 1, two times 100 of them lose it by 2.6
    deviations, and even one of 40 sets being cut would be the work of chance with a probability of 0.2 only."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        points = rng.standard_normal((200, 20)) @ rng.standard_normal((20, 20))
        assert TMeans(max_clusters=2, n_init=1, random_state=seed).fit(points).n_clusters_ == 1


def test_t_means_finds_two_gaussians_from_the_distance_on_at_which_they_pay():
    """That is 3.04 deviations for two of the same size, whatever their covariance."""
    found = {2.5: [], 4.0: []}
    for seed in range(10):
        rng = np.random.default_rng(seed)
        shape = np.linalg.qr(rng.standard_normal((12, 12)))[0] * np.linspace(0.3, 1.0, 12)
        origins = np.arange(800) % 2
        whitened = rng.standard_normal((800, 12))
        for distance, scores in found.items():
            points = (whitened + distance * origins[:, None] * np.eye(12)[11]) @ shape.T
            scores.append(adjusted_rand_score(origins, TMeans(max_clusters=2, random_state=seed).fit(points).labels_))
    assert max(found[2.5]) == 0
    assert min(found[4.0]) > 0.8


def test_x_means_gets_better_with_distance_and_never_worse_than_chance():
    """Two clusters in ten dimensions: unseen at a distance of 1 deviation, found at 6, cut where they were planted."""
    found = []
    for distance in (1.0, 6.0):
        rng = np.random.default_rng(0)
        origins = np.arange(600) % 2
        points = rng.standard_normal((600, 10))
        points[:, 0] += distance * origins
        found.append(adjusted_rand_score(origins, XMeans(random_state=0).fit(points).labels_))
    assert found[0] == 0
    assert found[1] > 0.98
