"""Shares and indices of splits: pure functions of labels, content keys and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from maple.errors import DataError, UsageError
from maple.text import plural

ROLES = ("train", "validation", "calibration", "test")


def fold_shares(shares: Sequence[float], given: Sequence[str]) -> tuple[float, ...]:
    """Shares of train, validation, calibration and test, with those of the ``given`` splits added to train.

    >>> fold_shares((0.7, 0.1, 0.1, 0.1), ["test"])
    (0.8, 0.1, 0.1, 0.0)
    """
    if len(shares) != 4 or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UsageError(f"splits {tuple(shares)} cannot be used: give four shares from 0 to 1 that sum to 1")
    folded = [0.0 if role in given else float(share) for role, share in zip(ROLES, shares)]
    folded[0] = round(1 - sum(folded[1:]), 9)
    if folded[0] <= 0:
        raise UsageError(f"splits {tuple(shares)} leave no training images: give train a share above 0")
    return tuple(folded)


def share_out(n: int, shares: Sequence[float]) -> np.ndarray:
    """Number of images per share, of ``n``: largest remainders, at least one for every share above 0.

    >>> share_out(10, (0.7, 0.1, 0.1, 0.1)), share_out(4, (0.7, 0.1, 0.1, 0.1))
    (array([7, 1, 1, 1]), array([1, 1, 1, 1]))
    """
    quotas = np.round(n * np.asarray(shares, dtype=np.float64), 9)
    counts = np.floor(quotas).astype(np.int64)
    largest = np.argsort(counts - quotas, kind="stable")
    counts[largest[: n - counts.sum()]] += 1
    for empty in np.flatnonzero((counts == 0) & (quotas > 0)):
        counts[np.argmax(counts)] -= 1
        counts[empty] = 1
    return counts


def split_indices(
    labels: np.ndarray, keys: np.ndarray, shares: Sequence[float], seed: int, class_names: Sequence[str] | None = None
) -> list[np.ndarray]:
    """Row numbers of each split, by ``shares`` of the distinct images of each class.

    Within a class, distinct images are ordered by a hash of (seed, content) and cut. Every share above 0 gets at least
    one image, copies of an image stay together, and neither row order nor machine matters.

    >>> keys = np.array([f"{i:032x}" for i in range(10)], dtype="S32")
    >>> [len(part) for part in split_indices(np.arange(10) % 2, keys, (0.6, 0.2, 0.2), seed=0)]
    [6, 2, 2]
    """
    labels = np.asarray(labels)
    distinct, inverse = np.unique(keys, return_inverse=True)
    owner = np.full(len(distinct), np.iinfo(np.int64).max)  # class of each distinct image: the lowest of its copies
    np.minimum.at(owner, inverse, labels)
    secret = str(int(seed)).encode()[:64]
    hashes = np.array([hashlib.blake2b(key, digest_size=16, key=secret).hexdigest() for key in distinct], dtype="S32")
    order = np.lexsort((hashes, owner))  # distinct images by class, then by hash
    starts = np.flatnonzero(np.diff(owner[order])) + 1  # where the next class begins
    part = np.empty(len(distinct), dtype=np.int64)
    for members in np.split(order, starts) if len(order) else ():
        check_enough(len(members), int(owner[members[0]]), shares, class_names)
        part[members] = np.repeat(np.arange(len(shares)), share_out(len(members), shares))
    part_of_row = part[inverse]
    parts = [np.flatnonzero(part_of_row == s) for s in range(len(shares))]
    for rows, share in zip(parts, shares):
        missing = np.setdiff1d(labels, labels[rows])
        if share > 0 and len(missing):
            name = _class_name(missing[0], class_names)
            raise DataError(f"{name} has too few images that no other class has: give each image one class")
    return parts


def check_enough(n: int, label: int, shares: Sequence[float], class_names: Sequence[str] | None) -> None:
    """Check that a class has a distinct image for every split."""
    needed = sum(share > 0 for share in shares)
    if n < needed:
        found = f"{_class_name(label, class_names)} has {plural(n, 'distinct image')}, too few for {needed} splits"
        raise DataError(f"{found}: add images, or leave out such classes with --min-images {needed}")


def _class_name(label: int, class_names: Sequence[str] | None) -> str:
    return f"class '{class_names[label]}'" if class_names is not None and label >= 0 else f"class {label}"
