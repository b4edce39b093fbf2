"""Commands that measure, update and report: evaluate, update, benchmark, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_line, print_results, print_rows

if TYPE_CHECKING:
    from maple.options import Flag
    from maple.runs.requests import AsJson, BenchmarkRequest, EvaluateRequest, Run, TextAsJson, UpdateRequest


@cli.command(
    "decision",
    settings=True,
    settable="option of a compared detector, such as knn.k=10",
    rare=True,
    default="the run's",
)
def evaluate(request: EvaluateRequest, as_json: AsJson = False) -> None:
    """Measure accuracy, calibration and detection of unknown images, and update the report."""
    from maple.runs.evaluate import evaluate_run

    print_results(evaluate_run(request), as_json)


@cli.command()
def update(request: UpdateRequest, as_json: TextAsJson = False) -> None:
    """Add images or new classes to a run, without retraining and without the old images.

    Thresholds become invalid: nothing is flagged until --calibrate, in the same command or a later one.
    """
    from maple.runs.update import update_run

    print_described(update_run(request), as_json)


@cli.command("train", settings=True, default="the profile's")
def benchmark(
    *,
    show_list: Annotated[bool, Flag("list the suites", "--list")] = False,
    request: BenchmarkRequest,
    dry_run: Annotated[bool, Flag("print the plan with an estimate of the time, and do nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute a table or figure of the paper, beside the paper's own numbers; finished trainings are not repeated."""
    from maple.evaluation.paper.tables import to_dict, to_rows
    from maple.progress import say
    from maple.runs.benchmark.suites import list_suites, plan_suites, run_suites

    if show_list or not request.names:
        print_rows(list_suites(), as_json)
        return
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


@cli.command()
def report(
    run: Run,
    predictions: Annotated[
        Path | None,
        Flag("predictions to include, .csv, .jsonl or .parquet", metavar="PREDICTIONS", positional=True),
    ] = None,
    out: Annotated[Path | None, Flag("HTML file to write", shown="report.html in the run")] = None,
) -> None:
    """Write one self-contained HTML file about a run."""
    from maple.runs.report import report_run

    print_line(f"report: {report_run(run, out, predictions, cli.command_line())}")
