"""Commands that ask a run about images: predict, explain, monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from maple.cli._flags import SECTIONS, BatchSize, DataRoot, TextAsJson, Trust, Workers, with_options
from maple.cli._output import print_described, print_line

DRIFT = 3  # the exit code of maple monitor when images have drifted
Images = Annotated[list[str], typer.Argument(help="images, folders, globs, .parquet or names of data sets")]
RunOrGraph = Annotated[Path, typer.Argument(help="run folder, or a graph exported from one (.onnx)")]
_DECISION = SECTIONS["decision"].title


@with_options("decision", rare=True, default="the run's")
def predict(
    run: RunOrGraph,
    images: Images,
    flags: dict[str, Any],
    out: Annotated[str, typer.Option(help="file to write or replace, .csv, .jsonl or .parquet; - prints CSV")] = "-",
    fdr: Annotated[
        float | None,
        typer.Option(
            help="decide over all images together: of those flagged, at most this share is in-distribution on average",
            rich_help_panel=_DECISION,
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="add a column prediction_set: classes that contain the true one with this probability",
            rich_help_panel=_DECISION,
        ),
    ] = None,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="add a column p_<class> for every class")
    ] = False,
    batch_size: BatchSize = 256,
    workers: Annotated[int, typer.Option(min=0, help="processes that decode images ahead")] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="discard the unfinished predictions of another request")
    ] = False,
    data_root: DataRoot = None,
    trust: Trust = False,
) -> None:
    """Class, probability, uncertainty and in/out decision for each image: one row each.

    Memory does not grow with the number of images. If the command is interrupted or killed, rerun it to resume.
    """
    from maple.runs.predict import PredictRequest, predict_images

    request = PredictRequest(
        model=run,
        sources=images,
        out=out,
        decision=flags,
        fdr=fdr,
        coverage=coverage,
        all_probabilities=all_probabilities,
        batch_size=batch_size,
        data_root=data_root,
        workers=workers,
        overwrite=overwrite,
        trust=trust,
    )
    predict_images(request)


@with_options("decision", rare=True, default="the run's")
def explain(
    run: Annotated[Path, typer.Argument(help="run folder")],
    images: Images,
    flags: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write, with pictures [dim]\\[default: print text][/]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="explain only this many images, those with the highest scores")
    ] = None,
    workers: Workers = 2,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: TextAsJson = False,
) -> None:
    """Explain the prediction of each image: nearest cluster, runner-up, and the features that deviate most."""
    from maple.runs.explain import explain_images, to_json, to_text

    cases = explain_images(
        run, images, out, decision=flags, limit=limit, data_root=data_root, workers=workers, trust=trust
    )
    if as_json or out is None:
        print(to_json(cases) if as_json else to_text(cases))
    else:
        print_line(f"explanations: {out}")


@with_options()
def monitor(
    run: RunOrGraph,
    images: Images,
    level: Annotated[
        float | None, typer.Option(help="largest probability of an alarm without drift [dim]\\[default: 0.01][/]")
    ] = None,
    false_alarm: Annotated[
        float | None, typer.Option(help="share of images flagged without drift [dim]\\[default: the run's][/]")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="file with the state of a stream: each call takes only the new images"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="plot to write, .svg")] = None,
    batch_size: BatchSize = 256,
    workers: Workers = 2,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: TextAsJson = False,
) -> None:
    """Test whether images have drifted from the calibration images; the exit code is the answer.

    Exit codes: 0 no drift seen, 3 drift, 2 wrong use, 1 failure.

    Without --state the images are one batch, in any order.

    With --state they continue a stream, in order of arrival; its alarm is valid however often it is checked, and
    persists.
    """
    from maple.runs.monitor import MonitorRequest, monitor_images

    request = MonitorRequest(
        model=run,
        sources=images,
        level=level,
        false_alarm=false_alarm,
        state=state,
        out=out,
        data_root=data_root,
        batch_size=batch_size,
        workers=workers,
        trust=trust,
    )
    found = monitor_images(request)
    print_described(found, as_json)
    if found.drift:
        raise typer.Exit(DRIFT)
