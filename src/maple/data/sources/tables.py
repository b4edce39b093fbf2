"""Tables of images: rows of a Parquet file, as Hugging Face writes them, and arrays of an ``.npz`` file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.data._decoder import Item, content_key
from maple.data.decode import Fit, Size, check_file_size
from maple.data.image_set import ImageSet, Labels, index_labels, no_labels
from maple.data.sources.folders import stamp_file
from maple.data.sources.remote import Place
from maple.data.stream import Source
from maple.errors import DataError
from maple.files import inert

_READ_ROWS = (64, 1024)  # of a Parquet file at a time: fewer where images are large
_READ_IMAGES = 2**22  # and about so many bytes of images
_SHARED_VALUES = 2**26  # bytes of a column in a row group up to which its rows share equal values in batches,
_SHARED_COLUMN = 2**31 - 2**20  # and up to which they do where the whole column is loaded: as much as pyarrow indexes
_PLAIN_BYTES = 2**30  # of a batch whose rows do not share them, at most: each row may hold all bytes of its row group
_MAX_NAME = 10_000  # bytes of the name of a class or file
_READ_BYTES = 2**20  # of its columns at a time: else whole row groups, which may be the whole file
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_NAME_COLUMN = "label_name"


class Table(Source):
    """Encoded images in a column of a Parquet file.

    Images that are read in order are read along with the file; the first that is read out of order loads the column,
    encoded, into memory.
    """

    def __init__(self, where: Path | Place, name: str, labelled: bool = False, may_be_empty: bool = False) -> None:
        self.where = where
        self.path = where if isinstance(where, Path) else None
        self.name, self.skipped = name, ()
        with self._open() as file:
            schema = file.schema_arrow
            self._image = _require(schema.names, _IMAGE_COLUMNS, where, "column")
            _check_rows(file, where)
            self.labels, self.class_names = _read_labels(file, where) if labelled else (None, ())
            read_image_column(schema.empty_table()[self._image], name, where)  # raises where it holds no images
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])  # first row of each row group, and the number of rows
        if len(self) == 0 and not may_be_empty:
            raise DataError(f"no images in '{where}': the file has no rows, add some")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digest(self) -> str:
        path = os.fsencode(str(self.where))
        return content_key(path + (stamp_file(path) if isinstance(self.where, Path) else self.where.stamp()))

    @property
    def n_bytes(self) -> int:
        """The size of the file."""
        with self._open() as file:
            return sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))

    def only(self, rows: Sequence[int]) -> tuple[Table, Sequence[int]]:
        """What reads these rows in another process, and their positions there."""
        return self._without_rows(), rows

    def _without_rows(self) -> Table:
        """The same table: an absolute path, and nothing that was read from it."""
        other = copy(self)
        other.where = self.where.absolute() if isinstance(self.where, Path) else self.where
        other.labels, other.class_names = None, ()
        other.__dict__.pop("_column", None)
        return other

    def item(self, i: int) -> Item:
        return _encoded(self._column, i)

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        with self._open(_SHARED_COLUMN) as file:
            empty = file.schema_arrow.empty_table()[self._image]
            tables = (file.read_row_group(i, columns=[self._image]) for i in range(file.num_row_groups))
            parts = [read_image_column(each[self._image], self.name, self.where)[0] for each in tables]
        return pa.chunked_array(
            [chunk for part in parts for chunk in part.chunks], read_image_column(empty, self.name, self.where)[0].type
        )

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        group = int(np.searchsorted(self._starts, start, side="right")) - 1
        row = int(self._starts[group])
        with self._open() as file:
            for batch in self._batches(file, group):
                column, files = read_image_column(pa.chunked_array([batch.column(0)]), self.name, self.where, row)
                for i in range(max(start - row, 0), len(column)):
                    yield files[i], _encoded(column, i)
                row += len(column)

    def _batches(self, file: pq.ParquetFile, first: int) -> Iterator[pa.RecordBatch]:
        """Rows from a row group on; pyarrow does not join the dictionaries of row groups in structs."""
        size = _rows_at_once(file, self._image)
        for group in range(first, file.num_row_groups):
            yield from file.iter_batches(size, [group], [self._image], use_threads=False)

    @contextmanager
    def _open(self, shared: int | None = None) -> Iterator[pq.ParquetFile]:
        """The file; rows share equal values of columns with at most ``shared`` bytes in a row group."""
        limit = _SHARED_VALUES if shared is None else shared
        try:
            source = self.where if isinstance(self.where, Path) else self.where.open()
            found = pq.read_metadata(source)
            how: Any = {"metadata": found, "read_dictionary": _find_repeatable(found, limit)}
            with pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False, **how) as file:
                yield file
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of names of columns
            reason = str(error).splitlines()[0]
            raise DataError(f"cannot read '{self.where}' as Parquet: {reason}; write it again") from None


class Tables(Source):
    """The Parquet files of a data set, as one table: its rows are those of the files in the order of their names."""

    def __init__(self, places: Sequence[Path | Place], name: str, labelled: bool = False) -> None:
        self.name, self.skipped = name, ()
        self.parts = [Table(each, f"{name}/{Path(str(each)).name}", labelled, may_be_empty=True) for each in places]
        self._starts = np.cumsum([0, *map(len, self.parts)])
        if len(self) == 0:
            raise DataError(f"no images in '{name}': its {len(places)} Parquet files have no rows, add some")
        self.labels, self.class_names = self._common_labels() if labelled else (None, ())

    def _common_labels(self) -> Labels:
        """Labels (N,) by the names of all files, sorted; as they are where all files name the same classes."""
        lists = {part.class_names: None for part in self.parts if len(part)}
        names = next(iter(lists)) if len(lists) == 1 else tuple(sorted({name for each in lists for name in each}))
        place = {name: i for i, name in enumerate(names)}
        own = [np.array([place[name] for name in part.class_names], np.int64)[part.labels] for part in self._filled()]
        return np.concatenate(own), names

    def _filled(self) -> Iterator[Any]:
        return (part for part in self.parts if len(part))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digest(self) -> str:
        return content_key("".join(part.digest() for part in self.parts).encode())

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(part.n_bytes for part in self.parts)

    def only(self, rows: Sequence[int]) -> tuple[Tables, Sequence[int]]:
        """What reads these rows in another process, and their positions there: the files that hold them."""
        first, last = self._find(min(rows)), self._find(max(rows))
        other = copy(self)
        other.parts = [part._without_rows() for part in self.parts[first : last + 1]]
        other.labels, other.class_names = None, ()
        other._starts = self._starts[first : last + 2] - self._starts[first]
        return other, [row - int(self._starts[first]) for row in rows]

    def _find(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def item(self, i: int) -> Item:
        part = self._find(i)
        return self.parts[part].item(i - int(self._starts[part]))

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        if start >= len(self):
            return
        first = self._find(start)
        yield from self.parts[first].items(start - int(self._starts[first]))
        for part in self.parts[first + 1 :]:
            yield from part.items(0)


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


def _require(names: Sequence[str], wanted: Sequence[str], path: Path | Place, kind: str) -> str:
    """The first of the ``wanted`` columns or arrays that a file has."""
    for name in wanted:
        if name in names:
            return name
    asked = " or ".join(f"'{name}'" for name in wanted)
    raise DataError(f"'{path}' has no {kind} {asked}: found {', '.join(names) or 'none'}")


def _find_repeatable(found: pq.FileMetaData, shared: int) -> list[str]:
    """Columns that are read with each distinct value once: a kilobyte of Parquet may repeat a large one for ever.

    Each batch then holds the values of all rows before it in the row group, so that large row groups are read plainly.
    """
    roots = (*_IMAGE_COLUMNS, *_LABEL_COLUMNS, _NAME_COLUMN)
    wanted = {*roots, *(f"{root}.{field}" for root in roots for field in ("bytes", "path"))}
    is_text = ("NONE", "STRING")
    return [
        column.path
        for i, column in enumerate(found.schema.column(i) for i in range(len(found.schema)))
        if column.path in wanted and column.physical_type == "BYTE_ARRAY" and column.logical_type.type in is_text
        if _largest_group(found, i) <= shared
    ]


def _largest_group(found: pq.FileMetaData, column: int) -> int:
    """The most bytes that a row group holds of a column."""
    return max(
        (found.row_group(i).column(column).total_uncompressed_size for i in range(found.num_row_groups)), default=0
    )


def _rows_at_once(file: pq.ParquetFile, image: str) -> int:
    """Rows of a batch: more where they are small and share equal values."""
    found, paths = file.metadata, (image, f"{image}.bytes")
    if not any(path in paths for path in _find_repeatable(found, _SHARED_VALUES)):
        own = [i for i in range(len(found.schema)) if found.schema.column(i).path in paths]
        largest = max((_largest_group(found, i) for i in own), default=0)
        return int(np.clip(_PLAIN_BYTES // max(largest, 1), 1, _READ_ROWS[0]))
    per_row = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups)) // max(found.num_rows, 1)
    return int(np.clip(_READ_IMAGES // max(per_row, 1), *_READ_ROWS))


def _check_rows(file: pq.ParquetFile, path: Path | Place) -> None:
    """Refuse more rows than bytes: rows that are empty or repeat the one before take no room in a file."""
    found, size = file.metadata, path.stat().st_size if isinstance(path, Path) else path.open().size()
    if found.num_rows > size:
        raise DataError(f"'{path}' has {found.num_rows:,} rows in {size:,} bytes, which are no images: write it again")


def _is_text(kind: pa.DataType) -> bool:
    """Whether values are texts or bytes, also where rows share them."""
    own = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_kind(own) for is_kind in _TEXTS)


def _check_text(column: pa.ChunkedArray, path: Path | Place) -> None:
    """Refuse texts that are no names, before each row has its own."""
    for chunk in column.chunks:
        values = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
        if _is_text(values.type):
            longest = pc.max(pc.binary_length(values)).as_py() or 0
            if longest > _MAX_NAME:
                raise DataError(f"a name in '{path}' has {longest:,} bytes: give at most {_MAX_NAME:,}")


def read_image_column(
    column: pa.ChunkedArray, name: str, path: Path | Place, first: int = 0
) -> tuple[pa.ChunkedArray, tuple[str, ...]]:
    """The encoded bytes, and a name for each image; ``first`` is the row of the first of them."""
    files = [f"{name}#{i}" for i in range(first, first + len(column))]
    if pa.types.is_struct(column.type):
        fields = [column.type.field(i).name for i in range(column.type.num_fields)]
        if "path" in fields:
            _check_text(pc.struct_field(column, "path"), path)
            paths = _to_texts(pc.struct_field(column, "path"))
            files = [inert(str(given or numbered)) for given, numbered in zip(paths, files)]
        if "bytes" in fields:
            column = pc.struct_field(column, "bytes")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"the image column of '{path}' holds {kind}: save encoded bytes (JPEG, PNG, ...)")
    return column, tuple(files)


def _read_labels(file: pq.ParquetFile, path: Path | Place) -> Labels:
    """Labels (N,) and class names, from the columns of numbers, of names, or both."""
    schema = file.schema_arrow
    first = _require(schema.names, (*_LABEL_COLUMNS, _NAME_COLUMN), path, "column")
    table = file.read(columns=[first, *({_NAME_COLUMN} & set(schema.names) - {first})])
    for column in table.column_names:
        if table[column].null_count:
            row = table[column].is_null().to_pylist().index(True)
            raise DataError(f"row {row} of '{path}' has no {column}: remove the row or give it one")
        if pa.types.is_nested(table[column].type):
            found = f"column '{column}' of '{path}' holds {table[column].type}"
            raise DataError(f"{found}: give one integer or name per image")
        _check_text(table[column], path)
    if len(table) == 0:
        return no_labels(0)  # refused later, with the number of rows
    declared = _class_label(schema, first)
    if first == _NAME_COLUMN or _is_text(table[first].type):
        names, rows = _distinct_names(table[first])
        class_ids, class_names = index_labels(names, declared, path)
        return class_ids[rows], class_names
    values = np.array(table[first].to_pylist())
    if _NAME_COLUMN in table.column_names and values.dtype.kind in "iu":
        return _index_named_labels(values, *_distinct_names(table[_NAME_COLUMN]), path)
    return index_labels(values, declared, path)


def _distinct_names(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The names that occur in a column, each once, and which of them a row has (N,)."""
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    used, rows = np.unique(encoded.indices.to_numpy(), return_inverse=True)
    return [str(name) for name in _to_texts(encoded.dictionary.take(pa.array(used)))], rows


def _to_texts(values: Any) -> list[Any]:
    """The values as Python has them; texts that are not UTF-8 as such names are written."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if _is_text(values.type):
        values = values.cast(pa.large_binary())
    return [
        each.decode("utf-8", "backslashreplace") if isinstance(each, bytes) else each for each in values.to_pylist()
    ]


def _class_label(schema: pa.Schema, label: str) -> list[str] | None:
    """Names of a ClassLabel, which Hugging Face keeps as JSON in the metadata of the schema."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _index_named_labels(values: np.ndarray, names: list[str], rows: np.ndarray, path: Path | Place) -> Labels:
    """Labels (N,) whose ``names`` are at ``rows`` (N,): classes in their order, one name per label and back."""
    distinct, first, labels = np.unique(values, return_index=True, return_inverse=True)
    named = rows[first]
    for row in np.flatnonzero(named[labels] != rows)[:1]:
        both = f"'{names[named[labels[row]]]}' and '{names[rows[row]]}'"
        raise DataError(f"label {values[row]} in '{path}' has the names {both}: give each label one name")
    class_names = tuple(names[i] for i in named)
    if len(set(class_names)) < len(distinct):
        twice = next(name for name in class_names if class_names.count(name) > 1)
        raise DataError(f"several labels in '{path}' have the name '{twice}': give each label its own name")
    return labels.astype(np.int64), class_names


# --- arrays ----------------------------------------------------------------------------------------------------------


def open_npz(path: Path, name: str, size: Size, fit: Fit, memory_limit: int, labelled: bool) -> ImageSet:
    """Images of an ``.npz`` file: ``images`` or ``x``, and ``labels`` or ``y``, optionally ``class_names``."""
    try:
        _check_unpacked(path, memory_limit)
        with np.load(path, allow_pickle=False) as arrays:
            images = _array(arrays, _require(arrays.files, ("images", "x"), path, "array"))
            labels = _array(arrays, _require(arrays.files, ("labels", "y"), path, "array")) if labelled else None
            names = _text(_array(arrays, "class_names"), path) if labelled and "class_names" in arrays.files else None
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"cannot read '{path}': {error}; save plain numbers and strings, not Python objects") from None
    except Exception as error:  # zip, its compressions and NumPy's header raise OSError, TokenError, SystemError, ...
        raise DataError(f"cannot read '{path}' as .npz: {error}; write it again") from None
    return ImageSet.from_arrays(images, labels, names, name=name, size=size, fit=fit, memory_limit=memory_limit)


def _array(arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    """One array of the file, whose text is valid."""
    array = arrays[name]
    if not isinstance(array, np.ndarray):
        raise ValueError(f"'{name}' is not an array")
    if array.dtype.kind == "U":
        array.tolist()  # raises an error for characters that do not exist
    return array


def _check_unpacked(path: Path, memory_limit: int) -> None:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > 8 * memory_limit:  # float64 arrays of uint8 pixels
        raise DataError(f"'{path}' unpacks to {unpacked / 2**30:.1f} GiB: save it as Parquet or as a folder of images")


def _text(names: np.ndarray, path: Path) -> list[str]:
    if names.ndim != 1 or names.dtype.kind not in "US":
        found = f"shape {names.shape} and type {names.dtype}"
        raise DataError(f"'class_names' in '{path}' has {found}: save a list of names")
    return [str(name) for name in names.astype(str)]
