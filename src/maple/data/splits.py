"""Splits of a data set: train, validation, calibration and test, disjoint.

The split of an image follows from its content and the seed alone, not from file names, row order or the order
in which a machine lists a directory; identical images are never in two splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from maple.data.catalogue.table import is_built_in
from maple.data.image_set import MEMORY_LIMIT, ImageSet, Progress
from maple.data.options import DataOptions
from maple.data.shares import ROLES, check_enough, fold_shares, split_indices
from maple.data.sources import is_torch_data, open_images, open_like
from maple.data.sources.names import find_source, find_split, split_files
from maple.errors import DataError, UsageError, suggest
from maple.types import Skipped

if TYPE_CHECKING:
    from maple.data.sources.torch_data import TorchData

Images: TypeAlias = "str | Path | ImageSet | TorchData"  # a source, a torch Dataset, or images that are open


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
    source: Images,
    options: DataOptions | None = None,
    data_root: str | Path | None = None,
    test: Images | None = None,
    validation: Images | None = None,
    calibration: Images | None = None,
    *,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Splits:
    """Open a source (as for ``open_images``) as train, validation, calibration and test images.

    A source without splits of its own is cut four ways by the shares of ``options.splits``. Where a split is given, or
    the data set has a file for it (``cifar10`` has train and test), that file is taken as it is and its share goes to
    train.
    Classes are matched by name, and each must occur in every split. An image that occurs in several sources stays in
    the last of train, validation, calibration, test.

    >>> splits = load_splits("digits")
    >>> [len(part) for part in (splits.train, splits.validation, splits.calibration, splits.test)]
    [1259, 181, 179, 178]
    """
    options = options or DataOptions()
    open_as = partial(open_images, fit=options.fit, data_root=data_root, memory_limit=memory_limit, progress=progress)
    source, given = _split_sources(source, data_root)
    asked = {"test": test, "calibration": calibration, "validation": validation}
    given |= {role: value for role, value in asked.items() if value is not None}
    whole = open_as(source, size=options.size)
    held = {
        role: open_like(value, whole.class_names, size=whole.size, fit=options.fit)
        if is_torch_data(value)
        else open_as(value, size=whole.size, split=role)
        for role in asked
        if (value := given.get(role)) is not None
    }
    for images in (whole, *held.values()):
        if (images.labels < 0).any():
            raise DataError(f"'{images.name}' holds images without a label: splits need the class of every image")
    return _cut(whole, held, options)


def _cut(whole: ImageSet, held: dict[str, ImageSet], options: DataOptions) -> Splits:
    """Cut a labelled set by the shares of the splits that are not ``held``, which are taken as they are."""
    skipped = [*whole.skipped, *(entry for images in held.values() for entry in images.skipped)]
    shares = fold_shares(options.splits, tuple(held))
    widest = held.get("test", whole)
    whole, left_out = _leave_out(whole, options)
    unknown = _only(widest, left_out) if left_out else None
    if len(whole.class_names) < 2:
        remedy = "lower --min-images, or leave out fewer classes" if left_out else "give each class its own subfolder"
        kept = ", ".join(map(repr, whole.class_names)) or "no class"
        raise DataError(f"training on '{whole.name}' needs at least two classes, and has {kept}: {remedy}")
    held = {role: _align(images, whole.class_names, left_out, role) for role, images in held.items()}
    whole, held, repeated = _drop_repeated(whole, held)
    for role, images in held.items():
        _check_complete(images, whole.class_names, role)
    for absent in np.setdiff1d(np.arange(len(whole.class_names)), whole.labels):
        check_enough(0, absent, shares, whole.class_names)
    parts = split_indices(whole.labels, whole.keys, shares, options.split_seed, whole.class_names)
    cut = {role: whole.subset(part) for role, part in zip(ROLES, parts)}
    return Splits(**(cut | held), left_out=left_out, left_out_images=unknown, skipped=(*skipped, *repeated))


def _split_sources(source: Images, data_root: str | Path | None) -> tuple[Images, dict[str, Images]]:
    """The source to train on, and the splits that a data set has files for."""
    if isinstance(source, ImageSet) or is_torch_data(source) or is_built_in(source):
        return source, {}
    folder = find_source(cast(str | Path, source), data_root)
    splits = split_files(folder) if folder.is_dir() else {}
    found: dict[str, Images] = {role: path for role in ROLES if (path := find_split(splits, role)) is not None}
    return (found.pop("train"), found) if "train" in found else (source, {})


def _leave_out(images: ImageSet, options: DataOptions) -> tuple[ImageSet, tuple[str, ...]]:
    """Leave out classes with fewer than ``min_images`` distinct images and those named; the rest, and their names."""
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
    """Keep the images of the classes ``names``."""
    inside = np.array([name in names for name in images.class_names], dtype=bool)
    return images.subset(inside[images.labels]).with_class_names(names)


def _align(images: ImageSet, class_names: Sequence[str], left_out: Sequence[str], role: str) -> ImageSet:
    """Match the classes of a given split to those of the training images."""
    dropped = np.array([name in left_out for name in images.class_names] + [False])
    if dropped.any():
        images = images.subset(~dropped[images.labels])
    try:
        return images.with_class_names(class_names)
    except DataError as error:
        raise DataError(f"the {role} images do not fit the training images: {error}") from None


def _drop_repeated(whole: ImageSet, held: dict[str, ImageSet]) -> tuple[ImageSet, dict[str, ImageSet], list[Skipped]]:
    """Keep an image that occurs in several sources in one: test before calibration before validation before train."""
    seen = np.zeros(0, dtype="S32")
    kept, repeated = {}, []
    for role, images in [*held.items(), ("train", whole)]:
        again = np.isin(images.keys, seen)
        reason = f"left out of {role}: also in a later split"
        repeated += [Skipped(images.files[i], reason) for i in np.flatnonzero(again)]
        seen = np.concatenate([seen, images.keys])
        kept[role] = images.subset(~again) if again.any() else images
        if len(images) and not len(kept[role]):
            raise DataError(f"every {role} image of '{images.name}' is also in another split: give other images")
    return kept.pop("train"), kept, repeated


def _check_complete(images: ImageSet, class_names: Sequence[str], role: str) -> None:
    missing = np.setdiff1d(np.arange(len(class_names)), images.labels)
    if len(missing):
        more = f" and {len(missing) - 1} other classes are" if len(missing) > 1 else " is"
        remedy = "add images of it there, or leave the class out of training"
        raise DataError(f"class '{class_names[missing[0]]}'{more} not in the {role} images '{images.name}': {remedy}")
