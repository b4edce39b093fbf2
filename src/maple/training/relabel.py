"""From validation errors to hard classes, and which classes a relabelling changed."""

from __future__ import annotations

import numpy as np

from maple.types import Relabelling


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
