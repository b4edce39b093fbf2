"""Gains: how much better MAPLE is than another reading of the same outputs, and how much of that may be chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maple.evaluation.results import Gain
from maple.stats.paired import auroc_difference, calibration_difference, mean_difference


@dataclass(frozen=True, eq=False)
class Reading:
    """The class probabilities and scores of one method."""

    log_probabilities: np.ndarray  # (N, C) of the IND images
    ind: np.ndarray  # (N,) scores
    ood: Mapping[str, np.ndarray]  # scores by OOD set


def measure_gains(ours: Reading, theirs: Reading, labels: np.ndarray) -> dict[str, Gain]:
    """The gains of ``ours`` over ``theirs``, positive where ours is better; keys as in ``Results.rows``."""
    first, second = (_Judged(reading.log_probabilities, labels) for reading in (ours, theirs))
    found = {
        "accuracy": mean_difference(first.correct, second.correct),
        "ece": calibration_difference((second.confidence, second.correct), (first.confidence, first.correct)),
        "nll": mean_difference(first.log_likelihood, second.log_likelihood),
        "brier": mean_difference(second.squared_error, first.squared_error),
    }
    for name, scores in ours.ood.items():
        found[f"auroc/{name}"] = auroc_difference((ours.ind, scores), (theirs.ind, theirs.ood[name]))
    return {name: Gain(*difference) for name, difference in found.items()}


class _Judged:
    """Log class probabilities (N, C) of labelled images, by image (N,)."""

    def __init__(self, logs: np.ndarray, labels: np.ndarray) -> None:
        probabilities = np.exp(logs)
        self.confidence = probabilities.max(axis=1)
        self.correct = probabilities.argmax(axis=1) == labels
        self.log_likelihood = logs[np.arange(len(labels)), labels]
        self.squared_error = ((probabilities - np.eye(probabilities.shape[1])[labels]) ** 2).sum(axis=1)
