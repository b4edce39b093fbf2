"""Images in, square uint8 arrays out: sources, decoding, and four splits.

A *source* is an image folder with one subfolder per class, a ``.parquet`` or ``.npz`` file, a built-in set (``digits``,
``simulated-diatoms``) or the name of a data set under the data root. :func:`open_images` turns it into an
:class:`ImageSet`; :func:`load_splits` into train, validation, calibration and test.

Nothing here is random or augmented: an image has one decoded form, and the split it belongs to follows from its content
and the seed alone, not from file names, row order or the order in which a machine lists a directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageOps, UnidentifiedImageError

from maple.config import DataOptions
from maple.errors import DataError, UsageError, suggest
from maple.types import Skipped

Fit = Literal["pad", "stretch", "crop"]
Progress = Callable[[int, int], None]  # images done, images in all
Size = Literal["auto"] | int

MAX_PIXELS = 100_000_000
MAX_SIDE = 20_000  # refused from this side on
MAX_FILE_BYTES = 512 * 2**20
MAX_SIZE = 4096  # side of the decoded square
MEMORY_LIMIT = 2 * 2**30

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm", ".pnm")
_KINDS = "/".join(IMAGE_SUFFIXES[:8])
_TABLES = (".parquet", ".npz")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none that runs a program or nests another format
_BUILT_IN = ("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far")
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid"),
    "calibration": ("calibration", "cal"),
    "test": ("test", "testing"),
}
_ALL_SPLIT_NAMES = {name for names in _SPLIT_NAMES.values() for name in names}
_AUGMENT_BY_NAME = {  # what 'auto' means where the default, crop and left-right flips, does not fit
    "digits": "crop",
    "svhn": "crop",
    "simulated-diatoms": "crop,flip-both",
    "plankton": "crop,flip-both",
}


# --- image sets ------------------------------------------------------------------------------------------------------


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
            return _decode(self.store.read(int(self.rows[i])), self.size, self.fit)
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
        size = _check_request(size, fit)
        raw = _as_image_array(images, name)
        n, height, width, _ = raw.shape
        label_ids, names = _no_labels(n) if labels is None else _index_labels(np.asarray(labels), class_names, name)
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


@dataclass(frozen=True, eq=False)
class Splits:
    """Four disjoint sets of images. A split with a share of 0 is empty; identical images are never in two splits."""

    train: ImageSet
    validation: ImageSet
    calibration: ImageSet
    test: ImageSet
    left_out: tuple[str, ...] = ()  # classes with fewer than ``min_images`` images
    skipped: tuple[Skipped, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names


def default_augment(name: str) -> str:
    """What ``augment='auto'`` means for the source ``name``.

    >>> default_augment("cifar10/train"), default_augment("digits"), default_augment("plankton_ndsb/train")
    ('crop,flip', 'crop', 'crop,flip-both')
    """
    return next((augment for start, augment in _AUGMENT_BY_NAME.items() if name.startswith(start)), "crop,flip")


# --- one image -------------------------------------------------------------------------------------------------------


def decode_image(source: bytes | str | Path, size: int, fit: Fit = "pad") -> np.ndarray:
    """One encoded image (bytes or a file) as a square RGB array, (S, S, 3) uint8.

    Transparency is laid on white, EXIF orientation applied, 16-bit grey scaled by the smallest of 8, 12 and 16 bits
    that holds its maximum; of several frames the first counts. An image that already has the right size keeps its
    pixels exactly; any other is made square (``pad`` with the median colour of its border, ``stretch``, or ``crop``
    to the centre) and resized with Pillow's bilinear filter.

    >>> file = io.BytesIO()
    >>> Image.new("LA", (4, 2), (0, 255)).save(file, "PNG")
    >>> decode_image(file.getvalue(), 8).shape
    (8, 8, 3)
    """
    _check_request(size, fit)
    if isinstance(source, bytes):
        try:
            return _decode(source, size, fit)
        except DataError as error:
            raise DataError(f"cannot use the image: {error}") from None
    try:
        return _decode(FileStore((Path(source),)).read(0), size, fit)
    except DataError as error:
        raise DataError(f"cannot use '{source}': {error}") from None


class _OwnLimits:
    """Within it Pillow's size limit is off, since ours is checked instead.

    Pillow *warns* about large images, from a process-wide setting; we refuse them. Counted, so that threads may nest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._saved: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._saved, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                Image.MAX_IMAGE_PIXELS = self._saved


_own_limits = _OwnLimits()


def _open_header(file: BinaryIO) -> Image.Image:
    """The image with its header read and its dimensions accepted; no pixel is decoded yet."""
    try:
        image = Image.open(file, formats=_FORMATS)
    except UnidentifiedImageError:
        raise DataError("not an image that can be read, or one of 0 pixels") from None
    width, height = image.size
    if min(width, height) < 1 or max(width, height) >= MAX_SIDE or width * height > MAX_PIXELS:
        raise DataError(
            f"{width} x {height} pixels: sides must be from 1 to {MAX_SIDE - 1:,} pixels, with at most "
            f"{MAX_PIXELS // 10**6} megapixels in all"
        )
    return image


def _dimensions(file: BinaryIO) -> tuple[int, int]:
    """Width and height from the header."""
    try:
        with _own_limits:
            return _open_header(file).size
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"broken: {error}") from None


def _decode(data: bytes, size: int, fit: Fit) -> np.ndarray:
    """As :func:`decode_image`; the error is the bare reason."""
    try:
        with _own_limits, _open_header(io.BytesIO(data)) as image:
            image.draft(None, (4 * size, 4 * size))  # lets JPEG decode a much larger image at a fraction of its size
            image.load()
            square = _fit_square(_to_rgb(_upright(image)), size, fit)
            return np.frombuffer(square.tobytes(), np.uint8).reshape(size, size, 3).copy()
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over: OSError, SyntaxError, struct.error, ...
        raise DataError(f"broken or truncated: {error}") from None


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says; one that cannot be read is ignored."""
    if image.format != "TIFF" and not image.info.keys() & {"exif", "xmp", "Raw profile type exif", "XML:com.adobe.xmp"}:
        return image  # most images: asking Pillow costs a third of decoding a small one
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as RGB; transparency on white."""
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_scale_to_8_bit(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _full_scale(values: np.ndarray) -> float:
    """The value that becomes 255: 1 for floats in [0, 1], else the largest of 8, 12 or 16 bits that is needed."""
    top = values.max(initial=0)
    if not (np.isfinite(top) and np.isfinite(values.min(initial=0))):
        raise DataError("pixels that are NaN or infinite")
    if values.dtype == bool or (values.dtype.kind == "f" and top <= 1):
        return 1.0
    return float(next((limit for limit in (255, 4095, 65535) if top <= limit), top))


def _scale_to_8_bit(values: np.ndarray, full: float | None = None) -> np.ndarray:
    """Pixel values of any type as uint8.

    >>> _scale_to_8_bit(np.array([0, 2048, 4095], dtype=np.uint16))
    array([  0, 128, 255], dtype=uint8)
    """
    if values.dtype == np.uint8:
        return values
    full = _full_scale(values) if full is None else full
    return np.rint(np.clip(values, 0, full) * (255 / full)).astype(np.uint8)


def _fit_square(image: Image.Image, size: int, fit: Fit) -> Image.Image:
    """An RGB image as ``size`` x ``size`` pixels."""
    width, height = image.size
    if (width, height) == (size, size):
        return image
    if fit == "crop":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    elif fit == "pad" and width != height:
        image = _pad_square(image)
    return image.resize((size, size), Image.Resampling.BILINEAR)


def _pad_square(image: Image.Image) -> Image.Image:
    """The image in the middle of a square of the median colour of its border."""
    if max(image.size) > MAX_SIZE:  # a strip of 19,999 x 1 pixels must not become a canvas of 400 megapixels
        scale = MAX_SIZE / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)  # (H, W, 3)
    height, width = pixels.shape[:2]
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    side = max(width, height)
    top, left = (side - height) // 2, (side - width) // 2
    canvas = np.empty((side, side, 3), dtype=np.uint8)
    canvas[:] = np.sort(border, axis=0)[len(border) // 2]
    canvas[top : top + height, left : left + width] = pixels
    return Image.fromarray(canvas)


def auto_size(dimensions: np.ndarray) -> int:
    """The side to decode to, from widths and heights (N, 2).

    Equal squares of at most 96 pixels keep their size; anything else gets the median long side, rounded to a multiple
    of 8, from 16 to 64.

    >>> auto_size(np.array([[32, 32], [32, 32]])), auto_size(np.array([[40, 30], [44, 20]]))
    (32, 40)
    """
    if (dimensions == dimensions[0, 0]).all() and dimensions[0, 0] <= 96:
        return int(dimensions[0, 0])
    median = float(np.median(dimensions.max(axis=1)))
    return int(np.clip(8 * round(median / 8), 16, 64))


# --- many encoded images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileStore:
    """Encoded images in files."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, i: int) -> BinaryIO:
        try:
            file = self.paths[i].open("rb")
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror or error}") from None
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            file.close()
            raise DataError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
        return file

    def read(self, i: int) -> bytes:
        with self.open(i) as file:
            try:
                return file.read()
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror or error}") from None


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
        if len(data) > MAX_FILE_BYTES:
            raise DataError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
        return data


@dataclass(frozen=True, eq=False)
class _Listing:
    """What a source holds, before anything is decoded."""

    store: FileStore | ColumnStore
    files: tuple[str, ...]
    labels: np.ndarray  # (N,) int64
    class_names: tuple[str, ...]
    name: str
    skipped: tuple[Skipped, ...] = ()


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _in_threads(work: Callable[[range], None], n: int, progress: Progress | None) -> None:
    """Do ``work`` on all of range(n) in blocks. Pillow lets go of the interpreter while it decodes and resizes."""
    blocks = [range(start, min(start + 128, n)) for start in range(0, n, 128)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for block, _ in zip(blocks, pool.map(work, blocks)):
            if progress is not None:
                progress(block.stop, n)


def _measure_all(store: FileStore | ColumnStore) -> np.ndarray:
    """Width and height (N, 2) of all images; 0 where the header cannot be read."""
    dimensions = np.zeros((len(store), 2), dtype=np.int64)

    def measure(rows: range) -> None:
        for i in rows:
            try:
                with store.open(i) as file:
                    dimensions[i] = _dimensions(file)
            except DataError:
                continue  # decoding will say why

    _in_threads(measure, len(store), None)
    return dimensions


def _decode_listing(
    listing: _Listing,
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
                image = _decode(data, size, fit)
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


def _check_losses(listing: _Listing, images: ImageSet, skipped: tuple[Skipped, ...]) -> None:
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


# --- sources ---------------------------------------------------------------------------------------------------------


def open_images(
    source: str | Path | ImageSet | Sequence[str | Path],
    *,
    size: Size = "auto",
    fit: Fit = "pad",
    data_root: str | Path | None = None,
    split: str | None = None,
    labelled: bool = True,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> ImageSet:
    """Open the images of a source.

    A source is

    - a folder with one subfolder per class (files deeper inside a class count, hidden files do not),
    - a ``.parquet`` file with encoded images (``image``) and ``label`` or ``label_name``, as Hugging Face writes them,
    - a ``.npz`` file with ``images`` or ``x``, and ``labels`` or ``y``, optionally ``class_names``,
    - ``digits``, or ``simulated-diatoms`` with ``/near`` and ``/far``; ``simulated-diatoms?n=5000&seed=3&size=64``,
    - a data set under the data root (``data_root`` or the environment variable MAPLE_DATA): ``cifar10/test`` is
      ``<root>/cifar10/test.parquet``; ``cifar10`` alone takes ``split``, else test, validation or train,
    - with ``labelled=False`` also an image file, a folder of images, a glob, or a list of these; labels are then -1.

    ``size`` is the side of the square that images are decoded to, see :func:`auto_size`. Images stay in memory when
    they fit into ``memory_limit`` bytes, and are otherwise decoded again whenever they are read. Files that cannot be
    used are listed in ``skipped``; ``progress`` is called with the numbers of images done and in all.

    >>> open_images("digits")
    ImageSet('digits', 1797 images, 10 classes, 8 px, in memory)
    """
    size = _check_request(size, fit)
    if isinstance(source, ImageSet):
        return _reuse(source, size, labelled)
    if isinstance(source, (list, tuple)):
        if len(source) != 1:
            return _decode_listing(_list_several(source, labelled), size, fit, memory_limit, progress)
        source = source[0]
    if not isinstance(source, (str, Path)):
        raise UsageError(f"cannot open {source!r}: give the name of a data set, a file or a folder")
    if _is_built_in(source):
        images = _open_built_in(str(source), size, fit, memory_limit)
        return images if labelled else _without_labels(images)
    if not labelled and _is_glob(source):
        return _decode_listing(_list_several([source], labelled), size, fit, memory_limit, progress)
    path, name = _locate(source, data_root, split)
    if path.suffix.lower() == ".npz":
        return _open_npz(path, name, size, fit, memory_limit, labelled)
    return _decode_listing(_list_path(path, name, labelled), size, fit, memory_limit, progress)


def _check_request(size: Size, fit: str) -> Size:
    """``size``, as a plain number, once it and ``fit`` can be used."""
    if size != "auto" and (not isinstance(size, (int, np.integer)) or not 1 <= size <= MAX_SIZE):
        raise UsageError(f"size {size!r} cannot be used: give 'auto' or a number of pixels from 1 to {MAX_SIZE}")
    if fit not in get_args(Fit):
        raise UsageError(f"unknown fit '{fit}': {suggest(fit, get_args(Fit))}")
    return size if size == "auto" else int(size)


def _reuse(images: ImageSet, size: Size, labelled: bool) -> ImageSet:
    if size not in ("auto", images.size):
        raise UsageError(
            f"'{images.name}' is open with {images.size} px, not {size} px: open its source with that size"
        )
    return images if labelled else _without_labels(images)


def _without_labels(images: ImageSet) -> ImageSet:
    labels, class_names = _no_labels(len(images))
    return replace(images, labels=labels, class_names=class_names)


def _no_labels(n: int) -> tuple[np.ndarray, tuple[str, ...]]:
    return np.full(n, -1, dtype=np.int64), ()


def _list_path(path: Path, name: str, labelled: bool) -> _Listing:
    """The encoded images of a folder or file that exists."""
    if path.suffix.lower() == ".parquet":
        return _list_parquet(path, name, labelled)
    if not labelled:
        return _list_unlabelled(_expand(path), name)
    if path.is_dir():
        return _list_class_folders(path, name)
    raise DataError(
        f"'{path}' is a single file: labelled images come as a folder with one subfolder per class, Parquet or .npz"
    )


# Folders


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


def _visible(folder: Path) -> list[Path]:
    """Entries of a folder that are not hidden, sorted, so that no machine sees another order."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list the folder '{folder}': {error.strerror or error}") from None


def _walk_images(folder: Path) -> Iterator[Path]:
    """All images in a folder and below, sorted; links to folders are not followed, so that they cannot form a ring."""
    for path in _visible(folder):
        if path.is_dir():
            if not path.is_symlink():
                yield from _walk_images(path)
        elif _is_image(path):
            yield path


def _list_class_folders(folder: Path, name: str) -> _Listing:
    entries = _visible(folder)
    classes = [path for path in entries if path.is_dir()]
    loose = [path for path in entries if _is_image(path)]
    if loose and not classes:
        raise DataError(f"'{folder}' holds images but no class subfolders: put each class in its own subfolder")
    members = {path.name: list(_walk_images(path)) for path in classes}
    if not any(members.values()):
        raise DataError(f"no images in '{folder}': expected one subfolder per class with {_KINDS} files")
    for class_name, group in members.items():
        if not group:
            raise DataError(f"class '{class_name}' of '{folder}' has no images: add images or remove the subfolder")
    paths = tuple(path for group in members.values() for path in group)
    return _Listing(
        store=FileStore(paths),
        files=tuple(str(path) for path in paths),
        labels=np.repeat(np.arange(len(members)), [len(group) for group in members.values()]),
        class_names=tuple(members),
        name=name,
        skipped=tuple(Skipped(str(path), "not inside a class subfolder") for path in loose),
    )


def _is_glob(source: str | Path) -> bool:
    return any(character in str(source) for character in "*?[") and not Path(source).exists()


def _match(pattern: Path) -> list[Path]:
    """The images that a glob matches, sorted; hidden ones and those in hidden folders do not count."""
    top = Path(pattern.anchor)
    try:
        found = sorted(top.glob(str(pattern.relative_to(top))))
    except ValueError as error:
        raise UsageError(f"'{pattern}' is not a pattern for files: {error}") from None
    return [path for path in found if _is_image(path) and not any(part.startswith(".") for part in path.parts[1:])]


def _expand(source: str | Path) -> list[Path]:
    """The image files that one path, folder or glob stands for."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = list(_walk_images(path))
        if not found:
            raise DataError(f"no images in '{source}': expected {_KINDS} files there or below")
        return found
    if _is_glob(path):
        found = _match(path)
        if not found:
            raise DataError(f"no images match '{source}': check the pattern")
        return found
    if not path.is_file():
        raise UsageError(f"no file or folder '{source}': check the path")
    if path.suffix.lower() in _TABLES:
        raise UsageError(f"'{source}' cannot be opened together with other sources: give it alone")
    return [path]


def _list_several(sources: Sequence[str | Path], labelled: bool) -> _Listing:
    """Images from several places, or from a glob; such images have no labels."""
    if labelled:
        raise UsageError("labelled images come from one source: a folder with one subfolder per class, Parquet or .npz")
    paths = [path for source in sources for path in _expand(source)]
    if not paths:
        raise UsageError("no images were given: name at least one file or folder")
    return _list_unlabelled(paths, str(sources[0]) if len(sources) == 1 else "images")


def _list_unlabelled(paths: Sequence[Path], name: str) -> _Listing:
    labels, class_names = _no_labels(len(paths))
    return _Listing(FileStore(tuple(paths)), tuple(str(path) for path in paths), labels, class_names, name)


# Parquet


def _list_parquet(path: Path, name: str, labelled: bool) -> _Listing:
    """Images and labels of a Parquet file; images stay encoded."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            image = _first_present(schema.names, ("image", "img"))
            label = _first_present(schema.names, ("label", "labels", "fine_label"))
            label_name = _first_present(schema.names, ("label_name",))
            found = f"found columns: {', '.join(schema.names) or 'none'}"
            if image is None:
                raise DataError(f"'{path}' has no image column: expected 'image' or 'img' with encoded bytes, {found}")
            if labelled and label is None and label_name is None:
                raise DataError(
                    f"'{path}' has no label column: expected 'label', 'labels', 'fine_label' or 'label_name', {found}"
                )
            table = file.read(columns=[column for column in (image, label, label_name) if column is not None])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read '{path}' as Parquet: {str(error).splitlines()[0]}") from None
    if len(table) == 0:
        raise DataError(f"no images in '{path}': the file has no rows")
    column, files = _image_column(table[image], name, path)
    labels, class_names = _parquet_labels(table, label, label_name, path) if labelled else _no_labels(len(table))
    return _Listing(ColumnStore(column), files, labels, class_names, name)


def _first_present(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _image_column(column: pa.ChunkedArray, name: str, path: Path) -> tuple[pa.ChunkedArray, tuple[str, ...]]:
    """The encoded bytes, and a name for each image."""
    files = [f"{name}#{i}" for i in range(len(column))]
    if pa.types.is_struct(column.type):
        fields = [column.type.field(i).name for i in range(column.type.num_fields)]
        if "path" in fields:
            paths = pc.struct_field(column, "path").to_pylist()
            files = [given or numbered for given, numbered in zip(paths, files)]
        if "bytes" in fields:
            column = pc.struct_field(column, "bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(
            f"the image column of '{path}' holds {column.type}: expected encoded bytes (JPEG, PNG, ...), or a struct "
            "with the field 'bytes'"
        )
    return column, tuple(files)


def _parquet_labels(
    table: pa.Table, label: str | None, label_name: str | None, path: Path
) -> tuple[np.ndarray, tuple[str, ...]]:
    for column in (label, label_name):
        if column is not None and table[column].null_count:
            row = table[column].is_null().to_pylist().index(True)
            raise DataError(f"row {row} of '{path}' has no {column}: remove the row or give it one")
    names = np.array(table[label_name].to_pylist(), dtype=str) if label_name is not None else None
    if label is None:
        assert names is not None
        return _index_labels(names, None, path)
    if pa.types.is_nested(table[label].type):
        raise DataError(
            f"column '{label}' of '{path}' holds {table[label].type}: expected one integer or name per image"
        )
    values = np.array(table[label].to_pylist())
    if names is None or values.dtype.kind not in "iu":
        return _index_labels(values, _hugging_face_names(table.schema, label), path)
    return _index_named_labels(values, names, path)


def _hugging_face_names(schema: pa.Schema, label: str) -> list[str] | None:
    """The names of a ClassLabel, which Hugging Face keeps as JSON in the metadata of the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _index_named_labels(values: np.ndarray, names: np.ndarray, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) with a name (N,) each: classes in the order of the labels, one name per label and back."""
    distinct, first, labels = np.unique(values, return_index=True, return_inverse=True)
    class_names = names[first]
    mixed = np.flatnonzero(class_names[labels] != names)
    if len(mixed):
        value, row = values[mixed[0]], mixed[0]
        raise DataError(
            f"label {value} in '{path}' is named both '{class_names[labels[row]]}' and '{names[row]}': "
            "give each label one name"
        )
    if len(np.unique(class_names)) < len(distinct):
        twice = next(name for name in class_names if (class_names == name).sum() > 1)
        raise DataError(f"several labels in '{path}' are named '{twice}': give each label its own name")
    return labels.astype(np.int64), tuple(str(name) for name in class_names)


def _index_labels(values: np.ndarray, declared: Sequence[str] | None, where: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) as indices of class names: the declared ones, the strings themselves, or the numbers as text.

    >>> _index_labels(np.array([7, 10, 7]), None, "x")
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


# Arrays


def _open_npz(path: Path, name: str, size: Size, fit: Fit, memory_limit: int, labelled: bool) -> ImageSet:
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 8 * memory_limit:  # float64 arrays of uint8 pixels
            raise DataError(
                f"'{path}' unpacks to {unpacked / 2**30:.1f} GiB: save sets of that size as Parquet or as a folder"
            )
        with np.load(path, allow_pickle=False) as arrays:
            images = _first_present(arrays.files, ("images", "x"))
            labels = _first_present(arrays.files, ("labels", "y")) if labelled else None
            found = f"found: {', '.join(arrays.files) or 'nothing'}"
            if images is None:
                raise DataError(f"'{path}' has no array 'images' or 'x': {found}")
            if labelled and labels is None:
                raise DataError(f"'{path}' has no array 'labels' or 'y': {found}")
            names = _text(arrays["class_names"], path) if labelled and "class_names" in arrays.files else None
            values = (arrays[images], arrays[labels] if labels is not None else None)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, MemoryError) as error:
        raise DataError(f"cannot read '{path}' as .npz: {error}") from None
    except ValueError as error:
        raise DataError(f"cannot read '{path}': {error}; save plain numbers and strings, not Python objects") from None
    return ImageSet.from_arrays(*values, names, name=name, size=size, fit=fit, memory_limit=memory_limit)


def _text(names: np.ndarray, path: Path) -> list[str]:
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(
            f"'class_names' in '{path}' has shape {names.shape} and type {names.dtype}: expected a list of names"
        )
    return [str(name) for name in names.astype(str)]


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
        full = _full_scale(raw)
    except DataError as error:
        raise DataError(f"the images of '{name}' hold {error}: save pixels from 0 to 255, or from 0 to 1") from None
    n, height, width, channels = raw.shape
    pixels = np.empty((n, size, size, 3), dtype=np.uint8)

    def convert(rows: range) -> None:
        block = _scale_to_8_bit(raw[rows.start : rows.stop], full)
        if (height, width) == (size, size) and channels != 4:
            pixels[rows.start : rows.stop] = block  # one channel is repeated
            return
        for i, image in zip(rows, block):
            rgb = _to_rgb(Image.fromarray(image[..., 0] if channels == 1 else image))
            pixels[i] = np.asarray(_fit_square(rgb, size, fit))

    _in_threads(convert, n, None)
    return pixels


# Built-in


def _is_built_in(source: Any) -> bool:
    """Whether a source names a built-in set. ``digits`` always does; a folder of that name is ``./digits``."""
    name = source.partition("?")[0] if isinstance(source, str) else ""
    return name in _BUILT_IN or (name.partition("/")[0] in _BUILT_IN and not Path(source).exists())


def _open_built_in(source: str, size: Size, fit: Fit, memory_limit: int) -> ImageSet:
    name, _, query = source.partition("?")
    if name not in _BUILT_IN:
        raise UsageError(f"unknown data set '{source}': {suggest(name, _BUILT_IN)}")
    if name == "digits":
        if query:
            raise UsageError(f"'{source}' cannot be opened: 'digits' takes no parameters")
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
        return ImageSet.from_arrays(images, digits.target, name=name, size=size, fit=fit)
    return _open_simulated(source, name, query, size, fit, memory_limit)


def _open_simulated(source: str, name: str, query: str, size: Size, fit: Fit, memory_limit: int) -> ImageSet:
    from maple.simulate import LARGEST, SMALLEST, simulated_diatoms

    limits = {"n": (1, 10_000_000), "size": (SMALLEST, LARGEST), "seed": (0, 2**32 - 1), "taxa": (1, 1_000)}
    given = _parse_query(source, query, limits)
    kind = cast(Literal["known", "near", "far"], name.partition("/")[2] or "known")
    side = given.get("size", size if isinstance(size, int) and SMALLEST <= size <= LARGEST else 32)
    n = given.get("n", 4000 if kind == "known" else 1000)
    if n * side * side * 3 > memory_limit:
        raise UsageError(
            f"'{source}' would take {n * side * side * 3 / 2**30:.1f} GiB: ask for fewer or smaller images"
        )
    taxa = {"n_taxa": given["taxa"]} if "taxa" in given else {}
    images, labels, names, _ = simulated_diatoms(n, size=side, seed=given.get("seed", 0), kind=kind, **taxa)
    return ImageSet.from_arrays(
        images, labels, names, name=name, size=side if size == "auto" else size, fit=fit, memory_limit=memory_limit
    )


def _parse_query(source: str, query: str, limits: dict[str, tuple[int, int]]) -> dict[str, int]:
    """``n=5000&seed=3`` as numbers, each within its limits."""
    values = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in limits:
            raise UsageError(f"unknown parameter '{key}' in '{source}': {suggest(key, limits)}")
        low, high = limits[key]
        if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
            raise UsageError(f"'{key}={text}' in '{source}' cannot be used: give a number from {low} to {high:,}")
        values[key] = int(text)
    return values


# Names and the data root


def list_data_sets(data_root: str | Path | None = None) -> tuple[str, ...]:
    """Names that :func:`open_images` knows: the built-in ones, and those under the data root with their splits."""
    root = _data_root(data_root)
    names = list(_BUILT_IN)
    if root is not None and root.is_dir():
        for entry in _visible(root):
            if entry.is_dir():
                names += [entry.name, *(f"{entry.name}/{split}" for split in _split_files(entry))]
            elif entry.suffix in _TABLES:
                names.append(entry.stem)
    return tuple(names)


def _data_root(data_root: str | Path | None) -> Path | None:
    root = data_root or os.environ.get("MAPLE_DATA")
    return Path(root).expanduser() if root else None


def _name_of(path: Path, data_root: str | Path | None) -> str:
    """``cifar10/test`` for a split of a data set or what lies under the data root, else the name of file or folder."""
    path = path.expanduser().resolve()
    bare = path.with_suffix("") if path.suffix.lower() in _TABLES else path
    root = _data_root(data_root)
    if root is not None and root.resolve() in bare.parents:
        return bare.relative_to(root.resolve()).as_posix()
    return f"{bare.parent.name}/{bare.name}" if bare.name in _ALL_SPLIT_NAMES else bare.name


def _split_files(folder: Path) -> dict[str, Path]:
    """The splits of a data set folder: Parquet or .npz files, or folders called train, test, ... and nothing else."""
    entries = _visible(folder)
    folders = [path for path in entries if path.is_dir()]
    files = {path.stem: path for path in entries if path.suffix.lower() in _TABLES and path.is_file()}
    if files and (not folders or _ALL_SPLIT_NAMES & files.keys()):
        return files
    are_splits = bool(folders) and all(path.name in _ALL_SPLIT_NAMES for path in folders)
    if are_splits and any(inner.is_dir() for path in folders for inner in _visible(path)):
        return {path.name: path for path in folders}
    return {}


def _find_split(splits: dict[str, Path], role: str) -> Path | None:
    """The file of one of the four splits, whichever of its names it bears."""
    name = _first_present(tuple(splits), _SPLIT_NAMES.get(role, (role,)))
    return splits[name] if name is not None else None


def _choose_split(name: str, folder: Path, split: str | None) -> Path:
    """The file to open where only the data set is named: ``split``, else test, validation, train, or the only one."""
    splits = _split_files(folder)
    if split is not None:
        found = splits.get(split) or _find_split(splits, split)
        if found is None:
            raise UsageError(f"data set '{name}' has no split '{split}': {suggest(split, splits)}")
        return found
    for role in ("test", "validation", "train"):
        if (found := _find_split(splits, role)) is not None:
            return found
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise UsageError(f"data set '{name}' has several splits: name one of {', '.join(f'{name}/{s}' for s in splits)}")


def _find(source: str | Path, data_root: str | Path | None) -> Path:
    """The existing file or folder that ``source`` means: a path, or a name under the data root."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    root = _data_root(data_root)
    if root is not None and not path.is_absolute():
        for candidate in (root / path, *(root / f"{path}{suffix}" for suffix in (".parquet", ".npz"))):
            if candidate.exists():
                return candidate
    where = f"the data root '{root}'" if root is not None else "no data root: set MAPLE_DATA or give --data-root"
    raise UsageError(
        f"no data set, file or folder '{source}': {suggest(str(source), list_data_sets(data_root))} "
        f"(looked among the built-in sets, in the current folder and in {where})"
    )


def _locate(source: str | Path, data_root: str | Path | None, split: str | None) -> tuple[Path, str]:
    """The file or folder to open, down to the split where a data set folder is meant, and its name."""
    path = _find(source, data_root)
    if path.is_dir() and _split_files(path):
        path = _choose_split(str(source), path, split)
    return path, _name_of(path, data_root)


# --- splits ----------------------------------------------------------------------------------------------------------


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
    whole, left_out = _leave_out(whole, options.min_images)
    if len(whole.class_names) < 2:
        raise DataError(_too_few_classes(whole, left_out))
    held = {role: _align(images, whole.class_names, left_out, role) for role, images in held.items()}
    whole, held, repeated = _drop_repeated(whole, held)
    for role, images in held.items():
        _check_complete(images, whole.class_names, role)
    for absent in np.setdiff1d(np.arange(len(whole.class_names)), whole.labels):
        _check_enough(0, absent, shares, whole.class_names)
    parts = split_indices(whole.labels, whole.keys, shares, options.split_seed, whole.class_names)
    cut = {role: whole.subset(part) for role, part in zip(_SPLIT_NAMES, parts)}
    return Splits(**(cut | held), left_out=left_out, skipped=(*skipped, *repeated))


def fold_shares(shares: Sequence[float], given: Sequence[str]) -> tuple[float, ...]:
    """The shares of train, validation, calibration and test, where those of the ``given`` splits go to train.

    >>> fold_shares((0.7, 0.1, 0.1, 0.1), ["test"])
    (0.8, 0.1, 0.1, 0.0)
    """
    roles = tuple(_SPLIT_NAMES)
    if len(shares) != 4 or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UsageError(f"splits {tuple(shares)} cannot be used: give four shares from 0 to 1 that sum to 1")
    folded = [0.0 if role in given else float(share) for role, share in zip(roles, shares)]
    folded[0] = round(1 - sum(folded[1:]), 9)
    if folded[0] <= 0:
        raise UsageError(f"splits {tuple(shares)} leave no training images: give train a share above 0")
    return tuple(folded)


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


def _class_name(label: int, class_names: Sequence[str] | None) -> str:
    return f"class '{class_names[label]}'" if class_names is not None and label >= 0 else f"class {label}"


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


def _check_enough(n: int, label: int, shares: Sequence[float], class_names: Sequence[str] | None) -> None:
    needed = sum(share > 0 for share in shares)
    if n < needed:
        raise DataError(
            f"{_class_name(label, class_names)} has {n} distinct image{'' if n == 1 else 's'}, too few for {needed} "
            f"splits: add images, or leave out such classes with --min-images {needed}"
        )


def _split_sources(
    source: str | Path | ImageSet, data_root: str | Path | None
) -> tuple[str | Path | ImageSet, dict[str, Any]]:
    """What to train on, and the splits that a data set brings along."""
    if isinstance(source, ImageSet) or _is_built_in(source):
        return source, {}
    folder = _find(source, data_root)
    splits = _split_files(folder) if folder.is_dir() else {}
    train = _find_split(splits, "train")
    if train is None:
        return source, {}
    found = {role: _find_split(splits, role) for role in ("validation", "calibration", "test")}
    return train, {role: path for role, path in found.items() if path is not None}


def _leave_out(images: ImageSet, min_images: int) -> tuple[ImageSet, tuple[str, ...]]:
    """Without the classes that have fewer than ``min_images`` distinct images, and their names."""
    n_classes = len(images.class_names)
    image = np.unique(images.keys, return_inverse=True)[1]  # (N,) number of the distinct image
    counts = np.bincount(np.unique(image * n_classes + images.labels) % n_classes, minlength=n_classes)
    kept = counts >= min_images
    if kept.all():
        return images, ()
    names = [name for name, keep in zip(images.class_names, kept) if keep]
    left_out = tuple(name for name, keep in zip(images.class_names, kept) if not keep)
    return images.subset(kept[images.labels]).with_class_names(names), left_out


def _too_few_classes(images: ImageSet, left_out: Sequence[str]) -> str:
    if left_out:
        return f"only {len(images.class_names)} class of '{images.name}' has enough images: lower --min-images"
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
