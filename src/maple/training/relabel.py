"""From validation errors to pseudo-labels: which classes are hard, and into which clusters they split."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import softmax

from maple.stats.clustering import ClusterMethod, ClusterSpace, cluster_points, map_class
from maple.types import Relabelling

ClassRule = Literal["sum", "max"]
ClusterScope = Literal["cluster", "class"]


def class_probabilities(logits: np.ndarray, cluster_to_class: np.ndarray, rule: ClassRule = "sum") -> np.ndarray:
    """Class probabilities (N, C) from cluster logits (N, M).

    ``sum`` adds the softmax over the clusters of a class. ``max`` takes the largest of them, the paper's rule, which
    under-counts split classes and does not sum to 1.

    >>> logits = np.log([[0.3, 0.3, 0.4]])
    >>> class_probabilities(logits, np.array([0, 0, 1])).round(2)
    array([[0.6, 0.4]])
    >>> class_probabilities(logits, np.array([0, 0, 1]), rule="max").round(2)
    array([[0.3, 0.4]])
    """
    probabilities = softmax(logits.astype(np.float64), axis=1)  # (N, M)
    order = np.argsort(cluster_to_class, kind="stable")
    starts = np.flatnonzero(np.diff(cluster_to_class[order], prepend=-1))
    reduce = np.add if rule == "sum" else np.maximum
    return reduce.reduceat(probabilities[:, order], starts, axis=1)  # (N, C)


def false_negative_ratios(class_ids: np.ndarray, labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Share of each class's images given to another class, (C,); NaN for a class without images.

    >>> false_negative_ratios(np.array([0, 1, 1]), np.array([0, 0, 1]), 3)
    array([0.5, 0. , nan])
    """
    counts = np.bincount(labels, minlength=n_classes).astype(float)
    wrong = np.bincount(labels[class_ids != labels], minlength=n_classes)
    return np.divide(wrong, counts, out=np.full(n_classes, np.nan), where=counts > 0)


def hard_classes(class_ids: np.ndarray, labels: np.ndarray, n_classes: int, threshold: float) -> np.ndarray:
    """Classes whose false-negative ratio exceeds ``threshold``; a class without validation images is never hard."""
    return np.flatnonzero(false_negative_ratios(class_ids, labels, n_classes) > threshold)


def split_clusters(
    embeddings: np.ndarray,
    rows: np.ndarray,
    current: Relabelling,
    hard: np.ndarray,
    *,
    method: ClusterMethod = "xmeans",
    scope: ClusterScope = "cluster",
    space: ClusterSpace = "raw",
    n_components: int = 5,
    max_clusters: int = 5,
    min_cluster_size: int = 1,
    seed: int = 0,
) -> Relabelling:
    """Split the ``hard`` classes; ``embeddings`` are those of ``rows``, all training images of these classes.

    With scope ``cluster`` every cluster of a hard class may split further, the largest first, until the class has
    ``max_clusters``; other classes keep their clusters. With scope ``class`` all classes start again from one cluster
    and the hard ones are clustered as a whole (the paper's algorithm). Either way a class is clustered in its own
    ``space``, see :func:`~maple.stats.clustering.map_class`.

    >>> rng = np.random.default_rng(0)
    >>> points = np.concatenate([rng.normal(-9, 1, (50, 2)), rng.normal(9, 1, (50, 2)), rng.normal(0, 1, (50, 2))])
    >>> labels = np.repeat([0, 0, 1], 50)
    >>> start = Relabelling.initial(labels, 2)
    >>> after = split_clusters(points[:100], np.arange(100), start, np.array([0]))
    >>> after.cluster_to_class, after.parents, after.shares
    (array([0, 0, 1]), array([0, 0, 1]), array([0.5, 0.5, 1. ]))
    """
    start = _merged(current) if scope == "class" else current
    children = np.zeros(len(start.cluster_ids), dtype=np.int64)  # which part of its cluster an image goes to
    for class_id in hard:
        in_class = start.cluster_to_class[start.cluster_ids[rows]] == class_id
        children[rows[in_class]] = _split_class(
            map_class(embeddings[in_class], space, n_components),
            start.cluster_ids[rows[in_class]],
            method,
            max_clusters,
            min_cluster_size,
            seed,
        )
    return _renumbered(start, children)


def _split_class(
    points: np.ndarray,
    cluster_ids: np.ndarray,
    method: ClusterMethod,
    max_clusters: int,
    min_cluster_size: int,
    seed: int,
) -> np.ndarray:
    """Which part of its cluster each of a class's images goes to (n,); the largest clusters are split first."""
    parts = np.zeros(len(points), dtype=np.int64)
    clusters, sizes = np.unique(cluster_ids, return_counts=True)
    room = max_clusters - len(clusters)
    for cluster in clusters[np.argsort(-sizes, kind="stable")]:
        inside = cluster_ids == cluster
        parts[inside] = cluster_points(
            points[inside], method, max_clusters=room + 1, min_cluster_size=min_cluster_size, seed=seed
        )
        room -= int(parts[inside].max())
    return parts


def changed_classes(before: Relabelling, after: Relabelling) -> np.ndarray:
    """Classes whose images are not grouped as before, however the clusters are numbered.

    >>> before = Relabelling(np.array([0, 0, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.ones(3))
    >>> after = Relabelling(np.array([0, 1, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.ones(3))
    >>> changed_classes(before, after), changed_classes(before, before)
    (array([0]), array([], dtype=int64))
    """
    # Two groupings are one exactly if each of their clusters meets only one cluster of the other.
    pairs = np.unique(before.cluster_ids * after.n_clusters + after.cluster_ids)
    n_pairs = np.bincount(after.cluster_to_class[pairs % after.n_clusters])  # (C,)
    n_before, n_after = np.bincount(before.cluster_to_class), np.bincount(after.cluster_to_class)  # (C,)
    return np.flatnonzero((n_pairs != n_before) | (n_pairs != n_after))


def _merged(current: Relabelling) -> Relabelling:
    """One cluster per class again."""
    n_classes = int(current.cluster_to_class.max()) + 1
    return Relabelling.initial(current.cluster_to_class[current.cluster_ids], n_classes)


def _renumbered(start: Relabelling, children: np.ndarray) -> Relabelling:
    """Number (cluster, child) pairs consecutively; clusters of a class stay neighbours."""
    width = int(children.max(initial=0)) + 1
    pairs, cluster_ids, counts = np.unique(
        start.cluster_ids * width + children, return_inverse=True, return_counts=True
    )
    parents = pairs // width  # (M,)
    sizes = np.bincount(start.cluster_ids, minlength=start.n_clusters)
    return Relabelling(cluster_ids.astype(np.int64), start.cluster_to_class[parents], parents, counts / sizes[parents])
