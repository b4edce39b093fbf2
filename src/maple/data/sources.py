"""Sources of images: what a name, a file or a folder stands for, and the images in it.

A *source* is an image folder with one subfolder per class, a ``.parquet`` or ``.npz`` file, a built-in set (``digits``,
``simulated-diatoms``), the name of a data set under the data root, or any of these corrupted (``corrupted:...``).
:func:`open_images` turns it into an :class:`~maple.data.image_set.ImageSet`, in an order that does not depend on how
a machine
lists a directory.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.data.decode import Fit, Size, check_size_and_fit
from maple.data.image_set import (
    MEMORY_LIMIT,
    ColumnStore,
    FileStore,
    ImageSet,
    Listing,
    Progress,
    decode_listing,
    index_labels,
    no_labels,
)
from maple.errors import DataError, UsageError, suggest
from maple.types import Skipped

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm", ".pnm")
_KINDS = "/".join(IMAGE_SUFFIXES[:8])
_TABLES = (".parquet", ".npz")
_BUILT_IN = ("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far")
_CORRUPTED = "corrupted:"
SPLIT_NAMES = {  # what a file or folder of each split may be called
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid"),
    "calibration": ("calibration", "cal"),
    "test": ("test", "testing"),
}
_ALL_SPLIT_NAMES = {name for names in SPLIT_NAMES.values() for name in names}
LOOSE = "not inside a class subfolder"  # why a labelled image is skipped


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
    - ``corrupted:cifar10/test?family=fog&severity=3&seed=0``: another source, corrupted by :mod:`maple.data.corrupt`
    once it
      is decoded; ``family=all`` and ``severity=all`` (the defaults) draw one for each image,
    - with ``labelled=False`` also an image file, a folder of images, a glob, or a list of these; labels are then -1.

    ``size`` is the side of the square that images are decoded to, see :func:`~maple.data.decode.auto_size`. Images
    stay in
    memory when they fit into ``memory_limit`` bytes, and are otherwise decoded again whenever they are read. Files that
    cannot be used are listed in ``skipped``; ``progress`` is called with the numbers of images done and in all.

    >>> open_images("digits")
    ImageSet('digits', 1797 images, 10 classes, 8 px, in memory)
    """
    size = check_size_and_fit(size, fit)
    if isinstance(source, ImageSet):
        return _reuse(source, size, labelled)
    if isinstance(source, (list, tuple)):
        if len(source) != 1:
            return decode_listing(_list_several(source, labelled), size, fit, memory_limit, progress)
        source = source[0]
    if not isinstance(source, (str, Path)):
        raise UsageError(f"cannot open {source!r}: give the name of a data set, a file or a folder")
    if is_corrupted(source):
        from maple.data.corrupt import corrupt_set

        clean, how = _parse_corrupted(str(source))
        images = open_images(
            clean,
            size=size,
            fit=fit,
            data_root=data_root,
            split=split,
            labelled=labelled,
            memory_limit=memory_limit,
            progress=progress,
        )
        return corrupt_set(images, memory_limit=memory_limit, **how)
    if is_built_in(source):
        images = _open_built_in(str(source), size, fit, memory_limit)
        return images if labelled else _without_labels(images)
    if not labelled and _is_glob(source):
        return decode_listing(_list_several([source], labelled), size, fit, memory_limit, progress)
    path, name = _locate(source, data_root, split)
    if path.suffix.lower() == ".npz":
        return _open_npz(path, name, size, fit, memory_limit, labelled)
    return decode_listing(_list_path(path, name, labelled), size, fit, memory_limit, progress)


def find_images(
    sources: Sequence[str | Path], data_root: str | Path | None = None
) -> tuple[Iterator[str] | Path | None, str]:
    """Where images without labels are, and what their source is called: nothing is opened.

    They are image files, or rows of a Parquet file; None where they are arrays, or made, and thus in memory anyway.
    """
    if len(sources) != 1:
        return chain.from_iterable(map(_expand, sources)), "images"
    source = sources[0]
    if is_built_in(source):
        return None, str(source)
    if _is_glob(source):
        return _expand(source), str(source)
    path, name = _locate(source, data_root, None)
    if path.suffix.lower() in _TABLES:
        return path if path.suffix.lower() == ".parquet" else None, name
    return _expand(path), name


def _reuse(images: ImageSet, size: Size, labelled: bool) -> ImageSet:
    if size not in ("auto", images.size):
        raise UsageError(
            f"'{images.name}' is open with {images.size} px, not {size} px: open its source with that size"
        )
    return images if labelled else _without_labels(images)


def _without_labels(images: ImageSet) -> ImageSet:
    labels, class_names = no_labels(len(images))
    return replace(images, labels=labels, class_names=class_names)


def _list_path(path: Path, name: str, labelled: bool) -> Listing:
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


# --- folders ----------------------------------------------------------------------------------------------------------


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


def _visible(folder: Path) -> list[Path]:
    """Entries of a folder that are not hidden, sorted, so that no machine sees another order."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list the folder '{folder}': {error.strerror or error}") from None


def _walk_images(folder: Path) -> Iterator[str]:
    """All images in a folder and below, sorted; links to folders are not followed, so that they cannot form a ring.

    Of millions of files only the names in one folder are held, as strings.
    """
    files, folders = [], set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.add(entry.name)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file():
                    files.append(entry.name)
    except OSError as error:
        raise DataError(f"cannot list the folder '{folder}': {error.strerror or error}") from None
    above = "" if folder == Path() else os.path.join(folder, "")  # noqa: PTH118 (no object per file)
    for name in sorted([*files, *folders]):
        if name in folders:
            yield from _walk_images(folder / name)
        else:
            yield above + name


def _list_class_folders(folder: Path, name: str) -> Listing:
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
    files = tuple(file for group in members.values() for file in group)
    return Listing(
        store=FileStore(tuple(map(Path, files))),
        files=files,
        labels=np.repeat(np.arange(len(members)), [len(group) for group in members.values()]),
        class_names=tuple(members),
        name=name,
        skipped=tuple(Skipped(str(path), LOOSE) for path in loose),
    )


def _is_glob(source: str | Path) -> bool:
    return any(character in str(source) for character in "*?[") and not Path(source).exists()


def _match(pattern: Path) -> Iterator[str]:
    """The images that a glob matches, sorted; hidden ones and those in hidden folders do not count."""
    top = Path(pattern.anchor)
    try:
        found = [
            str(path)
            for path in top.glob(str(pattern.relative_to(top)))
            if _is_image(path) and not any(part.startswith(".") for part in path.parts[1:])
        ]
    except ValueError as error:
        raise UsageError(f"'{pattern}' is not a pattern for files: {error}") from None
    found.sort(key=lambda path: path.replace(os.sep, "\0"))  # folder by folder, as paths are sorted
    yield from found


def _expand(source: str | Path) -> Iterator[str]:
    """The image files that one path, folder or glob stands for."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _some(_walk_images(path), f"no images in '{source}': expected {_KINDS} files there or below")
    elif is_built_in(source):
        raise UsageError(_alone(source))
    elif _is_glob(path):
        yield from _some(_match(path), f"no images match '{source}': check the pattern")
    elif not path.is_file():
        raise UsageError(f"no file or folder '{source}': check the path; the name of a data set is given alone")
    elif path.suffix.lower() in _TABLES:
        raise UsageError(_alone(source))
    else:
        yield str(path)


def _alone(source: str | Path) -> str:
    return f"'{source}' cannot be opened together with other sources: give it alone"


def _some(files: Iterator[str], else_say: str) -> Iterator[str]:
    """The files, of which there must be one at least."""
    first = next(files, None)
    if first is None:
        raise DataError(else_say)
    yield first
    yield from files


def _list_several(sources: Sequence[str | Path], labelled: bool) -> Listing:
    """Images from several places, or from a glob; such images have no labels."""
    if labelled:
        raise UsageError("labelled images come from one source: a folder with one subfolder per class, Parquet or .npz")
    files = [file for source in sources for file in _expand(source)]
    if not files:
        raise UsageError("no images were given: name at least one file or folder")
    return _list_unlabelled(files, str(sources[0]) if len(sources) == 1 else "images")


def _list_unlabelled(files: Iterable[str], name: str) -> Listing:
    files = tuple(files)
    labels, class_names = no_labels(len(files))
    return Listing(FileStore(tuple(map(Path, files))), files, labels, class_names, name)


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _list_parquet(path: Path, name: str, labelled: bool) -> Listing:
    """Images and labels of a Parquet file; images stay encoded."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            image = find_image_column(schema, path)
            label = _first_present(schema.names, ("label", "labels", "fine_label"))
            label_name = _first_present(schema.names, ("label_name",))
            if labelled and label is None and label_name is None:
                raise DataError(
                    f"'{path}' has no label column: expected 'label', 'labels', 'fine_label' or 'label_name', "
                    f"{_found_columns(schema)}"
                )
            table = file.read(columns=[column for column in (image, label, label_name) if column is not None])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read '{path}' as Parquet: {str(error).splitlines()[0]}") from None
    if len(table) == 0:
        raise DataError(f"no images in '{path}': the file has no rows")
    column, files = read_image_column(table[image], name, path)
    labels, class_names = _parquet_labels(table, label, label_name, path) if labelled else no_labels(len(table))
    return Listing(ColumnStore(column), files, labels, class_names, name)


def find_image_column(schema: pa.Schema, path: Path) -> str:
    """The name of the column that holds the images."""
    image = _first_present(schema.names, ("image", "img"))
    if image is None:
        raise DataError(
            f"'{path}' has no image column: expected 'image' or 'img' with encoded bytes, {_found_columns(schema)}"
        )
    return image


def _found_columns(schema: pa.Schema) -> str:
    return f"found columns: {', '.join(schema.names) or 'none'}"


def _first_present(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def read_image_column(
    column: pa.ChunkedArray, name: str, path: Path, first: int = 0
) -> tuple[pa.ChunkedArray, tuple[str, ...]]:
    """The encoded bytes, and a name for each image; ``first`` is the row of the first of them."""
    files = [f"{name}#{i}" for i in range(first, first + len(column))]
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
        return index_labels(names, None, path)
    if pa.types.is_nested(table[label].type):
        raise DataError(
            f"column '{label}' of '{path}' holds {table[label].type}: expected one integer or name per image"
        )
    values = np.array(table[label].to_pylist())
    if names is None or values.dtype.kind not in "iu":
        return index_labels(values, _hugging_face_names(table.schema, label), path)
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


# --- arrays -----------------------------------------------------------------------------------------------------------


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


# --- built-in sets ----------------------------------------------------------------------------------------------------


def is_built_in(source: Any) -> bool:
    """Whether images are made, not read from where the source says: a built-in set, or a corrupted one.

    ``digits`` is always the built-in set; a folder of that name is ``./digits``.
    """
    if is_corrupted(source):
        return True
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


def is_corrupted(source: Any) -> bool:
    """Whether a source is another one, corrupted."""
    return isinstance(source, str) and source.startswith(_CORRUPTED)


def clean_source(source: str) -> str:
    """The source that a corrupted one is made of; any other source itself.

    >>> clean_source("corrupted:slides/test?family=fog"), clean_source("digits")
    ('slides/test', 'digits')
    """
    return _parse_corrupted(source)[0] if is_corrupted(source) else source


def _parse_corrupted(source: str) -> tuple[str, dict[str, Any]]:
    """The clean source, and how to corrupt it: what follows the last ``?``, since the clean source may have its own.

    >>> _parse_corrupted("corrupted:simulated-diatoms?n=9?family=fog&severity=3")
    ('simulated-diatoms?n=9', {'family': 'fog', 'severity': 3, 'seed': 0})
    """
    from maple.data.corrupt import check_family

    rest = source.removeprefix(_CORRUPTED)
    clean, mark, query = rest.rpartition("?")
    clean = clean if mark else rest
    given = dict(parse_qsl(query if mark else "", keep_blank_values=True))
    for name in given.keys() - {"family", "severity", "seed"}:
        raise UsageError(f"unknown parameter '{name}' in '{source}': {suggest(name, ('family', 'severity', 'seed'))}")
    if not clean or is_corrupted(clean):
        raise UsageError(f"'{source}' names no clean images: write corrupted:SOURCE?family=fog&severity=3")
    family = given.pop("family", "all")
    if given.get("severity") == "all":
        del given["severity"]
    numbers = _parse_query(source, urlencode(given), {"severity": (1, 5), "seed": (0, 2**32 - 1)})
    return clean, {
        "family": family if family == "all" else check_family(family),
        "severity": "all",
        "seed": 0,
    } | numbers


def _open_simulated(source: str, name: str, query: str, size: Size, fit: Fit, memory_limit: int) -> ImageSet:
    from maple.data.simulate import LARGEST, SMALLEST, simulated_diatoms

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


# --- names and the data root ------------------------------------------------------------------------------------------


def list_data_sets(data_root: str | Path | None = None) -> tuple[str, ...]:
    """Names that :func:`open_images` knows: the built-in ones, and those under the data root with their splits."""
    root = find_data_root(data_root)
    names = list(_BUILT_IN)
    if root is not None and root.is_dir():
        for entry in _visible(root):
            if entry.is_dir():
                names += [entry.name, *(f"{entry.name}/{split}" for split in split_files(entry))]
            elif entry.suffix in _TABLES:
                names.append(entry.stem)
    return tuple(names)


def find_data_root(data_root: str | Path | None) -> Path | None:
    """The folder of named data sets: the given one, else the environment's; ``None`` where neither is."""
    root = data_root or os.environ.get("MAPLE_DATA")
    return Path(root).expanduser() if root else None


def _name_of(path: Path, data_root: str | Path | None) -> str:
    """``cifar10/test`` for a split of a data set or what lies under the data root, else the name of file or folder."""
    path = path.expanduser().resolve()
    bare = path.with_suffix("") if path.suffix.lower() in _TABLES else path
    root = find_data_root(data_root)
    if root is not None and root.resolve() in bare.parents:
        return bare.relative_to(root.resolve()).as_posix()
    return f"{bare.parent.name}/{bare.name}" if bare.name in _ALL_SPLIT_NAMES else bare.name


def split_files(folder: Path) -> dict[str, Path]:
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


def find_split(splits: dict[str, Path], role: str) -> Path | None:
    """The file of one of the four splits, whichever of its names it bears."""
    name = _first_present(tuple(splits), SPLIT_NAMES.get(role, (role,)))
    return splits[name] if name is not None else None


def _choose_split(name: str, folder: Path, split: str | None) -> Path:
    """The file to open where only the data set is named: ``split``, else test, validation, train, or the only one."""
    splits = split_files(folder)
    if split is not None:
        found = splits.get(split) or find_split(splits, split)
        if found is None:
            raise UsageError(f"data set '{name}' has no split '{split}': {suggest(split, splits)}")
        return found
    for role in ("test", "validation", "train"):
        if (found := find_split(splits, role)) is not None:
            return found
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise UsageError(f"data set '{name}' has several splits: name one of {', '.join(f'{name}/{s}' for s in splits)}")


def find_source(source: str | Path, data_root: str | Path | None) -> Path:
    """The existing file or folder that ``source`` means: a path, or a name under the data root."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    root = find_data_root(data_root)
    if root is not None and not path.is_absolute():
        for candidate in (root / path, *(root / f"{path}{suffix}" for suffix in (".parquet", ".npz"))):
            if candidate.exists():
                return candidate
    where = f"the data root '{root}'" if root is not None else "no data root: set MAPLE_DATA or give --data-root"
    raise UsageError(
        f"no data set, file or folder '{source}': {_hint(str(source), data_root)} "
        f"(looked among the built-in sets, in the current folder and in {where})"
    )


def _hint(source: str, data_root: str | Path | None) -> str:
    """What to do about a name that is not there: get the data set, if it is a known one, or spell it otherwise."""
    from maple.data.catalogue import find_data_set

    data_set = find_data_set(source)
    if data_set is not None:
        return f"'maple data {data_set.name}' says how to get it"
    return suggest(source, list_data_sets(data_root))


def _locate(source: str | Path, data_root: str | Path | None, split: str | None) -> tuple[Path, str]:
    """The file or folder to open, down to the split where a data set folder is meant, and its name."""
    path = find_source(source, data_root)
    if path.is_dir() and split_files(path):
        path = _choose_split(str(source), path, split)
    return path, _name_of(path, data_root)
