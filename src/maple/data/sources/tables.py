"""Tables of images: rows of a Parquet file, as Hugging Face writes them, and arrays of an ``.npz`` file."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.data.decode import Fit, Size, check_file_size
from maple.data.image_set import ImageSet, Labels, index_labels
from maple.data.sources.folders import stamp_file
from maple.data.stream import Item, Source
from maple.errors import DataError

_READ_ROWS = 64  # of a Parquet file at a time
_READ_BYTES = 2**20  # of its columns at a time: else whole row groups, which may be the whole file
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")


class Table(Source):
    """Encoded images in a column of a Parquet file.

    Images that are read in order are read along with the file; the first that is read out of order loads the column,
    encoded, into memory.
    """

    def __init__(self, path: Path, name: str, labelled: bool = False) -> None:
        self.path: Path = path
        self.name, self.skipped = name, ()
        with self._open() as file:
            schema = file.schema_arrow
            self._image = _find_image_column(schema, path)
            self.labels, self.class_names = _read_labels(file, path) if labelled else (None, ())
            read_image_column(schema.empty_table()[self._image], name, path)  # raises where it holds no images
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])  # first row of each row group, and the number of rows
        if len(self) == 0:
            raise DataError(f"no images in '{path}': the file has no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digest(self) -> str:
        path = os.fsencode(self.path)
        return hashlib.blake2b(path + stamp_file(path), digest_size=16).hexdigest()

    def item(self, i: int) -> Item:
        return _encoded(self._column, i)

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        with self._open() as file:
            return read_image_column(file.read(columns=[self._image])[self._image], self.name, self.path)[0]

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        group = int(np.searchsorted(self._starts, start, side="right")) - 1
        row = int(self._starts[group])
        with self._open() as file:
            groups = list(range(group, file.num_row_groups))
            for batch in file.iter_batches(_READ_ROWS, groups, [self._image], use_threads=False):
                column, files = read_image_column(pa.chunked_array([batch.column(0)]), self.name, self.path, row)
                for i in range(max(start - row, 0), len(column)):
                    yield files[i], _encoded(column, i)
                row += len(column)

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        try:
            with pq.ParquetFile(self.path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read '{self.path}' as Parquet: {str(error).splitlines()[0]}") from None


def _encoded(column: pa.ChunkedArray, i: int) -> Item:
    data = column[i].as_py()
    if not data:
        return DataError("the row holds no image bytes")
    try:
        check_file_size(len(data))
    except DataError as error:
        return error
    return data


# --- columns ---------------------------------------------------------------------------------------------------------


def _find_image_column(schema: pa.Schema, path: Path) -> str:
    image = _first_present(schema.names, _IMAGE_COLUMNS)
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


def _read_labels(file: pq.ParquetFile, path: Path) -> Labels:
    """Labels (N,) and class names, from the columns of numbers, of names, or both."""
    schema = file.schema_arrow
    label = _first_present(schema.names, _LABEL_COLUMNS)
    label_name = _first_present(schema.names, ("label_name",))
    if label is None and label_name is None:
        raise DataError(
            f"'{path}' has no label column: expected 'label', 'labels', 'fine_label' or 'label_name', "
            f"{_found_columns(schema)}"
        )
    table = file.read(columns=[column for column in (label, label_name) if column is not None])
    if len(table) == 0:
        return np.zeros(0, dtype=np.int64), ()  # refused below, with the number of rows
    for column in (label, label_name):
        if column is not None and table[column].null_count:
            row = table[column].is_null().to_pylist().index(True)
            raise DataError(f"row {row} of '{path}' has no {column}: remove the row or give it one")
    return _index_columns(table, label, label_name, path)


def _index_columns(table: pa.Table, label: str | None, label_name: str | None, path: Path) -> Labels:
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
    """Names of a ClassLabel, which Hugging Face keeps as JSON in the metadata of the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _index_named_labels(values: np.ndarray, names: np.ndarray, path: Path) -> Labels:
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


# --- arrays ----------------------------------------------------------------------------------------------------------


def open_npz(path: Path, name: str, size: Size, fit: Fit, memory_limit: int, labelled: bool) -> ImageSet:
    """Images of an ``.npz`` file: ``images`` or ``x``, and ``labels`` or ``y``, optionally ``class_names``."""
    try:
        _check_unpacked(path, memory_limit)
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


def _check_unpacked(path: Path, memory_limit: int) -> None:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > 8 * memory_limit:  # float64 arrays of uint8 pixels
        raise DataError(
            f"'{path}' unpacks to {unpacked / 2**30:.1f} GiB: save sets of that size as Parquet or as a folder"
        )


def _text(names: np.ndarray, path: Path) -> list[str]:
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(
            f"'class_names' in '{path}' has shape {names.shape} and type {names.dtype}: expected a list of names"
        )
    return [str(name) for name in names.astype(str)]
