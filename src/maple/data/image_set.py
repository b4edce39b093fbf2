"""Set of square images with labels, decoded into memory or decoded again whenever they are read.

Every source becomes an :class:`ImageSet`. Nothing here is random or augmented: an image has one decoded form, and its
key is a digest of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from maple.data._decoder import Item, content_key
from maple.data.decode import (
    Decoding,
    Fit,
    Size,
    auto_size,
    check_size_and_fit,
    fit_square,
    full_scale,
    scale_to_8_bit,
    to_rgb,
)
from maple.data.stream import Chunk, Source, decode_chunks
from maple.errors import DataError, suggest
from maple.types import Skipped

Labels = tuple[np.ndarray, tuple[str, ...]]  # class ids (N,) int64, and class names
Progress = Callable[[int, int], None]  # images done, images in all

MEMORY_LIMIT = 2 * 2**30
STATISTICS_IMAGES = 5000  # that channel statistics are taken over

_BLOCK = 128  # images of an array that are converted at a time
_NO_FLIPS = ("digits", "svhn")  # a mirrored digit is another sign, or none
# Under a microscope nothing is up: words that tell from a name that images may be flipped along both axes.
_NO_UPRIGHT = ("diatom", "plankton", "alga", "micro", "foram", "radiolari", "pollen", "protist")


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet(Source):
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
    keys: np.ndarray  # (N,) S32: digest of the content, from which splits are made
    pixels: np.ndarray | None = None  # (N, S, S, 3) uint8
    skipped: tuple[Skipped, ...] = ()  # files that cannot be used, and why
    name: str = "images"
    augment: str = "crop,flip"  # meaning of ``augment='auto'`` for these images
    fit: Fit = "pad"
    store: Source | None = None  # encoded images, where ``pixels`` is None
    rows: np.ndarray | None = None  # (N,) positions in ``store``

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        where = "in memory" if self.pixels is not None else "from disk"
        return f"ImageSet('{self.name}', {len(self)} images, {len(self.class_names)} classes, {self.size} px, {where})"

    def read(self, i: int) -> np.ndarray:
        """Image ``i``, (S, S, 3) uint8."""
        if self.pixels is not None:
            return self.pixels[i]
        (pixels,) = read_pixels(self, [np.array([i])])
        return pixels[0]

    @property
    def is_decoded(self) -> bool:
        return self.pixels is not None

    def digest(self) -> str:
        return content_key("\0".join(self.files).encode() + self.keys.tobytes())

    def item(self, i: int) -> Item:
        if self.pixels is not None:
            return self.pixels[i]
        assert self.store is not None and self.rows is not None
        return self.store.item(int(self.rows[i]))

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        yield from ((self.files[i], self.item(i)) for i in range(start, len(self)))

    def subset(self, indices: Any) -> ImageSet:
        """Images at ``indices`` (integers or a mask), with the same classes; ``skipped`` stays with the whole set."""
        index = np.asarray(indices)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        arrays = {name: getattr(self, name) for name in ("labels", "keys", "pixels", "rows")}
        part = {name: array[index] for name, array in arrays.items() if array is not None}
        return replace(self, **part, files=tuple(self.files[i] for i in index), skipped=())

    def with_class_names(self, names: Sequence[str]) -> ImageSet:
        """Relabel the images to index ``names``; classes are matched by name, never by position."""
        position = {name: i for i, name in enumerate(names)}
        for name in (self.class_names[c] for c in np.unique(self.labels[self.labels >= 0])):
            if name not in position:
                unknown = f"class '{name}' of '{self.name}' is not among the {len(names)} known classes"
                raise DataError(f"{unknown}: {suggest(name, names)}")
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
        """Make an image set of an array (N, H, W), (N, H, W, 1), (N, H, W, 3) or (N, H, W, 4).

        Values are uint8, integers of up to 16 bits, or floats in [0, 1]; labels are integers or class names.
        """
        size = check_size_and_fit(size, fit)
        raw = _as_image_array(images, name)
        n, height, width, _ = raw.shape
        label_ids, names = no_labels(n) if labels is None else index_labels(np.asarray(labels), class_names, name)
        if len(label_ids) != n:
            raise DataError(f"'{name}' has {n} images but {len(label_ids)} labels: each image needs one label")
        side = auto_size(np.array([[width, height]])) if size == "auto" else size
        if (needed := n * side * side * 3) > memory_limit:
            found = f"'{name}' needs {needed / 2**30:.1f} GiB of memory at {side} px"
            raise DataError(f"{found}: choose a smaller size, or save it as Parquet or as a folder of images")
        return ImageSet(
            labels=label_ids,
            class_names=names,
            files=tuple(f"{name}#{i}" for i in range(n)),
            size=side,
            keys=content_keys(raw),
            pixels=_square_arrays(raw, side, fit, name),
            name=name,
            augment=default_augment(name),
            fit=fit,
        )


def content_keys(images: np.ndarray) -> np.ndarray:
    """Digests (N,) S32 of images (N, H, W, C)."""
    return np.array([content_key(np.ascontiguousarray(image)) for image in images], dtype="S32")


def default_augment(name: str) -> str:
    """Meaning of ``augment='auto'`` for the source ``name``.

    >>> default_augment("cifar10/train"), default_augment("digits"), default_augment("river-Diatoms/train")
    ('crop,flip', 'crop', 'crop,flip-both')
    """
    if name.startswith(_NO_FLIPS):
        return "crop"
    return "crop,flip-both" if any(word in name.lower() for word in _NO_UPRIGHT) else "crop,flip"


# --- pixels ----------------------------------------------------------------------------------------------------------


def read_pixels(images: ImageSet, plan: Iterable[np.ndarray], workers: int = 0) -> Iterator[np.ndarray]:
    """Pixels (B, S, S, 3) of each batch of rows in ``plan``; ``workers`` processes decode what is not in memory.

    >>> images = ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8))
    >>> [batch.shape for batch in read_pixels(images, [np.array([0, 3]), np.array([4])])]
    [(2, 8, 8, 3), (1, 8, 8, 3)]
    """
    if images.pixels is not None:
        for rows in plan:
            yield images.pixels[rows]
        return
    workers = 0 if images.store is not None and images.store.is_decoded else workers
    chunks = (Chunk(0, [images.files[i] for i in rows], [images.item(i) for i in rows]) for rows in plan)
    with closing(decode_chunks(chunks, Decoding(images.size, images.fit), workers)) as decoded:
        for batch in decoded:
            for entry in batch.skipped:
                raise DataError(f"cannot use '{entry.file}': {entry.reason}; restore or remove the file")
            yield batch.pixels


def channel_statistics(images: ImageSet) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel in [0, 1], over at most 5,000 images evenly spread, without augmentation.

    >>> pixels = np.zeros((2, 8, 8, 3), np.uint8)
    >>> pixels[1] = 255
    >>> channel_statistics(ImageSet.from_arrays(pixels))
    ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    """
    rows = np.linspace(0, len(images) - 1, min(len(images), STATISTICS_IMAGES)).astype(int)
    sums, squares, n = np.zeros(3), np.zeros(3), 0
    for row in rows:
        pixels = images.read(int(row)).reshape(-1, 3).astype(np.float64) / 255
        sums += pixels.sum(0)
        squares += (pixels**2).sum(0)
        n += len(pixels)
    mean = sums / n
    std = np.sqrt(np.maximum(squares / n - mean**2, 0))
    if std.max() < 1e-6:
        raise DataError(f"all images of '{images.name}' have one colour: check the files")
    return mean.tolist(), np.maximum(std, 1e-3).tolist()


# --- arrays -----------------------------------------------------------------------------------------------------------


def _as_image_array(images: Any, name: str) -> np.ndarray:
    """Check images, and bring them to (N, H, W, 1 | 3 | 4), of any number type."""
    images = np.asarray(images)
    shape = images.shape
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype.kind not in "buif":
        found = f"the images of '{name}' have shape {shape} and type {images.dtype}"
        raise DataError(f"{found}: give numbers of shape (N, height, width) or (N, height, width, 3)")
    if images.shape[-1] not in (1, 3, 4):
        hint = "put the channels last" if images.shape[1] in (1, 3, 4) else "give 1, 3 or 4 channels"
        raise DataError(f"the images of '{name}' have shape {shape}: {hint}, (N, height, width, channels)")
    if 0 in images.shape:
        raise DataError(f"no images in '{name}': its array has shape {shape}, give at least one image")
    return images


def _square_arrays(raw: np.ndarray, size: int, fit: Fit, name: str) -> np.ndarray:
    """Convert (N, H, W, 1 | 3 | 4) of any type to (N, S, S, 3) uint8, scaled alike for all images."""
    if raw.dtype.kind in "if" and raw.min() < 0:
        raise DataError(f"the images of '{name}' hold negative values: save pixels from 0 to 255, or from 0 to 1")
    try:
        full = full_scale(raw)
    except DataError as error:
        raise DataError(f"the images of '{name}' hold {error}: save pixels from 0 to 255, or from 0 to 1") from None
    n, height, width, channels = raw.shape
    pixels = np.empty((n, size, size, 3), dtype=np.uint8)
    for start in range(0, n, _BLOCK):
        block = scale_to_8_bit(raw[start : start + _BLOCK], full)
        if (height, width) == (size, size) and channels != 4:
            pixels[start : start + _BLOCK] = block  # one channel is repeated
            continue
        for i, image in enumerate(block, start):
            rgb = to_rgb(Image.fromarray(image[..., 0] if channels == 1 else image))
            pixels[i] = np.asarray(fit_square(rgb, size, fit))
    return pixels


# --- labels ----------------------------------------------------------------------------------------------------------


def no_labels(n: int) -> Labels:
    """Labels and class names of ``n`` images whose classes are unknown."""
    return np.full(n, -1, dtype=np.int64), ()


def index_labels(values: np.ndarray | list[str], declared: Sequence[str] | None, where: Any) -> Labels:
    """Map labels (N,) to indices of class names: those declared, the strings themselves, or the numbers as text.

    An array gives all strings the length of the longest one, a list does not.

    >>> index_labels(np.array([7, 10, 7]), None, "x")
    (array([0, 1, 0]), ('7', '10'))
    """
    if declared is not None and len(set(declared)) < len(declared):
        twice = next(name for name in declared if list(declared).count(name) > 1)
        raise DataError(f"'{where}' has two classes named '{twice}': give each class its own name")
    if isinstance(values, list):
        return _index_names(values, declared, where)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "iubU":
        found = f"shape {values.shape} and type {values.dtype}"
        raise DataError(f"the labels of '{where}' have {found}: give one integer or name per image")
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
    top = np.iinfo(np.int64).max if declared is None else len(declared)
    for row in np.flatnonzero((values < 0) | (values >= top))[:1]:
        allowed = "labels start at 0" if declared is None else f"with {top} class names, labels go from 0 to {top - 1}"
        raise DataError(f"label {values[row]} in row {row} of '{where}' is out of range: {allowed}")
    if declared is not None:
        return values, tuple(map(str, declared))
    distinct, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), tuple(map(str, distinct))
