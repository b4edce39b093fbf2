"""From validation errors to pseudo-labels: which classes are hard, and into which clusters they split."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import softmax

from maple.cluster import cluster_points
from maple.types import Relabelling

ClassRule = Literal["sum", "max"]
ClusterMethod = Literal["xmeans", "gmeans", "kmeans"]
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
    max_clusters: int = 5,
    min_cluster_size: int = 1,
    seed: int = 0,
) -> Relabelling:
    """Split the ``hard`` classes; ``embeddings`` are those of ``rows``, all training images of these classes.

    With scope ``cluster`` every cluster of a hard class may split further, the largest first, until the class has
    ``max_clusters``; other classes keep their clusters. With scope ``class`` all classes start again from one cluster
    and the hard ones are clustered as a whole (the paper's algorithm).

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
        members = np.flatnonzero(start.cluster_to_class == class_id)
        budget = max_clusters - len(members)
        sizes = np.bincount(start.cluster_ids, minlength=start.n_clusters)
        for cluster in members[np.argsort(-sizes[members], kind="stable")]:
            if budget <= 0:
                break
            inside = start.cluster_ids[rows] == cluster
            parts = cluster_points(
                embeddings[inside],
                method,
                max_clusters=budget + 1,
                min_cluster_size=min_cluster_size,
                seed=seed,
            )
            children[rows[inside]] = parts
            budget -= int(parts.max())
    return _renumbered(start, children)


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
