"""Open a source: the image set, or the stream of images, that a name, a file or a folder stands for.

A *source* is an image folder with one subfolder per class, a ``.parquet`` or ``.npz`` file, a built-in set (``digits``,
``simulated-diatoms``), the name of a data set under the data root, any of these corrupted (``corrupted:...``), or a
torch ``Dataset`` or ``DataLoader``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maple.data.catalogue.table import BUILT_IN, is_built_in, is_corrupted
from maple.data.decode import Decoding, Fit, Size, auto_size, check_size_and_fit
from maple.data.image_set import MEMORY_LIMIT, ImageSet, Progress, default_augment, no_labels
from maple.data.sources.decoder import current_decoder
from maple.data.sources.folders import is_glob, list_class_folders, list_files
from maple.data.sources.labels import LIST_SUFFIXES, list_labelled
from maple.data.sources.names import locate_split, parquet_files, parse_corrupted, parse_numbers
from maple.data.sources.remote import Place, is_remote, list_remote
from maple.data.sources.tables import Table, Tables, open_npz
from maple.data.sources.torch_data import TorchImages, is_torch_data, list_torch_data
from maple.data.stream import Decoded, Source, read_sizes
from maple.errors import DataError, UsageError, suggest
from maple.files import inert
from maple.types import Skipped

if TYPE_CHECKING:
    from maple.data.sources.torch_data import TorchData

_CHUNK = 128  # images decoded together
_MANY = 4096  # images from which on starting processes pays
_MAX_PROCESSES = 8


@dataclass(frozen=True)
class _Request:
    """How to open a source."""

    size: Size
    fit: Fit
    data_root: str | Path | None = None
    split: str | None = None
    labelled: bool = False
    memory_limit: int = MEMORY_LIMIT
    progress: Progress | None = None
    class_names: Sequence[str] = ()  # of labels that are only numbers


def open_images(
    source: str | Path | ImageSet | Sequence[str | Path] | TorchData,
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
    - a ``.csv`` file with the columns ``file`` and ``label``, or a ``.json`` file exported from Label Studio,
    - a ``.npz`` file with ``images`` or ``x``, and ``labels`` or ``y``, optionally ``class_names``,
    - ``digits``, or ``simulated-diatoms`` with ``/near`` and ``/far``; ``simulated-diatoms?n=5000&seed=3&size=64``,
    - a data set under the data root (``data_root`` or the environment variable MAPLE_DATA): ``cifar10/test`` is
      ``<root>/cifar10/test.parquet``; ``cifar10`` alone takes ``split``, else test, validation or train,
    - ``corrupted:cifar10/test?family=fog&severity=3&seed=0``: another source, corrupted by :mod:`maple.data.corrupt`
      after decoding; ``family=all`` and ``severity=all`` (the defaults) draw one for each image,
    - a torch ``Dataset`` of (image, label), or a ``DataLoader``, whose data set is read in its own order: see
      :mod:`maple.data.sources.torch_data`,
    - a folder of Parquet files, as Ray, Spark and others write them: one table in the order of their names,
    - an address such as ``s3://bucket/folder`` or ``gs://...`` of Parquet files, or without labels of image files,
    - with ``labelled=False`` also an image file, a folder of images, a glob, or a list of these; labels are then -1.

    ``size`` is the side of the square that images are decoded to, see :func:`~maple.data.decode.auto_size`. Images
    stay in memory when they fit into ``memory_limit`` bytes, and are otherwise decoded again whenever they are read.
    Unusable files are listed in ``skipped``; ``progress`` is called with the numbers of images done and in all.

    >>> open_images("digits")
    ImageSet('digits', 1797 images, 10 classes, 8 px, in memory)
    """
    size = check_size_and_fit(size, fit)
    if isinstance(source, ImageSet):
        return _reuse(source, size, labelled)
    request = _Request(size, fit, data_root, split, labelled, memory_limit, progress)
    return _decode_all(_list_source(source if isinstance(source, (list, tuple)) else [source], request), request)


def open_like(
    images: Any, class_names: Sequence[str], *, size: Size = "auto", fit: Fit = "pad", may_be_new: bool = False
) -> Any:
    """A path or torch data as images of the classes ``class_names``; anything else, such as an ``ImageSet``, as it is.

    Labels that are only numbers count the ``class_names``. Other classes are refused, unless they ``may_be_new``.
    """
    if not (isinstance(images, str | Path) or is_torch_data(images)):
        return images
    request = _Request(check_size_and_fit(size, fit), fit, labelled=True, class_names=class_names)
    opened = _decode_all(_list_source([images], request), request)
    return opened if may_be_new else opened.with_class_names(class_names)


def open_source(
    sources: Sequence[str | Path], *, size: int, fit: Fit = "pad", data_root: str | Path | None = None
) -> Source:
    """List the images that :func:`open_images` opens without labels; files and tables are not decoded."""
    return _list_source(sources, _Request(size, fit, data_root))


def _reuse(images: ImageSet, size: Size, labelled: bool) -> ImageSet:
    if size not in ("auto", images.size):
        raise UsageError(f"'{images.name}' is open with {images.size} px, not {size} px: open it again with that size")
    return images if labelled else _without_labels(images)


def _without_labels(images: ImageSet) -> ImageSet:
    labels, class_names = no_labels(len(images))
    return replace(images, labels=labels, class_names=class_names)


# --- listing ---------------------------------------------------------------------------------------------------------


def _list_source(sources: Sequence[Any], request: _Request) -> Source:
    """The images of the sources; only arrays and built-in sets are in memory then."""
    if len(sources) != 1 and request.labelled:
        raise UsageError("give one source of labelled images: a folder with one subfolder per class, Parquet or .npz")
    if len(sources) != 1:
        return list_files(sources, "images")
    source = sources[0]
    if is_torch_data(source):
        return list_torch_data(source, request.size, request.fit, request.labelled, request.class_names)
    if not isinstance(source, (str, Path)):
        raise UsageError(f"cannot open {source!r}: give the name of a data set, a file, a folder, or a torch Dataset")
    if is_corrupted(source):
        return _open_corrupted(str(source), request)
    if is_built_in(source):
        images = _open_built_in(str(source), request)
        return images if request.labelled else _without_labels(images)
    if is_remote(source):
        return _list_remote(str(source), request)
    if not request.labelled and is_glob(source):
        return list_files([source], str(source))
    return _list_path(*locate_split(source, request.data_root, request.split), request)


def _open_corrupted(source: str, request: _Request) -> ImageSet:
    from maple.data.corrupt import corrupt_set

    how = parse_corrupted(source)
    images = _decode_all(_list_source([how.clean], request), request)
    return corrupt_set(images, how.family, how.severity, how.seed, request.memory_limit)


def _open_built_in(source: str, request: _Request) -> ImageSet:
    name, _, query = source.partition("?")
    if name not in BUILT_IN:
        raise UsageError(f"unknown data set '{source}': {suggest(name, BUILT_IN)}")
    if name != "digits":
        return _open_simulated(source, name, query, request)
    if query:
        raise UsageError(f"'{source}' cannot be opened: 'digits' takes no parameters")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    return ImageSet.from_arrays(images, digits.target, name=name, size=request.size, fit=request.fit)


def _open_simulated(source: str, name: str, query: str, request: _Request) -> ImageSet:
    from maple.data.simulate.diatoms import LARGEST, SMALLEST, simulated_diatoms

    limits = {"n": (1, 10_000_000), "size": (SMALLEST, LARGEST), "seed": (0, 2**32 - 1), "taxa": (1, 1_000)}
    given = parse_numbers(source, query, limits)
    kind: Any = name.partition("/")[2] or "known"
    asked = request.size if isinstance(request.size, int) and SMALLEST <= request.size <= LARGEST else 32
    side, n = given.get("size", asked), given.get("n", 4000 if kind == "known" else 1000)
    if (needed := n * side * side * 3) > request.memory_limit:
        raise UsageError(f"'{source}' needs {needed / 2**30:.1f} GiB of memory: ask for fewer or smaller images")
    taxa = {"n_taxa": given["taxa"]} if "taxa" in given else {}
    images, labels, names, _ = simulated_diatoms(n, size=side, seed=given.get("seed", 0), kind=kind, **taxa)
    size = side if request.size == "auto" else request.size
    limit = request.memory_limit
    return ImageSet.from_arrays(images, labels, names, name=name, size=size, fit=request.fit, memory_limit=limit)


def _list_remote(source: str, request: _Request) -> Source:
    """The images of an address: without labels those of files, else those of Parquet files."""
    found = list_remote(Place(source))
    if isinstance(found, list):
        return Tables(found, source, request.labelled)
    if request.labelled:
        raise UsageError(f"the image files of '{source}' have no labels: give Parquet files with the column label")
    return found


def _list_path(path: Path, name: str, request: _Request) -> Source:
    """The images of a folder or file that exists."""
    name, suffix = inert(name), path.suffix.lower()
    if tables := parquet_files(path):
        return Tables(tables, name, request.labelled)
    if suffix == ".npz":
        return open_npz(path, name, request.size, request.fit, request.memory_limit, request.labelled)
    if suffix == ".parquet":
        return Table(path, name, request.labelled)
    if suffix in LIST_SUFFIXES and path.is_file():
        return list_labelled(path, name, request.labelled)
    if not request.labelled:
        return list_files([path], name)
    if path.is_dir():
        return list_class_folders(path, name)
    raise DataError(
        f"'{path}' is a single file: give a folder with one subfolder per class, Parquet, .npz, or a list of files and "
        "labels (.csv)"
    )


# --- decoding --------------------------------------------------------------------------------------------------------


@dataclass
class _Usable:
    """The images of a source that can be decoded, and those that cannot."""

    rows: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, chunk: Decoded) -> None:
        self.rows += chunk.rows
        self.files += chunk.files
        self.keys += chunk.keys
        self.skipped += chunk.skipped


def _decode_all(source: Source, request: _Request) -> ImageSet:
    """Decode every image once: into memory if they fit, else only to see whether they can be decoded."""
    if isinstance(source, ImageSet):
        return source
    size = _choose_size(source) if request.size == "auto" else request.size
    n = len(source)
    pixels = np.empty((n, size, size, 3), np.uint8) if n * size * size * 3 <= request.memory_limit else None
    found = _decode_into(pixels, source, Decoding(size, request.fit, keys=True), request.progress)
    labels = no_labels(n)[0] if source.labels is None else source.labels
    index = np.array(found.rows, dtype=np.int64)
    _check_losses(source, labels, index, found.skipped)
    return ImageSet(
        labels=labels[index],
        class_names=source.class_names,
        files=tuple(found.files),
        size=size,
        keys=np.array(found.keys, dtype="S32"),
        pixels=None if pixels is None else pixels[: len(index)],
        skipped=(*source.skipped, *found.skipped),
        name=source.name,
        augment=default_augment(source.name),
        fit=request.fit,
        store=source if pixels is None else None,
        rows=index if pixels is None else None,
    )


def _decode_into(pixels: np.ndarray | None, source: Source, how: Decoding, progress: Progress | None) -> _Usable:
    """Decode all images, the usable ones into the first rows of ``pixels`` if there is room for them."""
    found, n = _Usable(), len(source)
    workers = 0 if n < _MANY else min(os.cpu_count() or 1, _MAX_PROCESSES)
    decode = current_decoder()
    with closing(decode(source, how, chunk_size=_CHUNK, workers=workers, keep=pixels is not None)) as decoded:
        for chunk in decoded:
            if pixels is not None:
                pixels[len(found.rows) : len(found.rows) + len(chunk.rows)] = chunk.pixels
            found.add(chunk)
            if progress is not None:
                progress(chunk.stop, n)
    return found


def _check_losses(source: Source, labels: np.ndarray, kept: np.ndarray, skipped: Sequence[Skipped]) -> None:
    """Some images may be broken, but not all, and not all of a class."""
    if not skipped:
        return
    first = f"'{skipped[0].file}': {skipped[0].reason}"
    if len(labels) == 1:
        raise DataError(f"cannot use {first}; give another image")
    if len(kept) == 0:
        raise DataError(f"none of the {len(skipped)} images of '{source.name}' can be used ({first}): replace them")
    for lost in np.setdiff1d(labels, labels[kept])[:1]:
        found = f"no image of class '{source.class_names[lost]}' of '{source.name}' can be used"
        raise DataError(f"{found} ({len(skipped)} skipped, first {first}): replace its files or remove the class")


def _choose_size(source: Source) -> int:
    """The side to decode to, from the headers of all images."""
    if isinstance(source, TorchImages):
        return source.size
    dimensions = read_sizes(source, _CHUNK)
    return auto_size(np.array(dimensions)) if dimensions else 16
