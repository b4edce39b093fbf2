"""Probable wrong labels, by confident learning (Northcutt, Jiang and Chuang, 2021), and the list of them.

The list has one row per image, possible errors first, with the columns of cleanlab, and is itself a source: correct the
column ``label`` and train again with ``maple train LIST``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from maple.files import naming_damage, to_csv

GIVEN = "given"  # split of images that are not the run's
_ROUNDING = 1e-9  # of the mean of up to a million probabilities, and to spare


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
    """Which labels may be wrong (N,) bool, and the class that is confident instead, else the label (N,).

    A class j is confident for an image if its probability reaches the class's threshold, p_j >= t_j
    (:func:`class_thresholds`). The most probable of the confident classes is j*; the label k is an issue if there is
    such a class and j* is not k. Thresholds make up for classes about which the model is more or less sure.

    >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.05, 0.95]])
    >>> issues, confident = find_label_issues(p, np.array([0, 0, 1, 0]))
    >>> issues.tolist(), confident.tolist()
    ([False, False, False, True], [0, 0, 1, 1])
    """
    thresholds = class_thresholds(probabilities, labels) * (1 - _ROUNDING)  # the mean of equal values may exceed them
    reached = np.where(probabilities >= thresholds, probabilities, -np.inf)  # (N, C)
    has_any = np.isfinite(reached).any(axis=1)
    confident = np.where(has_any, reached.argmax(axis=1), labels)
    return confident != labels, confident


# --- the list ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedLabel:
    """The label of one image, and the predicted one: the confident class of an issue, else the most probable class."""

    file: str
    label: str
    is_label_issue: bool
    label_quality: float  # probability of the label
    predicted_label: str
    probability: float  # of the predicted label
    split: str  # of the run that the image belongs to


def judge_labels(
    probabilities: np.ndarray, labels: np.ndarray, class_names: Sequence[str], files: Iterable[tuple[str, str]]
) -> list[JudgedLabel]:
    """The labels (N,) of images that share their thresholds; ``files`` are pairs of split and file name.

    >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.05, 0.95]])
    >>> judged = judge_labels(p, np.array([0, 0, 1, 0]), ["cat", "dog"], [("test", f"{i}.png") for i in range(4)])
    >>> [(each.file, each.label, each.predicted_label) for each in judged if each.is_label_issue]
    [('3.png', 'cat', 'dog')]
    """
    issues, confident = find_label_issues(probabilities, labels)
    predicted = np.where(issues, confident, probabilities.argmax(axis=1))
    return [
        JudgedLabel(
            file=file,
            label=class_names[labels[i]],
            is_label_issue=bool(issues[i]),
            label_quality=float(probabilities[i, labels[i]]),
            predicted_label=class_names[predicted[i]],
            probability=float(probabilities[i, predicted[i]]),
            split=split,
        )
        for i, (split, file) in enumerate(files)
    ]


def labels_csv(judged: Iterable[JudgedLabel]) -> str:
    """The list as CSV, possible errors first, the least probable labels first among them."""
    ordered = sorted(judged, key=lambda each: (not each.is_label_issue, each.label_quality))
    return to_csv(map(asdict, ordered), [each.name for each in fields(JudgedLabel)], header=True)


def read_labels(path: Path) -> list[JudgedLabel]:
    """A list of :func:`labels_csv`."""
    with naming_damage(path, "run maple evaluate again"), path.open(encoding="utf-8", newline="") as file:
        return [_read_row(row) for row in csv.DictReader(file)]


def _read_row(row: dict[str, str]) -> JudgedLabel:
    return JudgedLabel(
        file=row["file"],
        label=row["label"],
        is_label_issue=row["is_label_issue"] == "True",
        label_quality=float(row["label_quality"]),
        predicted_label=row["predicted_label"],
        probability=float(row["probability"]),
        split=row["split"],
    )
