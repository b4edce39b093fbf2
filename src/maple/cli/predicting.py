"""Commands that ask a run about images: predict, explain, monitor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_line

DRIFT = 3  # the exit code of maple monitor when images have drifted
_DECISION = cli.SECTIONS["decision"].title


@dataclass(frozen=True)
class _ImageArguments:
    """A model and images."""

    model: Path = cli.argument("run folder, or a graph exported from one (.onnx)", "RUN")
    sources: list[str] = cli.argument("images, folders, globs, .parquet or names of data sets", "IMAGES")


@dataclass(frozen=True)
class PredictArguments(_ImageArguments):
    """The arguments of ``maple predict``."""

    out: str = cli.flag("-", "file to write or replace, .csv, .jsonl or .parquet; - prints CSV")
    fdr: float | None = cli.flag(
        None,
        "decide over all images together: of those flagged, at most this share is in-distribution on average",
        panel=_DECISION,
    )
    coverage: float | None = cli.flag(
        None,
        "add a column prediction_set: classes that contain the true one with this probability",
        panel=_DECISION,
    )
    all_probabilities: bool = cli.flag(False, "add a column p_<class> for every class")
    batch_size: cli.BatchSize = 256
    workers: int = cli.flag(2, "processes that decode images ahead", min=0)
    overwrite: bool = cli.flag(False, "discard the unfinished predictions of another request")
    data_root: cli.DataRoot = None
    trust: cli.Trust = False


@cli.command("decision", rare=True, default="the run's")
def predict(given: PredictArguments, flags: cli.Flags) -> None:
    """Class, probability, uncertainty and in/out decision for each image: one row each.

    Memory does not grow with the number of images. If the command is interrupted or killed, rerun it to resume.
    """
    from maple.runs.predict import PredictRequest, predict_images

    predict_images(cli.to_request(given, PredictRequest, decision=flags))


@dataclass(frozen=True)
class ExplainArguments(_ImageArguments):
    """The arguments of ``maple explain``."""

    model: Path = cli.argument("run folder", "RUN")
    out: Path | None = cli.flag(None, "HTML file to write, with pictures", shown="print text")
    limit: int | None = cli.flag(None, "explain only this many images, those with the highest scores")
    workers: cli.Workers = 2
    data_root: cli.DataRoot = None
    trust: cli.Trust = False
    as_json: cli.TextAsJson = False


@cli.command("decision", rare=True, default="the run's")
def explain(given: ExplainArguments, flags: cli.Flags) -> None:
    """Explain the prediction of each image: nearest cluster, runner-up, and the features that deviate most."""
    from maple.runs.explain import ExplainRequest, explain_images, to_json, to_text

    cases = explain_images(cli.to_request(given, ExplainRequest, decision=flags))
    if given.as_json or given.out is None:
        print(to_json(cases) if given.as_json else to_text(cases))
    else:
        print_line(f"explanations: {given.out}")


@dataclass(frozen=True)
class MonitorArguments(_ImageArguments):
    """The arguments of ``maple monitor``."""

    level: float | None = cli.flag(None, "largest probability of an alarm without drift", shown="0.01")
    false_alarm: float | None = cli.flag(None, "share of images flagged without drift", shown="the run's")
    state: Path | None = cli.flag(None, "file with the state of a stream: each call takes only the new images")
    out: Path | None = cli.flag(None, "plot to write, .svg")
    batch_size: cli.BatchSize = 256
    workers: cli.Workers = 2
    data_root: cli.DataRoot = None
    trust: cli.Trust = False
    as_json: cli.TextAsJson = False


@cli.command()
def monitor(given: MonitorArguments) -> None:
    """Test whether images have drifted from the calibration images; the exit code is the answer.

    Exit codes: 0 no drift seen, 3 drift, 2 wrong use, 1 failure.

    Without --state the images are one batch, in any order.

    With --state they continue a stream, in order of arrival; its alarm is valid however often it is checked, and
    persists.
    """
    from maple.runs.monitor import MonitorRequest, monitor_images

    found = monitor_images(cli.to_request(given, MonitorRequest))
    print_described(found, given.as_json)
    if found.drift:
        raise typer.Exit(DRIFT)
