"""Labels of images: integers or names, as indices of class names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maple.errors import DataError, suggest

Labels = tuple[np.ndarray, tuple[str, ...]]  # class ids (N,) int64, and class names


def no_labels(n: int) -> Labels:
    """Labels and class names of ``n`` images whose classes are unknown."""
    return np.full(n, -1, dtype=np.int64), ()


def index_labels(values: np.ndarray, declared: Sequence[str] | None, where: Any) -> Labels:
    """Map labels (N,) to indices of class names: those declared, the strings themselves, or the numbers as text.

    >>> index_labels(np.array([7, 10, 7]), None, "x")
    (array([0, 1, 0]), ('7', '10'))
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if declared is not None and len(set(declared)) < len(declared):
        twice = next(name for name in declared if list(declared).count(name) > 1)
        raise DataError(f"'{where}' has two classes named '{twice}': give each its own name")
    if values.ndim != 1 or values.dtype.kind not in "iubU":
        raise DataError(
            f"the labels of '{where}' have shape {values.shape} and type {values.dtype}: expected one integer or name "
            "per image"
        )
    if values.dtype.kind == "U":
        return _index_names(values.tolist(), declared, where)
    return _index_numbers(values.astype(np.int64), declared, where)


def _index_names(values: Sequence[str], declared: Sequence[str] | None, where: Any) -> Labels:
    order = list(declared) if declared is not None else sorted(set(values))
    for unknown in sorted(set(values) - set(order)):
        raise DataError(f"label '{unknown}' in '{where}' is unknown: {suggest(unknown, order)}")
    position = {name: i for i, name in enumerate(order)}
    return np.array([position[value] for value in values], dtype=np.int64), tuple(map(str, order))


def _index_numbers(values: np.ndarray, declared: Sequence[str] | None, where: Any) -> Labels:
    if declared is None:
        allowed, top = "labels start at 0", np.iinfo(np.int64).max
    else:
        top = len(declared)
        allowed = f"there are {top} class names, so labels go from 0 to {top - 1}"
    for row in np.flatnonzero((values < 0) | (values >= top))[:1]:
        raise DataError(f"label {values[row]} in row {row} of '{where}' is out of range: {allowed}")
    if declared is not None:
        return values, tuple(map(str, declared))
    distinct, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), tuple(map(str, distinct))
