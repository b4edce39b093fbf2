"""Prediction sets: the classes that an image may belong to, with a guaranteed coverage."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
from numpy.typing import ArrayLike

from maple.decisions.conformal import check_rate, sort_scores
from maple.errors import DataError
from maple.stats.arrays import as_array, check_values


def true_class_scores(log_probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """-log p of the true class of each labelled image (n_labelled,): the ``set_scores`` of :func:`prediction_sets`.

    ``log_probabilities`` (N, C), ``labels`` (N,) class ids; images of unknown classes (-1, or none of the C) are left
    out.

    >>> true_class_scores(np.log([[0.5, 0.5], [0.2, 0.8]]), [-1, 1]).round(3)
    array([0.223])
    """
    log_probabilities, labels = _check_logs(log_probabilities), as_array(labels)
    known = np.flatnonzero((labels >= 0) & (labels < log_probabilities.shape[1]))
    return 0.0 - log_probabilities[known, labels[known]]


def prediction_sets(log_probabilities: ArrayLike, set_scores: ArrayLike, coverage: float) -> np.ndarray:
    """The classes that an image may belong to (N, C), bool: the true one is among them with probability ``coverage``.

    Class c is in the set where -log p_c is at most the r-th smallest of the n ``set_scores`` of calibration images
    (:func:`true_class_scores`), r = ceil((n + 1) coverage). An image exchangeable with them has its true class in the
    set with a probability of at least ``coverage``, and of at most 1 / (n + 1) more for continuous scores. If n is too
    small (r > n), all classes are in the set. The most probable class always is: that can only raise coverage, and no
    set is empty.

    >>> prediction_sets(np.log([[0.9, 0.06, 0.04], [0.5, 0.3, 0.2]]), -np.log([0.9, 0.8, 0.4, 0.3]), coverage=0.75)
    array([[ True, False, False],
           [ True,  True, False]])
    """
    check_rate(coverage, "coverage", 0.9)
    ordered = sort_scores(set_scores)
    if len(ordered) == 0:
        raise DataError("prediction sets need labelled calibration images: calibrate with labels")
    log_probabilities = _check_logs(log_probabilities)
    rank = _covering_rank(len(ordered), coverage)
    sets = -log_probabilities <= (ordered[rank - 1] if rank <= len(ordered) else np.inf)
    sets[np.arange(len(sets)), log_probabilities.argmax(axis=1)] = True
    return sets


def _check_logs(log_probabilities: ArrayLike) -> np.ndarray:
    """Log probabilities (N, C); NaN is an error that names the rows."""
    return check_values(log_probabilities, "log_probabilities", ndim=2, may_be_empty=True)


def min_labelled_images(coverage: float) -> int:
    """The least number of labelled calibration images with which :func:`prediction_sets` can leave any class out.

    >>> min_labelled_images(0.95), min_labelled_images(0.9), min_labelled_images(0.999)
    (19, 9, 999)
    """
    check_rate(coverage, "coverage", 0.9)
    n = max(floor(coverage / (1 - coverage)) - 1, 1)  # possibly one too few
    while _covering_rank(n, coverage) > n:
        n += 1
    return n


def _covering_rank(n: int, coverage: float) -> int:
    """The least r with r / (n + 1) >= coverage, exactly; at most n + 1."""
    rank = max(ceil(coverage * (n + 1)) - 1, 1)  # possibly one too few: the loop corrects it, and rounding
    while rank / (n + 1) < coverage:
        rank += 1
    return rank
