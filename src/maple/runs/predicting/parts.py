"""Parts of a prediction file: Parquet files of rows, each with a footer that says which images it holds.

The parts of one file lie in one folder as ``000000.part``, ``000001.part``, …. A part is written under a temporary
name, flushed to the disk and renamed, so that it is complete or not there; its footer records the request, the images
that it covers and those that were skipped. One process writes the parts in order
(:mod:`maple.runs.predicting.writer`), or many processes in any order, each a fixed range of images: a part that is
written twice is the same part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from maple.types import Skipped

CLASS_COLUMNS = ("class", "md_class", "softmax_class")
METADATA_KEY = b"maple"
_COLUMN_TYPES = {  # of columns that are not numbers
    **{name: pa.string() for name in ("file", *CLASS_COLUMNS)},
    "is_ood": pa.bool_(),
    "cluster": pa.int64(),
    "prediction_set": pa.list_(pa.string()),
}
_SUFFIX = ".part"


@dataclass(frozen=True)
class Tally:
    """Progress of a request: images read, rows written and images skipped."""

    images: int = 0  # read, usable or not
    rows: int = 0
    skipped: int = 0
    first_skipped: Skipped | None = None

    def add(self, rows: int, skipped: Sequence[Skipped], images: int = 0) -> Tally:
        """Add rows and skipped images; ``images`` is the number of images read by then."""
        first = self.first_skipped or next(iter(skipped), None)
        return Tally(images, self.rows + rows, self.skipped + len(skipped), first)


@dataclass(frozen=True)
class Footer:
    """Metadata of a part: the request, the position behind its last image, its rows and the images skipped in it.

    A part of a fixed range of images also has their ``first`` position and the size ``step`` of such ranges.
    """

    request: dict[str, Any]
    images: int
    rows: int
    skipped: list[Skipped]
    first: int | None = None
    step: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(path: Path) -> Footer:
        """The footer of a part; ``ValueError``, ``LookupError``, ``TypeError`` or ``OSError`` where it is damaged."""
        footer = pq.read_metadata(path)
        found = json.loads(footer.metadata[METADATA_KEY])
        skipped = [Skipped(**item) for item in found["skipped"]]
        own = dict(found["request"]), int(found["images"]), footer.num_rows, skipped
        return Footer(*own, found.get("first"), found.get("step"))


def part_path(folder: Path, i: int) -> Path:
    """The file of part ``i``."""
    return folder / f"{i:06}{_SUFFIX}"


def part_number(path: Path) -> int | None:
    """The number of a part, by its name; None for other files.

    >>> part_number(Path("said.csv.partial/000012.part")), part_number(Path("whole"))
    (12, None)
    """
    return int(path.stem) if path.suffix == _SUFFIX and path.stem.isdecimal() else None


def row_schema(columns: Sequence[str]) -> pa.Schema:
    """The types of the columns of a part."""
    return pa.schema([(name, _COLUMN_TYPES.get(name, pa.float64())) for name in columns])


def write_part(path: Path, table: pa.Table, footer: Footer) -> None:
    """Write a part, complete and on the disk, or not at all."""
    with replacing(path, path.with_name(f"writing-{uuid4().hex}")) as file:
        pq.write_table(table.replace_schema_metadata({METADATA_KEY: footer.to_json()}), file)


@contextmanager
def replacing(target: Path, temporary: Path) -> Iterator[BinaryIO]:
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
