"""Files of rows that are written as the rows come, appear when they are complete, and go on where a kill left them.

While ``said.csv`` is being written, its rows are in ``said.csv.partial`` (for Parquet, whose files cannot be appended
to, a folder of parts), and ``said.csv.partial.json`` is the journal: what was asked for, and up to which mark the rows
are known to be on the disk. Whatever lies behind the mark is forgotten by the call that goes on, so that it does not
matter when the last one ended, or how.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.errors import RunError, UsageError
from maple.progress import say, warn
from maple.text import shorten_list
from maple.types import MAX_CELL, SET_SEPARATOR, Skipped

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (".csv", *JSON_SUFFIXES, PARQUET_SUFFIX)
SAVE_SECONDS = 1.0  # between two entries of the journal, which wait for the disk: so much work a kill may cost
CLASS_COLUMNS = ("class", "md_class", "softmax_class")
READ_ROWS = 4096  # at a time, where rows are read again
MAX_GROUP_ROWS = 2**16  # of a row group in Parquet,
MAX_GROUP_VALUES = 2**23  # and its rows times columns

Row = dict[str, Any]


# --- text ------------------------------------------------------------------------------------------------------------


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
    return value.replace("\r", "\\r") if isinstance(value, str) else value  # which Python would not quote


def to_json_lines(rows: Iterable[Row]) -> str:
    """Rows as JSON, one in each line.

    >>> to_json_lines([{"file": "a.png", "p_value": float("nan")}])
    '{"file": "a.png", "p_value": null}\\n'
    """
    return "".join(json.dumps(_without_nan(row), ensure_ascii=False) + "\n" for row in rows)


def _without_nan(row: Row) -> Row:
    return {key: None if value != value else value for key, value in row.items()}


# --- rows on the disk ------------------------------------------------------------------------------------------------


class Rows(ABC):
    """Rows at ``partial``, where they wait until all are there."""

    def __init__(self, partial: Path) -> None:
        self.partial = partial
        self.whole = partial.with_name(f"{partial.name}.whole")  # the complete file, while it is made of the rows

    @abstractmethod
    def open(self) -> None:
        """Take hold of what is there, or of nothing, so that no other process can."""

    @abstractmethod
    def go_back(self, mark: int) -> bool:
        """Forget what was appended after that mark, 0 being the beginning; False where not even so much is there."""

    @abstractmethod
    def append(self, rows: list[Row]) -> None:
        """Write rows."""

    @abstractmethod
    def save(self) -> int:
        """Wait until all rows are on the disk; the mark to go back to."""

    @abstractmethod
    def read_column(self, name: str) -> np.ndarray:
        """The values (N,) of a column of numbers, in float64."""

    @abstractmethod
    def finish(self, target: Path, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        """Put the complete file in its place, with other decisions (N,) where they are given."""

    @abstractmethod
    def close(self) -> None:
        """Let go, and leave everything as it is."""

    def discard(self) -> None:
        """Let go, and leave nothing."""
        self.close()
        self.whole.unlink(missing_ok=True)
        if self.partial.is_dir():
            shutil.rmtree(self.partial, ignore_errors=True)
        else:
            self.partial.unlink(missing_ok=True)


class TextRows(Rows):
    """CSV or JSON Lines; a mark is a number of bytes."""

    def __init__(self, partial: Path, columns: Sequence[str], as_lines: bool = False) -> None:
        super().__init__(partial)
        self.columns, self.as_lines = columns, as_lines
        self._header = b"" if as_lines else to_csv([], columns, header=True).encode()

    def open(self) -> None:
        self._file = _hold(self.partial, self.partial)

    def go_back(self, mark: int) -> bool:
        if self._file.seek(0, os.SEEK_END) < mark:
            return False
        self._file.truncate(mark)
        self._file.seek(mark)
        if mark == 0:
            self._file.write(self._header)
        return True

    def append(self, rows: list[Row]) -> None:
        self._file.write(self._encode(rows))

    def _encode(self, rows: list[Row]) -> bytes:
        return (to_json_lines(rows) if self.as_lines else to_csv(rows, self.columns)).encode()

    def save(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def read_column(self, name: str) -> np.ndarray:
        return np.fromiter((float(row[name]) for row in self._read()), dtype=np.float64)

    def _read(self) -> Iterator[Row]:
        with self.partial.open(encoding="utf-8", newline="") as file:
            if self.as_lines:
                yield from map(json.loads, file)
            else:
                csv.field_size_limit(MAX_CELL)
                yield from csv.DictReader(file)

    def finish(self, target: Path, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        if is_ood is None:
            self.close()
            self.partial.replace(target)
            return
        with _replacing(target, self.whole) as file:
            file.write(self._header)
            changed = (row | {"is_ood": bool(flag)} for row, flag in zip(self._read(), is_ood))
            while rows := list(islice(changed, READ_ROWS)):
                file.write(self._encode(rows))

    def copy(self, target: Path) -> None:
        """Put a copy in its place: the rows stay where they are until they are discarded."""
        with _replacing(target, self.whole) as file, self.partial.open("rb") as rows:
            shutil.copyfileobj(rows, file)

    def close(self) -> None:
        with suppress(OSError):  # of a full disk, which was reported when it was met
            self._file.close()


class ParquetRows(Rows):
    """Parquet; a mark is a number of parts, each of which is written between two entries of the journal."""

    def __init__(self, partial: Path, columns: Sequence[str], class_names: Sequence[str]) -> None:
        super().__init__(partial)
        self.columns, self.class_names = columns, class_names
        self._schema = pa.schema([(name, _column_type(name)) for name in columns])
        self._writer: pq.ParquetWriter | None = None
        self._n_parts = 0

    def open(self) -> None:
        self.partial.mkdir(exist_ok=True)
        self._held = _hold(self.partial / ".held", self.partial)

    def go_back(self, mark: int) -> bool:
        if not all(self._part(i).is_file() for i in range(mark)):
            return False
        self._n_parts, kept = mark, {self._part(i) for i in range(mark)}
        for path in self.partial.glob(f"*{PARQUET_SUFFIX}"):
            if path not in kept:
                path.unlink()
        return True

    def _part(self, i: int) -> Path:
        return self.partial / f"{i:06}{PARQUET_SUFFIX}"

    def append(self, rows: list[Row]) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._part(self._n_parts), self._schema)
        self._writer.write_table(pa.Table.from_pylist([_without_nan(row) for row in rows], schema=self._schema))

    def save(self) -> int:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            with self._part(self._n_parts).open("rb") as file:
                os.fsync(file.fileno())
            self._n_parts += 1
        return self._n_parts

    def read_column(self, name: str) -> np.ndarray:
        parts = [pq.read_table(self._part(i), columns=[name])[name].to_numpy() for i in range(self._n_parts)]
        return np.concatenate(parts, dtype=np.float64)

    def finish(self, target: Path, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        types = {name: pa.dictionary(pa.int32(), pa.string()) for name in CLASS_COLUMNS}
        schema = pa.schema([(field.name, types.get(field.name, field.type)) for field in self._schema])
        schema = schema.with_metadata({"maple": json.dumps(about)})
        row = 0
        with _replacing(target, self.whole) as file, pq.ParquetWriter(file, schema) as writer:
            for table in self._groups():
                columns = {name: self._encode_classes(table[name]) for name in CLASS_COLUMNS}
                if is_ood is not None:
                    columns["is_ood"] = pa.array(is_ood[row : row + len(table)])
                writer.write_table(pa.table([columns.get(name, table[name]) for name in self.columns], schema))
                row += len(table)

    def _groups(self) -> Iterator[pa.Table]:
        """All rows in groups of equal size, which do not tell how the rows lay in the parts."""
        size = max(1, min(MAX_GROUP_ROWS, MAX_GROUP_VALUES // len(self.columns)))
        waiting = self._schema.empty_table()
        for i in range(self._n_parts):
            with pq.ParquetFile(self._part(i)) as part:
                for batch in part.iter_batches(READ_ROWS):
                    waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch])])
                    while len(waiting) >= size:
                        yield waiting.slice(0, size).combine_chunks()
                        waiting = waiting.slice(size)
        if len(waiting):
            yield waiting.combine_chunks()

    def _encode_classes(self, column: pa.ChunkedArray) -> pa.DictionaryArray:
        """Names of classes as their positions among all names, the same in every row group."""
        names = pa.array(self.class_names, pa.string())
        return pa.DictionaryArray.from_arrays(pc.index_in(column, names).combine_chunks(), names)

    def close(self) -> None:
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        self._held.close()


def _column_type(name: str) -> pa.DataType:
    texts = {name: pa.string() for name in ("file", *CLASS_COLUMNS)}
    others = {"is_ood": pa.bool_(), "cluster": pa.int64(), "prediction_set": pa.list_(pa.string())}
    return (texts | others).get(name, pa.float64())


@contextmanager
def _replacing(target: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``target`` once it is complete and on the disk."""
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:  # a full disk needs the room
        temporary.unlink(missing_ok=True)
        raise


def _hold(path: Path, what: Path) -> BinaryIO:
    """A file, made where there is none, that no other process can hold until this one closes it or ends."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows, where nothing is held
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"'{what}' is being written by another process: wait for it, or choose another --out") from None
    return file


# --- going on --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """How far a request has come."""

    images: int = 0  # read, whether or not they could be used
    rows: int = 0
    skipped: int = 0
    first_skipped: Skipped | None = None
    mark: int = 0  # of the rows
    skipped_mark: int = 0  # of the list of images that were skipped

    def add(self, rows: int, skipped: Sequence[Skipped], images: int = 0) -> State:
        """So many rows more, and images without a row, up to that image."""
        return replace(
            self,
            images=images,
            rows=self.rows + rows,
            skipped=self.skipped + len(skipped),
            first_skipped=self.first_skipped or next(iter(skipped), None),
        )


def skipped_path(path: Path) -> Path:
    """Where images are listed that have no row in ``path``."""
    return path.with_suffix(".skipped.csv")


def _open_rows(path: Path, columns: Sequence[str], class_names: Sequence[str]) -> Rows:
    """Rows of the form that the end of the name says."""
    partial = path.with_name(f"{path.name}.partial")
    if path.suffix == PARQUET_SUFFIX:
        return ParquetRows(partial, columns, class_names)
    return TextRows(partial, columns, as_lines=path.suffix in JSON_SUFFIXES)


class ResumableFile:
    """One request on its way to a file: rows are appended, and the file is there when it is finished.

    ``request`` says in words what was asked for and holds digests of what it was asked about: whatever is the same goes
    on, anything else is refused unless ``overwrite`` starts anew; without a request nothing is kept. Within ``with``,
    ``state`` says from which image on. Images that were skipped are listed in a file of their own, if there are any.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        class_names: Sequence[str],
        request: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path, self.overwrite = path, overwrite
        self.request, self._is_kept = dict(request or {}), request is not None
        self.state = self.saved = State()
        self._rows = _open_rows(path, columns, class_names)
        self._skipped = TextRows(path.with_name(f"{path.name}.partial.skipped.csv"), ["file", "reason"])
        self._journal = path.with_name(f"{path.name}.partial.json")
        self._new_journal = path.with_name(f"{path.name}.partial.json.new")

    def __enter__(self) -> Self:
        with self._naming_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rows.open()
            self._skipped.open()
            try:
                self._go_on()
            except BaseException:
                self._close()
                raise
        self._saved_at = time.monotonic()
        return self

    def _go_on(self) -> None:
        state = State() if self.overwrite else self._read_journal()
        if not (self._rows.go_back(state.mark) and self._skipped.go_back(state.skipped_mark)):
            warn(f"'{self._rows.partial}' does not hold what its journal says: starting anew")
            state = State()
        if state.images:
            say(f"going on after {state.images:,} images, from '{self._rows.partial}'")
        else:
            state = State()
            self._journal.unlink(missing_ok=True)
            self._rows.go_back(0)
            self._skipped.go_back(0)
        self.state = self.saved = state

    def _read_journal(self) -> State:
        """What an earlier call saved of the same request."""
        if not self._journal.exists():
            return State()
        try:
            found = json.loads(self._journal.read_text(encoding="utf-8"))
            request, first = dict(found["request"]), found["state"].pop("first_skipped")
            state = State(**found["state"], first_skipped=first and Skipped(**first))
        except (ValueError, LookupError, TypeError, AttributeError):
            warn(f"'{self._journal}' is damaged: starting anew")
            return State()
        other = [name for name, value in self.request.items() if request.get(name) != value]
        if other:
            raise UsageError(
                f"'{self._rows.partial}' holds {state.images:,} images of a request that differs in "
                f"{shorten_list(other)}: repeat that request to go on with it, or add --overwrite to start anew"
            )
        return state

    def append(self, rows: list[Row], skipped: Sequence[Skipped], images: int) -> None:
        """Write rows and list images that have none; ``images`` is how many have been read now."""
        with self._naming_file():
            if rows:
                self._rows.append(rows)
            if skipped:
                self._skipped.append([asdict(item) for item in skipped])
        self.state = self.state.add(len(rows), skipped, images)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Wait until all is on the disk, and say so in the journal."""
        with self._naming_file():
            self.state = replace(self.state, mark=self._rows.save(), skipped_mark=self._skipped.save())
            with _replacing(self._journal, self._new_journal) as file:
                file.write(json.dumps({"request": self.request, "state": asdict(self.state)}).encode())
        self.saved, self._saved_at = self.state, time.monotonic()

    def read_column(self, name: str) -> np.ndarray:
        """The values (N,) of a column of numbers, in float64, of all rows so far."""
        self.save()
        return self._rows.read_column(name)

    def finish(self, is_ood: np.ndarray | None = None, about: Mapping[str, Any] | None = None) -> None:
        """Put the complete file in its place, and the list of skipped images beside it; nothing else stays.

        ``is_ood`` (N,) are decisions that take the place of those in the rows; ``about`` is kept where the form of the
        file has a place for it. A call that ends in between is gone on with like any other.
        """
        self.save()
        with self._naming_file():
            if self.state.skipped:
                self._skipped.copy(skipped_path(self.path))
            else:
                skipped_path(self.path).unlink(missing_ok=True)  # of an earlier file of this name
            self._rows.finish(self.path, is_ood, about or {})
            self.discard()

    def discard(self) -> None:
        """Leave nothing to go on with."""
        self._journal.unlink(missing_ok=True)
        self._new_journal.unlink(missing_ok=True)
        self._rows.discard()
        self._skipped.discard()
        self.saved = State()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if self.saved.images and self._is_kept:
            self._close()
            say(f"{self.saved.images:,} images are done and kept in '{self._rows.partial}': the same command goes on")
        else:
            self.discard()

    def _close(self) -> None:
        self._rows.close()
        self._skipped.close()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write '{self.path}': {error.strerror or error}; free some space and give the same command "
                "again, or choose another --out"
            ) from None
