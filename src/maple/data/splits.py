"""Train, validation, calibration and test: four disjoint sets of images.

The split an image belongs to follows from its content and the seed alone, not from file names, row order or the order
in which a machine lists a directory; identical images are never in two splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import MEMORY_LIMIT, ImageSet, Progress
from maple.data.sources import SPLIT_NAMES, find_source, find_split, is_built_in, open_images, split_files
from maple.errors import DataError, UsageError, suggest
from maple.options import DataOptions
from maple.text import plural
from maple.types import Skipped


@dataclass(frozen=True, eq=False)
class Splits:
    """Four disjoint sets of images. A split with a share of 0 is empty; identical images are never in two splits."""

    train: ImageSet
    validation: ImageSet
    calibration: ImageSet
    test: ImageSet
    left_out: tuple[str, ...] = ()  # classes with fewer than ``min_images`` images, and those named in ``leave_out``
    left_out_images: ImageSet | None = None  # of these, labelled: in the test file, or in the source without one
    skipped: tuple[Skipped, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names


def load_splits(
    source: str | Path | ImageSet,
    options: DataOptions | None = None,
    data_root: str | Path | None = None,
    test: str | Path | ImageSet | None = None,
    validation: str | Path | ImageSet | None = None,
    calibration: str | Path | ImageSet | None = None,
    *,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Splits:
    """Train, validation, calibration and test images of a source.

    A source without splits of its own is cut four ways by the shares of ``options.splits``. Where a split is given, or
    the data set has a file for it (``cifar10`` has train and test), that is taken as it is and its share goes to train.
    Classes are matched by name, and each must occur in every split. An image that occurs in several sources stays in
    the last of train, validation, calibration, test.

    >>> splits = load_splits("digits")
    >>> [len(part) for part in (splits.train, splits.validation, splits.calibration, splits.test)]
    [1259, 181, 179, 178]
    """
    options = options or DataOptions()
    source, given = _split_sources(source, data_root)
    asked = {"test": test, "calibration": calibration, "validation": validation}
    given |= {role: value for role, value in asked.items() if value is not None}
    whole = open_images(
        source, size=options.size, fit=options.fit, data_root=data_root, memory_limit=memory_limit, progress=progress
    )
    held = {
        role: open_images(
            given[role],
            size=whole.size,
            fit=options.fit,
            data_root=data_root,
            split=role,
            memory_limit=memory_limit,
            progress=progress,
        )
        for role in asked
        if role in given
    }
    for images in (whole, *held.values()):
        if (images.labels < 0).any():
            raise DataError(f"'{images.name}' holds images without a label: splits need the class of every image")
    skipped = [*whole.skipped, *(entry for images in held.values() for entry in images.skipped)]
    shares = fold_shares(options.splits, tuple(held))
    widest = held.get("test", whole)
    whole, left_out = _leave_out(whole, options)
    unknown = _only(widest, left_out) if left_out else None
    if len(whole.class_names) < 2:
        raise DataError(_too_few_classes(whole, left_out))
    held = {role: _align(images, whole.class_names, left_out, role) for role, images in held.items()}
    whole, held, repeated = _drop_repeated(whole, held)
    for role, images in held.items():
        _check_complete(images, whole.class_names, role)
    for absent in np.setdiff1d(np.arange(len(whole.class_names)), whole.labels):
        _check_enough(0, absent, shares, whole.class_names)
    parts = split_indices(whole.labels, whole.keys, shares, options.split_seed, whole.class_names)
    cut = {role: whole.subset(part) for role, part in zip(SPLIT_NAMES, parts)}
    return Splits(**(cut | held), left_out=left_out, left_out_images=unknown, skipped=(*skipped, *repeated))


def _split_sources(
    source: str | Path | ImageSet, data_root: str | Path | None
) -> tuple[str | Path | ImageSet, dict[str, Any]]:
    """What to train on, and the splits that a data set brings along."""
    if isinstance(source, ImageSet) or is_built_in(source):
        return source, {}
    folder = find_source(source, data_root)
    splits = split_files(folder) if folder.is_dir() else {}
    train = find_split(splits, "train")
    if train is None:
        return source, {}
    found = {role: find_split(splits, role) for role in ("validation", "calibration", "test")}
    return train, {role: path for role, path in found.items() if path is not None}


def _leave_out(images: ImageSet, options: DataOptions) -> tuple[ImageSet, tuple[str, ...]]:
    """Without the classes that have fewer than ``min_images`` distinct images or are named, and their names."""
    for name in options.leave_out:
        if name not in images.class_names:
            raise UsageError(f"--leave-out: '{images.name}' has no class '{name}': {suggest(name, images.class_names)}")
    n_classes = len(images.class_names)
    image = np.unique(images.keys, return_inverse=True)[1]  # (N,) number of the distinct image
    counts = np.bincount(np.unique(image * n_classes + images.labels) % n_classes, minlength=n_classes)
    few = {name for name, count in zip(images.class_names, counts) if count < options.min_images}
    left_out = tuple(name for name in images.class_names if name in few or name in options.leave_out)
    kept = [name for name in images.class_names if name not in left_out]
    return (_only(images, kept) if left_out else images), left_out


def _only(images: ImageSet, names: Sequence[str]) -> ImageSet:
    """The images of the classes ``names``."""
    inside = np.array([name in names for name in images.class_names], dtype=bool)
    return images.subset(inside[images.labels]).with_class_names(names)


def _too_few_classes(images: ImageSet, left_out: Sequence[str]) -> str:
    if left_out:
        remedy = "lower --min-images, or leave out fewer classes"
        return f"only {len(images.class_names)} class of '{images.name}' is left or has enough images: {remedy}"
    name = f" ('{images.class_names[0]}')" if images.class_names else ""
    return (
        f"'{images.name}' has {len(images.class_names)} class{name}: at least two are needed, each in its own "
        "subfolder or with its own label"
    )


def _align(images: ImageSet, class_names: Sequence[str], left_out: Sequence[str], role: str) -> ImageSet:
    """Images of a given split with the classes of the training images."""
    dropped = np.array([name in left_out for name in images.class_names] + [False])
    if dropped.any():
        images = images.subset(~dropped[images.labels])
    try:
        return images.with_class_names(class_names)
    except DataError as error:
        raise DataError(f"the {role} images do not fit the training images: {error}") from None


def _drop_repeated(whole: ImageSet, held: dict[str, ImageSet]) -> tuple[ImageSet, dict[str, ImageSet], list[Skipped]]:
    """An image that occurs in several sources stays in the one that promises most: test, calibration, validation."""
    seen = np.zeros(0, dtype="S32")
    kept, repeated = {}, []
    for role, images in [*held.items(), ("train", whole)]:
        again = np.isin(images.keys, seen)
        repeated += [
            Skipped(images.files[i], f"left out of {role}: also in a later split") for i in np.flatnonzero(again)
        ]
        seen = np.concatenate([seen, images.keys])
        kept[role] = images.subset(~again) if again.any() else images
        if len(images) and not len(kept[role]):
            raise DataError(f"every {role} image of '{images.name}' is also in another split: give other images")
    return kept.pop("train"), kept, repeated


def _check_complete(images: ImageSet, class_names: Sequence[str], role: str) -> None:
    missing = np.flatnonzero(np.bincount(images.labels[images.labels >= 0], minlength=len(class_names)) == 0)
    if len(missing):
        more = f" and {len(missing) - 1} other classes are" if len(missing) > 1 else " is"
        raise DataError(
            f"class '{class_names[missing[0]]}'{more} missing from the {role} images '{images.name}': add images of it "
            "there, or leave the class out of training"
        )


# --- shares and indices -----------------------------------------------------------------------------------------------


def fold_shares(shares: Sequence[float], given: Sequence[str]) -> tuple[float, ...]:
    """The shares of train, validation, calibration and test, where those of the ``given`` splits go to train.

    >>> fold_shares((0.7, 0.1, 0.1, 0.1), ["test"])
    (0.8, 0.1, 0.1, 0.0)
    """
    roles = tuple(SPLIT_NAMES)
    if len(shares) != 4 or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UsageError(f"splits {tuple(shares)} cannot be used: give four shares from 0 to 1 that sum to 1")
    folded = [0.0 if role in given else float(share) for role, share in zip(roles, shares)]
    folded[0] = round(1 - sum(folded[1:]), 9)
    if folded[0] <= 0:
        raise UsageError(f"splits {tuple(shares)} leave no training images: give train a share above 0")
    return tuple(folded)


def share_out(n: int, shares: Sequence[float]) -> np.ndarray:
    """``n`` images by ``shares``: largest remainders, and at least one for every share above 0.

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
    labels: np.ndarray,
    keys: np.ndarray,
    shares: Sequence[float],
    seed: int,
    class_names: Sequence[str] | None = None,
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
        _check_enough(len(members), int(owner[members[0]]), shares, class_names)
        part[members] = np.repeat(np.arange(len(shares)), share_out(len(members), shares))
    part_of_row = part[inverse]
    parts = [np.flatnonzero(part_of_row == s) for s in range(len(shares))]
    for rows, share in zip(parts, shares):
        missing = np.setdiff1d(labels, labels[rows])
        if share > 0 and len(missing):
            raise DataError(
                f"{_class_name(missing[0], class_names)} consists of copies of images of other classes, so that it is "
                "missing from a split: give each image one class"
            )
    return parts


def _check_enough(n: int, label: int, shares: Sequence[float], class_names: Sequence[str] | None) -> None:
    needed = sum(share > 0 for share in shares)
    if n < needed:
        raise DataError(
            f"{_class_name(label, class_names)} has {plural(n, 'distinct image')}, too few for {needed} "
            f"splits: add images, or leave out such classes with --min-images {needed}"
        )


def _class_name(label: int, class_names: Sequence[str] | None) -> str:
    return f"class '{class_names[label]}'" if class_names is not None and label >= 0 else f"class {label}"
