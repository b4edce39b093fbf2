"""``maple benchmark``: from the names of suites to tables.

:mod:`maple.evaluation.paper.suites` describes the suites. Tables are filled from trained networks and written as
Markdown, CSV, JSON, drawings and a page.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import maple
from maple.errors import UsageError
from maple.evaluation.paper.columns import Images, floor_columns, read_figure, split_images
from maple.evaluation.paper.profiles import PROFILES, find_profile
from maple.evaluation.paper.rows import Row, Training
from maple.evaluation.paper.suites import PAPER, SUITES, Suite, find_suite
from maple.evaluation.paper.tables import Provenance, SuiteResults, TableRow, to_csv, to_dict, to_sheet
from maple.evaluation.results import Results
from maple.files import save_json, write_atomic
from maple.progress import is_first_process, say, warn
from maple.reporting.plots import standalone_svg
from maple.reporting.suite_page import Network, draw_suite, render_suite
from maple.runs.benchmark.jobs import Job, check_changes, list_jobs
from maple.runs.benchmark.plan import describe_plan, plan_jobs
from maple.runs.benchmark.trainings import FACTS, ensure_evaluated, train_all, training_facts
from maple.runs.evaluate import describe_hardware, find_commit
from maple.runs.requests import BenchmarkRequest
from maple.runs.setup.request import LEFT_OUT

ALL = "all"
TABLES = "tables"


def list_suites() -> list[dict[str, Any]]:
    """The suites: place in the paper, data sets, trainings per seed, and what each shows."""
    return [
        {
            "benchmark": suite.name,
            "paper": suite.place,
            "needs": ", ".join(_needs(suite)),
            "trainings": len(suite.trainings(PROFILES["cpu"])),
            "shows": suite.shows,
        }
        for suite in SUITES.values()
    ]


def _needs(suite: Suite) -> list[str]:
    """The data sets of a suite."""
    protocols = dict.fromkeys(training.protocol for training in suite.trainings(PROFILES["paper"]))
    used = [PROFILES["paper"].protocols[name] for name in protocols]
    sources = [source for each in used for source in (each.source, *each.ood.values()) if source != LEFT_OUT]
    return list(dict.fromkeys(source.partition("/")[0] for source in sources))


def plan_suites(request: BenchmarkRequest) -> list[dict[str, Any]]:
    """The trainings of all suites, each once, with an estimate of their time; the last row is the sum."""
    jobs = _list_jobs(request, _find_suites(request))
    check_changes(request.flags, jobs)
    rows = [asdict(plan) for plan in plan_jobs(jobs)]
    new = [row for row in rows if row["state"] != "finished"]
    total = {
        "training": f"{len(new)} of {len(rows)} to be done",
        "hours": round(sum(row["hours"] or 0 for row in new), 2),
    }
    return [*rows, {key: total.get(key) for key in rows[0]}] if rows else []


def _find_suites(request: BenchmarkRequest) -> list[Suite]:
    """Suites by name; ``all`` are those of the paper."""
    papers = [name for name, suite in SUITES.items() if suite.reference == PAPER]
    return [find_suite(name) for name in (papers if ALL in request.names else dict.fromkeys(request.names))]


def _list_jobs(request: BenchmarkRequest, suites: Sequence[Suite]) -> list[Job]:
    """The networks of these suites, each once."""
    profile = find_profile(request.profile)
    seeds = profile.seeds if request.seeds is None else request.seeds
    if not seeds:
        raise UsageError("--seeds is empty: give at least one")
    return list_jobs(suites, profile, seeds, request.out, request.data_root, request.flags)


def run_suites(request: BenchmarkRequest) -> Iterator[tuple[Path, SuiteResults]]:
    """Train what is missing, then fill one table after the other: its page and its figures."""
    suites = _find_suites(request)
    jobs = _list_jobs(request, suites)
    check_changes(request.flags, jobs)
    for job in jobs:
        job.key  # noqa: B018  (data that is missing is better known before hours of training)
    if is_first_process():
        say(f"{describe_plan(jobs)}; all are kept in '{request.out}'")
    train_all(jobs)
    if not is_first_process():  # which alone reads what was trained
        return
    for suite in suites:
        found, networks = collect(suite, _list_jobs(request, [suite]), request.command)
        yield write_suite(request.out / TABLES / f"{suite.name}-{found.profile.name}", found, networks), found
    if not suites:
        warn("no suite was named: see maple benchmark --list")


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Evaluated:
    """The results and facts of one network."""

    results: dict[Images, Results]
    facts: dict[str, float]  # of the training

    def read(self, row: Row, column: str) -> float:
        """One figure; NaN where there is none."""
        images, name = split_images(column)
        if images not in self.results:
            return math.nan
        return read_figure(self.results[images], row.method, name, self.facts if images == "test" else None)


def collect(suite: Suite, jobs: Sequence[Job], command: str) -> tuple[SuiteResults, dict[Training, Network]]:
    """Train and evaluate missing networks and read the figures of a suite; also the networks of the first seed."""
    profile = jobs[0].profile
    seeds = tuple(dict.fromkeys(job.seed for job in jobs))
    found = {(job.training, job.seed): evaluate_job(suite, job) for job in jobs}
    floors = floor_columns(suite.columns)
    rows = [
        TableRow(
            row.title,
            {name: [found[row.training, seed].read(row, name) for seed in seeds] for name in suite.columns},
            suite.paper.get(row.paper, {}),
            {name: [found[row.training, seed].read(row, floor) for seed in seeds] for name, floor in floors.items()},
        )
        for row in suite.rows(profile)
    ]
    networks = {
        job.training: Network(job.folder, found[job.training, job.seed].results["test"])
        for job in jobs
        if job.seed == seeds[0]
    }
    provenance = Provenance(
        command=command,
        commit=find_commit(),
        maple=maple.__version__,
        python=platform.python_version(),
        hardware=describe_hardware(),
        trainings={job.folder.name: job.title for job in jobs},
    )
    return SuiteResults(suite, profile, seeds, rows, provenance, jobs[0].changes), networks


def evaluate_job(suite: Suite, job: Job) -> _Evaluated:
    """Everything that a suite reads of a network: found, or evaluated now."""
    others: set[Images] = {split_images(name)[0] for name in suite.columns} - {"test"}
    if not job.protocol.corrupted:
        others.discard("corrupted")
    results = {images: ensure_evaluated(job, images=images) for images in sorted(others)}
    results["test"] = ensure_evaluated(job, suite.detectors(job.profile))
    return _Evaluated(results, training_facts(job) if any(name in FACTS for name in suite.columns) else {})


def write_suite(folder: Path, found: SuiteResults, networks: dict[Training, Network]) -> Path:
    """Write Markdown, LaTeX, CSV, JSON, drawings and the page, whose path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = draw_suite(found, networks)
    sheet = to_sheet(found)
    write_atomic(folder / "table.md", sheet.to_markdown())
    write_atomic(folder / "table.tex", sheet.to_latex(f"tab:{found.suite.name}"))
    write_atomic(folder / "table.csv", to_csv(found))
    save_json(folder / "results.json", to_dict(found))
    for i, drawing in enumerate(drawings, start=1):
        write_atomic(folder / f"{found.suite.name}-{i}.svg", standalone_svg(drawing.plot))
    page = folder / "report.html"
    write_atomic(page, render_suite(found, drawings))
    return page
