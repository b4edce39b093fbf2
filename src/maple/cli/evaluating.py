"""Commands that measure, update and report: evaluate, update, benchmark, report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_line, print_results, print_rows
from maple.errors import UsageError


@dataclass(frozen=True)
class EvaluateArguments:
    """The arguments of ``maple evaluate``."""

    run: Path = cli.argument("run folder", "RUN")
    ind: str | None = cli.flag(None, "in-distribution test images", shown="the run's test split")
    ood: cli.OodSources = None
    detector: str | None = cli.flag(
        None,
        "detectors to compare with, such as rmd,energy,knn; they are fitted on the run's training images",
        shown="softmax,energy; all: maple methods",
    )
    ood_validation: str | None = cli.flag(None, "unknown images for lee-md-ood, the detector that is tuned on them")
    workers: cli.Workers = 2
    data_root: cli.RunDataRoot = None
    trust: cli.Trust = False
    as_json: cli.AsJson = False


@cli.command(
    "decision",
    settings=True,
    settable="option of a compared detector, such as knn.k=10",
    rare=True,
    default="the run's",
)
def evaluate(given: EvaluateArguments, flags: cli.Flags) -> None:
    """Measure accuracy, calibration and detection of unknown images, and update the report."""
    from maple.options import read_names
    from maple.runs.evaluate import EvaluateRequest, create_detectors, evaluate_run

    settings = {key: flags.pop(key) for key in list(flags) if "." in key}
    names = read_names(given.detector or "")
    if given.detector is not None and not names:
        raise UsageError("--detector is empty: name detectors, such as rmd,energy (maple methods lists them)")
    request = cli.to_request(
        given,
        EvaluateRequest,
        ood=cli.named_sources(given.ood),
        decision=flags,
        detectors=create_detectors(names, settings) if names or settings else None,
        command=cli.command_line(),
    )
    print_results(evaluate_run(request), given.as_json)


@dataclass(frozen=True)
class UpdateArguments:
    """The arguments of ``maple update``."""

    run: Path = cli.argument("run folder", "RUN")
    data: str | None = cli.flag(None, "labelled images to learn from, of known or new classes")
    calibrate: str | None = cli.flag(
        None,
        "labelled images of all classes that the run has not seen: one half for temperature and score, the other half "
        "for thresholds",
    )
    only: str | None = cli.flag(None, "classes of --data to learn", shown="all", metavar="NAME,...")
    out: Path | None = cli.flag(None, "run folder to write", shown="replace RUN")
    workers: cli.Workers = 2
    data_root: cli.RunDataRoot = None
    trust: cli.Trust = False
    as_json: cli.TextAsJson = False


@cli.command()
def update(given: UpdateArguments) -> None:
    """Add images or new classes to a run, without retraining and without the old images.

    Thresholds become invalid: nothing is flagged until --calibrate, in the same command or a later one.
    """
    from maple.options import read_names
    from maple.runs.update import UpdateRequest, update_run

    only = tuple(read_names(given.only or ""))
    print_described(
        update_run(cli.to_request(given, UpdateRequest, only=only, command=cli.command_line())), given.as_json
    )


@dataclass(frozen=True)
class BenchmarkArguments:
    """The arguments of ``maple benchmark``."""

    names: list[str] | None = cli.argument("suites; 'all' for all of them", "NAMES", None)
    show_list: bool = cli.flag(False, "list the suites", "--list")
    profile: str = cli.flag("cpu", "how networks are trained: paper, cpu or tiny")
    seeds: str | None = cli.flag(None, "seeds, such as 0,1,2", shown="the profile's")
    out: Path = cli.flag(Path("runs/benchmark"), "folder for trainings and tables")
    data_root: cli.DataRoot = None
    dry_run: bool = cli.flag(False, "print the plan with an estimate of the time, and do nothing")
    as_json: cli.AsJson = False


@cli.command("train", settings=True, default="the profile's")
def benchmark(given: BenchmarkArguments, flags: cli.Flags) -> None:
    """Compute a table or figure of the paper, beside the paper's own numbers; finished trainings are not repeated."""
    from maple.evaluation.paper.tables import to_dict, to_rows
    from maple.progress import say
    from maple.runs.benchmark.suites import BenchmarkRequest, list_suites, plan_suites, run_suites

    if given.show_list or not given.names:
        print_rows(list_suites(), given.as_json)
        return
    request = BenchmarkRequest(
        names=tuple(given.names),
        profile_name=given.profile,
        asked_seeds=cli.read_numbers(given.seeds, "--seeds", int, "numbers such as 0,1,2"),
        out=given.out,
        data_root=given.data_root,
        changes=flags,
        command=cli.command_line(),
    )
    if given.dry_run:
        print_rows(plan_suites(request), given.as_json)
        return
    done = []
    for page, found in run_suites(request):
        done.append(to_dict(found))
        if not given.as_json:
            print_rows(to_rows(found), given.as_json)
            say(f"report: {page}")
    if given.as_json:
        print(json.dumps(done, indent=1))


@dataclass(frozen=True)
class ReportArguments:
    """The arguments of ``maple report``."""

    run: Path = cli.argument("run folder", "RUN")
    predictions: Path | None = cli.argument("predictions to include, .csv, .jsonl or .parquet", "PREDICTIONS", None)
    out: Path | None = cli.flag(None, "HTML file to write", shown="report.html in the run")


@cli.command()
def report(given: ReportArguments) -> None:
    """Write one self-contained HTML file about a run."""
    from maple.runs.report import report_run

    print_line(f"report: {report_run(given.run, given.out, given.predictions, cli.command_line())}")
