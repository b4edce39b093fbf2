"""A prediction file in the report: counts per class, and the images to look at.

`read_predictions` reads CSV, JSON lines and Parquet files of ``maple predict`` row by row, so memory does not grow with
the file.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maple.data.decoders import decode_image
from maple.decisions.attention import REASONS, Reason, find_reason, look_rank
from maple.errors import DataError, MapleError
from maple.files import skipped_path
from maple.reporting.record import to_float
from maple.text import number, percent, plural
from maple.types import MAX_CELL, PREDICTION_COLUMNS, SET_SEPARATOR

MAX_ROWS = 100  # predictions listed for each reason to look at them
MAX_PREVIEWS = 20  # of them with a thumbnail
PREVIEW_SIZE = 96  # pixels a side


@dataclass(frozen=True)
class PredictionRow:
    """One row of a prediction file."""

    file: str
    class_name: str
    probability: float
    is_ood: bool
    p_value: float  # NaN without calibration images
    score: float
    prediction_set: list[str] | None

    @property
    def is_decided(self) -> bool:
        """Whether the run had calibration images, so that the image is either known or unknown."""
        return not math.isnan(self.p_value)


@dataclass
class PredictionSummary:
    """Counts over a prediction file, and the rows to look at."""

    path: Path
    n_images: int = 0
    n_skipped: int = 0  # images without a row, listed in another file
    n_decided: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # images per class
    flagged: Counter[str] = field(default_factory=Counter)
    set_sizes: Counter[int] = field(default_factory=Counter)  # images per number of classes in their prediction set
    n_reasons: Counter[Reason | None] = field(default_factory=Counter)  # images per reason to look at them
    rows: dict[Reason | None, list[PredictionRow]] = field(default_factory=dict)  # by reason, some of them

    def add(self, row: PredictionRow) -> None:
        self.n_images += 1
        self.n_decided += row.is_decided
        self.counts[row.class_name] += 1
        self.flagged[row.class_name] += row.is_ood
        if row.prediction_set is not None:
            self.set_sizes[len(row.prediction_set)] += 1

    def reason_of(self, row: PredictionRow) -> Reason | None:
        """Why to look at an image; known once all rows are counted."""
        n_known = self.counts[row.class_name] - self.flagged[row.class_name]
        return find_reason(row.probability, row.is_ood, n_known / self.n_images)

    @property
    def skipped_path(self) -> Path:
        return skipped_path(self.path)

    @property
    def n_flagged(self) -> int:
        return self.flagged.total()

    @property
    def is_decided(self) -> bool:
        return bool(self.n_decided) or not self.n_images

    @property
    def verdict(self) -> str:
        """How many images are flagged, in words."""
        if not self.is_decided:
            return "none flagged, because the run has no calibration images"
        share = percent(self.n_flagged / self.n_images) if self.n_images else "–"
        return f"{self.n_flagged:,} ({share}) flagged as unknown"

    @property
    def sorted_counts(self) -> list[tuple[str, int]]:
        """Classes and their images, most frequent first."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))


def read_predictions(path: Path, keep: int = MAX_ROWS) -> PredictionSummary:
    """Count the predictions per class and per reason to look at them; keep the first rows of each reason."""
    found = PredictionSummary(path)
    if found.skipped_path.is_file():
        found.n_skipped = sum(1 for _ in _read_rows(found.skipped_path))
    for row in iterate_predictions(path):
        found.add(row)
    found.rows = {reason: [] for reason in (*REASONS, None)}
    for row in iterate_predictions(path):  # again: which classes are rare is known only now
        reason = found.reason_of(row)
        found.n_reasons[reason] += 1
        found.rows[reason].append(row)
        if len(found.rows[reason]) > 2 * keep:
            _trim(found.rows[reason], keep)
    for rows in found.rows.values():
        _trim(rows, keep)
    return found


def _trim(rows: list[PredictionRow], keep: int) -> None:
    rows.sort(key=lambda row: look_rank(row.probability, row.is_ood, row.p_value, row.score))
    del rows[keep:]


def iterate_predictions(path: Path) -> Iterator[PredictionRow]:
    """The rows of a prediction file, one by one."""
    return (_parse_row(row, path, n) for n, row in enumerate(_read_rows(path), start=1))


def _read_rows(path: Path) -> Iterator[Any]:
    try:
        if path.suffix.lower() == ".parquet" or path.is_dir():
            for part in _find_parts(path) if path.is_dir() else [path]:
                yield from _read_parquet(part)
            return
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                csv.field_size_limit(MAX_CELL)
                yield from csv.DictReader(file)
            else:
                yield from (json.loads(line) for line in file if line.strip())
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"cannot read the predictions '{path}': {reason}; give a file written by maple predict"
        ) from None
    except (ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise DataError(f"'{path}' is not CSV, JSON lines or Parquet ({error}): write it with maple predict") from None


def _find_parts(folder: Path) -> list[Path]:
    """The parts that ``maple predict --engine ray`` wrote; a folder of images must not pass for no predictions."""
    if parts := sorted(folder.glob("part-*.parquet")):
        return parts
    raise DataError(f"'{folder}' is a folder without predictions: give the file that maple predict wrote")


def _read_parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as table:
        sets = [name for name in table.schema_arrow.names if name == "prediction_set"]
        for batch in table.iter_batches(columns=[*PREDICTION_COLUMNS, *sets]):
            yield from batch.to_pylist()


def _parse_row(row: Any, path: Path, n: int) -> PredictionRow:
    missing = [name for name in PREDICTION_COLUMNS if not isinstance(row, Mapping) or name not in row]
    if missing:
        raise DataError(f"'{path}' row {n} lacks {', '.join(missing[:3])}: give a file written by maple predict")
    return PredictionRow(
        file=str(row["file"]),
        class_name=str(row["class"]),
        probability=to_float(row["probability"]),
        is_ood=str(row["is_ood"]).strip().lower() in ("true", "1"),
        p_value=to_float(row["p_value"]),
        score=to_float(row["score"]),
        prediction_set=_parse_set(row.get("prediction_set")),
    )


def _parse_set(value: Any) -> list[str] | None:
    """The classes of a prediction set; None if the file has none."""
    if isinstance(value, str):
        value = value.split(SET_SEPARATOR)
    return [str(name) for name in value] if isinstance(value, list) else None


def describe_sets(sizes: Counter[int]) -> str:
    """The sizes of prediction sets in a sentence; empty if there are none.

    >>> print(describe_sets(Counter({1: 8, 2: 1, 4: 1})))
    Prediction sets hold 1.4 classes on average; 80 % hold a single class, the largest holds 4 classes.
    """
    n = sizes.total()
    if not n:
        return ""
    mean = sum(size * count for size, count in sizes.items()) / n
    average = "1 class" if mean == 1 else f"{number(mean, 1)} classes"
    single, largest = percent(sizes[1] / n), plural(max(sizes), "class")
    return f"Prediction sets hold {average} on average; {single} hold a single class, the largest holds {largest}."


def read_previews(found: PredictionSummary) -> dict[str, np.ndarray]:
    """Thumbnails by file of the first images of each reason, of those that can still be read."""
    shown = [row.file for rows in found.rows.values() for row in rows[:MAX_PREVIEWS]]
    previews = {file: _read_preview(file, found.path.parent) for file in shown}
    return {file: image for file, image in previews.items() if image is not None}


def _read_preview(file: str, folder: Path) -> np.ndarray | None:
    for path in (Path(file), folder / file):
        try:
            if path.is_file():
                return decode_image(path, PREVIEW_SIZE, "pad")
        except (MapleError, OSError, ValueError):  # moved, changed or not a path at all
            continue
    return None
