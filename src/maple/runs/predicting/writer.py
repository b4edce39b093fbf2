"""Prediction files: rows are saved in parts, the file appears once it is complete, and a rerun skips finished parts.

While ``said.csv`` is being written, its rows lie in the folder ``said.csv.partial`` as parts
(:mod:`maple.runs.predicting.parts`), whatever the format of the final file. Resuming needs nothing but the parts: the
complete ones are kept, everything else is predicted again. CSV, JSON Lines and Parquet files are written from the parts
at the end; so is a folder of Parquet files with a manifest, which readers of Parquet open as one table.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from maple.errors import RunError, UsageError
from maple.files import Row, draft_folder, is_full, save_json, skipped_path, take_lock, to_csv
from maple.progress import say, warn
from maple.runs.predicting.parts import (
    CLASS_COLUMNS,
    METADATA_KEY,
    Footer,
    Tally,
    part_number,
    part_path,
    replacing,
    row_schema,
    write_part,
)
from maple.text import plural, shorten_list
from maple.types import Counts, Skipped

PARQUET_SUFFIX = ".parquet"
SUFFIXES = (".csv", ".jsonl", ".ndjson", PARQUET_SUFFIX)
SAVE_SECONDS = 1.0  # between two parts: a kill costs at most this much work
READ_ROWS = 4096  # at a time, from the parts,
READ_VALUES = 2**18  # and rows times columns, where they become Python objects
MAX_GROUP_ROWS = 2**16  # of a row group in Parquet,
MAX_GROUP_VALUES = 2**23  # and its rows times columns; also the values of a part
MANIFEST = "_manifest.json"  # of a folder; readers of Parquet ignore names that begin so
_LOCK = ".lock"


# --- rows as text -----------------------------------------------------------------------------------------------------


def to_json_lines(rows: Iterable[Row]) -> str:
    """Rows as JSON Lines; NaN becomes null.

    >>> to_json_lines([{"file": "a.png", "p_value": float("nan")}])
    '{"file": "a.png", "p_value": null}\\n'
    """
    known = ({key: None if value != value else value for key, value in row.items()} for row in rows)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in known)


# --- the file ---------------------------------------------------------------------------------------------------------


def _read_footer(path: Path, lost: str) -> Footer | None:
    """The footer of a part; None, with a warning, where it is damaged."""
    try:
        return Footer.read(path)
    except (ValueError, LookupError, TypeError, OSError):
        warn(f"'{path}' is damaged: predicting {lost} again")
        return None


class ResumableFile:
    """A prediction file in the making: append rows, then ``finish``; the suffix of ``path`` chooses the format.

    Without a suffix it is a folder of Parquet files.

    ``request`` describes what was asked for, with digests of the model and the images. Parts of the same request are
    kept and ``tally`` tells from which image to go on; parts of another request are refused unless ``overwrite`` is
    set. Without a request nothing is kept. Skipped images are listed in a file beside ``path``.

    With ``scattered`` parts may be written in any order and by other processes: ``found`` holds those that are
    complete, ``record`` adds one, and ``gather`` follows the last.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        class_names: Sequence[str],
        request: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        scattered: bool = False,
    ) -> None:
        self.path, self.columns, self.class_names = path, columns, class_names
        self.overwrite, self.scattered = overwrite, scattered
        self.found: dict[int, Footer] = {}  # complete parts when the file was opened, and those recorded since
        self.request, self._is_kept = dict(request or {}), request is not None
        self.folder = path.with_name(f"{path.name}.partial")
        self.tally = self._saved = Tally()
        self._schema = row_schema(columns)
        self._whole = self.folder / "whole"  # a final file being written
        self._n_parts = 0  # complete ones
        self._waiting: list[pa.Table] = []  # rows of the next part
        self._skipped: list[Skipped] = []  # of the next part

    # --- starting and ending

    def __enter__(self) -> Self:
        with self._naming_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.folder / _LOCK)
            if self._lock is None:
                raise RunError(
                    f"'{self.folder}' is being written by another process: wait for it, or choose another --out"
                )
            try:
                self._resume()
            except BaseException:
                self._lock.release()
                raise
        self._saved_at = time.monotonic()
        return self

    def _resume(self) -> None:
        """Keep the complete parts of an interrupted request, and remove everything else."""
        for i, footer in () if self.overwrite else self._scattered() if self.scattered else enumerate(self._footers()):
            self.record(i, footer)
        if self.found:
            if other := [name for name, value in self.request.items() if footer.request.get(name) != value]:
                raise UsageError(
                    f"'{self.folder}' holds {self.tally.images:,} images of a request that differs in "
                    f"{shorten_list(other)}: repeat that request to resume it, or add --overwrite to start again"
                )
            say(f"resuming after {self.tally.images:,} images, from '{self.folder}'")
        self._n_parts = len(self.found)
        for path in {*self.folder.iterdir()} - {*map(self._part, self.found), self.folder / _LOCK}:
            path.unlink()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if self._saved.images and self._is_kept:
            self._lock.release()
            n = self._saved.images
            done = f"{plural(n, 'image')} {'is' if n == 1 else 'are'} done and kept in '{self.folder}'"
            say(f"{done}: rerun the same command to resume")
        else:
            self.discard()

    def discard(self) -> None:
        """Remove the parts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()  # last: another process may start the file anew as soon as it has the lock
        self._saved = Tally()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space and rerun the same command, or choose" if is_full(error) else "choose"
            raise RunError(f"cannot write '{self.path}': {error.strerror or error}; {remedy} another --out") from None

    # --- parts

    def _part(self, i: int) -> Path:
        return part_path(self.folder, i)

    def _parts(self) -> list[Path]:
        return [self._part(i) for i in range(self._n_parts)]

    def _footers(self) -> Iterator[Footer]:
        """The footers of all complete parts, in order; a damaged part ends them."""
        for path in takewhile(Path.exists, map(self._part, count())):
            if (footer := _read_footer(path, "its images and all later ones")) is None:
                return
            yield footer

    def _scattered(self) -> Iterator[tuple[int, Footer]]:
        """Numbers and footers of all complete parts, with gaps."""
        for path in sorted(self.folder.iterdir()):
            if (i := part_number(path)) is not None and (footer := _read_footer(path, "its images")) is not None:
                yield i, footer

    def record(self, i: int, footer: Footer) -> None:
        """Note a complete part."""
        if i not in self.found:  # one that was written again counts once
            self.found[i] = footer
            done = footer.images if footer.first is None else self.tally.images + footer.images - footer.first
            self.tally = self._saved = self.tally.add(footer.rows, footer.skipped, done)

    def gather(self) -> None:
        """Take the recorded parts, of which none is missing, as the whole, in the order of the images."""
        self._n_parts, self.tally = len(self.found), Tally()
        for _, footer in sorted(self.found.items()):
            self.tally = self.tally.add(footer.rows, footer.skipped, footer.images)
        self._saved = self.tally

    def append(self, rows: list[Row], skipped: Sequence[Skipped], images: int) -> None:
        """Add rows and skipped images; ``images`` is the number of images read by then."""
        if rows:
            self._waiting.append(pa.Table.from_pylist(rows, self._schema))
        self._skipped += skipped
        self.tally = self.tally.add(len(rows), skipped, images)
        n_values = (self.tally.rows - self._saved.rows) * len(self.columns)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS or n_values >= MAX_GROUP_VALUES:
            self.save()

    def save(self) -> None:
        """Write the rows since the last part as the next one."""
        if self.tally.images > self._saved.images:
            n_rows = self.tally.rows - self._saved.rows
            footer = Footer(self.request, self.tally.images, n_rows, self._skipped)
            table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
            with self._naming_file():
                write_part(self._part(self._n_parts), table, footer)
            self._n_parts += 1
            self._waiting, self._skipped, self._saved = [], [], self.tally
        self._saved_at = time.monotonic()

    def read_column(self, name: str) -> np.ndarray:
        """The values (N,) of a numeric column in all rows so far, in float64."""
        self.save()
        columns = [pq.read_table(path, columns=[name])[name].to_numpy() for path in self._parts()]
        return np.concatenate(columns, dtype=np.float64)

    def count(self, is_ood: np.ndarray | None = None) -> Counts:
        """How many of all rows so far are flagged or doubtful; ``is_ood`` (N,) replaces their decisions."""
        self.save()
        tables = self._tables(READ_ROWS, READ_VALUES, is_ood)
        return sum((Counts.of(t["is_ood"].to_numpy(), t["probability"].to_numpy()) for t in tables), Counts())

    # --- the complete file

    def finish(self, is_ood: np.ndarray | None = None, about: Mapping[str, Any] | None = None) -> None:
        """Write the complete file and the list of skipped images, and remove the parts.

        ``is_ood`` (N,) replaces the decisions in the rows; ``about`` becomes metadata of a Parquet file. A process
        killed in between resumes like any other.
        """
        self.save()
        with self._naming_file():
            if not self.path.suffix:
                self._write_folder(is_ood, about or {})
            else:
                self._write_skipped(skipped_path(self.path))
                with replacing(self.path, self._whole) as file:
                    if self.path.suffix == PARQUET_SUFFIX:
                        self._write_parquet(file, is_ood, about or {})
                    else:
                        self._write_text(file, is_ood)
            self.discard()

    def _write_skipped(self, target: Path) -> None:
        if not self.tally.skipped:
            target.unlink(missing_ok=True)  # left by an earlier file of this name
            return
        columns = ["file", "reason"]
        with replacing(target, self._whole) as file:
            file.write(to_csv([], columns, header=True).encode())
            for footer in self._footers():
                file.write(to_csv(map(asdict, footer.skipped), columns).encode())

    def _write_text(self, file: BinaryIO, is_ood: np.ndarray | None) -> None:
        """Write CSV or JSON Lines."""
        is_csv = self.path.suffix == ".csv"
        file.write(to_csv([], self.columns, header=is_csv).encode())
        for table in self._tables(READ_ROWS, READ_VALUES, is_ood):
            rows = table.to_pylist()
            file.write((to_csv(rows, self.columns) if is_csv else to_json_lines(rows)).encode())

    def _write_parquet(self, file: BinaryIO, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        """Write row groups."""
        schema, tables = self._final_tables(is_ood, about)
        with pq.ParquetWriter(file, schema) as writer:
            for table in tables:
                writer.write_table(table)

    def _write_folder(self, is_ood: np.ndarray | None, about: Mapping[str, Any]) -> None:
        """Write a folder of Parquet files, the list of skipped images, and a manifest of both; it appears at once."""
        written: list[dict[str, Any]] = []
        with draft_folder(self.path) as draft:
            draft.mkdir()
            for i, table in enumerate(self._final_tables(is_ood, about)[1]):
                name = f"part-{i:06}{PARQUET_SUFFIX}"
                with replacing(draft / name, self._whole) as file:
                    pq.write_table(table, file)
                written.append({"file": name, "rows": len(table)})
            self._write_skipped(skipped_path(draft))
            found = {"images": self.tally.rows + self.tally.skipped, "rows": self.tally.rows}
            found["skipped"] = self.tally.skipped
            save_json(draft / MANIFEST, {**about, **found, "request": self.request, "parts": written})

    def _final_tables(
        self, is_ood: np.ndarray | None, about: Mapping[str, Any]
    ) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """Row groups; class names are encoded as indices into ``class_names``, NaN becomes null."""
        names, index = pa.array(self.class_names, pa.string()), pa.dictionary(pa.int32(), pa.string())
        final = pa.schema(
            [(each.name, index if each.name in CLASS_COLUMNS else each.type) for each in self._schema],
            metadata={METADATA_KEY: json.dumps(about)},
        )

        def encode(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
            if pa.types.is_dictionary(kind):
                return pa.DictionaryArray.from_arrays(pc.index_in(column, names).combine_chunks(), names)
            if pa.types.is_floating(kind):
                return pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
            return column

        tables = self._tables(MAX_GROUP_ROWS, MAX_GROUP_VALUES, is_ood)
        return final, (pa.table([encode(table[each.name], each.type) for each in final], final) for table in tables)

    def _tables(self, max_rows: int, max_values: int, is_ood: np.ndarray | None) -> Iterator[pa.Table]:
        """All rows, regardless of how they lie in the parts, with the decisions (N,) if they are given."""
        size = max(1, min(max_rows, max_values // len(self.columns)))
        waiting, n_read = self._schema.empty_table(), 0
        for path in self._parts():
            with pq.ParquetFile(path) as part:
                for batch in part.iter_batches(READ_ROWS):
                    table = pa.Table.from_batches([batch], self._schema)
                    if is_ood is not None:
                        flags = pa.array(is_ood[n_read : n_read + len(table)])
                        table = table.set_column(self.columns.index("is_ood"), "is_ood", flags)
                    n_read += len(table)
                    waiting = pa.concat_tables([waiting, table])
                    while len(waiting) >= size:
                        yield waiting.slice(0, size).combine_chunks()
                        waiting = waiting.slice(size)
        if len(waiting):
            yield waiting.combine_chunks()
