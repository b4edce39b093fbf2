"""Many square images with labels: decoded into memory, or kept encoded and decoded whenever they are read.

An :class:`ImageSet` is what every source becomes. Nothing here is random or augmented: an image has one decoded form,
and its key is a digest of its content.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from PIL import Image

from maple.data.decode import (
    Fit,
    Size,
    auto_size,
    check_file_size,
    check_size_and_fit,
    decode_bytes,
    fit_square,
    full_scale,
    open_file,
    read_dimensions,
    read_file,
    scale_to_8_bit,
    to_rgb,
)
from maple.errors import DataError, suggest
from maple.types import Skipped

Progress = Callable[[int, int], None]  # images done, images in all

MEMORY_LIMIT = 2 * 2**30

_NO_FLIPS = ("digits", "svhn")  # a mirrored digit is another sign, or none
# Under a microscope nothing is up: words that tell from a name that images may be flipped along both axes.
_NO_UPRIGHT = ("diatom", "plankton", "alga", "micro", "foram", "radiolari", "pollen", "protist")


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """N square images with labels, in memory (``pixels``) or read from disk one at a time (``pixels`` is None).

    >>> import numpy as np
    >>> images = ImageSet.from_arrays(np.zeros((3, 8, 8), np.uint8), [1, 0, 1], ["cat", "dog"], name="pets")
    >>> images
    ImageSet('pets', 3 images, 2 classes, 8 px, in memory)
    >>> images.subset([0, 2]).labels
    array([1, 1])
    >>> images.with_class_names(["dog", "cat"]).labels
    array([0, 1, 0])
    """

    labels: np.ndarray  # (N,) int64 class ids; -1 where unknown
    class_names: tuple[str, ...]
    files: tuple[str, ...]  # where each image came from
    size: int  # side of the square, S
    keys: np.ndarray  # (N,) S32: digest of the content, what splits are made from
    pixels: np.ndarray | None = None  # (N, S, S, 3) uint8
    skipped: tuple[Skipped, ...] = ()  # what could not be used, and why
    name: str = "images"
    augment: str = "crop,flip"  # what ``augment='auto'`` means for these images
    fit: Fit = "pad"
    store: FileStore | ColumnStore | None = None  # encoded images, where ``pixels`` is None
    rows: np.ndarray | None = None  # (N,) rows of ``store``

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        where = "in memory" if self.pixels is not None else "from disk"
        return f"ImageSet('{self.name}', {len(self)} images, {len(self.class_names)} classes, {self.size} px, {where})"

    def read(self, i: int) -> np.ndarray:
        """Image ``i``, (S, S, 3) uint8."""
        if self.pixels is not None:
            return self.pixels[i]
        assert self.store is not None and self.rows is not None
        try:
            return decode_bytes(self.store.read(int(self.rows[i])), self.size, self.fit)
        except DataError as error:
            raise DataError(f"cannot use '{self.files[i]}': {error}") from None

    def subset(self, indices: Any) -> ImageSet:
        """The images at ``indices`` (integers or a mask), with the same classes; ``skipped`` stays with the whole."""
        index = np.asarray(indices)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        return replace(
            self,
            labels=self.labels[index],
            files=tuple(self.files[i] for i in index),
            keys=self.keys[index],
            pixels=self.pixels[index] if self.pixels is not None else None,
            rows=self.rows[index] if self.rows is not None else None,
            skipped=(),
        )

    def with_class_names(self, names: Sequence[str]) -> ImageSet:
        """The same images with labels that index ``names``: classes are matched by name, never by position."""
        position = {name: i for i, name in enumerate(names)}
        for c in np.unique(self.labels[self.labels >= 0]):
            if self.class_names[c] not in position:
                raise DataError(
                    f"class '{self.class_names[c]}' of '{self.name}' is not among the {len(names)} known classes: "
                    f"{suggest(self.class_names[c], names)}"
                )
        to_new = np.array([position.get(name, -1) for name in self.class_names] + [-1], dtype=np.int64)
        return replace(self, labels=to_new[self.labels], class_names=tuple(names))  # label -1 finds the last entry, -1

    @staticmethod
    def from_arrays(
        images: Any,
        labels: Any = None,
        class_names: Sequence[str] | None = None,
        *,
        name: str = "arrays",
        size: Size = "auto",
        fit: Fit = "pad",
        memory_limit: int = MEMORY_LIMIT,
    ) -> ImageSet:
        """Images from an array (N, H, W), (N, H, W, 1), (N, H, W, 3) or (N, H, W, 4).

        Values are uint8, integers of up to 16 bits, or floats in [0, 1]; labels are integers or class names.
        """
        size = check_size_and_fit(size, fit)
        raw = _as_image_array(images, name)
        n, height, width, _ = raw.shape
        label_ids, names = no_labels(n) if labels is None else index_labels(np.asarray(labels), class_names, name)
        if len(label_ids) != n:
            raise DataError(f"'{name}' has {n} images but {len(label_ids)} labels: each image needs one label")
        side = auto_size(np.array([[width, height]])) if size == "auto" else size
        if n * side * side * 3 > memory_limit:
            raise DataError(
                f"'{name}' would take {n * side * side * 3 / 2**30:.1f} GiB at {side} px: choose a smaller size, or "
                "save it as Parquet or as a folder of images, which need not fit into memory"
            )
        return ImageSet(
            labels=label_ids,
            class_names=names,
            files=tuple(f"{name}#{i}" for i in range(n)),
            size=side,
            keys=np.array([_digest(np.ascontiguousarray(image)) for image in raw], dtype="S32"),
            pixels=_square_arrays(raw, side, fit, name),
            name=name,
            augment=default_augment(name),
            fit=fit,
        )


def default_augment(name: str) -> str:
    """What ``augment='auto'`` means for the source ``name``.

    >>> default_augment("cifar10/train"), default_augment("digits"), default_augment("river-Diatoms/train")
    ('crop,flip', 'crop', 'crop,flip-both')
    """
    if name.startswith(_NO_FLIPS):
        return "crop"
    return "crop,flip-both" if any(word in name.lower() for word in _NO_UPRIGHT) else "crop,flip"


# --- labels -----------------------------------------------------------------------------------------------------------


def no_labels(n: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) and class names of ``n`` images whose classes are unknown."""
    return np.full(n, -1, dtype=np.int64), ()


def index_labels(values: np.ndarray, declared: Sequence[str] | None, where: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) as indices of class names: the declared ones, the strings themselves, or the numbers as text.

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
        order = list(declared) if declared is not None else sorted(set(values.tolist()))
        unknown = sorted(set(values.tolist()) - set(order))
        if unknown:
            raise DataError(f"label '{unknown[0]}' in '{where}' is unknown: {suggest(unknown[0], order)}")
        position = {name: i for i, name in enumerate(order)}
        return np.array([position[value] for value in values.tolist()], dtype=np.int64), tuple(map(str, order))
    values = values.astype(np.int64)
    top = len(declared) if declared is not None else np.iinfo(np.int64).max
    bad = np.flatnonzero((values < 0) | (values >= top))
    if len(bad):
        allowed = (
            f"there are {top} class names, so labels go from 0 to {top - 1}"
            if declared is not None
            else "labels start at 0"
        )
        raise DataError(f"label {values[bad[0]]} in row {bad[0]} of '{where}' is out of range: {allowed}")
    if declared is not None:
        return values, tuple(str(name) for name in declared)
    distinct, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), tuple(str(value) for value in distinct)


# --- encoded images ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileStore:
    """Encoded images in files, read when they are asked for."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, i: int) -> BinaryIO:
        return open_file(self.paths[i])

    def read(self, i: int) -> bytes:
        return read_file(self.paths[i])


@dataclass(frozen=True, eq=False)
class ColumnStore:
    """Encoded images in a column of a Parquet file; the column stays encoded, in memory."""

    column: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.column)

    def open(self, i: int) -> BinaryIO:
        return io.BytesIO(self.read(i))

    def read(self, i: int) -> bytes:
        data = self.column[i].as_py()
        if not data:
            raise DataError("the row holds no image bytes")
        check_file_size(len(data))
        return data


@dataclass(frozen=True, eq=False)
class Listing:
    """What a source holds, before anything is decoded."""

    store: FileStore | ColumnStore
    files: tuple[str, ...]
    labels: np.ndarray  # (N,) int64
    class_names: tuple[str, ...]
    name: str
    skipped: tuple[Skipped, ...] = ()


def decode_listing(
    listing: Listing,
    size: Size,
    fit: Fit,
    memory_limit: int,
    progress: Progress | None,
) -> ImageSet:
    """Decode every image once: into memory where that is allowed, else only to see that it can be decoded."""
    store, n = listing.store, len(listing.store)
    if size == "auto":
        dimensions = _measure_all(store)
        readable = dimensions[dimensions[:, 0] > 0]
        size = auto_size(readable) if len(readable) else 16
    in_memory = n * size * size * 3 <= memory_limit
    pixels = np.empty((n, size, size, 3), dtype=np.uint8) if in_memory else None
    keys = np.zeros(n, dtype="S32")
    reasons: dict[int, str] = {}

    def decode(rows: range) -> None:
        for i in rows:
            try:
                data = store.read(i)
                keys[i] = _digest(data)
                image = decode_bytes(data, size, fit)
                if pixels is not None:
                    pixels[i] = image
            except DataError as error:
                reasons[i] = str(error)

    _in_threads(decode, n, progress)
    skipped = tuple(Skipped(listing.files[i], reasons[i]) for i in sorted(reasons))
    images = ImageSet(
        labels=listing.labels,
        class_names=listing.class_names,
        files=listing.files,
        size=size,
        keys=keys,
        pixels=pixels,
        name=listing.name,
        augment=default_augment(listing.name),
        fit=fit,
        store=None if in_memory else store,
        rows=None if in_memory else np.arange(n),
    )
    if skipped:
        images = images.subset(np.setdiff1d(np.arange(n), list(reasons)))
        _check_losses(listing, images, skipped)
    return replace(images, skipped=listing.skipped + skipped)


def _check_losses(listing: Listing, images: ImageSet, skipped: tuple[Skipped, ...]) -> None:
    """Some images may be broken, but not all, and not all of a class."""
    first = f"'{skipped[0].file}': {skipped[0].reason}"
    if len(images) == 0:
        if len(skipped) == 1:
            raise DataError(f"cannot use {first}; give another image")
        raise DataError(f"none of the {len(skipped)} images of '{listing.name}' can be used ({first}): replace them")
    lost = np.setdiff1d(listing.labels, images.labels)
    if len(lost):
        raise DataError(
            f"class '{listing.class_names[lost[0]]}' of '{listing.name}' has no image that can be used (of "
            f"{len(skipped)} skipped files, the first is {first}): replace its files or remove the class"
        )


def _measure_all(store: FileStore | ColumnStore) -> np.ndarray:
    """Width and height (N, 2) of all images; 0 where the header cannot be read."""
    dimensions = np.zeros((len(store), 2), dtype=np.int64)

    def measure(rows: range) -> None:
        for i in rows:
            try:
                with store.open(i) as file:
                    dimensions[i] = read_dimensions(file)
            except DataError:
                continue  # decoding will say why

    _in_threads(measure, len(store), None)
    return dimensions


def _in_threads(work: Callable[[range], None], n: int, progress: Progress | None) -> None:
    """Do ``work`` on all of range(n), in blocks that a pool of threads shares.

    The result does not depend on the number of threads. Threads have not been seen to be reliably faster than one.
    """
    blocks = [range(start, min(start + 128, n)) for start in range(0, n, 128)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for block, _ in zip(blocks, pool.map(work, blocks)):
            if progress is not None:
                progress(block.stop, n)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


# --- arrays -----------------------------------------------------------------------------------------------------------


def _as_image_array(images: Any, name: str) -> np.ndarray:
    """Images as (N, H, W, 1 | 3 | 4), of any number type."""
    images = np.asarray(images)
    shape = images.shape
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype.kind not in "buif":
        raise DataError(
            f"the images of '{name}' have shape {shape} and type {images.dtype}: expected numbers of shape "
            "(N, height, width) or (N, height, width, 3)"
        )
    if images.shape[-1] not in (1, 3, 4):
        hint = "put the channels last" if images.shape[1] in (1, 3, 4) else "expected 1, 3 or 4 channels"
        raise DataError(f"the images of '{name}' have shape {shape}: {hint}, (N, height, width, channels)")
    if 0 in images.shape:
        raise DataError(f"no images in '{name}': its array has shape {shape}")
    return images


def _square_arrays(raw: np.ndarray, size: int, fit: Fit, name: str) -> np.ndarray:
    """(N, H, W, 1 | 3 | 4) of any type as (N, S, S, 3) uint8, scaled alike for all images."""
    if raw.dtype.kind in "if" and raw.min() < 0:
        raise DataError(f"the images of '{name}' hold negative values: save pixels from 0 to 255, or from 0 to 1")
    try:
        full = full_scale(raw)
    except DataError as error:
        raise DataError(f"the images of '{name}' hold {error}: save pixels from 0 to 255, or from 0 to 1") from None
    n, height, width, channels = raw.shape
    pixels = np.empty((n, size, size, 3), dtype=np.uint8)

    def convert(rows: range) -> None:
        block = scale_to_8_bit(raw[rows.start : rows.stop], full)
        if (height, width) == (size, size) and channels != 4:
            pixels[rows.start : rows.stop] = block  # one channel is repeated
            return
        for i, image in zip(rows, block):
            rgb = to_rgb(Image.fromarray(image[..., 0] if channels == 1 else image))
            pixels[i] = np.asarray(fit_square(rgb, size, fit))

    _in_threads(convert, n, None)
    return pixels
