"""Commands that make a run or search settings: demo, train, fit, tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_results

if TYPE_CHECKING:
    from maple.options import Flag
    from maple.runs.requests import AsJson, FitRequest, TextAsJson, TrainRequest, TuneRequest

_TRAINING = ("data", "model", "train", "maple", "detector", "decision")  # panels of flags, in this order


@cli.command(plugins=False)
def demo(
    out: Annotated[Path, Flag("run folder to write")] = Path("runs/demo"),
    seed: Annotated[int, Flag("seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa: about two minutes."""
    from maple.runs.train import run_demo

    print_results(run_demo(out, seed), as_json)


@cli.command(*_TRAINING, settings=True)
def train(request: TrainRequest, as_json: AsJson = False) -> None:
    """Train a network on DATA, fit its detector and test it; the run folder holds everything.

    --init continues the training of a network: its weights, normalisation and image size are kept, and its head if it
    has one output per class. The default preset is then finetune, with a lower learning rate and a warm-up; for
    transformers add --optimizer adam --learning-rate 0.0001 --weight-decay 0.

    Options that are not listed here are set with --set or in a TOML file (--config); maple methods NAME lists those of
    a method.
    """
    from maple.runs.train import train_run

    print_results(train_run(request), as_json)


@cli.command(
    "data",
    "detector",
    "decision",
    settings=True,
    settable="option of the sections data, detector and decision, such as detector.covariance=full",
)
def fit(request: FitRequest, as_json: AsJson = False) -> None:
    """Make a run of an already trained network, without training; the run folder holds everything."""
    from maple.runs.fit import fit_run

    print_results(fit_run(request), as_json)


@cli.command(*_TRAINING, settings=True)
def tune(
    request: TuneRequest,
    dry_run: Annotated[bool, Flag("print the plan and do nothing")] = False,
    as_json: TextAsJson = False,
) -> None:
    """Search for better settings of a recipe on in-distribution images alone; rerun the command to resume."""
    from maple.runs.tune.plan import make_plan
    from maple.runs.tune.search import tune_recipe

    print_described(make_plan(request) if dry_run else tune_recipe(request), as_json)
