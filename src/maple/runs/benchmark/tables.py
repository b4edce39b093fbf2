"""Fill the tables of suites from trained networks, and write them: Markdown, CSV, JSON, drawings and a page."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maple
from maple.evaluation.paper.columns import CORRUPTED_COLUMN, read_figure
from maple.evaluation.paper.rows import Row, Training
from maple.evaluation.paper.suites import Suite
from maple.evaluation.paper.tables import SuiteResults, TableRow, to_csv, to_dict, to_markdown
from maple.evaluation.results import Results
from maple.files import save_json, write_atomic
from maple.reporting.plots import standalone_svg
from maple.reporting.suite_page import Network, draw_suite, render_suite
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.trainings import FACTS, ensure_evaluated, training_facts
from maple.runs.provenance import describe_hardware, find_commit


@dataclass(frozen=True)
class _Evaluated:
    """What is known of one network."""

    results: Results
    corrupted: Results | None  # on corrupted images
    facts: dict[str, float]  # of the training

    def read(self, row: Row, column: str) -> float:
        """One figure; NaN where there is none."""
        if not column.startswith(CORRUPTED_COLUMN):
            return read_figure(self.results, row.method, column, self.facts)
        if self.corrupted is None:
            return math.nan
        return read_figure(self.corrupted, row.method, column.removeprefix(CORRUPTED_COLUMN))


def collect(suite: Suite, jobs: Sequence[Job], command: str) -> tuple[SuiteResults, dict[Training, Network]]:
    """Train and evaluate missing networks and read the figures of a suite; also the networks of the first seed."""
    profile = jobs[0].profile
    seeds = tuple(dict.fromkeys(job.seed for job in jobs))
    found = {(job.training, job.seed): _evaluate(suite, job) for job in jobs}
    rows = [
        TableRow(
            row.title,
            {name: [found[row.training, seed].read(row, name) for seed in seeds] for name in suite.columns},
            suite.paper.get(row.paper, {}),
        )
        for row in suite.rows(profile)
    ]
    networks = {
        job.training: Network(job.folder, found[job.training, job.seed].results) for job in jobs if job.seed == seeds[0]
    }
    return SuiteResults(suite, profile, seeds, rows, _provenance(jobs, command)), networks


def _evaluate(suite: Suite, job: Job) -> _Evaluated:
    needs_corrupted = any(name.startswith(CORRUPTED_COLUMN) for name in suite.columns) and job.protocol.corrupted
    results = ensure_evaluated(job, suite.detectors(job.profile))
    return _Evaluated(
        results,
        ensure_evaluated(job, corrupted=True) if needs_corrupted else None,
        training_facts(job) if any(name in FACTS for name in suite.columns) else {},
    )


def _provenance(jobs: Sequence[Job], command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": find_commit(),
        "maple": maple.__version__,
        "python": platform.python_version(),
        "hardware": describe_hardware(),
        "trainings": {job.folder.name: job.title for job in jobs},
    }


def write_suite(folder: Path, found: SuiteResults, networks: dict[Training, Network]) -> Path:
    """Write Markdown, CSV, JSON, drawings and the page, whose path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = draw_suite(found, networks)
    write_atomic(folder / "table.md", to_markdown(found))
    write_atomic(folder / "table.csv", to_csv(found))
    save_json(folder / "results.json", to_dict(found))
    for i, (_, plot) in enumerate(drawings, start=1):
        write_atomic(folder / f"{found.suite.name}-{i}.svg", standalone_svg(plot))
    page = folder / "report.html"
    write_atomic(page, render_suite(found, drawings))
    return page
