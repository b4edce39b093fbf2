"""What suites found, as Markdown, CSV, JSON and a page with plots: our figures next to the paper's."""

from __future__ import annotations

import csv
import io
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import maple
from maple.evaluation.paper.suites import CORRUPTED_COLUMN, Profile, Row, Suite, columns_of, figure_kind, read_figure
from maple.evaluation.results import Results
from maple.files import save_json, write_atomic
from maple.reporting.page import render_page
from maple.reporting.plots import BLUE, Line, Panel, Plot, plot_quantiles, plot_reliability, plot_rows, standalone_svg
from maple.reporting.record import read_run
from maple.reporting.sections import draw_projections
from maple.runs.benchmark.trainings import FACTS, Job, ensure_evaluated, training_facts
from maple.runs.provenance import describe_hardware, find_commit
from maple.stats.metrics import format_spread

PLOTTED = ("accuracy", "ece", "auroc", "gaussian_error")  # kinds of figures worth a panel
MAX_PANELS = 5


@dataclass(frozen=True, eq=False)
class TableRow:
    """One line: our figures, one per seed, and the paper's."""

    title: str
    figures: dict[str, list[float]]  # column: one per seed
    paper: dict[str, float]

    def mean(self, column: str) -> float:
        """NaN where a seed has none."""
        return float(np.mean(self.figures[column]))

    def spread(self, column: str) -> float:
        values = self.figures[column]
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class SuiteResults:
    """A filled table, and where its figures come from."""

    suite: Suite
    profile: Profile
    seeds: tuple[int, ...]
    rows: list[TableRow]
    plots: list[tuple[str, Plot]]  # caption and drawing
    provenance: dict[str, Any]


def collect(suite: Suite, jobs: Sequence[Job], command: str) -> SuiteResults:
    """Train and evaluate whatever is missing, and read the figures of a suite."""
    profile = jobs[0].profile
    seeds = tuple(dict.fromkeys(job.seed for job in jobs))
    found: dict[tuple[Any, int], tuple[Results, Results | None, dict[str, float]]] = {}
    needs_corrupted = any(name.startswith(CORRUPTED_COLUMN) for name in suite.columns)
    needs_facts = any(name in FACTS for name in suite.columns)
    for job in jobs:
        results = ensure_evaluated(job, suite.detectors)
        corrupted = ensure_evaluated(job, corrupted=True) if needs_corrupted and job.protocol.corrupted else None
        facts = training_facts(job) if needs_facts else {}
        found[job.training, job.seed] = results, corrupted, facts
    rows = [
        TableRow(
            row.title,
            {name: [_read(row, name, *found[row.training, seed]) for seed in seeds] for name in suite.columns},
            suite.paper.get(row.paper, {}),
        )
        for row in suite.rows(profile)
    ]
    first = {job.training: job for job in reversed(jobs)}  # of the first seed
    drawn = _draw_figure(suite, profile, first, {t: found[t, first[t].seed][0] for t in first})
    plots = [*drawn, *_draw_rows(suite, rows)]
    return SuiteResults(suite, profile, seeds, rows, plots, _provenance(jobs, command))


def _read(row: Row, column: str, results: Results, corrupted: Results | None, facts: dict[str, float]) -> float:
    if not column.startswith(CORRUPTED_COLUMN):
        return read_figure(results, row.method, column, facts)
    return math.nan if corrupted is None else read_figure(corrupted, row.method, column.removeprefix(CORRUPTED_COLUMN))


def _provenance(jobs: Sequence[Job], command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": find_commit(),
        "maple": maple.__version__,
        "python": platform.python_version(),
        "hardware": describe_hardware(),
        "trainings": {job.folder.name: job.title for job in jobs},
    }


# --- text ------------------------------------------------------------------------------------------------------------


def _cell(values: Sequence[float], digits: int) -> str:
    return "–" if any(math.isnan(value) for value in values) else format_spread(values, digits=digits)


def table_cells(found: SuiteResults) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a column whose figures the paper has is followed by the paper's."""
    columns = columns_of(found.suite)
    arrows = {"higher": " ↑", "lower": " ↓", "": ""}
    headings = [""]
    for name, column in columns.items():
        headings.append(column.title + arrows[column.better])
        if any(name in row.paper for row in found.rows):
            headings.append("paper")
    lines = []
    for row in found.rows:
        line = [row.title]
        for name, column in columns.items():
            line.append(_cell(row.figures[name], column.digits))
            if any(name in other.paper for other in found.rows):
                line.append(_cell([row.paper.get(name, math.nan)], column.digits))
        lines.append(line)
    return headings, lines


def to_rows(found: SuiteResults) -> list[dict[str, str]]:
    """The table as a terminal shows it; columns without a title of their own belong to the one before."""
    headings, lines = table_cells(found)
    named = [f"{heading} {headings[i - 1]}" if heading == "paper" else heading for i, heading in enumerate(headings)]
    return [dict(zip(named, line)) for line in lines]


def to_markdown(found: SuiteResults) -> str:
    """The table with its title, and how it was made."""
    suite, profile, seeds = found.suite, found.profile, found.seeds
    headings, lines = table_cells(found)
    rows = [headings, ["---"] + ["---:"] * (len(headings) - 1), *lines]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in rows)
    spread = f"mean ± deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    made = f"Profile {profile.name} ({profile.about}); {spread}. `{found.provenance['command']}`, {_made_with(found)}."
    body = f"{table}\n\n" if suite.columns else ""
    return f"# {suite.title}\n\n{suite.place} of the paper: {suite.shows}.\n\n{body}{made}\n"


def _made_with(found: SuiteResults) -> str:
    said = found.provenance
    commit = f", commit {said['commit']}" if said["commit"] else ""
    return f"maple {said['maple']}{commit}, Python {said['python']}, {said['hardware']}"


def to_csv(found: SuiteResults) -> str:
    """One line per row, column and seed, unrounded, and the paper's figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "value", "paper"])
    for row in found.rows:
        for column, values in row.figures.items():
            for seed, value in zip(found.seeds, values):
                writer.writerow(
                    [row.title, column, seed, "" if math.isnan(value) else value, row.paper.get(column, "")]
                )
    return text.getvalue()


def to_dict(found: SuiteResults) -> dict[str, Any]:
    """Everything but the drawings."""
    return {
        "suite": found.suite.name,
        "profile": found.profile.name,
        "seeds": list(found.seeds),
        "rows": [{"title": row.title, "figures": row.figures, "paper": row.paper} for row in found.rows],
        "provenance": found.provenance,
    }


def write_suite(folder: Path, found: SuiteResults) -> Path:
    """Markdown, CSV, JSON, drawings and a page; the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "table.md", to_markdown(found))
    write_atomic(folder / "table.csv", to_csv(found))
    save_json(folder / "results.json", to_dict(found))
    for i, (_, plot) in enumerate(found.plots):
        write_atomic(folder / f"{found.suite.name}-{i + 1}.svg", standalone_svg(plot))
    page = folder / "report.html"
    write_atomic(page, render_suite(found))
    return page


def render_suite(found: SuiteResults) -> str:
    """The page."""
    headings, lines = table_cells(found)
    return render_page(
        "suite.html.j2",
        {
            "version": maple.__version__,
            "title": found.suite.title,
            "subtitle": f"{found.suite.place} of the paper: {found.suite.shows}",
            "headings": headings if found.suite.columns else [],
            "lines": lines,
            "best": _best_cells(found),
            "plots": [{"caption": caption, "svg": plot.svg} for caption, plot in found.plots],
            "profile": f"Profile {found.profile.name}: {found.profile.about}.",
            "seeds": ", ".join(map(str, found.seeds)),
            "made": _made_with(found),
            "command": found.provenance["command"],
            "trainings": found.provenance["trainings"],
        },
    )


def _best_cells(found: SuiteResults) -> set[tuple[int, int]]:
    """Row and cell of the best of our figures in each column."""
    best, place = set(), 1
    for name, column in columns_of(found.suite).items():
        values = np.array([row.mean(name) for row in found.rows])
        if column.better and np.isfinite(values).any():
            leading = np.nanmax(values) if column.better == "higher" else np.nanmin(values)
            best |= {(i, place) for i in np.flatnonzero(values == leading).tolist()}
        place += 1 + any(name in row.paper for row in found.rows)
    return best


# --- drawings --------------------------------------------------------------------------------------------------------


def _draw_rows(suite: Suite, rows: Sequence[TableRow]) -> list[tuple[str, Plot]]:
    """Dots for our figures, rings for the paper's."""
    columns = columns_of(suite)
    clean = [name for name in columns if not name.startswith(CORRUPTED_COLUMN)]
    chosen = [name for name in clean if figure_kind(name)[0] in PLOTTED][:MAX_PANELS]
    if not chosen:
        return []
    panels = [
        Panel(
            columns[name].title,
            [row.mean(name) for row in rows],
            [row.spread(name) for row in rows],
            [row.paper.get(name, math.nan) for row in rows],
        )
        for name in chosen
    ]
    return [("Our figures next to the paper's.", plot_rows([row.title for row in rows], panels, "ours", "the paper"))]


def _draw_figure(
    suite: Suite, profile: Profile, jobs: dict[Any, Job], results: dict[Any, Results]
) -> list[tuple[str, Plot]]:
    """The figure that a suite stands for, from networks of the first seed."""
    drawn: list[tuple[str, Plot]] = []
    for row in suite.rows(profile):
        found = results[row.training]
        if suite.figure in ("latent", "clusters"):
            plots = draw_projections(read_run(jobs[row.training].folder))
            plots = plots if suite.figure == "clusters" else plots[-1:]
            drawn += [(f"{row.title}: {plot.alt}", plot) for plot in plots]
        elif suite.figure == "calibration" and (judged := found.methods[row.method].classification):
            drawn.append((row.title, plot_reliability([(Line(row.title, BLUE, "-"), judged.reliability)])))
        elif suite.figure == "qq":
            plot = plot_quantiles(found.qq_theoretical, found.qq_observed, found.n_components)
            drawn.append((f"{row.title}, {found.n_components} components", plot))
    return list({plot.svg: (caption, plot) for caption, plot in drawn}.values())  # rows may share a network
