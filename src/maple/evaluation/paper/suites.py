"""The experiments of the paper as suites, one table or figure each, and the protocol of OpenOOD 1.5.

They are read from ``suites.toml`` and ``openood.toml``.

A suite is a table: its rows name a training and the method that reads its network, its columns name figures. Nothing
runs here: :mod:`maple.runs.benchmark.trainings` trains and evaluates, :mod:`maple.runs.benchmark.suites` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maple.errors import UsageError, suggest
from maple.evaluation.paper.columns import describe_columns
from maple.evaluation.paper.profiles import PROFILES, Profile, Protocol, simulate
from maple.evaluation.paper.rows import (
    READ_NORMALISED,
    READ_OURS,
    STANDARD_DETECTORS,
    Line,
    Row,
    Training,
    comparator_rows,
    detector_rows,
)
from maple.options import read_toml

Table = dict[str, dict[str, float]]  # row, column, figure

BEYOND = "Beyond the paper"
PAPER = "paper"


@dataclass(frozen=True)
class Suite:
    """One table or figure of the paper."""

    name: str
    title: str
    place: str  # in the paper
    shows: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    paper: Table
    protocol: str = "cifar10"
    comparators: tuple[str, ...] = ()  # of the paper
    registry: bool = False  # one row per registered detector
    figure: str = ""  # kind of drawing: latent, clusters, calibration, qq
    reference: str = PAPER  # whose figures ``paper`` holds
    where: str = ""  # section of the plug-in file that it comes from

    @property
    def subtitle(self) -> str:
        of_paper = self.reference == PAPER and self.place != BEYOND
        return f"{self.place}{' of the paper' if of_paper else ''}: {self.shows}"

    def rows(self, profile: Profile) -> list[Row]:
        """The rows of the table."""
        if self.comparators:
            return comparator_rows(profile, self.protocol, self.comparators)
        if self.registry:
            return detector_rows(profile, self.protocol)
        return [row for line in self.lines for row in line.rows(profile, self.protocol)]

    def trainings(self, profile: Profile) -> list[Training]:
        """The networks of the table, each once, in order."""
        return list(dict.fromkeys(row.training for row in self.rows(profile)))

    def detectors(self, profile: Profile) -> list[str]:
        """The detectors that rows read, beyond those of every evaluation."""
        usual = (*STANDARD_DETECTORS, READ_OURS, READ_NORMALISED)
        asked = [row.method for row in self.rows(profile) if row.method not in (*usual, row.recipe)]
        return list(dict.fromkeys(asked))


def _read_suite(name: str, section: dict[str, Any]) -> Suite:
    """A suite from its section of ``suites.toml``."""
    settings = section.pop("settings", {})
    varied = [
        Line(title, flags=flags, paper_clusters=True, method=READ_NORMALISED) for title, flags in settings.items()
    ]
    return Suite(
        name=name,
        columns=tuple(section.pop("columns", "").split()),
        lines=(*(Line(**line) for line in section.pop("rows", ())), *varied),
        paper=_read_figures(**section.pop("paper", {"columns": ""})),
        **section,
    )


def _read_figures(columns: str, **rows: list[float]) -> Table:
    """The paper's figures by row and column, without those that the paper does not give."""
    names = columns.split()
    return {
        row: {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
        for row, values in rows.items()
    }


SUITES = {
    name: _read_suite(name, section)
    for file in ("suites.toml", "openood.toml")
    for name, section in read_toml(Path(__file__).with_name(file)).items()
}


def register_suite(name: str, section: Mapping[str, Any], protocol: Protocol, where: str) -> None:
    """Make a suite of a plug-in known, from a section as in ``suites.toml``, with images of its own."""
    if name in SUITES and SUITES[name].where != where:
        raise UsageError(f"the name '{name}' of a suite in {where} is taken: choose another name")
    try:
        suite = _read_suite(name, {**section, "protocol": name, "where": where})
        describe_columns(suite.columns)
        if not (suite.columns and suite.rows(PROFILES["cpu"])):
            raise UsageError(f"{where} has no columns or rows: give both, as docs/howto/extend.md shows")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where} is no suite ({error}): see docs/howto/extend.md") from None
    for profile in PROFILES.values():
        profile.protocols[name] = simulate(protocol) if profile.simulated else protocol
    SUITES[name] = suite


def find_suite(name: str) -> Suite:
    """A suite by name.

    >>> find_suite("fnr").place
    'Table 6'
    """
    if name not in SUITES:
        raise UsageError(f"unknown benchmark '{name}': {suggest(name, SUITES)}")
    return SUITES[name]
