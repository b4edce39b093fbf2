"""``maple benchmark``: from the names of suites to tables; see :mod:`maple.evaluation.paper.suites` for what they
are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maple.errors import UsageError
from maple.evaluation.paper.profiles import PROFILES, Profile, find_profile
from maple.evaluation.paper.suites import SUITES, Suite, find_suite
from maple.evaluation.paper.tables import SuiteResults
from maple.progress import is_first_process, say, warn
from maple.runs.benchmark.jobs import Job, list_jobs
from maple.runs.benchmark.plan import plan_jobs
from maple.runs.benchmark.tables import collect, write_suite
from maple.runs.benchmark.trainings import train_all
from maple.runs.setup.request import LEFT_OUT

ALL = "all"
TABLES = "tables"


@dataclass(frozen=True)
class BenchmarkRequest:
    """What ``maple benchmark`` was asked to do."""

    names: tuple[str, ...]
    profile_name: str = "cpu"
    asked_seeds: tuple[int, ...] | None = None
    out: Path = Path("runs/benchmark")
    data_root: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    command: str = "maple benchmark"

    @property
    def profile(self) -> Profile:
        return find_profile(self.profile_name)

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.asked_seeds if self.asked_seeds is not None else self.profile.seeds

    @property
    def suites(self) -> list[Suite]:
        names = SUITES if ALL in self.names else dict.fromkeys(self.names)
        return [find_suite(name) for name in names]

    def jobs(self, *suites: Suite) -> list[Job]:
        """The networks of these suites, each once."""
        return list_jobs(suites, self.profile, self.seeds, self.out, self.data_root, self.changes)


def list_suites() -> list[dict[str, Any]]:
    """What there is: place in the paper, trainings per seed, what it shows."""
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
    protocol = PROFILES["paper"].protocols[suite.protocol]
    sources = [source for source in (protocol.source, *protocol.ood.values()) if source != LEFT_OUT]
    return list(dict.fromkeys(source.partition("/")[0] for source in sources))


def plan_suites(request: BenchmarkRequest) -> list[dict[str, Any]]:
    """The trainings of all suites, each once, with an estimate of their time; the last row is the sum."""
    rows = [plan.to_dict() for plan in plan_jobs(request.jobs(*request.suites))]
    new = [row for row in rows if row["state"] != "finished"]
    known = [row["hours"] for row in new if row["hours"] is not None]
    total = {"training": f"{len(new)} of {len(rows)} to be done", "hours": round(sum(known), 2)}
    return [*rows, {key: total.get(key) for key in rows[0]}] if rows else []


def run_suites(request: BenchmarkRequest) -> Iterator[tuple[Path, SuiteResults]]:
    """Train what is missing, then fill one table after the other: its page and its figures."""
    suites = request.suites
    if not request.seeds:
        raise UsageError("--seeds is empty: give at least one")
    jobs = request.jobs(*suites)
    for job in jobs:
        job.key  # noqa: B018  (data that is missing is better known before hours of training)
    done = sum(job.is_finished for job in jobs)
    say(f"{len(jobs)} trainings, {done} of them finished; all are kept in '{request.out}'")
    train_all(jobs)
    if not is_first_process():  # which alone reads what was trained
        return
    for suite in suites:
        found, networks = collect(suite, request.jobs(suite), request.command)
        yield write_suite(request.out / TABLES / f"{suite.name}-{request.profile.name}", found, networks), found
    if not suites:
        warn("no suite was named: see maple benchmark --list")
