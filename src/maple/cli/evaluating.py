"""Commands that measure, update and report: evaluate, update, benchmark, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from maple.cli._flags import (
    AsJson,
    DataRoot,
    OodSources,
    RunDataRoot,
    TextAsJson,
    Trust,
    Workers,
    command_line,
    named_sources,
    read_seeds,
    with_options,
)
from maple.cli._output import print_described, print_line, print_results, print_rows
from maple.errors import UsageError
from maple.options import read_names

RunPath = Annotated[Path, typer.Argument(help="run folder")]


@with_options("decision", settable=True, rare=True, default="the run's")
def evaluate(
    run: RunPath,
    flags: dict[str, Any],
    ind: Annotated[str | None, typer.Option(help="in-distribution test images; default: the run's test split")] = None,
    ood: OodSources = None,
    detector: Annotated[
        str | None,
        typer.Option(
            help="detectors to compare with, such as rmd,energy,knn; they are fitted on the run's training images "
            "[dim]\\[default: softmax,energy; all: maple methods][/]"
        ),
    ] = None,
    ood_validation: Annotated[
        str | None, typer.Option(help="unknown images for lee-md-ood, the detector that is tuned on them")
    ] = None,
    workers: Workers = 2,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, calibration and detection of unknown images, and update the report."""
    from maple.runs.evaluate import EvaluateRequest, create_detectors, evaluate_run

    settings = {key: flags.pop(key) for key in list(flags) if "." in key}
    request = EvaluateRequest(
        run=run,
        ind=ind,
        ood=named_sources(ood),
        decision=flags,
        detectors=create_detectors(_names(detector), settings) if detector is not None or settings else None,
        ood_validation=ood_validation,
        data_root=data_root,
        workers=workers,
        command=command_line(),
        trust=trust,
    )
    print_results(evaluate_run(request), as_json)


def _names(detectors: str | None) -> list[str]:
    names = read_names(detectors or "")
    if detectors is not None and not names:
        raise UsageError("--detector is empty: name detectors, such as rmd,energy (maple methods lists them)")
    return names


@with_options()
def update(
    run: RunPath,
    data: Annotated[str | None, typer.Option(help="labelled images to learn from, of known or of new classes")] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="labelled images of all classes that the run has not seen: one half for temperature and score, the "
            "other half for thresholds"
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="classes of --data to learn [dim]\\[default: all][/]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder to write [dim]\\[default: replace RUN][/]")] = None,
    workers: Workers = 2,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: TextAsJson = False,
) -> None:
    """Add images or whole new classes to a run, without retraining and without the old images.

    Thresholds are void afterwards: nothing is flagged until --calibrate, in the same command or a later one.
    """
    from maple.runs.update import UpdateRequest, update_run

    request = UpdateRequest(
        run,
        data=data,
        calibrate=calibrate,
        only=tuple(read_names(only or "")),
        out=out,
        data_root=data_root,
        workers=workers,
        trust=trust,
        command=command_line(),
    )
    print_described(update_run(request), as_json)


@with_options("train", settable=True, default="the profile's")
def benchmark(
    flags: dict[str, Any],
    names: Annotated[list[str] | None, typer.Argument(help="suites; 'all' for all of them")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list the suites")] = False,
    profile: Annotated[str, typer.Option(help="how networks are trained: paper, cpu or tiny")] = "cpu",
    seeds: Annotated[str | None, typer.Option(help="seeds, such as 0,1,2 [dim]\\[default: the profile's][/]")] = None,
    out: Annotated[Path, typer.Option(help="folder for trainings and tables")] = Path("runs/benchmark"),
    data_root: DataRoot = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, with an estimate of the time")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute a table or figure of the paper, next to the paper's figures; finished trainings are not repeated."""
    from maple.evaluation.paper.tables import to_dict, to_rows
    from maple.progress import say
    from maple.runs.benchmark.suites import BenchmarkRequest, list_suites, plan_suites, run_suites

    if show_list or not names:
        print_rows(list_suites(), as_json)
        return
    request = BenchmarkRequest(
        tuple(names), profile, read_seeds(seeds), out, data_root, changes=flags, command=command_line()
    )
    if dry_run:
        print_rows(plan_suites(request), as_json)
        return
    done = []
    for page, found in run_suites(request):
        done.append(to_dict(found))
        if not as_json:
            print_rows(to_rows(found), as_json)
            say(f"report: {page}")
    if as_json:
        print(json.dumps(done, indent=1))


@with_options()
def report(
    run: RunPath,
    predictions: Annotated[Path | None, typer.Argument(help="predictions to include, .csv, .jsonl or .parquet")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: report.html in the run")] = None,
) -> None:
    """Write one self-contained HTML file about a run."""
    from maple.runs.report import report_run

    print_line(f"report: {report_run(run, out, predictions, command_line())}")
