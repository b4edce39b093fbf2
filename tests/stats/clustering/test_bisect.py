"""The search that X-, G- and T-Means share: cuts, the tree, and what all three promise as estimators."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from clusters import spherical_blobs
from maple.errors import FitError, UsageError
from maple.stats.clustering._bisect import _Cluster, _Model
from maple.stats.clustering._leading import Leading
from maple.stats.clustering._means import cluster_means, within_sum_of_squares
from maple.stats.clustering._starts import bisect_points
from maple.stats.clustering.gmeans import GMeans
from maple.stats.clustering.tmeans import TMeans
from maple.stats.clustering.xmeans import XMeans

ALL = pytest.mark.parametrize("estimator", [XMeans, GMeans, TMeans])


def test_sums_of_squares_in_float32_are_summed_in_float64(rng):
    points = (1e3 + rng.standard_normal((5_000, 40))).astype(np.float32)
    labels = rng.integers(3, size=len(points))
    centers = cluster_means(points, labels)
    exact = sum(float(((points[i].astype(float) - centers[labels[i]]) ** 2).sum()) for i in range(len(points)))
    assert_allclose(within_sum_of_squares(points, labels, centers), exact, rtol=1e-12)


def test_cluster_means(rng):
    points, labels = rng.standard_normal((3_000, 4)), rng.integers(3, size=3_000)
    assert_allclose(cluster_means(points, labels), [points[labels == j].mean(axis=0) for j in range(3)])
    assert cluster_means(points.astype(np.float32), labels).dtype == np.float32


@pytest.mark.parametrize("dimension", [2, 12, 120])
def test_a_cut_is_as_good_as_two_means_in_all_dimensions(dimension, rng):
    points = np.maximum(rng.standard_normal((400, 8)) @ rng.standard_normal((8, dimension)), 0)  # like embeddings
    labels = bisect_points(points, random_state=0)
    inertia = within_sum_of_squares(points, labels, cluster_means(points, labels))
    assert inertia <= 1.005 * KMeans(2, n_init=10, random_state=0).fit(points).inertia_


def test_a_cut_leaves_a_middle_cluster_whole(rng):
    """From the principal component alone, the middle one of three in a row is cut through."""
    points, origins = spherical_blobs(np.array([[-30.0, 0.0], [0.0, 0.0], [30.0, 0.0]]), [100, 100, 100], rng)
    labels = bisect_points(points, n_init=8, random_state=0)
    assert sorted(len(set(labels[origins == j])) for j in range(3)) == [1, 1, 1]


def test_equal_points_are_not_cut():
    assert bisect_points(np.full((10, 3), 0.1, np.float32)) is None


def test_only_a_cluster_whose_points_change_is_tested_again():
    cluster = _Cluster(np.zeros(1), np.arange(3), is_tested=True, gain=2.0)
    cluster.move(np.ones(1), np.arange(3))
    assert cluster.is_tested and cluster.sum == 1 and cluster.gain == 2
    cluster.move(np.ones(1), np.array([0, 1]))
    assert not cluster.is_tested and cluster.indices.tolist() == [0, 1] and cluster.gain == 0


def test_the_halves_with_the_largest_gain_take_the_place_of_their_cluster():
    def cluster(first: int, gain: float = 0.0) -> _Cluster:
        halves = [_Cluster(np.zeros(1), np.array([first])), _Cluster(np.zeros(1), np.array([first + 1]))]
        return _Cluster(np.zeros(1), np.array([first, first + 1]), is_tested=True, gain=gain, halves=halves)

    clusters = [cluster(0, gain=1.0), cluster(2), cluster(4, gain=3.0), cluster(6, gain=2.0)]
    random = np.random.RandomState(0)
    parts = XMeans(max_clusters=6)._improve_structure(Leading.of(np.zeros((8, 1)), random), clusters, random)
    assert [part.indices.tolist() for part in parts] == [[0, 1], [2, 3], [4], [5], [6], [7]]
    model = _Model.of(parts, 8, 1)
    assert model.labels.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert [each.indices.tolist() for each in model.clusters()] == [part.indices.tolist() for part in parts]


def test_structure_that_the_leading_components_of_all_points_leave_out_is_found(rng):
    """Thirty far clusters in thirty directions hide that one of them is two, along a direction of its own."""
    n_directions = 30
    places = np.zeros((n_directions, 80))
    places[np.arange(n_directions), np.arange(n_directions)] = 200.0
    origins = np.repeat(np.arange(n_directions), 40)
    points = places[origins] + 0.5 * rng.standard_normal((len(origins), 80))
    points[:20, 79] += 20.0  # half of the first cluster
    points[20:40, 79] -= 20.0  # the mean of which stays, and with it the components of all points
    model = XMeans(max_clusters=40, random_state=0).fit(points)
    assert not set(model.labels_[:20]) & set(model.labels_[20:])


def test_one_far_point_is_a_cluster_of_its_own_by_default(rng):
    points = np.concatenate([rng.standard_normal((40, 2)), [[500.0, 0.0]]])
    assert sorted(np.bincount(XMeans(max_clusters=2, random_state=0).fit(points).labels_)) == [1, 40]


def test_the_corners_of_a_square_are_found_where_four_clusters_are_allowed(rng):
    """No single cut pays; whether two do is looked up only if there is room for four."""
    corners = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    points, origins = spherical_blobs(corners, [50] * 4, rng)
    assert XMeans(max_clusters=3, random_state=0).fit(points).n_clusters_ == 1
    assert adjusted_rand_score(origins, XMeans(max_clusters=4, random_state=0).fit(points).labels_) == 1


@parametrize_with_checks([XMeans(), GMeans(), TMeans()])
def test_scikit_learn_accepts(estimator, check):
    check(estimator)


@ALL
def test_attributes_agree_with_each_other(estimator, three):
    points, origins = three
    model = estimator(random_state=0).fit(points)
    assert model.n_clusters_ == 3
    assert adjusted_rand_score(origins, model.labels_) == 1
    assert model.labels_.dtype == np.int64
    assert set(model.labels_) == {0, 1, 2}
    assert model.n_features_in_ == 6
    assert_array_equal(model.predict(points), model.labels_)
    assert_array_equal(estimator(random_state=0).fit_predict(points), model.labels_)
    assert_allclose(model.cluster_centers_, cluster_means(points, model.labels_))
    distances = np.linalg.norm(points[:, None] - model.cluster_centers_, axis=2)
    assert_allclose(model.transform(points), distances, rtol=1e-6)
    assert_allclose(model.inertia_, (distances.min(axis=1) ** 2).sum())
    prefix = estimator.__name__.lower()
    assert model.get_feature_names_out().tolist() == [f"{prefix}0", f"{prefix}1", f"{prefix}2"]


@ALL
def test_parameters_are_those_of_a_k_means_run_that_has_converged(estimator, rng):
    points = np.maximum(rng.standard_normal((500, 8)), 0) @ rng.standard_normal((8, 20)) + rng.exponential(
        size=(500, 1)
    )
    model = estimator(random_state=0, significance=0.1) if estimator is GMeans else estimator(random_state=0)
    model.fit(points)
    assert model.n_clusters_ > 1
    again = KMeans(model.n_clusters_, init=model.cluster_centers_, n_init=1).fit(points)
    assert_allclose(again.inertia_, model.inertia_, rtol=1e-3)
    assert np.mean(again.labels_ == model.labels_) > 0.99


@pytest.mark.parametrize("dimension", [1, 2, 30])
@ALL
def test_one_spherical_gaussian_stays_one_cluster(estimator, dimension, rng):
    for _ in range(3):
        assert estimator(random_state=0).fit(rng.standard_normal((300, dimension))).n_clusters_ == 1


@ALL
def test_no_cluster_is_smaller_than_allowed(estimator, rng):
    points, origins = spherical_blobs(40 * np.eye(5)[:4], [200, 150, 40, 7], rng)
    model = estimator(min_cluster_size=20, random_state=0).fit(points)
    assert np.bincount(model.labels_).min() >= 20
    assert adjusted_rand_score(np.minimum(origins, 2)[origins < 3], model.labels_[origins < 3]) > 0.99
    assert estimator(min_cluster_size=1 if estimator is XMeans else 7, random_state=0).fit(points).n_clusters_ >= 3
    assert estimator(min_cluster_size=200, random_state=0).fit(points).n_clusters_ == 1


@ALL
@pytest.mark.parametrize(("least", "clusters"), [(30, 2), (31, 1)])
def test_a_cluster_may_be_as_small_as_allowed(estimator, least, clusters, rng):
    points, _ = spherical_blobs(40 * np.eye(2), [30, 50], rng)
    assert estimator(min_cluster_size=least, random_state=0).fit(points).n_clusters_ == clusters


def test_a_cluster_that_k_means_makes_too_small_is_dissolved():
    """K-Means over all points leaves two of them alone: their cluster goes, and its neighbour takes them."""
    points = np.concatenate([np.linspace(0, 1, 30), np.linspace(10, 11, 30), [30.0, 30.1]])[:, None]
    starts = [np.arange(30), np.arange(30, 60), np.arange(60, 62)]
    clusters = [_Cluster(points[rows].sum(axis=0), rows) for rows in starts]
    leading = Leading.of(points, np.random.RandomState(0))
    improved, n_iter = XMeans(min_cluster_size=5)._improve_parameters(leading, clusters, 100)
    assert n_iter >= 1
    assert [len(cluster.indices) for cluster in improved] == [30, 32]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_cut_with_too_small_a_side_is_not_proposed(is_own, rng):
    points = np.concatenate([rng.standard_normal((50, 2)), [[90.0, 0.0], [90.0, 1.0], [91.0, 0.0]]])
    random = np.random.RandomState(0)
    whole, leading = _Cluster(points.sum(axis=0), np.arange(53)), Leading.of(points, random)
    XMeans(min_cluster_size=4)._test(leading, whole, is_own, 5, random)
    assert whole.is_tested and whole.gain == 0 and not whole.halves
    XMeans(min_cluster_size=3)._test(leading, whole, is_own, 5, random)
    assert whole.gain > 0
    assert [len(half.indices) for half in whole.halves] == [50, 3]


@ALL
def test_no_more_clusters_than_allowed_and_the_clearest_first(estimator, rng):
    centers = np.array([[0.0, 0.0, 0.0], [0.0, 60.0, 0.0], [500.0, 0.0, 0.0], [500.0, 0.0, 12.0]])
    points, origins = spherical_blobs(centers, [100] * 4, rng)
    for max_clusters, merged in ((1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (3, [0, 1, 2, 2]), (4, [0, 1, 2, 3])):
        labels = estimator(max_clusters=max_clusters, random_state=0).fit(points).labels_
        assert len(set(labels)) == max_clusters
        if estimator is XMeans or max_clusters != 3:  # the test of normality is as sure of one as of the other
            assert adjusted_rand_score(np.array(merged)[origins], labels) == 1


@ALL
def test_float32_and_float64_agree(estimator, three):
    points = 500 + three[0]
    single, double = (estimator(random_state=0).fit(points.astype(dtype)) for dtype in (np.float32, np.float64))
    assert single.cluster_centers_.dtype == np.float32
    assert double.cluster_centers_.dtype == np.float64
    assert_array_equal(single.labels_, double.labels_)
    assert_allclose(single.cluster_centers_, double.cluster_centers_, rtol=1e-6)
    assert_allclose(single.inertia_, double.inertia_, rtol=1e-4)
    assert single.transform(points.astype(np.float32)).dtype == np.float32


@ALL
def test_the_order_of_rows_does_not_change_the_partition(estimator, three, rng):
    points, _ = three
    labels = estimator(random_state=0).fit(points).labels_
    for _ in range(3):
        order = rng.permutation(len(points))
        assert adjusted_rand_score(labels[order], estimator(random_state=0).fit(points[order]).labels_) == 1


@ALL
def test_the_same_seed_gives_the_same_clusters_and_the_global_generator_is_left_alone(estimator, rng):
    points = rng.standard_normal((300, 4)) * [9, 5, 1, 1] + rng.exponential(5.0, (300, 1))
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = (estimator(random_state=3).fit(points) for _ in range(2))
    assert_array_equal(first.labels_, second.labels_)
    assert_array_equal(first.cluster_centers_, second.cluster_centers_)
    assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@ALL
def test_points_are_not_changed(estimator, three):
    points = three[0].astype(np.float32)
    points.flags.writeable = False
    copy = points.copy()
    estimator(random_state=0).fit(points).predict(points)
    assert_array_equal(points, copy)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
@ALL
def test_equal_points_are_one_cluster(estimator, value, dtype):
    model = estimator(random_state=0).fit(np.full((200, 7), value, dtype))
    assert model.n_clusters_ == 1
    assert_allclose(model.cluster_centers_, value)
    assert_allclose(model.inertia_, 0, atol=1e-6)


@ALL
def test_two_values_repeated_are_two_clusters(estimator):
    points = np.repeat(np.array([[0.1, 0.2, 0.3], [5.0, 0.2, 0.3]], np.float32), 40, axis=0)
    labels = estimator(random_state=0).fit(points).labels_
    assert adjusted_rand_score(np.repeat([0, 1], 40), labels) == 1
    assert len(set(labels)) == 2


@ALL
def test_one_and_two_points(estimator):
    assert estimator().fit(np.ones((1, 3))).labels_.tolist() == [0]
    assert estimator().fit(np.eye(2)).labels_.tolist() == [0, 0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    points=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 4)),
        elements=st.sampled_from([-1e6, -1.0, 0.0, 0.1, 1.0, 2.0, 1e-3, 1e6]),
    ),
    max_clusters=st.integers(1, 6),
    min_cluster_size=st.integers(1, 10),
)
def test_promises_hold_for_any_points(points, max_clusters, min_cluster_size):
    for estimator in (XMeans, GMeans, TMeans):
        model = estimator(max_clusters, min_cluster_size, random_state=0).fit(points)
        counts = np.bincount(model.labels_)
        assert len(counts) == model.n_clusters_ <= max_clusters
        assert len(counts) == 1 or counts.min() >= min_cluster_size
        assert np.isfinite(model.cluster_centers_).all()
        assert math.isfinite(getattr(model, "bic_", 0.0))


@pytest.mark.parametrize("seed", range(8))
def test_clusters_that_lose_their_points_together_are_removed_together(seed):
    """Images that are there several times, up to rounding: bisections go on within them, and K-Means undoes them."""
    rng = np.random.default_rng(seed)
    points = np.repeat(rng.standard_normal((7, 3)), 6, axis=0) + 1e-9 * rng.standard_normal((42, 3))
    model = XMeans(11, random_state=seed).fit(points)
    assert np.isfinite(model.cluster_centers_).all() and model.n_clusters_ == 7


@ALL
def test_large_float32_values_do_not_overflow(estimator, rng):
    points = np.concatenate([rng.standard_normal((40, 30)) + 8 * place for place in range(3)])
    usual = estimator(random_state=0).fit(points)
    for scale in (1e17, 1e19, 1e37):
        large = estimator(random_state=0).fit((scale * points).astype(np.float32))
        assert_array_equal(large.labels_, usual.labels_)
        assert large.cluster_centers_.dtype == np.float32 and math.isfinite(getattr(large, "bic_", 0.0))
    with pytest.raises(FitError, match="overflow"):
        estimator().fit(1e200 * points)


@ALL
def test_no_matrix_of_all_pairs_of_points(estimator, rng):
    points = rng.standard_normal((5_000, 8)).astype(np.float32)  # 160 kB; all pairs would be 100 MB and more
    estimator(random_state=0).fit(points[:50])
    tracemalloc.start()
    try:
        estimator(random_state=0).fit(points)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["max_clusters", "min_cluster_size", "n_init", "max_iter"])
@pytest.mark.parametrize("value", [0, -1, 2.5, None])
@ALL
def test_wrong_parameters(estimator, name, value):
    with pytest.raises(UsageError, match=name):
        estimator(**{name: value}).fit(np.eye(5))
