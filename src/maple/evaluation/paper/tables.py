"""A filled suite: our figures next to published ones, as cells, a sheet, CSV and plain values."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from maple.evaluation.paper.columns import describe_columns
from maple.evaluation.paper.profiles import Profile
from maple.evaluation.paper.suites import Suite
from maple.evaluation.sheet import Sheet
from maple.evaluation.table import format_cell
from maple.stats.metrics import add_floor

SIMULATED = "on simulated images"  # heading of the first column


@dataclass(frozen=True, eq=False)
class TableRow:
    """One line: our figures, one per seed, and those of the paper or benchmark."""

    title: str
    figures: dict[str, list[float]]  # column: one per seed
    paper: dict[str, float]
    floors: dict[str, list[float]] = field(
        default_factory=dict
    )  # of ECE columns: what perfect probabilities would have

    def mean(self, column: str) -> float:
        """Mean over the seeds; NaN if one has no figure."""
        return float(np.mean(self.figures[column]))

    def spread(self, column: str) -> float:
        values = self.figures[column]
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    def text(self, column: str, digits: int) -> str:
        """The cell of a column; that of an ECE has the mean floor in brackets."""
        return add_floor(format_cell(self.figures[column], digits), self.floors.get(column, []), digits)


@dataclass(frozen=True)
class Provenance:
    """How a table was made."""

    command: str
    commit: str | None  # outside of a checkout there is none
    maple: str
    python: str
    hardware: str
    trainings: Mapping[str, str]  # what was trained, by folder


@dataclass(frozen=True, eq=False)
class SuiteResults:
    """A filled table and its provenance."""

    suite: Suite
    profile: Profile
    seeds: tuple[int, ...]
    rows: list[TableRow]
    provenance: Provenance
    changes: Mapping[str, Any] = field(default_factory=dict)  # flags that went before the profile's

    @property
    def profile_text(self) -> str:
        """The profile, and the flags of the suite and of the command that changed it."""
        own = self.profile.protocols[self.suite.protocol].flags
        changes = {name: value for name, value in own.items() if name in self.profile.flags} | dict(self.changes)
        but = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changes.items())
        return f"Profile {self.profile.name} ({self.profile.about}{f'; here with {but}' if but else ''})"


def table_cells(found: SuiteResults) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a column whose figures are published is followed by these."""
    columns = describe_columns(found.suite.columns)
    arrows = {"higher": " ↑", "lower": " ↓", "": ""}
    compared = {name for row in found.rows for name in row.paper}
    headings, lines = [SIMULATED if found.profile.simulated else ""], [[row.title] for row in found.rows]
    for name, column in columns.items():
        brackets = " (by chance)" if any(name in row.floors for row in found.rows) else ""
        headings.append(column.title + arrows[column.better] + brackets)
        for row, line in zip(found.rows, lines):
            line.append(row.text(name, column.digits))
        if name in compared:
            headings.append(found.suite.reference)
            for row, line in zip(found.rows, lines):
                line.append(format_cell([row.paper.get(name, math.nan)], column.digits))
    return headings, lines


def to_rows(found: SuiteResults) -> list[dict[str, str]]:
    """The table as a terminal shows it; a column of published figures is named after the column before it."""
    headings, lines = table_cells(found)
    theirs = found.suite.reference
    named = [f"{heading} {headings[i - 1]}" if heading == theirs else heading for i, heading in enumerate(headings)]
    return [dict(zip(named, line)) for line in lines]


def to_sheet(found: SuiteResults) -> Sheet:
    """The table with its title, and how it was made."""
    suite, seeds, how = found.suite, found.seeds, found.provenance
    headings, lines = table_cells(found)
    spread = f"mean ± deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    made = f"{found.profile_text}; {spread}. `{how.command}`, {made_with(how)}."
    best = frozenset(best_cells(found))
    return Sheet(suite.title, headings, lines, best, f"{suite.subtitle}.", made)


def made_with(made: Provenance) -> str:
    """Versions and hardware in a line."""
    commit = f", commit {made.commit}" if made.commit else ""
    return f"maple {made.maple}{commit}, Python {made.python}, {made.hardware}"


def to_csv(found: SuiteResults) -> str:
    """One line per row, column and seed, unrounded, the published figure, and whether the images are simulated."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "value", found.suite.reference, "images"])
    images = "simulated" if found.profile.simulated else "as named"
    for row in found.rows:
        for column, values in row.figures.items():
            for seed, value in zip(found.seeds, values):
                published, shown = row.paper.get(column, ""), "" if math.isnan(value) else value
                writer.writerow([row.title, column, seed, shown, published, images])
    return text.getvalue()


def to_dict(found: SuiteResults) -> dict[str, Any]:
    """Everything but the drawings."""
    return {
        "suite": found.suite.name,
        "profile": found.profile.name,
        "simulated": found.profile.simulated,
        "seeds": list(found.seeds),
        "rows": [asdict(row) for row in found.rows],
        "provenance": asdict(found.provenance),
    }


def best_cells(found: SuiteResults) -> set[tuple[int, int]]:
    """Row and cell of the best of our figures in each column."""
    best, place = set(), 1
    for name, column in describe_columns(found.suite.columns).items():
        values = np.array([row.mean(name) for row in found.rows])
        if column.better and np.isfinite(values).any():
            leading = np.nanmax(values) if column.better == "higher" else np.nanmin(values)
            best |= {(i, place) for i in np.flatnonzero(values == leading).tolist()}
        place += 1 + any(name in row.paper for row in found.rows)
    return best
