"""Split classes into clusters: from embeddings of hard classes to pseudo-labels."""

from __future__ import annotations

from typing import Literal

import numpy as np

from maple.stats.clustering import ClusterMethod, ClusterSpace, cluster_points, map_class
from maple.types import Relabelling

ClusterScope = Literal["cluster", "class"]


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
