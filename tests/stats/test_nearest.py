"""The nearest centroid, found by float32 products in blocks, is the one of float64."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.errors import DataError
from maple.stats.gaussians import Gaussians, fit_gaussians
from maple.stats.moments import Moments
from maple.stats.nearest import Nearest, nearest_centroids
from maple.types import Outputs


def explicit(projection: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return np.array([[((z - c) ** 2).sum() for c in centroids] for z in projection])


def simple_gaussians(n_clusters: int, n_components: int = 16, norm_exponent: float = 0.0, dim: int = 24) -> Gaussians:
    rng = np.random.default_rng(0)
    return Gaussians(
        matrix=rng.normal(size=(dim, n_components)),
        offset=rng.normal(size=n_components),
        centroids=5 * rng.normal(size=(n_clusters, n_components)),
        log_priors=np.full(n_clusters, -np.log(n_clusters)),
        norm_exponent=norm_exponent,
    )


@given(seed=st.integers(0, 10_000), m=st.integers(1, 40), k=st.integers(1, 9), scale=st.sampled_from([1e-3, 1.0, 1e6]))
def test_nearest_is_that_of_explicit_loops(seed, m, k, scale):
    rng = np.random.default_rng(seed)
    projection, centroids = scale * rng.normal(size=(7, k)), scale * rng.normal(size=(m, k))
    expected = Nearest.of(explicit(projection, centroids))
    found = nearest_centroids(projection, centroids)
    assert found.cluster.tolist() == expected.cluster.tolist()
    np.testing.assert_allclose(found.squared_distance, expected.squared_distance, rtol=1e-12, atol=1e-13 * scale**2)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-10, atol=1e-13 * scale**2)


@pytest.mark.parametrize("apart", [1, 1500])  # in one block of centroids, and in two
def test_float64_decides_between_centroids_that_float32_cannot_tell_apart(apart):
    rng = np.random.default_rng(0)
    centroids = 100 + rng.normal(size=(3000, 8))
    centroids[500 + apart] = centroids[500] + 1e-9 * np.ones(8)
    projection = centroids[500] + np.outer([1, -1], 1e-3 * np.ones(8))  # beside one of the two, then beside the other
    assert nearest_centroids(projection, centroids).cluster.tolist() == [500 + apart, 500]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_float64_orders_centroids_that_float32_puts_in_another_order(k):
    rng = np.random.default_rng(0)
    centroids = 100 + 1e-5 * np.arange(300)[:, None] + 1e-7 * rng.normal(size=(300, k))
    projection = centroids[:100] + 1e-7 * rng.normal(size=(100, k))
    assert nearest_centroids(projection, centroids).cluster.tolist() == list(range(100))


def test_clear_images_do_not_keep_close_ones_from_float64():
    centroids = np.array([[100.0, 100.0], [100.0, 100.0 + 1e-6], [-100.0, 0.0]])
    projection = np.array([[100.0, 100.0 - 1e-3], [-100.0, 1.0], [100.0, 100.0 + 1e-3]])
    assert nearest_centroids(projection, centroids).cluster.tolist() == [0, 2, 1]
    assert nearest_centroids(projection[::-1], centroids).cluster.tolist() == [1, 2, 0]


def test_images_so_far_that_float32_overflows_are_exact():
    centroids = np.array([[0.0, 0.0], [1.0, 0.0]])
    found = nearest_centroids(np.array([[1e30, 0.0], [-1e30, 0.0], [0.9, 0.0]]), centroids)
    assert found.cluster.tolist() == [1, 0, 1]
    np.testing.assert_allclose(found.squared_distance, [1e60, 1e60, 0.01])


@pytest.mark.parametrize("norm_exponent", [0.0, 0.5, 1.0])
def test_blocks_of_images_and_centroids_make_no_difference(norm_exponent):
    gaussians = simple_gaussians(n_clusters=2500, norm_exponent=norm_exponent, dim=640)
    embeddings = np.random.default_rng(1).normal(size=(2100, 640)).astype(np.float32)
    expected = Nearest.of(gaussians.squared_distances(embeddings))
    found = gaussians.nearest(embeddings)
    assert np.array_equal(found.cluster, expected.cluster)
    np.testing.assert_allclose(found.squared_distance, expected.squared_distance, rtol=1e-9)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9)


def test_one_covariance_per_cluster_gives_the_same_as_all_distances():
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    outputs = Outputs(rng.normal(size=(600, 6)) * (1 + labels[:, None]) + 4 * np.eye(3, 6)[labels], labels=labels)
    detector = MapleDetector(covariance="full", norm_exponent=0).fit(outputs)
    found, table = detector.gaussians_.nearest(outputs.embeddings), detector.squared_distances(outputs)
    assert np.array_equal(found.cluster, table.argmin(axis=1))
    np.testing.assert_allclose(found.squared_distance, table.min(axis=1), rtol=1e-12)


def test_embeddings_that_overflow_are_far_and_broken_ones_an_error():
    labels = np.arange(60) % 3
    x = np.random.default_rng(0).normal(size=(60, 4)) + labels[:, None]
    gaussians = fit_gaussians(Moments(3, 4).update(x, labels))
    huge = np.full((1, 4), 3e38, dtype=np.float32)
    assert gaussians.nearest(huge).squared_distance[0] == gaussians.squared_distances(huge).min()
    with pytest.raises(DataError, match="1 of 1"):
        gaussians.nearest(np.full((1, 4), np.nan))


def test_scoring_many_classes_takes_memory_for_blocks_only():
    gaussians = simple_gaussians(n_clusters=30_000)
    embeddings = np.random.default_rng(1).normal(size=(3000, 24)).astype(np.float32)
    tracemalloc.start()
    gaussians.nearest(embeddings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.15 * 8 * len(embeddings) * gaussians.n_clusters  # of the table of all distances, in float64


@pytest.mark.parametrize("score", ["normalised", "distance", "relative", "residual", "spread"])
def test_scores_need_no_table_of_distances_and_agree_with_it(score):
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 4
    outputs = Outputs(rng.normal(size=(400, 8)) + 6 * np.eye(4, 8)[labels], labels=labels)
    learned = MapleDetector(norm_exponent=1, score_by=score).fit(outputs).learned_
    alone, with_table = Description.of(learned, outputs), Description.of(learned, outputs)
    assert with_table.squared_distances.shape == (400, 4)
    np.testing.assert_allclose(alone.score, with_table.score, rtol=1e-9)
    assert "squared_distances" not in vars(alone)
