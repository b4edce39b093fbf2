"""X-, G- and T-Means against likelihoods written out by hand, scikit-learn's checks, and data with known answers."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from maple.errors import DataError, UsageError
from maple.stats.clustering import (
    GMeans,
    TMeans,
    XMeans,
    _ClusterTree,
    anderson_darling,
    anderson_darling_critical_value,
    bic,
    bisect_points,
    cluster_means,
    cluster_points,
    held_out_gain,
    map_class,
    merge_small_clusters,
    spherical_log_likelihood,
    tied_log_likelihood,
    within_sum_of_squares,
)
from maple.stats.gaussians import normalise, oas_covariance

ALL = pytest.mark.parametrize("estimator", [XMeans, GMeans, TMeans])


def blobs(centers: np.ndarray, sizes: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points of spherical Gaussians of variance 1, shuffled, and the Gaussian that each came from."""
    origins = rng.permutation(np.repeat(np.arange(len(centers)), sizes))
    return centers[origins] + rng.standard_normal((len(origins), centers.shape[1])), origins


@pytest.fixture
def three(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three well separated clusters in six dimensions."""
    return blobs(20 * np.eye(6)[:3], [60, 90, 120], rng)


# likelihood and criterion


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


# Anderson-Darling


def test_anderson_darling_equals_the_definition(rng):
    sample = rng.exponential(size=25)
    y = sorted((sample - sample.mean()) / sample.std(ddof=1))
    total = 0.0
    for i in range(1, 26):
        total += (2 * i - 1) * (stats.norm.logcdf(y[i - 1]) + stats.norm.logsf(y[25 - i]))
    by_hand = (-25 - total / 25) * (1 + 0.75 / 25 + 2.25 / 25**2)
    assert_allclose(anderson_darling(sample), by_hand, rtol=1e-12)


def test_anderson_darling_ignores_shift_and_scale_and_survives_outliers(rng):
    sample = rng.standard_normal(100)
    assert_allclose(anderson_darling(1e4 - 3 * sample), anderson_darling(-sample), rtol=1e-9)
    assert math.isfinite(anderson_darling(np.append(np.zeros(10_000), 1e12)))


@pytest.mark.parametrize(("significance", "published"), [(0.1, 0.631), (0.05, 0.752), (0.025, 0.873), (0.01, 1.035)])
def test_critical_values_of_the_published_table(significance, published):
    assert_allclose(anderson_darling_critical_value(significance), published, atol=0.005)


@pytest.mark.parametrize("n", [10, 200])
def test_anderson_darling_keeps_its_level(n, rng):
    statistics = np.array([anderson_darling(sample) for sample in rng.standard_normal((4_000, n))])
    for significance in (0.05, 0.01):
        rejected = int((statistics > anderson_darling_critical_value(significance)).sum())
        assert stats.binomtest(rejected, len(statistics), significance).pvalue > 1e-3


# likelihood of held-out points under a tied covariance


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
    monkeypatch.setattr("maple.stats.clustering.EXPLAINED_VARIANCE", 1.0)
    points, origins = blobs(np.array([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]), [300, 300], rng)
    linear = rng.standard_normal((3, 3)) * [1, 10, 100]
    plain, mapped = (
        held_out_gain(x[:400], origins[:400], x[400:]) for x in (points, (points @ linear).astype(np.float64) + 7)
    )
    assert plain > 0
    assert_allclose(mapped, plain, rtol=1e-8)


def test_points_without_variance_gain_nothing():
    assert held_out_gain(np.zeros((4, 2)), np.array([0, 0, 1, 1]), np.ones((3, 2))) == 0


# bisection and tree


@pytest.mark.parametrize("dimension", [2, 12, 120])
def test_a_cut_is_as_good_as_two_means_in_all_dimensions(dimension, rng):
    points = np.maximum(rng.standard_normal((400, 8)) @ rng.standard_normal((8, dimension)), 0)  # like embeddings
    labels = bisect_points(points, random_state=0)
    inertia = within_sum_of_squares(points, labels, cluster_means(points, labels))
    assert inertia <= 1.005 * KMeans(2, n_init=10, random_state=0).fit(points).inertia_


def test_a_cut_leaves_a_middle_cluster_whole(rng):
    """From the principal component alone, the middle one of three in a row is cut through."""
    points, origins = blobs(np.array([[-30.0, 0.0], [0.0, 0.0], [30.0, 0.0]]), [100, 100, 100], rng)
    labels = bisect_points(points, n_init=8, random_state=0)
    assert sorted(len(set(labels[origins == j])) for j in range(3)) == [1, 1, 1]


def test_equal_points_are_not_cut():
    assert bisect_points(np.full((10, 3), 0.1, np.float32)) is None


def test_tree_gives_a_dissolved_leafs_place_to_its_sibling():
    root = _ClusterTree(np.zeros(1), np.arange(6))
    left, right = _ClusterTree(np.zeros(1), np.arange(2)), _ClusterTree(np.zeros(1), np.arange(2, 6))
    first, second = _ClusterTree(np.zeros(1), np.arange(2, 4)), _ClusterTree(np.zeros(1), np.arange(4, 6))
    root.children, right.children = (left, right), (first, second)
    assert root.leaves() == [left, first, second]
    assert root.model(1).labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert root.without(first).leaves() == [left, second]
    assert root.without(left).leaves() == [second]


# estimators


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


def test_bic_attribute_is_the_criterion_and_beats_one_cluster(three):
    points, _ = three
    model = XMeans(random_state=0).fit(points)
    assert model.bic_ == bic(points, model.labels_, model.cluster_centers_)
    assert model.bic_ > XMeans(max_clusters=1).fit(points).bic_


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


@pytest.mark.parametrize("dimension", [2, 10, 128])
def test_only_x_means_cuts_an_elongated_gaussian(dimension, rng):
    points = rng.standard_normal((500, dimension)) * np.array([30.0] + [1.0] * (dimension - 1))
    assert GMeans(random_state=0).fit(points).n_clusters_ == 1
    assert TMeans(random_state=0).fit(points).n_clusters_ == 1
    assert XMeans(random_state=0).fit(points).n_clusters_ > 1


def test_t_means_finds_elongated_clusters_in_many_dimensions(rng):
    shape = np.geomspace(6.0, 0.5, 64)
    points, origins = blobs(np.stack([np.zeros(64), 6 * np.eye(64)[0], 6 * np.eye(64)[1]]), [150, 100, 50], rng)
    assert adjusted_rand_score(origins, TMeans(random_state=0).fit(points * shape).labels_) > 0.98


def test_g_means_keeps_its_level_where_there_are_about_as_many_dimensions_as_points(rng):
    """Along the vector between two centres found on the same points, these look bimodal."""
    points = rng.standard_normal((300, 200)).astype(np.float32)
    sides = bisect_points(points, random_state=0)
    first, second = cluster_means(points, sides)
    assert anderson_darling(points @ (second - first)) > anderson_darling_critical_value(1e-4)
    assert GMeans(random_state=0).fit(points).n_clusters_ == 1


def test_g_means_finds_clusters_in_many_dimensions(rng):
    points, origins = blobs(rng.standard_normal((3, 200)), [100, 100, 100], rng)
    assert adjusted_rand_score(origins, GMeans(random_state=0).fit(points).labels_) == 1


def test_x_means_looks_beyond_a_cut_that_does_not_pay(rng):
    corners = 20 * np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    points, origins = blobs(corners, [100] * 4, rng)
    sides = bisect_points(points, random_state=0)
    whole = np.zeros_like(sides)
    assert bic(points, sides, cluster_means(points, sides)) < bic(points, whole, cluster_means(points, whole))
    assert adjusted_rand_score(origins, XMeans(random_state=0).fit(points).labels_) == 1


@ALL
def test_no_cluster_is_smaller_than_allowed(estimator, rng):
    points, origins = blobs(40 * np.eye(5)[:4], [200, 150, 40, 7], rng)
    model = estimator(min_cluster_size=20, random_state=0).fit(points)
    assert np.bincount(model.labels_).min() >= 20
    assert adjusted_rand_score(np.minimum(origins, 2)[origins < 3], model.labels_[origins < 3]) > 0.99
    assert estimator(min_cluster_size=1 if estimator is XMeans else 7, random_state=0).fit(points).n_clusters_ >= 3
    assert estimator(min_cluster_size=200, random_state=0).fit(points).n_clusters_ == 1


def test_a_cluster_that_k_means_makes_too_small_is_dissolved():
    """K-Means over all points leaves two of them alone: their cluster goes, and its sibling takes them."""
    points = np.concatenate([np.linspace(0, 1, 30), np.linspace(10, 11, 30), [30.0, 30.1]])[:, None]
    tree = _ClusterTree(np.zeros(1), np.arange(62))
    near, far = _ClusterTree(np.array([0.5]), np.arange(30)), _ClusterTree(np.array([15.0]), np.arange(30, 62))
    far.children = (
        _ClusterTree(np.array([10.0]), np.arange(30, 50)),
        _ClusterTree(np.array([30.0]), np.arange(50, 62)),
    )
    tree.children = (near, far)
    improved, n_iter = XMeans(min_cluster_size=5)._improve_parameters(points, tree)
    assert n_iter >= 1
    assert [len(leaf.indices) for leaf in improved.leaves()] == [30, 32]


def test_a_cut_with_too_small_a_side_is_not_proposed(rng):
    points = np.concatenate([rng.standard_normal((50, 2)), [[90.0, 0.0], [90.0, 1.0], [91.0, 0.0]]])
    random = np.random.RandomState(0)
    assert XMeans(min_cluster_size=4)._propose(points, 5, random) is None
    proposal = XMeans(min_cluster_size=3)._propose(points, 5, random)
    assert proposal.gain > 0
    assert np.bincount(proposal.labels).tolist() == [50, 3]


def test_x_means_returns_the_model_with_the_best_criterion_not_the_last(rng):
    """Two tight clusters next to a wide one: by themselves they are two, but not at the variance that all share."""
    points, origins = blobs(np.array([[0.0, 0.0], [300.0, 0.0], [300.0, 2.0]]), [300, 100, 100], rng)
    center = np.array([[0.0, 0.0], [300.0, 0.0], [300.0, 2.0]])[origins]
    points = center + (points - center) * np.array([10.0, 0.1, 0.1])[origins][:, None]
    tight = points[origins > 0]
    assert XMeans(random_state=0).fit(tight).n_clusters_ == 2
    assert adjusted_rand_score(origins, GMeans(random_state=0).fit(points).labels_) == 1
    model = XMeans(random_state=0).fit(points)
    assert adjusted_rand_score(np.minimum(origins, 1), model.labels_) == 1
    assert model.bic_ > bic(points, origins, cluster_means(points, origins))


@ALL
def test_no_more_clusters_than_allowed_and_the_clearest_first(estimator, rng):
    centers = np.array([[0.0, 0.0, 0.0], [0.0, 60.0, 0.0], [500.0, 0.0, 0.0], [500.0, 0.0, 12.0]])
    points, origins = blobs(centers, [100] * 4, rng)
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
    with pytest.raises(UsageError, match=f"{name} is {value!r}: give a whole number of at least 1"):
        estimator(**{name: value}).fit(np.eye(5))


@pytest.mark.parametrize("value", [0, 0.2, "low"])
def test_wrong_significance(value):
    with pytest.raises(UsageError, match=r"significance is .*: give a probability"):
        GMeans(significance=value).fit(np.eye(5))


# the space of a class


def cloud(rng: np.random.Generator, n: int = 300, dimension: int = 12) -> np.ndarray:
    """Embeddings of one class: correlated, of different lengths, away from the origin."""
    shape = rng.standard_normal((dimension, dimension)) * np.geomspace(1, 0.1, dimension)
    return (rng.standard_normal((n, dimension)) @ shape + 4).astype(np.float32) * rng.uniform(1, 3, (n, 1))


def same_up_to_sign(found: np.ndarray, expected: np.ndarray, **tolerance: float) -> None:
    assert found.shape == expected.shape
    assert_allclose(found * np.sign((found * expected).sum(axis=0)), expected, **tolerance)


def test_raw_embeddings_stay_as_they_are(rng):
    embeddings = cloud(rng)
    assert map_class(embeddings) is embeddings


def test_normalised_embeddings_lie_on_the_sphere(rng):
    embeddings = cloud(rng)
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    assert_allclose(map_class(embeddings, "normalised") * lengths, embeddings, rtol=1e-5)


@pytest.mark.parametrize("n_components", [1, 5, 12, 99])
def test_projected_embeddings_are_the_leading_components_of_the_normalised_ones(n_components, rng):
    embeddings = cloud(rng).astype(np.float64)
    expected = PCA(min(n_components, 12), svd_solver="full").fit_transform(normalise(embeddings))
    same_up_to_sign(map_class(embeddings, "projected", n_components), expected, atol=1e-9)


def test_whitened_components_have_variance_one(rng):
    embeddings = cloud(rng).astype(np.float64)
    model = PCA(0.95, svd_solver="full", whiten=True)
    expected = model.fit_transform(normalise(embeddings)) * math.sqrt(300 / 299)  # our covariances divide by n
    assert 1 < model.n_components_ < 12
    same_up_to_sign(map_class(embeddings, "whitened"), expected, atol=1e-7)


def test_few_images_are_whitened_by_a_shrunk_covariance(rng):
    embeddings = cloud(rng, n=14, dimension=40).astype(np.float64)
    mapped = map_class(embeddings, "whitened")
    kept = PCA(0.95, svd_solver="full").fit(normalise(embeddings))
    variances = kept.explained_variance_ * 13 / 14
    shrunk = np.diag(oas_covariance(np.diag(variances), 14))
    same_up_to_sign(mapped, kept.transform(normalise(embeddings)) / np.sqrt(shrunk), atol=1e-7)
    assert (np.diff(mapped.var(axis=0)) < 0).all()  # not fully whitened


@pytest.mark.parametrize("space", ["projected", "whitened"])
class TestSpacesOfComponents:
    def test_no_more_components_than_images_allow(self, space, rng):
        for n, widest in ((0, 1), (1, 1), (2, 1), (4, 3)):
            mapped = map_class(rng.standard_normal((n, 30)), space, n_components=5)
            assert mapped.shape[0] == n and 1 <= mapped.shape[1] <= widest
            assert np.isfinite(mapped).all()

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_class_without_variance_is_a_column_of_zeros(self, space, dtype, rng):
        for class_of in (np.zeros(200), np.full(200, 0.1), rng.standard_normal(200)):
            same = np.tile(class_of.astype(dtype), (50, 1))
            lengths = rng.uniform(1, 9, (50, 1)).astype(dtype)  # on the sphere, length is nothing but rounding
            for embeddings in (same, same * lengths):
                assert_array_equal(map_class(embeddings, space), np.zeros((50, 1)))

    def test_constant_features_and_duplicates_change_nothing(self, space, rng):
        embeddings = cloud(rng).astype(np.float64)
        plain = map_class(embeddings, space)
        wide = np.concatenate([np.zeros((300, 3)), embeddings], axis=1)
        same_up_to_sign(map_class(wide, space), plain, atol=1e-7)
        same_up_to_sign(map_class(np.repeat(embeddings, 2, axis=0), space)[::2], plain, atol=1e-7)

    def test_the_order_of_rows_and_one_vector_of_zeros_do_not_matter(self, space, rng):
        embeddings = np.concatenate([cloud(rng), np.zeros((1, 12))]).astype(np.float32)
        plain = map_class(embeddings, space)
        assert_array_equal(map_class(embeddings, space), plain)
        assert np.isfinite(plain).all()
        order = rng.permutation(301)
        same_up_to_sign(map_class(embeddings[order], space), plain[order], atol=1e-4)

    def test_embeddings_are_not_changed(self, space, rng):
        embeddings = cloud(rng)
        copy = embeddings.copy()
        map_class(embeddings, space)
        assert_array_equal(embeddings, copy)


@pytest.mark.parametrize(("dimension", "gap"), [(3, 5.0), (30, 5.0), (30, 20.0)])
def test_whitening_hides_two_equal_clusters_from_the_criterion(dimension, gap, rng):
    """The variance between them is part of what is made 1: never worth log 2 per image to a spherical criterion."""
    center = 100 * np.eye(dimension)[0]
    points, origins = blobs(np.stack([center, center + gap * np.eye(dimension)[1]]), [200, 200], rng)
    mapped = map_class(points, "whitened")
    one, two = (bic(mapped, labels, cluster_means(mapped, labels)) for labels in (0 * origins, origins))
    assert mapped.shape[1] > 1
    assert two < one


def test_an_unknown_space_is_refused():
    with pytest.raises(UsageError, match="unknown space 'whitend' for clustering: did you mean 'whitened'"):
        map_class(np.eye(3), "whitend")


# one class of a data set


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points(method, three):
    points, origins = three
    labels = cluster_points(points.astype(np.float32), method, max_clusters=3, min_cluster_size=20, seed=0)
    assert labels.dtype == np.int64
    assert set(labels) == {0, 1, 2}
    assert adjusted_rand_score(origins, labels) == 1
    assert_array_equal(labels, cluster_points(points, method, max_clusters=3, min_cluster_size=20, seed=0))


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points_does_nothing_where_nothing_may_be_split(method, rng, monkeypatch):
    monkeypatch.setattr("maple.stats.clustering._run_k_means", None)
    points = rng.standard_normal((30, 3))
    for max_clusters, min_cluster_size in ((1, 1), (5, 16), (5, 31)):
        labels = cluster_points(points, method, max_clusters=max_clusters, min_cluster_size=min_cluster_size, seed=0)
        assert_array_equal(labels, np.zeros(30))
    assert len(cluster_points(points[:0], method, max_clusters=5, min_cluster_size=1, seed=0)) == 0


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points_of_repeated_points(method):
    labels = cluster_points(np.ones((40, 3), np.float32), method, max_clusters=5, min_cluster_size=2, seed=0)
    assert_array_equal(labels, np.zeros(40))


def test_k_means_merges_clusters_that_are_too_small(rng):
    points, origins = blobs(np.array([[0.0, 0.0], [60.0, 0.0], [75.0, 0.0]]), [100, 100, 5], rng)
    labels = cluster_points(points, "kmeans", max_clusters=3, min_cluster_size=10, seed=0)
    assert adjusted_rand_score(np.minimum(origins, 1), labels) == 1
    assert len(set(cluster_points(points, "kmeans", max_clusters=3, min_cluster_size=1, seed=0))) == 3


def test_merging_takes_the_nearest_big_cluster_not_a_nearer_small_one():
    points = np.array([[0.0], [0.0], [0.0], [3.5], [5.5], [9.0], [9.0], [9.0]])
    assert merge_small_clusters(points, np.array([0, 0, 0, 1, 2, 3, 3, 3]), 3).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert merge_small_clusters(points, np.array([0, 0, 0, 1, 2, 3, 3, 3]), 9).tolist() == [0] * 8
    assert merge_small_clusters(points, np.array([0, 0, 0, 2, 2, 5, 5, 5]), 1).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


def test_cluster_points_refuses_what_it_cannot_use():
    points = np.eye(4)
    with pytest.raises(UsageError, match="unknown clustering method 'xmean': did you mean 'xmeans'"):
        cluster_points(points, "xmean", max_clusters=2, min_cluster_size=1, seed=0)
    points[2, 1] = np.nan
    with pytest.raises(DataError, match="NaN or infinity"):
        cluster_points(points, "xmeans", max_clusters=2, min_cluster_size=1, seed=0)


def test_torch_tensors_are_points_too(three):
    torch = pytest.importorskip("torch")
    points = three[0].astype(np.float32)
    tensor = torch.from_numpy(points)
    assert_array_equal(XMeans(random_state=0).fit(tensor).labels_, XMeans(random_state=0).fit(points).labels_)
    assert set(cluster_points(tensor, max_clusters=3, min_cluster_size=2, seed=0)) == {0, 1, 2}
