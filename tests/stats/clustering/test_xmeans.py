"""X-Means: the criterion against likelihoods written out by hand, and data with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.metrics import adjusted_rand_score

from clusters import spherical_blobs
from maple.stats.clustering._bisect import Cut
from maple.stats.clustering._means import cluster_means, cluster_sums
from maple.stats.clustering._starts import bisect_points
from maple.stats.clustering.gmeans import GMeans
from maple.stats.clustering.tmeans import TMeans
from maple.stats.clustering.xmeans import XMeans, bic, spherical_log_likelihood


@pytest.mark.parametrize(("n_clusters", "dimension"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 5)])
def test_bic_equals_the_likelihood_written_out_by_hand(n_clusters, dimension, rng):
    points = rng.normal(3.0, 2.0, (30, dimension))
    labels = np.arange(30) % n_clusters
    labels[:5] = 0  # clusters of unequal size
    centers = rng.normal(3.0, 1.0, (n_clusters, dimension))  # any centres, not only means

    squares = 0.0
    for i in range(30):
        for d in range(dimension):
            squares += (points[i, d] - centers[labels[i], d]) ** 2
    variance = squares / (dimension * (30 - n_clusters))
    by_hand = 0.0
    for i in range(30):
        share = np.mean(labels == labels[i])
        gaussian = stats.multivariate_normal(centers[labels[i]], variance * np.eye(dimension))
        by_hand += math.log(share) + gaussian.logpdf(points[i])

    assert_allclose(spherical_log_likelihood(points, labels, centers), by_hand, rtol=1e-12)
    n_parameters = (n_clusters - 1) + n_clusters * dimension + 1
    assert_allclose(bic(points, labels, centers), by_hand - n_parameters / 2 * math.log(30), rtol=1e-12)


def test_likelihood_peaks_where_the_variance_is_per_dimension(rng):
    """With the printed variance, D times as large, a likelihood per point would be lower by about D / 2 (log D - 1)."""
    points = 3.0 * rng.standard_normal((20_000, 8))
    likelihood = spherical_log_likelihood(points, np.zeros(len(points), int), np.zeros((1, 8)))
    entropy = 4 * math.log(2 * math.pi * math.e * 9.0)
    assert_allclose(likelihood / len(points), -entropy, atol=0.05)


@pytest.mark.parametrize("value", [0.0, 0.1, -7e5, 1e-30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_repeated_points_have_a_finite_criterion_and_are_better_described_by_one_cluster(value, dtype):
    points = np.full((50, 3), value, dtype)
    one = bic(points, np.zeros(50, int), points[:1])
    two = bic(points, np.arange(50) % 2, points[:2])
    assert math.isfinite(one)
    assert math.isfinite(two)
    assert one > two


def test_a_centre_that_is_off_by_rounding_is_no_evidence_for_two_clusters():
    points = np.full((50, 3), 0.1, np.float32)
    rounded = np.nextafter(points[:1], np.float32(1))
    one = bic(points, np.zeros(50, int), rounded)
    assert one > bic(points, np.arange(50) % 2, points[:2])


def test_bic_attribute_is_the_criterion_and_beats_one_cluster(three):
    points, _ = three
    model = XMeans(random_state=0).fit(points)
    assert model.bic_ == bic(points, model.labels_, model.cluster_centers_)
    assert model.bic_ > XMeans(max_clusters=1).fit(points).bic_


@pytest.mark.parametrize("dimension", [2, 10, 128])
def test_only_x_means_cuts_an_elongated_gaussian(dimension, rng):
    points = rng.standard_normal((500, dimension)) * np.array([30.0] + [1.0] * (dimension - 1))
    assert GMeans(random_state=0).fit(points).n_clusters_ == 1
    assert TMeans(random_state=0).fit(points).n_clusters_ == 1
    assert XMeans(random_state=0).fit(points).n_clusters_ > 1


def test_x_means_looks_beyond_a_cut_that_does_not_pay(rng):
    corners = 20 * np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    points, origins = spherical_blobs(corners, [100] * 4, rng)
    sides = bisect_points(points, random_state=0)
    whole = np.zeros_like(sides)
    assert bic(points, sides, cluster_means(points, sides)) < bic(points, whole, cluster_means(points, whole))
    assert adjusted_rand_score(origins, XMeans(random_state=0).fit(points).labels_) == 1


def test_looking_ahead_cuts_every_cluster_in_two(rng):
    """Each of three clusters of two values becomes both of them."""
    points = np.repeat([[0.0], [1.0], [10.0], [12.0], [30.0], [33.0]], 4, axis=0)
    labels = np.repeat([2, 0, 1], 8)
    cut = Cut(points, points, float((points**2).sum()), labels, cluster_sums(points, labels))
    finer = XMeans()._bisect_each(cut, np.random.RandomState(0))
    parts = np.unique(np.column_stack([finer, points[:, 0]]), axis=0)
    assert len(parts) == 6 == len(np.unique(finer)) and finer.max() == 5


def test_x_means_returns_the_model_with_the_best_criterion_not_the_last(rng):
    """Two tight clusters next to a wide one: by themselves they are two, but not at the variance that all share."""
    points, origins = spherical_blobs(np.array([[0.0, 0.0], [300.0, 0.0], [300.0, 2.0]]), [300, 100, 100], rng)
    center = np.array([[0.0, 0.0], [300.0, 0.0], [300.0, 2.0]])[origins]
    points = center + (points - center) * np.array([10.0, 0.1, 0.1])[origins][:, None]
    tight = points[origins > 0]
    assert XMeans(random_state=0).fit(tight).n_clusters_ == 2
    assert adjusted_rand_score(origins, GMeans(random_state=0).fit(points).labels_) == 1
    model = XMeans(random_state=0).fit(points)
    assert adjusted_rand_score(np.minimum(origins, 1), model.labels_) == 1
    assert model.bic_ > bic(points, origins, cluster_means(points, origins))
