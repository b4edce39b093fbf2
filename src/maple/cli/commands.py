"""The commands that work with runs; :mod:`maple.cli.catalogue` has those that list methods and data sets.

Arguments and flags of a command are the fields of its request in :mod:`maple.runs.requests`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_line, print_named, print_results, print_rows

if TYPE_CHECKING:
    from maple.options import Flag
    from maple.prediction.engine import Engine
    from maple.runs import flag_values, requests
    from maple.runs._engine import EngineFlags

DRIFT = 3  # the exit code of maple monitor when images have drifted
_TRAINING = ("data", "model", "train", "maple", "detector", "decision")  # panels of flags, in this order


@contextmanager
def _engine(request: EngineFlags, folder: Path | None = None, overwrite: bool = False) -> Iterator[Engine]:
    """What runs the network, as ``--engine`` says; ``folder`` keeps the sums of an unfinished fit."""
    if not request.on_ray:
        from maple.prediction.engine import LOCAL

        yield LOCAL
        return
    from maple.deploy.ray.cluster import prepare

    prepare(request)
    from maple.deploy.ray.engine import RayEngine

    with RayEngine(request, folder, overwrite) as engine:
        yield engine


# --- making a run, searching settings ---------------------------------------------------------------------------------


@cli.command()
def demo(
    out: Annotated[Path, Flag("run folder to write")] = Path("runs/demo"),
    seed: Annotated[int, Flag("seed")] = 0,
    as_json: flag_values.AsJson = False,
) -> None:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa: about two minutes."""
    from maple.runs.demo import run_demo

    print_results(run_demo(out, seed), as_json)


@cli.command(*_TRAINING, settings=True)
def train(request: requests.TrainRequest, as_json: flag_values.AsJson = False) -> None:
    """Train a network on DATA, fit its detector and test it; the run folder holds everything.

    --init continues the training of a network: its weights, normalisation and image size are kept, and its head if it
    has one output per class. The default preset is then finetune, with a lower learning rate and a warm-up; for
    transformers add --optimizer adam --learning-rate 0.0001 --weight-decay 0.

    Options that are not listed here are set with --set or in a TOML file (--config); maple methods NAME lists those of
    a method.
    """
    from maple.runs.setup.request import check_files

    check_files(request)
    from maple.runs.train import train_run

    print_results(train_run(request), as_json)


@cli.command(
    "data",
    "detector",
    "decision",
    settings=True,
    settable="option of the sections data, detector (listed by maple methods maple) and decision, such as "
    "detector.pca=false; may be repeated",
)
def fit(request: requests.FitRequest, as_json: flag_values.AsJson = False) -> None:
    """Make a run from a trained network, without training it; the run folder holds everything."""
    from maple.runs.setup.request import check_files

    check_files(request)
    from maple.files import RunFile
    from maple.runs.fit import fit_run

    with _engine(request, request.folder / RunFile.MOMENTS, request.overwrite) as engine:
        print_results(fit_run(request, engine), as_json)


@cli.command(*_TRAINING, settings=True)
def tune(
    request: requests.TuneRequest,
    dry_run: Annotated[bool, Flag("print the plan and do nothing")] = False,
    as_json: flag_values.TextAsJson = False,
) -> None:
    """Search for better settings of a recipe on in-distribution images alone; rerun the command to resume."""
    from maple.runs.tune.plan import make_plan
    from maple.runs.tune.search import tune_recipe

    print_described(make_plan(request) if dry_run else tune_recipe(request), as_json)


# --- asking a run about images ----------------------------------------------------------------------------------------


@cli.command("decision", rare=True, default="the run's")
def predict(request: requests.PredictRequest) -> None:
    """Class, probability, uncertainty and in/out decision for each image: one row each.

    Memory does not grow with the number of images. If the command is interrupted or killed, rerun it to resume.
    """
    if request.on_ray:
        from maple.deploy.ray.cluster import prepare

        prepare(request)
        from maple.deploy.ray.predict import predict_on_ray

        predict_on_ray(request)
        return
    from maple.runs.predicting.predict import predict_images

    predict_images(request)


@cli.command("decision", rare=True, default="the run's")
def explain(request: requests.ExplainRequest, as_json: flag_values.TextAsJson = False) -> None:
    """Explain the prediction of each image: nearest cluster, runner-up, and the features that deviate most."""
    from maple.runs.predicting.explain import explain_images, to_json, to_text

    cases = explain_images(request)
    if as_json or request.out is None:
        print(to_json(cases) if as_json else to_text(cases))
    else:
        print_line(f"explanations: {request.out}")


@cli.command()
def monitor(request: requests.MonitorRequest, as_json: flag_values.TextAsJson = False) -> None:
    """Test whether images have drifted from the calibration images; the exit code is the answer.

    Exit codes: 0 no drift seen, 3 drift, 2 wrong use, 1 failure.

    Without --state the images are one batch, in any order.

    With --state they continue a stream, in order of arrival; its alarm is valid however often it is checked, and
    persists.
    """
    from maple.runs.predicting.monitor import monitor_images

    with _engine(request) as engine:
        found = monitor_images(request, engine)
    print_described(found, as_json)
    if found.drift:
        raise typer.Exit(DRIFT)


# --- measuring, updating, reporting -----------------------------------------------------------------------------------


@cli.command(
    "decision",
    settings=True,
    settable="option of a compared detector, such as knn.k=10; may be repeated; see maple methods NAME",
    rare=True,
    default="the run's",
)
def evaluate(request: requests.EvaluateRequest, as_json: flag_values.AsJson = False) -> None:
    """Measure accuracy, calibration and detection of unknown images, and update the report.

    With runs of several seeds the table shows mean ± deviation.
    """
    from maple.runs.evaluate import evaluate_runs

    with _engine(request) as engine:
        first, *others = evaluate_runs(request, engine)
    print_results(first, as_json, others)


@cli.command()
def clean(request: requests.CleanRequest, as_json: flag_values.TextAsJson = False) -> None:
    """List labels that may be wrong, first those that are most so; correct the list and train with it."""
    from maple.runs.clean import clean_run

    print_described(clean_run(request), as_json)


@cli.command()
def update(request: requests.UpdateRequest, as_json: flag_values.TextAsJson = False) -> None:
    """Add images or new classes to a run, without retraining and without the old images.

    Thresholds become invalid: nothing is flagged until --calibrate, in the same command or a later one.
    """
    from maple.runs.update import update_run

    print_described(update_run(request), as_json)


@cli.command("train", without=("seed", "time_limit"), settings=True, default="the profile's")  # --seeds
def benchmark(
    *,
    show_list: Annotated[bool, Flag("list the suites", "--list")] = False,
    request: requests.BenchmarkRequest,
    dry_run: Annotated[bool, Flag("print the plan with an estimate of the time, and do nothing")] = False,
    as_json: flag_values.AsJson = False,
) -> None:
    """Compute a table or figure of the paper, beside the paper's own numbers; finished trainings are not repeated."""
    from maple.evaluation.paper.tables import to_dict, to_rows
    from maple.progress import say
    from maple.runs.benchmark.suites import list_suites, plan_suites, run_suites

    if show_list or not request.names:
        if as_json:
            print_rows(list_suites(), as_json)
        else:
            print_named(_describe_suites(list_suites()))
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


def _describe_suites(rows: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """What each suite shows, and where it is from, what it needs and how many networks it trains, by its name."""
    from maple.text import plural

    return {
        row["benchmark"]: (
            row["shows"],
            f"{row['paper']}; needs {row['needs']}; {plural(int(row['trainings']), 'training')}",
        )
        for row in rows
    }


@cli.command()
def report(
    run: flag_values.Run,
    predictions: Annotated[
        Path | None,
        Flag("predictions to include, .csv, .jsonl or .parquet", metavar="PREDICTIONS", positional=True),
    ] = None,
    out: Annotated[Path | None, Flag("HTML file to write", shown="report.html in the run")] = None,
) -> None:
    """Write one self-contained HTML file about a run."""
    from maple.runs.report import report_run

    print_line(f"report: {report_run(run, out, predictions, cli.command_line())}")


# --- bringing a run into use ------------------------------------------------------------------------------------------


@cli.command()
def export(request: requests.ExportRequest, as_json: flag_values.AsJson = False) -> None:
    """Write network, Gaussians and decision as one graph, and check its parity with the run on images."""
    from maple.deploy.export import export_run

    report = export_run(request)
    print(json.dumps(report.to_dict()) if as_json else report.describe())


@cli.command()
def push(
    run: flag_values.Run,
    place: Annotated[str, Flag("hf://ORG/NAME, or hf://ORG/NAME@BRANCH", metavar="PLACE", positional=True)],
    gallery: Annotated[bool, Flag("include the gallery: thumbnails of training images")] = False,
    private: Annotated[bool, Flag("make a new repository private")] = False,
    message: Annotated[str | None, Flag("message of the commit")] = None,
    as_json: flag_values.TextAsJson = False,
) -> None:
    """Push a run to the Hugging Face Hub with a model card; maple.load("hf://ORG/NAME") loads it.

    It uses the token of hf auth login or HF_TOKEN. Training images stay here, unless with --gallery, and so do their
    folder and the command of the run.
    """
    from maple.runs.hub import push_run

    print_described(push_run(run, place, gallery=gallery, private=private, message=message), as_json)


@cli.command("serve", "decision", rare=True, default="the model's")
def serve(
    model: Annotated[
        Path, Flag("run folder, or the .onnx file that maple export wrote", metavar="MODEL", positional=True)
    ],
    flags: cli.Flags,
    api_key: Annotated[
        str | None,
        Flag(
            "key that requests must send in the header X-API-Key; prefer the environment variable",
            panel=cli.SECTIONS["serve"].title,
            envvar="MAPLE_API_KEY",
        ),
    ] = None,
    trust: flag_values.Trust = False,
) -> None:
    """Answer requests over HTTP, with a page for the browser, until Ctrl-C or SIGTERM.

    Accepted requests are answered before it stops. Without --host it listens on this machine only.
    """
    from maple.decisions.options import DecisionOptions
    from maple.deploy.serve.options import ServeOptions
    from maple.deploy.serve.server import serve_model
    from maple.options import build_options, list_options

    decision = {name: flags.pop(name) for name in list_options(DecisionOptions) if name in flags}
    options = build_options(ServeOptions, {**flags, "api_key": api_key}, where=None)
    serve_model(model, options, decision, trust=trust)
