"""The images of a run: opened and split as its section [origin] says, in the class order of its head.

Digests in ``classes.json`` tell later commands whether the source still holds the same images.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from maple.data.image_set import ImageSet, Progress
from maple.data.options import DataOptions
from maple.data.shares import split_indices
from maple.data.sources import open_images
from maple.data.sources.names import SPLIT_NAMES
from maple.data.splits import Splits, load_splits
from maple.errors import DataError, RunError, UsageError
from maple.files import RunFile
from maple.progress import counting, say, warn
from maple.runs.folder import RunFolder, RunOrigin
from maple.runs.loading import warn_of_skipped
from maple.runs.requests import FitRequest, RunRequest, TrainRequest
from maple.runs.setup.request import LEFT_OUT, describe_request
from maple.types import RunClasses, Skipped

AnyRequest = TypeVar("AnyRequest", TrainRequest, FitRequest)
RESTORE = "restore the images, or give their folder with --data-root"

# --- opening ----------------------------------------------------------------------------------------------------------


def open_splits(request: RunRequest, options: DataOptions) -> Splits:
    """The splits of a run that is to be made; validation images and unknown images that it asks for must be there."""
    splits = load_run_splits(describe_request(request), options, request.data_root)
    if LEFT_OUT in request.ood.values():
        left_out_images(splits)
    if not len(splits.validation):
        raise UsageError(
            "there are no validation images: give them a share of --splits, or of their own (--validation of maple "
            "train, --calibrate of maple fit)"
        )
    return splits


def load_run_splits(origin: RunOrigin, options: DataOptions, data_root: Path | None) -> Splits:
    """The splits of a run.

    With ``origin.calibrate``, the source holds the images that the network was trained on, and all are training
    images; with ``origin.classes``, these are the classes in the order of the head's outputs.
    """
    with counting("decoding") as progress:
        if origin.calibrate:
            splits = _split_unseen(origin, options, data_root, progress)
        else:
            splits = load_splits(
                origin.source,
                options,
                data_root=data_root,
                test=origin.test,
                validation=origin.validation,
                calibration=origin.calibration,
                progress=progress,
            )
    return order_classes(splits, origin.classes) if origin.classes else splits


def reopen_splits(run: RunFolder, size: int, data_root: Path | None = None, remedy: str = RESTORE) -> Splits:
    """The splits of a finished run, from its source; :class:`RunError` if the images have changed since training.

    ``remedy`` is what the command proposes then.
    """
    settings = run.read_config()
    origin = settings.origin
    options = dataclasses.replace(settings.resolve().data, size=size)
    try:
        splits = load_run_splits(origin, options, data_root or origin.root)
    except UsageError as error:
        raise RunError(f"cannot reopen the images of the run ({error}): {remedy}") from None
    digests = run.read_classes().digests
    if any(digest_images(getattr(splits, name)) != digest for name, digest in digests.items()):
        raise RunError(
            f"the images of '{origin.source}' have changed since training, and its splits cannot be restored: {remedy}"
        )
    return splits


def _split_unseen(origin: RunOrigin, options: DataOptions, data_root: Path | None, progress: Progress | None) -> Splits:
    """All images of the source for training; those of ``calibrate`` for validation and calibration.

    The shares are those of validation and calibration in ``--splits``. Images that are also in the source were seen by
    the network: they are left out of validation, calibration and test.
    """
    _, validation, calibration, _ = options.splits
    open_like = partial(open_images, fit=options.fit, data_root=data_root, progress=progress)
    train = open_like(origin.source, size=options.size, split="train")

    def open_unseen(role: str, source: str, split: str) -> ImageSet:
        return _leave_out_seen(open_like(source, size=train.size, split=split), train, role)

    unseen = open_unseen("calibrate", origin.calibrate or "", "validation")
    if not validation or not calibration:
        raise UsageError("--splits leaves no images for validation or calibration: give both shares above 0")
    shares = (validation / (validation + calibration), calibration / (validation + calibration))
    parts = split_indices(unseen.labels, unseen.keys, shares, options.split_seed, unseen.class_names)
    return load_splits(
        train,
        dataclasses.replace(options, splits=(1.0, 0.0, 0.0, 0.0)),
        data_root=data_root,
        test=open_unseen("test", origin.test, "test") if origin.test else None,
        validation=dataclasses.replace(unseen.subset(parts[0]), skipped=unseen.skipped),
        calibration=unseen.subset(parts[1]),
        progress=progress,
    )


def _leave_out_seen(images: ImageSet, train: ImageSet, role: str) -> ImageSet:
    """The images without those that are training images, which are listed as skipped."""
    seen = np.isin(images.keys, train.keys)
    if seen.all():
        raise DataError(
            f"every image of --{role} '{images.name}' is among those that the network was trained on "
            f"('{train.name}'): give images that it has not seen"
        )
    reason = f"left out of {role}: the network was trained on it"
    repeated = tuple(Skipped(images.files[i], reason) for i in np.flatnonzero(seen))
    return dataclasses.replace(images.subset(~seen), skipped=images.skipped + repeated)


def left_out_images(splits: Splits | None, known: Sequence[str] = ()) -> ImageSet:
    """The images of the classes that were left out, except the ``known`` ones, which ``maple update`` added."""
    images = splits.left_out_images if splits else None
    if images is None or not len(images):
        raise UsageError(
            f"no class was left out, so '{LEFT_OUT}' has no images: train with --leave-out or --min-images"
        )
    unknown = omit_classes(images, known)
    if not len(unknown):
        raise UsageError(f"maple update added all classes that were left out, so '{LEFT_OUT}' has no images: remove it")
    return unknown


def omit_classes(images: ImageSet, names: Sequence[str]) -> ImageSet:
    """The images of all classes but those named; class ids stay.

    >>> images = open_images("digits")
    >>> len(images), len(omit_classes(images, ["8", "9"]))
    (1797, 1443)
    """
    kept = np.array([name not in names for name in images.class_names], dtype=bool)
    return images.subset(kept[images.labels])


# --- order of the classes ---------------------------------------------------------------------------------------------


def order_classes(splits: Splits, names: Sequence[str]) -> Splits:
    """The same splits with their classes in another order."""
    if set(names) != set(splits.class_names) or len(names) != len(splits.class_names):
        missing = sorted(set(names) ^ set(splits.class_names)) or ["a name given twice"]
        raise UsageError(
            f"the {len(names)} class names are not those of the {len(splits.class_names)} classes of the data, "
            f"first '{missing[0]}': give each class of the data once"
        )
    ordered = {role: getattr(splits, role).with_class_names(names) for role in SPLIT_NAMES}
    return dataclasses.replace(splits, **ordered)


def order_like_head(request: AnyRequest, splits: Splits, names: Sequence[str]) -> tuple[AnyRequest, Splits]:
    """The classes in the order of the network's head, if it names those of the data."""
    if request.class_names or set(names) != set(splits.class_names):
        return request, splits
    return dataclasses.replace(request, class_names=tuple(names)), order_classes(splits, names)


# --- records ----------------------------------------------------------------------------------------------------------


def describe_classes(splits: Splits) -> RunClasses:
    """The content of ``classes.json`` before training."""
    return RunClasses(
        classes=splits.class_names,
        skipped=splits.skipped,
        left_out=splits.left_out,
        digests={"train": digest_images(splits.train), "test": digest_images(splits.test)},
    )


def digest_images(images: ImageSet) -> str:
    """A digest of content and classes; order and file names do not matter.

    >>> images = open_images("digits")
    >>> digest_images(images) == digest_images(images.subset(np.arange(len(images))[::-1]))
    True
    >>> digest_images(images) == digest_images(images.subset(np.arange(100)))
    False
    """
    order = np.lexsort((images.labels, images.keys))
    parts = ("\0".join(images.class_names).encode(), images.keys[order].tobytes(), images.labels[order].tobytes())
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def announce_images(request: RunRequest, splits: Splits, options: DataOptions, more: str = "") -> None:
    """Print the number of images per split, the run folder, and what was skipped or left out."""
    sizes = {name: len(getattr(splits, name)) for name in SPLIT_NAMES}
    say(
        f"{splits.train.name}: {len(splits.class_names)} classes, {splits.train.size} x {splits.train.size} pixels, "
        + ", ".join(f"{n} {name}" for name, n in sizes.items())
        + more
    )
    say(f"run folder: {request.folder}")
    warn_of_skipped(splits.skipped, where=f"; all are listed in {RunFile.CLASSES} of the run")
    few = [name for name in splits.left_out if name not in options.leave_out]
    if few:
        warn(f"{len(few)} classes with fewer than {options.min_images} images are left out")
