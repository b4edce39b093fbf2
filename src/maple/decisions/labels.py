"""Probable wrong labels, by confident learning (Northcutt, Jiang and Chuang, 2021)."""

from __future__ import annotations

import numpy as np


def class_thresholds(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean probability of each class over the images labelled so, t (C,); infinite for classes without images.

    ``probabilities`` (N, C), ``labels`` (N,) class ids.
    """
    n_classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=n_classes)
    own = probabilities[np.arange(len(labels)), labels]  # (N,) of the label
    sums = np.bincount(labels, weights=own, minlength=n_classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which labels are probably wrong (N,) bool, and the class that is confident instead, else the label (N,).

    A class j is confident for an image if its probability reaches the class's threshold, p_j >= t_j
    (:func:`class_thresholds`). The most probable of the confident classes is j*; the label k is an issue if there is
    such a class and j* is not k. Thresholds make up for classes about which the model is more or less sure.

    >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.05, 0.95]])
    >>> issues, confident = find_label_issues(p, np.array([0, 0, 1, 0]))
    >>> issues.tolist(), confident.tolist()
    ([False, False, False, True], [0, 0, 1, 1])
    """
    reached = np.where(probabilities >= class_thresholds(probabilities, labels), probabilities, -np.inf)  # (N, C)
    has_any = np.isfinite(reached).any(axis=1)
    confident = np.where(has_any, reached.argmax(axis=1), labels)
    return confident != labels, confident
