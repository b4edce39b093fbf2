"""Prediction files: rows are saved in parts, the file appears once it is complete, and a rerun skips finished parts.

While ``said.csv`` is being written, its rows lie in the folder ``said.csv.partial`` as Parquet files
``000000.part``, ``000001.part``, …, whatever the format of the final file. A part is written under a temporary
name, flushed to the disk and renamed, and its footer records the request, the number of images read so far and the
images that were skipped. Resuming needs nothing but the parts: the complete ones are kept, everything else is predicted
again. CSV, JSON Lines and Parquet files are written from the parts at the end.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.errors import RunError, UsageError
from maple.files import take_lock
from maple.progress import say, warn
from maple.text import shorten_list
from maple.types import SET_SEPARATOR, Skipped

PARQUET_SUFFIX = ".parquet"
SUFFIXES = (".csv", ".jsonl", ".ndjson", PARQUET_SUFFIX)
SAVE_SECONDS = 1.0  # between two parts: a kill costs at most this much work
CLASS_COLUMNS = ("class", "md_class", "softmax_class")
READ_ROWS = 4096  # at a time, from the parts,
READ_VALUES = 2**18  # and rows times columns, where they become Python objects
MAX_GROUP_ROWS = 2**16  # of a row group in Parquet,
MAX_GROUP_VALUES = 2**23  # and its rows times columns; also the values of a part
_METADATA_KEY = b"maple"
_LOCK = ".lock"

Row = dict[str, Any]


# --- formats ---------------------------------------------------------------------------------------------------------


def to_csv(rows: Iterable[Row], columns: Sequence[str], header: bool = False) -> str:
    """Rows as CSV.

    >>> to_csv([{"file": "a.png", "prediction_set": ["cat", "dog"]}], ["file", "prediction_set"], header=True)
    'file,prediction_set\\na.png,cat | dog\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return SET_SEPARATOR.join(value)
    return value.replace("\r", "\\r") if isinstance(value, str) else value  # Python does not quote \r


def to_json_lines(rows: Iterable[Row]) -> str:
    """Rows as JSON Lines; NaN becomes null.

    >>> to_json_lines([{"file": "a.png", "p_value": float("nan")}])
    '{"file": "a.png", "p_value": null}\\n'
    """
    return "".join(json.dumps(_without_nan(row), ensure_ascii=False) + "\n" for row in rows)


def _without_nan(row: Row) -> Row:
    return {key: None if value != value else value for key, value in row.items()}


def _column_type(name: str) -> pa.DataType:
    texts = {name: pa.string() for name in ("file", *CLASS_COLUMNS)}
    others = {"is_ood": pa.bool_(), "cluster": pa.int64(), "prediction_set": pa.list_(pa.string())}
    return (texts | others).get(name, pa.float64())


def _write_parquet(
    file: BinaryIO, tables: Iterable[pa.Table], schema: pa.Schema, class_names: Sequence[str], about: Mapping[str, Any]
) -> None:
    """Write tables as row groups; class names are encoded as indices into ``class_names``, NaN becomes null."""
    names = pa.array(class_names, pa.string())
    encoded = [(each.name, _final_type(each)) for each in schema]
    final = pa.schema(encoded, metadata={_METADATA_KEY: json.dumps(about)})
    with pq.ParquetWriter(file, final) as writer:
        for table in tables:
            writer.write_table(pa.table([_encode(table[each.name], each.type, names) for each in final], final))


def _final_type(column: pa.Field) -> pa.DataType:
    return pa.dictionary(pa.int32(), pa.string()) if column.name in CLASS_COLUMNS else column.type


def _encode(column: pa.ChunkedArray, kind: pa.DataType, names: pa.Array) -> pa.ChunkedArray | pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pc.index_in(column, names).combine_chunks(), names)
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
    return column


# --- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """Progress of a request: images read, rows written and images skipped."""

    images: int = 0  # read, usable or not
    rows: int = 0
    skipped: int = 0
    first_skipped: Skipped | None = None

    def add(self, rows: int, skipped: Sequence[Skipped], images: int = 0) -> Tally:
        """Add rows and skipped images; ``images`` is the number of images read by then."""
        return Tally(
            images, self.rows + rows, self.skipped + len(skipped), self.first_skipped or next(iter(skipped), None)
        )


class _Parts:
    """Parquet files ``000000.part``, ``000001.part``, … in a folder that one process holds.

    Each part carries its :class:`_Footer`. ``n`` counts the complete parts; a part that is not complete has no name.
    """

    def __init__(self, folder: Path, columns: Sequence[str]) -> None:
        self.folder = folder
        self.schema = pa.schema([(name, _column_type(name)) for name in columns])
        self.whole = folder / "whole"  # a file being written, part or final
        self.n = 0

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(self.folder / _LOCK)
        if self._lock is None:
            raise RunError(f"'{self.folder}' is being written by another process: wait for it, or choose another --out")

    def close(self) -> None:
        self._lock.release()

    def discard(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, i: int) -> Path:
        return self.folder / f"{i:06}.part"

    def paths(self) -> list[Path]:
        return [self.path(i) for i in range(self.n)]

    def footers(self) -> Iterator[_Footer]:
        """The footers of all complete parts, in order; a damaged part ends them."""
        for path in takewhile(Path.exists, map(self.path, count())):
            try:
                yield _Footer.read(path)
            except (ValueError, LookupError, TypeError, OSError):
                warn(f"'{path}' is damaged: predicting its images and all later ones again")
                return

    def keep(self, n: int) -> None:
        """Remove everything but the first ``n`` parts."""
        self.n = n
        kept = {*self.paths(), self.folder / _LOCK}
        for path in self.folder.iterdir():
            if path not in kept:
                path.unlink()

    def write(self, tables: Sequence[pa.Table], footer: _Footer) -> None:
        table = pa.concat_tables([self.schema.empty_table(), *tables])
        with _replacing(self.path(self.n), self.whole) as file:
            pq.write_table(table.replace_schema_metadata({_METADATA_KEY: footer.to_json()}), file)
        self.n += 1

    def read_column(self, name: str) -> np.ndarray:
        """The values (N,) of a numeric column."""
        columns = [pq.read_table(path, columns=[name])[name].to_numpy() for path in self.paths()]
        return np.concatenate(columns, dtype=np.float64)

    def tables(self, size: int) -> Iterator[pa.Table]:
        """All rows in tables of ``size`` rows, regardless of how they lie in the parts."""
        waiting = self.schema.empty_table()
        for path in self.paths():
            with pq.ParquetFile(path) as part:
                for batch in part.iter_batches(READ_ROWS):
                    waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], self.schema)])
                    while len(waiting) >= size:
                        yield waiting.slice(0, size).combine_chunks()
                        waiting = waiting.slice(size)
        if len(waiting):
            yield waiting.combine_chunks()


@dataclass(frozen=True)
class _Footer:
    """Metadata of a part: the request, the images read by its end, its rows and the images skipped in it."""

    request: dict[str, Any]
    images: int
    skipped: list[Skipped]
    rows: int = 0

    def to_json(self) -> str:
        skipped = [asdict(item) for item in self.skipped]
        return json.dumps({"request": self.request, "images": self.images, "skipped": skipped})

    @staticmethod
    def read(path: Path) -> _Footer:
        footer = pq.read_metadata(path)
        found = json.loads(footer.metadata[_METADATA_KEY])
        skipped = [Skipped(**item) for item in found["skipped"]]
        return _Footer(dict(found["request"]), int(found["images"]), skipped, footer.num_rows)


@contextmanager
def _replacing(target: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file that replaces ``target`` once it is complete and on the disk."""
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:  # a full disk needs the room
        temporary.unlink(missing_ok=True)
        raise


# --- the file --------------------------------------------------------------------------------------------------------


def skipped_path(path: Path) -> Path:
    """The list of images that have no row in ``path``."""
    return path.with_suffix(".skipped.csv")


class ResumableFile:
    """A prediction file in the making: append rows, then ``finish``; the suffix of ``path`` chooses the format.

    ``request`` describes what was asked for, with digests of the model and the images. Parts of the same request are
    kept and ``tally`` tells from which image to go on; parts of another request are refused unless ``overwrite`` is
    set. Without a request nothing is kept. Skipped images are listed in a file beside ``path``.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        class_names: Sequence[str],
        request: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path, self.columns, self.class_names = path, columns, class_names
        self.overwrite = overwrite
        self.request, self._is_kept = dict(request or {}), request is not None
        self.tally = self._saved = Tally()
        self._parts = _Parts(path.with_name(f"{path.name}.partial"), columns)
        self._waiting: list[pa.Table] = []  # rows of the next part
        self._skipped: list[Skipped] = []  # of the next part

    def __enter__(self) -> Self:
        with self._naming_file():
            self._parts.open()
            try:
                self._resume()
            except BaseException:
                self._parts.close()
                raise
        self._saved_at = time.monotonic()
        return self

    def _resume(self) -> None:
        n_parts, tally = 0, Tally()
        for footer in () if self.overwrite else self._parts.footers():
            n_parts, tally = n_parts + 1, tally.add(footer.rows, footer.skipped, footer.images)
        if n_parts:
            self._check_request(footer)
            say(f"resuming after {tally.images:,} images, from '{self._parts.folder}'")
        self._parts.keep(n_parts)
        self.tally = self._saved = tally

    def _check_request(self, last: _Footer) -> None:
        other = [name for name, value in self.request.items() if last.request.get(name) != value]
        if other:
            raise UsageError(
                f"'{self._parts.folder}' holds {last.images:,} images of a request that differs in "
                f"{shorten_list(other)}: repeat that request to resume it, or add --overwrite to start again"
            )

    def append(self, rows: list[Row], skipped: Sequence[Skipped], images: int) -> None:
        """Add rows and skipped images; ``images`` is the number of images read by then."""
        if rows:
            self._waiting.append(pa.Table.from_pylist(rows, self._parts.schema))
        self._skipped += skipped
        self.tally = self.tally.add(len(rows), skipped, images)
        n_values = (self.tally.rows - self._saved.rows) * len(self.columns)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS or n_values >= MAX_GROUP_VALUES:
            self.save()

    def save(self) -> None:
        """Write the rows since the last part as the next one."""
        if self.tally.images > self._saved.images:
            with self._naming_file():
                self._parts.write(self._waiting, _Footer(self.request, self.tally.images, self._skipped))
            self._waiting, self._skipped, self._saved = [], [], self.tally
        self._saved_at = time.monotonic()

    def read_column(self, name: str) -> np.ndarray:
        """The values (N,) of a numeric column in all rows so far, in float64."""
        self.save()
        return self._parts.read_column(name)

    def finish(self, is_ood: np.ndarray | None = None, about: Mapping[str, Any] | None = None) -> None:
        """Write the complete file and the list of skipped images, and remove the parts.

        ``is_ood`` (N,) replaces the decisions in the rows; ``about`` becomes metadata of a Parquet file. A process
        killed in between resumes like any other.
        """
        self.save()
        with self._naming_file():
            self._write_skipped()
            with _replacing(self.path, self._parts.whole) as file:
                self._write_rows(file, is_ood, about or {})
            self.discard()

    def _write_skipped(self) -> None:
        target = skipped_path(self.path)
        if not self.tally.skipped:
            target.unlink(missing_ok=True)  # left by an earlier file of this name
            return
        columns = ["file", "reason"]
        with _replacing(target, self._parts.whole) as file:
            file.write(to_csv([], columns, header=True).encode())
            for footer in self._parts.footers():
                file.write(to_csv(map(asdict, footer.skipped), columns).encode())

    def _write_rows(self, file: BinaryIO, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        if self.path.suffix == PARQUET_SUFFIX:
            size = max(1, min(MAX_GROUP_ROWS, MAX_GROUP_VALUES // len(self.columns)))
            _write_parquet(file, self._decided(size, is_ood), self._parts.schema, self.class_names, about)
            return
        is_csv = self.path.suffix == ".csv"
        file.write(to_csv([], self.columns, header=is_csv).encode())
        size = max(1, min(READ_ROWS, READ_VALUES // len(self.columns)))
        for table in self._decided(size, is_ood):
            rows = table.to_pylist()
            file.write((to_csv(rows, self.columns) if is_csv else to_json_lines(rows)).encode())

    def _decided(self, size: int, is_ood: np.ndarray | None) -> Iterator[pa.Table]:
        """All rows in tables of ``size`` rows, with the decisions (N,) where they are given."""
        start = 0
        for table in self._parts.tables(size):
            if is_ood is not None:
                flags = pa.array(is_ood[start : start + len(table)])
                table = table.set_column(table.schema.get_field_index("is_ood"), "is_ood", flags)
            yield table
            start += len(table)

    def discard(self) -> None:
        """Remove the parts."""
        self._parts.discard()
        self._saved = Tally()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if self._saved.images and self._is_kept:
            self._parts.close()
            done = f"{self._saved.images:,} images are done and kept in '{self._parts.folder}'"
            say(f"{done}: rerun the same command to resume")
        else:
            self.discard()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write '{self.path}': {error.strerror or error}; free some space and rerun the same command, "
                "or choose another --out"
            ) from None
