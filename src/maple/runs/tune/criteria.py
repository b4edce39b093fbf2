"""Criteria of a setting, from validation images alone.

Probabilities and scores are fitted on one half of the validation images and judged on the other, then the other way
round; a criterion is the mean over both.
"""

from __future__ import annotations

import math

import numpy as np

from maple.data.image_set import ImageSet
from maple.decisions.conformal import conformal_threshold
from maple.networks import embed
from maple.runs.fit import fit_as
from maple.runs.setup.config import RunConfig
from maple.stats.chi_square import gaussian_test
from maple.stats.metrics import negative_log_likelihood
from maple.training.loop import Run


def silent_errors(scores: np.ndarray, wrong: np.ndarray, false_alarm: float) -> float:
    """The share of all images that are ``wrong`` (N,) and not flagged by their ``scores`` (N,).

    An image is flagged if its score is above the threshold that flags at most the share ``false_alarm`` of the *right*
    images. Wrong images are the only in-distribution substitute for unknown ones. The flagged share of the wrong images
    would be simpler, but would reward a network for easy errors; this criterion falls with fewer errors as well as with
    better scores.

    >>> scores, wrong = np.array([0, 1, 2, 3, 2.5, 9]), np.array([0, 0, 0, 0, 1, 1], dtype=bool)
    >>> silent_errors(scores, wrong, false_alarm=0.2) == 1 / 6
    True
    """
    threshold = conformal_threshold(scores[~wrong], false_alarm) if not wrong.all() else math.inf
    return float((wrong & (scores <= threshold)).mean())


def judge(
    log_probabilities: np.ndarray,  # (N, C)
    scores: np.ndarray,  # (N,)
    squared_distance: np.ndarray,  # (N,) to the nearest cluster
    degrees_of_freedom: int,
    labels: np.ndarray,  # (N,)
    false_alarm: float,
) -> dict[str, float]:
    """All criteria, lower is better, and the accuracy, on images that nothing was fitted on.

    The error of the Gaussian test is divided by the degrees of freedom K, the mean of the chi-square distribution,
    since K differs from network to network.
    """
    wrong = log_probabilities.argmax(axis=1) != labels
    return {
        "nll": negative_log_likelihood(log_probabilities, labels, log=True),
        "gaussian": gaussian_test(squared_distance, degrees_of_freedom) / degrees_of_freedom,
        "errors": silent_errors(scores, wrong, false_alarm),
        "accuracy": float(1 - wrong.mean()),
    }


def halve(images: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of two halves with the same classes, by content alone; copies of an image stay together.

    >>> images = ImageSet.from_arrays(np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8), [0, 0, 0, 1, 1])
    >>> [images.labels[half].tolist() for half in halve(images)]
    [[0, 0, 1], [0, 1]]
    """
    distinct, first, inverse = np.unique(images.keys, return_index=True, return_inverse=True)
    order = np.lexsort((distinct, images.labels[first]))  # by class, then by digest of the content
    part = np.empty(len(distinct), dtype=np.int64)
    part[order] = np.arange(len(distinct)) % 2
    return np.flatnonzero(part[inverse] == 0), np.flatnonzero(part[inverse] == 1)


def judge_run(run: Run, train: ImageSet, validation: ImageSet, config: RunConfig) -> dict[str, float]:
    """The criteria of a trained network: each half of the validation images judges what was fitted on the other."""
    found, sizes = [], []
    halves = halve(validation)
    for taught, judged in (halves, halves[::-1]):
        taught_images = validation.subset(taught)
        predictor = fit_as(config, run.backbone, train, taught_images, relabelling=run.relabelling)
        unseen = embed(run.backbone, validation, indices=judged, workers=config.train.workers)
        told = predictor.detector.describe(unseen)
        scores, distance, dof = told.score, told.squared_distance, told.degrees_of_freedom
        logs, labels = predictor.log_probabilities(told), validation.labels[judged]
        found.append(judge(logs, scores, distance, dof, labels, config.decision.false_alarm))
        sizes.append(len(judged))
    return {name: float(np.average([each[name] for each in found], weights=sizes)) for name in found[0]}
