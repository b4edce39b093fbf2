"""K-Means from several starts is that of scikit-learn, or better."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans, kmeans_plusplus

from maple.stats.clustering._means import cluster_means, within_sum_of_squares
from maple.stats.clustering._starts import bisect_components, bisect_points, draw_centers, many_means, two_means


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_two_means_are_those_of_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(-1, 1, (300, 4)), rng.normal(1.5, 1, (200, 4))])
    centered = (points - points.mean(axis=0)).astype(dtype)
    start = centered[:2]
    sides = two_means(centered, start[None], max_iter=100)
    theirs = KMeans(2, init=start, n_init=1).fit(centered)
    assert (sides == theirs.labels_).mean() in (0.0, 1.0)


def test_the_best_of_two_starts_is_taken():
    rng = np.random.default_rng(0)
    places = np.array([[-8.0, 0.0], [-8.0, 1.0], [8.0, 0.0], [8.0, 1.0]])
    points = np.repeat(places, 50, axis=0) + 0.1 * rng.normal(size=(200, 2))
    centered = points - points.mean(axis=0)
    bad, good = np.array([[0.0, -0.5], [0.0, 0.5]]), np.array([[-1.0, 0.0], [1.0, 0.0]])
    assert two_means(centered, np.stack([bad]), 100)[:100].mean() == 0.5  # stays across
    for starts in ([bad, good], [good, bad]):
        assert_array_equal(two_means(centered, np.stack(starts), 100), np.arange(200) >= 100)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_means_are_no_worse_than_the_given_centres_and_as_good_as_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    points = np.maximum(rng.normal(size=(2000, 10)) @ rng.normal(size=(10, 12)), 0).astype(dtype)
    centered = points - points.mean(axis=0)
    given = centered[:6]

    def inertia(labels: np.ndarray) -> float:
        return within_sum_of_squares(centered, labels, cluster_means(centered, labels))

    alone = many_means(centered, given, 0, 300, np.random.RandomState(0))
    assert alone.dtype == np.int64
    one = KMeans(6, init=given, n_init=1).fit(centered)
    assert inertia(alone) <= 1.001 * one.inertia_
    best = many_means(centered, given, 8, 300, np.random.RandomState(0))
    assert inertia(best) < inertia(alone)
    assert inertia(best) <= 1.005 * KMeans(6, n_init=10, random_state=0).fit(centered).inertia_


def test_many_means_of_fewer_values_than_centres():
    points = np.repeat([[-1.0], [1.0]], 5, axis=0)
    labels = many_means(points, np.zeros((3, 1)), 2, 10, np.random.RandomState(0))
    assert len(labels) == 10 and len(set(labels[:5])) == len(set(labels[5:])) == 1


def test_centres_are_drawn_far_apart():
    points = np.repeat([[0.0, 0.0], [50.0, 0.0], [0.0, 90.0]], 20, axis=0)
    for seed in range(5):
        assert len(np.unique(draw_centers(points, 3, np.random.RandomState(seed)), axis=0)) == 3


def test_two_centres_of_equal_points_are_equal():
    assert_array_equal(draw_centers(np.ones((5, 2)), 2, np.random.RandomState(0)), np.ones((2, 2)))


@pytest.mark.parametrize("n_init", [1, 3])
def test_a_bisection_tells_two_clusters_apart_from_any_start(n_init, rng):
    points = np.concatenate([rng.normal(0, 1, (30, 3)), rng.normal(20, 1, (50, 3))])
    for seed in range(5):
        labels = bisect_points(points, n_init=n_init, random_state=seed)
        assert_array_equal(labels, np.arange(80) >= 30)  # the first point has the label 0


def test_one_iteration_assigns_points_to_the_given_centres(rng):
    centered = rng.normal(size=(60, 2))
    centered -= centered.mean(axis=0)
    centers = np.array([[0.3, 0.1], [1.0, -0.5]])
    assert_array_equal(two_means(centered, centers[None], max_iter=1), cdist(centered, centers).argmin(axis=1))
    once = KMeans(2, init=centers, n_init=1, max_iter=1).fit(centered).cluster_centers_
    found = many_means(centered, centers, 0, 1, np.random.RandomState(0))
    assert_array_equal(found, cdist(centered, once).argmin(axis=1))


def test_drawn_centres_are_nearer_to_the_points_than_those_of_one_draw():
    """The better of two draws by squared distance, as scikit-learn makes them with two trials."""
    rng = np.random.default_rng(0)
    points = 5 * rng.normal(size=(8, 2))[rng.integers(8, size=150)] + rng.normal(size=(150, 2))

    def inertia(centers: np.ndarray) -> float:
        return (cdist(points, centers).min(axis=1) ** 2).sum()

    ours = np.mean([inertia(draw_centers(points, 6, np.random.RandomState(seed))) for seed in range(300)])
    theirs = {
        trials: np.mean(
            [inertia(kmeans_plusplus(points, 6, random_state=seed, n_local_trials=trials)[0]) for seed in range(300)]
        )
        for trials in (1, 2)
    }
    assert ours == pytest.approx(theirs[2], rel=0.08) and ours < theirs[1]


def test_equal_points_are_not_bisected(rng):
    assert bisect_components(np.full((7, 2), 0.1), 4, 100, np.random.RandomState(0)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_bisection_from_one_start_is_one_of_two_means(seed):
    """Each point is on the side of the nearer mean, which the signs along the first component are not."""
    points = np.random.default_rng(seed).gamma(0.3, size=(400, 2)) * [3, 1]
    sides = bisect_components(points, 1, 300, np.random.RandomState(0))
    nearer = cdist(points, cluster_means(points, sides)).argmin(axis=1)
    assert (nearer != sides).mean() < 0.01
    centred = points - points.mean(axis=0)
    signs = centred @ np.linalg.svd(centred, full_matrices=False)[2][0] > 0
    assert 0.05 < (signs != sides).mean() < 0.95


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_points_of_two_values_are_bisected_at_any_scale(scale, dtype):
    values = (scale * np.array([0.25, 1.0, 0.25, 0.25, 1.0])[:, None]).astype(dtype)
    sides = bisect_components(values, 4, 100, np.random.RandomState(0))
    assert_array_equal(sides, [0, 1, 0, 0, 1])
