"""Split classes into clusters: from embeddings of hard classes to pseudo-labels.

The clusters of a class depend on the metric: :func:`map_class` offers four spaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.utils import check_array

from maple.errors import DataError, UsageError, suggest
from maple.stats.arrays import as_embeddings, normalise, row_blocks
from maple.stats.clustering._bisect import serial_if_small
from maple.stats.clustering._means import cluster_means
from maple.stats.clustering.gmeans import GMeans
from maple.stats.clustering.tmeans import EXPLAINED_VARIANCE, TMeans
from maple.stats.clustering.xmeans import XMeans
from maple.stats.covariance import principal_axes, shrink_if_few
from maple.stats.moments import Moments
from maple.types import Relabelling

ClusterMethod = Literal["xmeans", "gmeans", "tmeans", "kmeans"]
ClusterSpace = Literal["raw", "normalised", "projected", "whitened"]
ClusterScope = Literal["cluster", "class"]
ShareWork = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]  # the results of a function for all items


def work_alone(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """``work`` of each item, in one process.

    >>> work_alone(abs, [-1, 2])
    [1, 2]
    """
    return [work(item) for item in items]


@dataclass(frozen=True)
class Clustering:
    """Options for splitting a class into clusters."""

    method: ClusterMethod = "xmeans"
    scope: ClusterScope = "cluster"  # split the clusters of a class further, or the class as a whole
    space: ClusterSpace = "raw"  # for clustering: see :func:`map_class`
    n_components: int = 5  # of the space ``projected``
    max_clusters: int = 5  # of a class
    min_cluster_size: int = 1
    seed: int = 0


def split_clusters(
    embeddings: np.ndarray,
    rows: np.ndarray,
    current: Relabelling,
    hard: np.ndarray,
    how: Clustering = Clustering(),
    share: ShareWork = work_alone,
) -> Relabelling:
    """Split the ``hard`` classes; ``embeddings`` belong to ``rows``, all training images of these classes.

    With scope ``cluster`` every cluster of a hard class may split further, the largest first, until the class has
    ``max_clusters``; other classes keep their clusters. With scope ``class`` all classes start again from one cluster
    and the hard ones are clustered as a whole (the paper's algorithm). Each class is clustered in its own
    ``space``, see :func:`map_class`, and independently of the others: ``share`` may divide the classes, largest first,
    over processes.

    >>> rng = np.random.default_rng(0)
    >>> points = np.concatenate([rng.normal(-9, 1, (50, 2)), rng.normal(9, 1, (50, 2)), rng.normal(0, 1, (50, 2))])
    >>> labels = np.repeat([0, 0, 1], 50)
    >>> start = Relabelling.initial(labels, 2)
    >>> after = split_clusters(points[:100], np.arange(100), start, np.array([0]))
    >>> after.cluster_to_class, after.parents, after.shares
    (array([0, 0, 1]), array([0, 0, 1]), array([0.5, 0.5, 1. ]))
    """
    start = _merged(current) if how.scope == "class" else current
    children = np.zeros(len(start.cluster_ids), dtype=np.int64)  # index of the new part within the old cluster
    classes = start.cluster_to_class[start.cluster_ids[rows]]
    members = sorted((np.flatnonzero(classes == class_id) for class_id in hard), key=len, reverse=True)

    def split(inside: np.ndarray) -> np.ndarray:
        points = map_class(embeddings[inside], how.space, how.n_components)
        return _split_class(points, start.cluster_ids[rows[inside]], how)

    for inside, parts in zip(members, share(split, members)):
        children[rows[inside]] = parts
    return _renumbered(start, children)


def _split_class(points: np.ndarray, cluster_ids: np.ndarray, how: Clustering) -> np.ndarray:
    """Index of the new part within the old cluster of each image of a class (n,); largest clusters split first."""
    parts = np.zeros(len(points), dtype=np.int64)
    clusters, sizes = np.unique(cluster_ids, return_counts=True)
    room = how.max_clusters - len(clusters)
    for cluster in clusters[np.argsort(-sizes, kind="stable")]:
        inside = cluster_ids == cluster
        parts[inside] = cluster_points(points[inside], replace(how, max_clusters=room + 1))
        room -= int(parts[inside].max())
    return parts


def _merged(current: Relabelling) -> Relabelling:
    """Merge clusters: one per class."""
    n_classes = int(current.cluster_to_class.max()) + 1
    return Relabelling.initial(current.cluster_to_class[current.cluster_ids], n_classes)


def _renumbered(start: Relabelling, children: np.ndarray) -> Relabelling:
    """Number (cluster, child) pairs consecutively; the clusters of a class stay adjacent."""
    width = int(children.max(initial=0)) + 1
    numbers = start.cluster_ids * width + children
    pairs, cluster_ids, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    parents = pairs // width  # (M,)
    sizes = np.bincount(start.cluster_ids, minlength=start.n_clusters)
    return Relabelling(cluster_ids.astype(np.int64), start.cluster_to_class[parents], parents, counts / sizes[parents])


def map_class(embeddings: Any, space: ClusterSpace = "raw", n_components: int = 5) -> np.ndarray:
    """The embeddings (n, D) of one class in the space in which it is clustered, (n, D) or (n, K).

    - ``raw``: as they are (the paper).
    - ``normalised``: on the unit sphere, as in detectors.
    - ``projected``: normalised, then the first ``n_components`` principal components of this class. With fewer
      dimensions, a criterion for spherical clusters requires more evidence.
    - ``whitened``: normalised, then the principal components that explain 95 % of the variance of this class, each
      scaled to variance 1; shrunk (OAS) if there are few images.

    A class without variance becomes a single column of zeros.

    X-Means finds nothing in whitened space, because the variance between clusters is part of the variance of the
    class. Of K >= 2 components of variance 1, two clusters explain at most one, a gain of
    K / 2 log(K / (K - 1)) <= log 2 per image, which is the cost of encoding one of two equal halves. So :func:`bic`
    never prefers two clusters of about equal size to one, at any separation.

    >>> embeddings = np.array([[5.0, 0.0], [0.6, 0.8], [3.0, -4.0]])
    >>> map_class(embeddings, "normalised")
    array([[ 1. ,  0. ],
           [ 0.6,  0.8],
           [ 0.6, -0.8]])
    >>> abs(map_class(embeddings, "projected", n_components=1).ravel()).round(6)
    array([0. , 0.8, 0.8])
    >>> many = np.random.default_rng(0).standard_normal((100, 3)) * [1, 2, 5]
    >>> map_class(many, "whitened").std(axis=0).round(6)
    array([1., 1., 1.])
    """
    if space not in get_args(ClusterSpace):
        raise UsageError(f"unknown space '{space}' for clustering: {suggest(space, get_args(ClusterSpace))}")
    embeddings = as_embeddings(embeddings)
    if space == "raw":
        return embeddings
    if space == "normalised":
        return normalise(embeddings)
    n, dimension = embeddings.shape
    rounding = (4 * np.finfo(embeddings.dtype).eps) ** 2  # of vectors of length 1
    moments = Moments(1, dimension, norm_exponent=1.0).update(embeddings, np.zeros(n, np.int64))
    if n == 0 or np.trace(moments.total_covariance) <= rounding:
        return np.zeros((n, 1))
    matrix = _component_map(moments, space, n_components)
    mapped = np.empty((n, matrix.shape[1]))
    for rows in row_blocks(n, dimension):
        mapped[rows] = (normalise(embeddings[rows]) - moments.mean) @ matrix
    return mapped


def _component_map(moments: Moments, space: ClusterSpace, n_components: int) -> np.ndarray:
    """The map (D, K) from centred embeddings to principal components; scaled to variance 1 if ``space`` is whitened."""
    if space == "projected":
        return principal_axes(moments.total_covariance)[1][:, :n_components]
    variances, axes = principal_axes(moments.total_covariance, EXPLAINED_VARIANCE)
    return axes / np.sqrt(np.diag(shrink_if_few(np.diag(variances), moments.n_images)))


def cluster_points(points: np.ndarray, how: Clustering) -> np.ndarray:
    """Cluster the points (n, D) of one class: labels (n,) int64 in 0..k-1, k at most ``how.max_clusters``.

    Each cluster has at least ``how.min_cluster_size`` points, unless it is the only one. ``"kmeans"`` makes as many
    clusters as allowed and merges small ones into the nearest large one.

    >>> points = np.array([[0.0], [0.1], [0.2], [7.0], [7.1], [7.2]])
    >>> cluster_points(points, Clustering(max_clusters=2, min_cluster_size=3))
    array([0, 0, 0, 1, 1, 1])
    >>> cluster_points(points, Clustering(max_clusters=2, min_cluster_size=4))
    array([0, 0, 0, 0, 0, 0])
    """
    if how.method not in get_args(ClusterMethod):
        raise UsageError(f"unknown clustering method '{how.method}': {suggest(how.method, get_args(ClusterMethod))}")
    points = np.asarray(points)
    if not np.isfinite(points).all():
        raise DataError("the embeddings to cluster hold NaN or infinity: lower learning_rate and train again")
    if how.max_clusters < 2 or len(points) < 2 * how.min_cluster_size:
        return np.zeros(len(points), np.int64)
    points = check_array(points, dtype=[np.float64, np.float32], order="C")
    if how.method == "kmeans":
        return _k_means_labels(points, how)
    estimator = {"xmeans": XMeans, "gmeans": GMeans, "tmeans": TMeans}[how.method]
    return estimator(how.max_clusters, how.min_cluster_size, random_state=how.seed).fit(points).labels_


def merge_small_clusters(points: np.ndarray, labels: np.ndarray, min_cluster_size: int) -> np.ndarray:
    """Merge each cluster of fewer than ``min_cluster_size`` points, smallest first; labels (n,) in 0..k-1.

    It joins the large cluster with the nearest centre, or the nearest of all if none is large.

    >>> points = np.array([[0.0], [1.0], [2.0], [9.0], [10.0]])
    >>> merge_small_clusters(points, np.array([0, 0, 1, 2, 2]), 2)
    array([0, 0, 0, 1, 1])
    """
    while True:
        labels = np.unique(labels, return_inverse=True)[1].astype(np.int64)
        counts = np.bincount(labels)
        smallest = int(counts.argmin())
        if len(counts) < 2 or counts[smallest] >= min_cluster_size:
            return labels
        centers = cluster_means(points, labels)
        distances = euclidean_distances(centers[smallest : smallest + 1], centers)[0]  # (k,)
        distances[smallest] = np.inf
        if counts.max() >= min_cluster_size:
            distances[counts < min_cluster_size] = np.inf
        labels = np.where(labels == smallest, distances.argmin(), labels)


def _k_means_labels(points: np.ndarray, how: Clustering) -> np.ndarray:
    n_clusters = min(how.max_clusters, len(points) // how.min_cluster_size)
    with serial_if_small(points), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of repeated points: empty clusters are merged below
        labels = KMeans(n_clusters, n_init=4, random_state=how.seed).fit(points).labels_
    return merge_small_clusters(points, labels, how.min_cluster_size)
