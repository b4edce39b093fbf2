"""From embeddings of hard classes to pseudo-labels: spaces, methods and bookkeeping."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from clusters import spherical_blobs
from maple.errors import DataError, UsageError
from maple.stats.arrays import normalise
from maple.stats.clustering._means import cluster_means
from maple.stats.clustering.splitting import Clustering, cluster_points, map_class, merge_small_clusters, split_clusters
from maple.stats.clustering.xmeans import XMeans, bic
from maple.stats.covariance import oas_covariance
from maple.types import Relabelling


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
    points, origins = spherical_blobs(np.stack([center, center + gap * np.eye(dimension)[1]]), [200, 200], rng)
    mapped = map_class(points, "whitened")
    one, two = (bic(mapped, labels, cluster_means(mapped, labels)) for labels in (0 * origins, origins))
    assert mapped.shape[1] > 1
    assert two < one


def test_an_unknown_space_is_refused():
    with pytest.raises(UsageError, match="'whitend'"):
        map_class(np.eye(3), "whitend")


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points(method, three):
    points, origins = three
    labels = cluster_points(points.astype(np.float32), Clustering(method, max_clusters=3, min_cluster_size=20))
    assert labels.dtype == np.int64
    assert set(labels) == {0, 1, 2}
    assert adjusted_rand_score(origins, labels) == 1
    assert_array_equal(labels, cluster_points(points, Clustering(method, max_clusters=3, min_cluster_size=20)))


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points_does_nothing_where_nothing_may_be_split(method, rng, monkeypatch):
    for name in ("XMeans", "GMeans", "TMeans", "KMeans"):
        monkeypatch.setattr(f"maple.stats.clustering.splitting.{name}", None)
    points = rng.standard_normal((30, 3))
    for max_clusters, min_cluster_size in ((1, 1), (5, 16), (5, 31)):
        labels = cluster_points(
            points, Clustering(method, max_clusters=max_clusters, min_cluster_size=min_cluster_size)
        )
        assert_array_equal(labels, np.zeros(30))
    assert len(cluster_points(points[:0], Clustering(method))) == 0


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_cluster_points_of_repeated_points(method):
    labels = cluster_points(np.ones((40, 3), np.float32), Clustering(method, max_clusters=5, min_cluster_size=2))
    assert_array_equal(labels, np.zeros(40))


def test_k_means_merges_clusters_that_are_too_small(rng):
    points, origins = spherical_blobs(np.array([[0.0, 0.0], [60.0, 0.0], [75.0, 0.0]]), [100, 100, 5], rng)
    labels = cluster_points(points, Clustering("kmeans", max_clusters=3, min_cluster_size=10))
    assert adjusted_rand_score(np.minimum(origins, 1), labels) == 1
    assert len(set(cluster_points(points, Clustering("kmeans", max_clusters=3, min_cluster_size=1)))) == 3


def test_k_means_makes_no_more_clusters_than_have_enough_points():
    points = np.array([[0.0], [0.1], [9.0], [9.1]])
    labels = cluster_points(points, Clustering("kmeans", max_clusters=5, min_cluster_size=2))
    assert adjusted_rand_score([0, 0, 1, 1], labels) == 1


@pytest.mark.parametrize("method", ["xmeans", "kmeans"])
def test_one_far_image_is_a_cluster_unless_a_size_is_asked_for(method, rng):
    points = np.concatenate([rng.standard_normal((40, 2)), [[500.0, 0.0]]])
    sizes = np.bincount(cluster_points(points, Clustering(method, max_clusters=2)))
    assert sorted(sizes) == [1, 40]


def test_merging_takes_the_nearest_big_cluster_not_a_nearer_small_one():
    points = np.array([[0.0], [0.0], [0.0], [3.5], [5.5], [9.0], [9.0], [9.0]])
    assert merge_small_clusters(points, np.array([0, 0, 0, 1, 2, 3, 3, 3]), 3).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert merge_small_clusters(points, np.array([0, 0, 0, 1, 2, 3, 3, 3]), 9).tolist() == [0] * 8
    assert merge_small_clusters(points, np.array([0, 0, 0, 2, 2, 5, 5, 5]), 1).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


def test_a_cluster_of_just_the_size_that_is_asked_for_is_big():
    points = np.array([[0.0], [0.5], [8.5], [9.0], [7.0]])
    assert merge_small_clusters(points, np.array([0, 0, 1, 1, 2]), 2).tolist() == [0, 0, 1, 1, 1]
    assert merge_small_clusters(points, np.array([0, 0, 1, 1, 1]), 2).tolist() == [0, 0, 1, 1, 1]


def test_cluster_points_refuses_what_it_cannot_use():
    points = np.eye(4)
    with pytest.raises(UsageError, match="'xmean'"):
        cluster_points(points, Clustering("xmean", max_clusters=2, min_cluster_size=1))
    points[2, 1] = np.nan
    with pytest.raises(DataError, match="NaN"):
        cluster_points(points, Clustering("xmeans", max_clusters=2, min_cluster_size=1))


def test_torch_tensors_are_points_too(three):
    torch = pytest.importorskip("torch")
    points = three[0].astype(np.float32)
    tensor = torch.from_numpy(points)
    assert_array_equal(XMeans(random_state=0).fit(tensor).labels_, XMeans(random_state=0).fit(points).labels_)
    assert set(cluster_points(tensor, Clustering(max_clusters=3, min_cluster_size=2))) == {0, 1, 2}


# ---------------------------------------------------------------------------------------------------------- splits


def squares(rng, centres, n=60):
    return np.concatenate([rng.normal(c, 0.3, (n, 2)) for c in centres]).astype(np.float32)


def test_split_finds_planted_clusters_and_leaves_other_classes_alone(rng):
    points = squares(rng, [(-5, 0), (5, 0), (0, 5)])
    labels = np.repeat([0, 0, 1], 60)
    after = split_clusters(points[:120], np.arange(120), Relabelling.initial(labels, 2), np.array([0]))
    assert after.cluster_to_class.tolist() == [0, 0, 1]
    assert after.parents.tolist() == [0, 0, 1]
    assert len(set(after.cluster_ids[:60])) == len(set(after.cluster_ids[60:120])) == 1
    np.testing.assert_array_equal(after.cluster_to_class[after.cluster_ids], labels)
    np.testing.assert_allclose(after.shares, [0.5, 0.5, 1])


def test_later_events_split_existing_clusters_further(rng):
    points = squares(rng, [(-5, -5), (-5, 5), (5, -5), (5, 5)])
    labels = np.zeros(240, np.int64)
    first = Relabelling(np.repeat([0, 1], 120), np.array([0, 0]), np.array([0, 0]), np.array([0.5, 0.5]))
    after = split_clusters(points, np.arange(240), first, np.array([0]), Clustering(max_clusters=4))
    assert after.n_clusters == 4
    for cluster in range(4):  # no image changes its former cluster
        assert len(set(first.cluster_ids[after.cluster_ids == cluster])) == 1
    np.testing.assert_array_equal(after.cluster_to_class[after.cluster_ids], labels)


def test_max_clusters_counts_the_whole_class(rng):
    points = squares(rng, [(-9, -9), (-9, 9), (9, -9), (9, 9), (0, 0), (0, 20)])
    current = Relabelling(np.repeat([0, 1], 180), np.array([0, 0]), np.array([0, 0]), np.array([0.5, 0.5]))
    after = split_clusters(points, np.arange(360), current, np.array([0]), Clustering(max_clusters=3))
    assert after.n_clusters == 3


def test_min_cluster_size(rng):
    points = np.concatenate([squares(rng, [(0, 0)], 100), squares(rng, [(9, 9)], 5)])
    start = Relabelling.initial(np.zeros(105, np.int64), 1)
    kwargs = {"rows": np.arange(105), "current": start, "hard": np.array([0])}
    assert split_clusters(points, how=Clustering(min_cluster_size=10), **kwargs).n_clusters == 1
    assert split_clusters(points, how=Clustering(min_cluster_size=5), **kwargs).n_clusters == 2


def test_class_scope_starts_again_from_whole_classes(rng):
    points = squares(rng, [(0, 0), (0, 0), (8, 8)])
    labels = np.repeat([0, 0, 1], 60)
    current = Relabelling(np.repeat([0, 1, 2], 60), np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0.5, 0.5, 1]))
    after = split_clusters(points[:0], np.arange(0), current, np.array([], np.int64), Clustering(scope="class"))
    assert after.cluster_to_class.tolist() == [0, 1]
    np.testing.assert_array_equal(after.cluster_ids, labels)


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_every_method_is_deterministic(rng, method):
    points = squares(rng, [(-5, 0), (5, 0)])
    start = Relabelling.initial(np.zeros(120, np.int64), 1)
    how = Clustering(method=method, seed=3)
    results = [split_clusters(points, np.arange(120), start, np.array([0]), how) for _ in range(2)]
    np.testing.assert_array_equal(results[0].cluster_ids, results[1].cluster_ids)
    assert results[0].n_clusters >= 2


SPACES = ["raw", "normalised", "projected", "whitened"]


def split_class(points, **options):
    """Clusters of one class, found at one event."""
    start = Relabelling.initial(np.zeros(len(points), np.int64), 1)
    how = Clustering(**{"min_cluster_size": 20, **options})
    return split_clusters(points, np.arange(len(points)), start, np.array([0]), how).cluster_ids


def two_gaussians(rng, n=600, dimension=32):
    """Two Gaussians in one class, of equal size and far apart, as seen from the origin."""
    origins = rng.permutation(n) % 2
    points = rng.standard_normal((n, dimension)) + 30 * np.eye(dimension)[0]
    points[:, 1] += 12 * origins
    return points.astype(np.float32), origins


def one_long_gaussian(rng, n=600, dimension=64):
    points = rng.standard_normal((n, dimension)) * np.geomspace(12, 0.5, dimension)
    return (points + 60).astype(np.float32)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans"])
def test_two_gaussians_in_a_class_are_found(method, space, rng):
    points, origins = two_gaussians(rng)
    found = adjusted_rand_score(origins, split_class(points, method=method, space=space))
    if space == "whitened":  # where all directions look alike, no cut in two is drawn towards the right one
        assert found == 0
    else:
        assert found > 0.99


@pytest.mark.parametrize("space", SPACES)
def test_one_long_gaussian_is_split_by_x_means_where_length_shows(space, rng):
    points = one_long_gaussian(rng)
    assert split_class(points, method="tmeans", space=space).max() == 0
    if space in ("raw", "normalised"):
        assert split_class(points, space=space).max() > 0
    if space == "whitened":
        assert split_class(points, space=space).max() == 0


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", ["xmeans", "tmeans"])
def test_clusters_depend_neither_on_the_run_nor_on_the_order_of_images(method, space, rng):
    points, _ = two_gaussians(rng)
    labels = split_class(points, method=method, space=space)
    np.testing.assert_array_equal(split_class(points, method=method, space=space), labels)
    order = rng.permutation(len(points))
    assert adjusted_rand_score(labels[order], split_class(points[order], method=method, space=space)) == 1


def test_the_number_of_components_decides_what_is_seen(rng):
    """Of all directions, the one that tells the two apart has the second largest variance."""
    points, origins = two_gaussians(rng)
    points[:, 2] += rng.normal(0, 7, len(points))
    one, two = (split_class(points, method="tmeans", space="projected", n_components=k) for k in (1, 2))
    assert one.max() == 0
    assert adjusted_rand_score(origins, two) > 0.99


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_degenerate_classes_are_left_in_one_piece(method, space, rng):
    few = rng.standard_normal((3, 40))
    for points in (np.ones((40, 6)), np.zeros((40, 6)), few, np.tile(few[:1], (40, 1))):
        assert split_class(points.astype(np.float32), method=method, space=space, min_cluster_size=2).max() == 0


@pytest.mark.parametrize("space", SPACES)
def test_repeated_images_are_clustered_like_others(space, rng):
    points = np.repeat(rng.standard_normal((2, 8)).astype(np.float32), 30, axis=0)
    assert adjusted_rand_score(np.repeat([0, 1], 30), split_class(points, space=space)) == 1


def test_a_class_has_one_space_and_its_clusters_share_it(rng, monkeypatch):
    seen = []

    def record(embeddings, space, n_components):
        seen.append((len(embeddings), space, n_components))
        return embeddings

    monkeypatch.setattr("maple.stats.clustering.splitting.map_class", record)
    current = Relabelling(
        np.repeat([0, 1, 2, 3], 30), np.array([0, 0, 1, 2]), np.array([0, 0, 1, 2]), np.array([0.5, 0.5, 1, 1])
    )
    rows = np.r_[0:60, 90:120]
    how = Clustering(space="whitened", n_components=7)
    split_clusters(rng.standard_normal((90, 4)), rows, current, np.array([0, 2]), how)
    assert seen == [(60, "whitened", 7), (30, "whitened", 7)]
