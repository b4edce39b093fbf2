"""Commands that ask a run about images: predict, explain, monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_line

if TYPE_CHECKING:
    from maple.runs.requests import ExplainRequest, MonitorRequest, PredictRequest, TextAsJson

DRIFT = 3  # the exit code of maple monitor when images have drifted


@cli.command("decision", rare=True, default="the run's")
def predict(request: PredictRequest) -> None:
    """Class, probability, uncertainty and in/out decision for each image: one row each.

    Memory does not grow with the number of images. If the command is interrupted or killed, rerun it to resume.
    """
    from maple.runs.predict import predict_images

    predict_images(request)


@cli.command("decision", rare=True, default="the run's")
def explain(request: ExplainRequest, as_json: TextAsJson = False) -> None:
    """Explain the prediction of each image: nearest cluster, runner-up, and the features that deviate most."""
    from maple.runs.explain import explain_images, to_json, to_text

    cases = explain_images(request)
    if as_json or request.out is None:
        print(to_json(cases) if as_json else to_text(cases))
    else:
        print_line(f"explanations: {request.out}")


@cli.command()
def monitor(request: MonitorRequest, as_json: TextAsJson = False) -> None:
    """Test whether images have drifted from the calibration images; the exit code is the answer.

    Exit codes: 0 no drift seen, 3 drift, 2 wrong use, 1 failure.

    Without --state the images are one batch, in any order.

    With --state they continue a stream, in order of arrival; its alarm is valid however often it is checked, and
    persists.
    """
    from maple.runs.monitor import monitor_images

    found = monitor_images(request)
    print_described(found, as_json)
    if found.drift:
        raise typer.Exit(DRIFT)
