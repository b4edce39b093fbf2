"""Write rows of a split as a Parquet file or as class folders, complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from maple.data.catalogue.records import Row
from maple.errors import DataError

_ROW_GROUP_BYTES = 32 * 2**20
_SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int64()), ("label_name", pa.string())])


def write_parquet(path: Path, rows: Iterator[Row]) -> Path:
    """Write rows to ``<path>.parquet``, which appears when complete; at most one row group is in memory."""
    target = path.with_name(path.name + ".parquet")
    with _temporary(target) as part, pq.ParquetWriter(part, _SCHEMA, compression="zstd") as writer:
        group: list[Row] = []
        size = 0
        for row in rows:
            group.append(row)
            size += len(row.image)
            if size >= _ROW_GROUP_BYTES:
                writer.write_table(_table(group))
                group, size = [], 0
        if group:
            writer.write_table(_table(group))
    return target


def _table(group: Sequence[Row]) -> pa.Table:
    image, label, label_name, _ = zip(*group)
    return pa.table([image, label, label_name], schema=_SCHEMA)


def write_folder(path: Path, rows: Iterator[Row]) -> Path:
    """Write rows to ``<path>/<class>/<file>``; the folder appears when complete."""
    with _temporary(path) as part:
        for row in rows:
            for name in (row.label_name, row.file):
                if not name or name.startswith(".") or "/" in name or "\\" in name:
                    raise DataError(f"'{name}' cannot be the name of a file or folder: fetch the originals again")
            folder = part / row.label_name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / row.file).write_bytes(row.image)
    return path


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Temporary path beside ``target`` that is renamed to it at the end, or removed."""
    workplace = target.with_name(f".{target.name}.part")
    shutil.rmtree(workplace, ignore_errors=True)  # left by a process that was killed
    workplace.mkdir(parents=True)
    part = workplace / target.name
    try:
        yield part
        if part.is_file():
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:  # also on Ctrl-C
        shutil.rmtree(workplace, ignore_errors=True)
        if not any(target.parent.iterdir()):
            target.parent.rmdir()  # an empty folder would count as a data set
