"""Hard classes: those with many errors on validation images."""

from __future__ import annotations

import numpy as np


def false_negative_ratios(class_ids: np.ndarray, labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Share of the images of each class that are assigned to another class (C,); NaN for a class without images.

    >>> false_negative_ratios(np.array([0, 1, 1]), np.array([0, 0, 1]), 3)
    array([0.5, 0. , nan])
    """
    counts = np.bincount(labels, minlength=n_classes).astype(float)
    wrong = np.bincount(labels[class_ids != labels], minlength=n_classes)
    return np.divide(wrong, counts, out=np.full(n_classes, np.nan), where=counts > 0)


def find_hard_classes(class_ids: np.ndarray, labels: np.ndarray, n_classes: int, threshold: float) -> np.ndarray:
    """Classes whose false-negative ratio exceeds ``threshold``; a class without validation images is never hard."""
    return np.flatnonzero(false_negative_ratios(class_ids, labels, n_classes) > threshold)
