"""Hard classes and splits that keep their bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, recall_score

from maple.stats.splitting import split_clusters
from maple.training.relabel import changed_classes, false_negative_ratios, hard_classes
from maple.types import Relabelling


def blobs(rng, centres, n=60):
    return np.concatenate([rng.normal(c, 0.3, (n, 2)) for c in centres]).astype(np.float32)


def test_false_negative_ratio_is_one_minus_recall(rng):
    labels, predicted = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    expected = 1 - recall_score(labels, predicted, average=None)
    np.testing.assert_allclose(false_negative_ratios(predicted, labels, 4), expected)


def test_class_without_validation_images_is_never_hard():
    predicted, labels = np.array([1, 0]), np.array([0, 0])
    assert hard_classes(predicted, labels, 3, 0.3).tolist() == [0]


def test_threshold_is_exclusive():
    predicted, labels = np.array([0, 1]), np.array([0, 0])
    assert hard_classes(predicted, labels, 2, 0.5).tolist() == []


def test_split_finds_planted_clusters_and_leaves_other_classes_alone(rng):
    points = blobs(rng, [(-5, 0), (5, 0), (0, 5)])
    labels = np.repeat([0, 0, 1], 60)
    after = split_clusters(points[:120], np.arange(120), Relabelling.initial(labels, 2), np.array([0]))
    assert after.cluster_to_class.tolist() == [0, 0, 1]
    assert after.parents.tolist() == [0, 0, 1]
    assert len(set(after.cluster_ids[:60])) == len(set(after.cluster_ids[60:120])) == 1
    np.testing.assert_array_equal(after.cluster_to_class[after.cluster_ids], labels)
    np.testing.assert_allclose(after.shares, [0.5, 0.5, 1])


def test_later_events_split_existing_clusters_further(rng):
    points = blobs(rng, [(-5, -5), (-5, 5), (5, -5), (5, 5)])
    labels = np.zeros(240, np.int64)
    first = Relabelling(np.repeat([0, 1], 120), np.array([0, 0]), np.array([0, 0]), np.array([0.5, 0.5]))
    after = split_clusters(points, np.arange(240), first, np.array([0]), max_clusters=4)
    assert after.n_clusters == 4
    for cluster in range(4):  # no image changes its former cluster
        assert len(set(first.cluster_ids[after.cluster_ids == cluster])) == 1
    np.testing.assert_array_equal(after.cluster_to_class[after.cluster_ids], labels)


def test_max_clusters_counts_the_whole_class(rng):
    points = blobs(rng, [(-9, -9), (-9, 9), (9, -9), (9, 9), (0, 0), (0, 20)])
    current = Relabelling(np.repeat([0, 1], 180), np.array([0, 0]), np.array([0, 0]), np.array([0.5, 0.5]))
    after = split_clusters(points, np.arange(360), current, np.array([0]), max_clusters=3)
    assert after.n_clusters == 3


def test_min_cluster_size(rng):
    points = np.concatenate([blobs(rng, [(0, 0)], 100), blobs(rng, [(9, 9)], 5)])
    start = Relabelling.initial(np.zeros(105, np.int64), 1)
    kwargs = {"rows": np.arange(105), "current": start, "hard": np.array([0])}
    assert split_clusters(points, min_cluster_size=10, **kwargs).n_clusters == 1
    assert split_clusters(points, min_cluster_size=5, **kwargs).n_clusters == 2


def test_class_scope_starts_again_from_whole_classes(rng):
    points = blobs(rng, [(0, 0), (0, 0), (8, 8)])
    labels = np.repeat([0, 0, 1], 60)
    current = Relabelling(np.repeat([0, 1, 2], 60), np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0.5, 0.5, 1]))
    after = split_clusters(points[:0], np.arange(0), current, np.array([], np.int64), scope="class")
    assert after.cluster_to_class.tolist() == [0, 1]
    np.testing.assert_array_equal(after.cluster_ids, labels)


@pytest.mark.parametrize("method", ["xmeans", "gmeans", "tmeans", "kmeans"])
def test_every_method_is_deterministic(rng, method):
    points = blobs(rng, [(-5, 0), (5, 0)])
    start = Relabelling.initial(np.zeros(120, np.int64), 1)
    results = [split_clusters(points, np.arange(120), start, np.array([0]), method=method, seed=3) for _ in range(2)]
    np.testing.assert_array_equal(results[0].cluster_ids, results[1].cluster_ids)
    assert results[0].n_clusters >= 2


# geometries

SPACES = ["raw", "normalised", "projected", "whitened"]


def split_class(points, **options):
    """Clusters of one class, found at one event."""
    start = Relabelling.initial(np.zeros(len(points), np.int64), 1)
    options = {"min_cluster_size": 20, **options}
    return split_clusters(points, np.arange(len(points)), start, np.array([0]), **options).cluster_ids


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

    monkeypatch.setattr("maple.stats.splitting.map_class", record)
    current = Relabelling(
        np.repeat([0, 1, 2, 3], 30), np.array([0, 0, 1, 2]), np.array([0, 0, 1, 2]), np.array([0.5, 0.5, 1, 1])
    )
    rows = np.r_[0:60, 90:120]
    split_clusters(rng.standard_normal((90, 4)), rows, current, np.array([0, 2]), space="whitened", n_components=7)
    assert seen == [(60, "whitened", 7), (30, "whitened", 7)]


def regrouped(cluster_ids, cluster_to_class):
    mapping = np.array(cluster_to_class)
    return Relabelling(np.array(cluster_ids), mapping, np.arange(len(mapping)), np.ones(len(mapping)))


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1]), []),
        (regrouped([1, 1, 0, 0, 2, 2], [0, 0, 1]), []),  # other numbers, same clusters
        (regrouped([0, 1, 1, 0, 2, 2], [0, 0, 1]), [0]),  # as many clusters, other members
        (regrouped([0, 0, 1, 1, 2, 3], [0, 0, 1, 1]), [1]),
        (regrouped([0, 0, 0, 0, 1, 2], [0, 1, 1]), [0, 1]),
    ],
)
def test_changed_classes_compare_members(after, changed):
    before = regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1])
    assert changed_classes(before, after).tolist() == changed
