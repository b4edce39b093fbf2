"""Sums of squares, leading components and K-Means are those of plain formulas, SVD and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.cluster import KMeans

from maple.stats.clustering._means import cluster_means, draw_two, leading_projection, lloyd, scatter_within, two_means


def explicit_scatter(points: np.ndarray, labels: np.ndarray) -> float:
    wide = points.astype(np.float64)
    return sum(((wide[labels == j] - wide[labels == j].mean(axis=0)) ** 2).sum() for j in np.unique(labels))


@pytest.mark.parametrize("shift", [0.0, 1e7])  # the second cancels every digit of sums of squares around 0
def test_scatter_within_is_that_of_explicit_means(shift):
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 3
    points = rng.normal(size=(3000, 5)) + 4 * labels[:, None] + shift
    together, apart = scatter_within(points, labels)
    assert_allclose(together, explicit_scatter(points, 0 * labels), rtol=1e-8)
    assert_allclose(apart, explicit_scatter(points, labels), rtol=1e-8)


def test_leading_projection_is_that_of_the_singular_values():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(700, 50)) * 2.0 ** -np.arange(50)
    centered = points - points.mean(axis=0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    projection, deviation = leading_projection(centered, 3, np.random.RandomState(0))
    assert_allclose(deviation, values[0] / np.sqrt(700), rtol=1e-6)
    assert_allclose(np.abs(projection), np.abs(left[:, :3] * values[:3]), atol=1e-4)


def test_two_means_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(-1, 1, (300, 4)), rng.normal(1.5, 1, (200, 4))])
    centered = points - points.mean(axis=0)
    start = centered[:2]
    sides, explained = two_means(centered, start, max_iter=100)
    theirs = KMeans(2, init=start, n_init=1).fit(centered)
    assert (sides == theirs.labels_).mean() in (0.0, 1.0)
    assert_allclose((centered**2).sum() - explained, theirs.inertia_, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lloyd_is_that_of_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    points = (rng.normal(size=(3000, 70)) + 2 * rng.normal(size=(4, 70))[np.arange(3000) % 4]).astype(dtype)
    centered = points - points.mean(axis=0)
    ours = lloyd(centered, centered[:4], max_iter=100)
    theirs = KMeans(4, init=centered[:4], n_init=1).fit(centered)
    assert_array_equal(ours.labels, theirs.labels_)
    assert_allclose(ours.centers, cluster_means(centered, ours.labels), atol=1e-5)


def test_a_centre_without_points_stays():
    found = lloyd(np.array([[-1.0], [1.0]]), np.array([[-1.0], [1.0], [50.0]]), max_iter=10)
    assert found.labels.tolist() == [0, 1]
    assert found.centers[2] == 50


def test_two_centres_of_equal_points_are_equal():
    assert_array_equal(draw_two(np.ones((5, 2)), np.random.RandomState(0)), np.ones((2, 2)))
