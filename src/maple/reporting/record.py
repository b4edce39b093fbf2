"""The content of a run folder that a report shows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maple.decisions.labels import JudgedLabel, read_labels
from maple.errors import RunError
from maple.evaluation.results import Results
from maple.files import RunFile, load_record, naming_damage, no_run
from maple.options import read_toml
from maple.reporting.gallery import Gallery, read_gallery
from maple.types import RunClasses

_COLUMNS = ("epoch", "cross_entropy", "triplet", "validation_loss", "validation_accuracy", "clusters", "seconds")


@dataclass(frozen=True)
class RelabellingEvent:
    """One relabelling during the training."""

    epoch: int
    classes: tuple[str, ...]  # that were split
    clusters: int  # from then on
    shift: float  # largest change of a class probability on validation images; NaN if not measured


@dataclass(frozen=True, eq=False)
class History:
    """The rows of ``history.csv``, one per epoch."""

    columns: Mapping[str, np.ndarray]  # (E,) each
    events: tuple[RelabellingEvent, ...]

    @property
    def n_epochs(self) -> int:
        return len(self.columns["epoch"])

    @property
    def minutes(self) -> float:
        return float(np.nansum(self.columns["seconds"])) / 60

    @property
    def validation_accuracy(self) -> float:
        """After the last epoch."""
        return float(self.columns["validation_accuracy"][-1])


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The parts of a run folder; a part that it does not hold is ``None`` or empty."""

    folder: Path
    config_text: str | None
    config: Mapping[str, Any]  # sections of config.toml
    classes: RunClasses | None
    history: History | None
    results: Results | None
    labels: tuple[JudgedLabel, ...] | None  # of the images of the last evaluation, possible errors first
    gallery: Gallery

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        if self.classes is not None:
            return self.classes.classes
        return tuple(self.results.class_names) if self.results else ()

    @property
    def origin(self) -> Mapping[str, Any]:
        return self.config.get("origin", {})

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.results.provenance if self.results else {}

    @property
    def seed(self) -> int | None:
        return self.config.get("train", {}).get("seed", self.provenance.get("seed"))


def read_run(folder: Path) -> RunRecord:
    """Read the parts of a run that the report draws."""
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a folder: give the run folder that maple train wrote")
    config, classes, history, results = paths = [
        folder / name for name in (RunFile.CONFIG, RunFile.CLASSES, RunFile.HISTORY, RunFile.RESULTS)
    ]
    if not any(path.is_file() for path in paths):
        raise no_run(folder, RunFile.CONFIG)
    return RunRecord(
        folder=folder,
        config=_read_config(config) if config.is_file() else {},
        config_text=config.read_text(encoding="utf-8") if config.is_file() else None,
        classes=load_record(classes, RunClasses.from_json) if classes.is_file() else None,
        history=_read_history(history) if history.is_file() else None,
        results=Results.load(results) if results.is_file() else None,
        labels=tuple(read_labels(labels)) if (labels := folder / RunFile.LABELS).is_file() else None,
        gallery=read_gallery(folder / RunFile.GALLERY),
    )


def _read_config(path: Path) -> dict[str, Any]:
    sections = read_toml(path)
    with naming_damage(path):
        for name in ("origin", "model", "train"):  # that the report reads
            if not isinstance(sections.get(name, {}), dict):
                raise ValueError(f"{name} is not a section")
    return sections


def _read_history(path: Path) -> History | None:
    """The history; None if the file has no rows."""
    with naming_damage(path), path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
        return _parse_history(rows) if rows else None


def _parse_history(rows: Sequence[Mapping[str, Any]]) -> History:
    columns = {name: np.array([to_float(row.get(name)) for row in rows]) for name in _COLUMNS}
    events = tuple(
        RelabellingEvent(
            epoch=int(to_float(row["epoch"])),
            classes=tuple(row["relabelled"].split(";")),
            clusters=int(to_float(row["clusters"])),
            shift=to_float(row.get("relabel_shift")),
        )
        for row in rows
        if row.get("relabelled")
    )
    return History(columns, events)


def to_float(value: Any) -> float:
    """A number from a text file; NaN if it is missing or not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
