"""Sums of squares and Lloyd's iterations are those of plain formulas and of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.cluster import KMeans

from maple.stats.clustering._leading import Leading
from maple.stats.clustering._means import cluster_means, cluster_sums, lloyd, scatter_within


def explicit_scatter(points: np.ndarray, labels: np.ndarray) -> float:
    wide = points.astype(np.float64)
    return sum(((wide[labels == j] - wide[labels == j].mean(axis=0)) ** 2).sum() for j in np.unique(labels))


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [(np.float64, 0.0), (np.float32, 0.0), (np.float64, 1e7), (np.float32, 1e3)],  # the last two cancel every digit
)
def test_scatter_within_is_that_of_explicit_means(dtype, shift):
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 3
    points = (rng.normal(size=(3000, 5)) + 4 * labels[:, None] + shift).astype(dtype)
    squares = float(np.vdot(points, points))
    found = scatter_within(points, labels, cluster_sums(points, labels), squares)
    assert_allclose(found, explicit_scatter(points, labels), rtol=1e-8 if dtype == np.float64 else 1e-5)


def test_sums_of_float32_are_added_in_float64(rng):
    points, labels = rng.standard_normal((200_000, 3)).astype(np.float32), np.zeros(200_000, np.int64)
    assert_allclose(cluster_sums(points, labels)[0], points.astype(np.float64).sum(axis=0), atol=1e-2)
    assert cluster_sums(points, labels, n_clusters=2)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lloyd_is_that_of_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    points = (rng.normal(size=(3000, 70)) + 2 * rng.normal(size=(4, 70))[np.arange(3000) % 4]).astype(dtype)
    centered = points - points.mean(axis=0)
    labels = np.full(3000, -1)
    labels[:4] = np.arange(4)  # one point in each cluster, and the others in none
    ours = lloyd(Leading.of(centered, np.random.RandomState(0)), labels, centered[:4].astype(np.float64), max_iter=100)
    theirs = KMeans(4, init=centered[:4], n_init=1, tol=0).fit(centered)
    assert_array_equal(ours.labels, theirs.labels_)
    assert_allclose(ours.sums / ours.counts[:, None], cluster_means(centered, ours.labels), atol=1e-5)


def test_lloyd_stops_after_the_given_iterations(rng):
    points = rng.standard_normal((2000, 40))
    leading = Leading.of(points - points.mean(axis=0), np.random.RandomState(0))
    labels = np.arange(2000) % 5
    found = [lloyd(leading, labels, cluster_sums(leading.points, labels), max_iter=m) for m in (1, 2, 3, 100)]
    assert [each.n_iter for each in found[:3]] == [1, 2, 3] and found[3].n_iter > 3
    assert not np.array_equal(found[1].labels, found[3].labels)


def test_clusters_that_stay_take_one_iteration():
    points = np.array([[-9.0], [-8.0], [8.0], [9.0]])
    labels = np.array([0, 0, 1, 1])
    found = lloyd(Leading.of(points, np.random.RandomState(0)), labels, cluster_sums(points, labels), max_iter=10)
    assert found.n_iter == 1 and found.labels.tolist() == [0, 0, 1, 1]


def test_a_cluster_without_points_keeps_its_centre():
    points = np.array([[-9.0], [9.0], [-1.0], [1.0], [30.0], [-30.0]])
    labels = np.array([0, 0, 1, 1, 2, 3])  # the means of the first two are equal: the first takes all of their points
    found = lloyd(Leading.of(points, np.random.RandomState(0)), labels, cluster_sums(points, labels), max_iter=10)
    assert found.labels.tolist() == [0, 0, 0, 0, 2, 3]
    assert found.counts.tolist() == [4, 0, 1, 1]
