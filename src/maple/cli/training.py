"""Commands that make a run or search settings: demo, train, fit, tune."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from maple.cli import _flags as cli
from maple.cli._output import print_described, print_results

_START = "Start from a trained network"
_TRAINING = ("data", "model", "train", "maple", "detector", "decision")  # panels of flags, in this order
_CHANNELS = "three numbers, such as 0.485,0.456,0.406"


@dataclass(frozen=True)
class DemoArguments:
    """The arguments of ``maple demo``."""

    out: Path = cli.flag(Path("runs/demo"), "run folder to write")
    seed: int = cli.flag(0, "seed")
    as_json: cli.AsJson = False


@cli.command(plugins=False)
def demo(given: DemoArguments) -> None:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa: about two minutes."""
    from maple.runs.train import run_demo

    print_results(run_demo(given.out, given.seed), given.as_json)


def _preset_help() -> str:
    from maple.runs.setup.presets import list_presets

    return f"settings by name: {', '.join(list_presets())}"


@dataclass(frozen=True)
class _TrainingArguments:
    """Images to train on, and where settings come from."""

    source: str = cli.argument("image folder, .parquet, .npz, or the name of a data set", "DATA")
    data_root: cli.DataRoot = None
    config: Path | None = cli.flag(None, "TOML file with options; flags take precedence")
    preset: str | None = cli.flag(None, _preset_help)
    validation: str | None = cli.flag(None, "validation images, instead of a share of DATA")


@dataclass(frozen=True)
class TrainArguments(_TrainingArguments):
    """The arguments of ``maple train``."""

    calibration: str | None = cli.flag(None, "calibration images, instead of a share of DATA")
    test: str | None = cli.flag(None, "test images, instead of a share of DATA")
    ood: cli.OodSources = None
    out: Path | None = cli.flag(None, "run folder to write", shown="runs/<name of DATA>")
    resume: bool = cli.flag(False, "continue an interrupted run")
    overwrite: bool = cli.flag(False, "replace an existing run")
    as_json: cli.AsJson = False
    init: str | None = cli.flag(
        None,
        "trained network to start from: a run, or anything that maple fit opens except compiled graphs; the default of "
        "--preset is then finetune",
        panel=_START,
    )
    weights: Path | None = cli.flag(None, "weights of that network: .safetensors or a torch file", panel=_START)
    head: str | None = cli.flag(None, "layer of that network that gives the logits", shown="found", panel=_START)
    trust: bool = cli.flag(False, "allow a network that runs code (python:...)", panel=_START)


@cli.command(*_TRAINING, settings=True)
def train(given: TrainArguments, flags: cli.Flags) -> None:
    """Train a network on DATA, fit its detector and test it; the run folder holds everything.

    --init continues the training of a network: its weights, normalisation and image size are kept, and its head if it
    has one output per class. The default preset is then finetune, with a lower learning rate and a warm-up; for
    transformers add --optimizer adam --learning-rate 0.0001 --weight-decay 0.

    Options that are not listed here are set with --set or in a TOML file (--config); maple methods NAME lists those of
    a method.
    """
    from maple.runs.setup.request import default_out
    from maple.runs.train import TrainRequest, train_run

    request = cli.to_request(
        given,
        TrainRequest,
        out=given.out or default_out(given.source),
        ood=cli.named_sources(given.ood),
        flags=flags,
        file=cli.read_config(given.config),
        command=cli.command_line(),
    )
    print_results(train_run(request), given.as_json)


@dataclass(frozen=True)
class FitArguments:
    """The arguments of ``maple fit``."""

    model: str = cli.argument(
        "timm/NAME, torchvision/NAME or resnet20, with --weights; a Hugging Face folder; a TorchScript, .pt2 or .onnx "
        "file; python:package.module:function",
        "MODEL",
    )
    source: str = cli.flag(MISSING, "labelled images that the network was trained on", "--data")
    calibrate: str | None = cli.flag(
        None, "labelled images that it was not trained on: --splits divides them into validation and calibration"
    )
    test: str | None = cli.flag(None, "labelled test images that it was not trained on")
    out: Path | None = cli.flag(None, "run folder to write", shown="runs/<name of the data>")
    weights: Path | None = cli.flag(None, "weights of the network: .safetensors or a torch file")
    n_classes: int | None = cli.flag(None, "number of classes", "--classes", shown="as in the weights", min=1)
    class_names: str | None = cli.flag(
        None,
        "classes in the order of the logits, or @FILE with one per line",
        shown="the network's, if it names those of the data, else in the order of the data",
    )
    head: str | None = cli.flag(
        None, "layer that gives the logits; of ONNX the tensor with the embedding", shown="found"
    )
    drop_head: bool = cli.flag(False, "use only the embedding: for classes that the network was not trained for")
    mean: str | None = cli.flag(
        None, "mean that the network subtracts from images in 0..1", shown="its own, or 0", metavar="R,G,B"
    )
    std: str | None = cli.flag(None, "standard deviation that it divides by", shown="its own, or 1", metavar="R,G,B")
    shallow: str | None = cli.flag(None, "intermediate layer for the `shallow` score", shown="none")
    trust: cli.Trust = False
    ood: cli.OodSources = None
    data_root: cli.DataRoot = None
    workers: cli.Workers = 2
    overwrite: bool = cli.flag(False, "replace an existing run")
    as_json: cli.AsJson = False


@cli.command(
    "data",
    "detector",
    "decision",
    settings=True,
    settable="option of the sections data, detector and decision, such as detector.covariance=full",
)
def fit(given: FitArguments, flags: cli.Flags) -> None:
    """Make a run of an already trained network, without training; the run folder holds everything."""
    from maple.options import read_names
    from maple.runs.fit import FitRequest, fit_run
    from maple.runs.setup.request import default_out

    request = cli.to_request(
        given,
        FitRequest,
        out=given.out or default_out(given.source),
        class_names=tuple(read_names(given.class_names or "")),
        mean=cli.read_numbers(given.mean, "--mean", float, _CHANNELS, length=3),
        std=cli.read_numbers(given.std, "--std", float, _CHANNELS, length=3),
        ood=cli.named_sources(given.ood),
        flags=flags if "train.workers" in flags else {**flags, "workers": given.workers},
        command=cli.command_line(),
    )
    print_results(fit_run(request), given.as_json)


@dataclass(frozen=True)
class TuneArguments(_TrainingArguments):
    """The arguments of ``maple tune``."""

    calibration: str | None = cli.flag(None, "calibration images, which the search does not use")
    test: str | None = cli.flag(None, "test images, which the search does not use")
    out: Path | None = cli.flag(None, "folder of the study", shown="runs/<name of DATA>-tune")
    search: str = cli.flag("bayes", "bayes (Optuna's TPE) or grid", metavar="bayes|grid")
    trials: int | None = cli.flag(None, "trials of a Bayesian search, over all processes", shown="20")
    parameters: str | None = cli.flag(
        None,
        "options to search, such as max_clusters,margin",
        shown="hard_class_error,relabel_every,max_clusters; bayes: also learning rate, margin and weights",
    )
    values: list[str] | None = cli.flag(
        None, "values to search instead of the default range; may be repeated", metavar="NAME=VALUE,..."
    )
    criterion: str = cli.flag(
        "nll", "criterion to minimise on in-distribution validation images", metavar="nll|gaussian|errors"
    )
    prune: bool = cli.flag(True, "stop trials early whose validation loss falls behind")
    storage: str | None = cli.flag(None, "Optuna URL of the study", shown="an SQLite file in OUT")
    study: str | None = cli.flag(None, "name of the study in its storage", shown="the name of OUT")
    dry_run: bool = cli.flag(False, "print the plan and do nothing")
    as_json: cli.TextAsJson = False


@cli.command(*_TRAINING, settings=True)
def tune(given: TuneArguments, flags: cli.Flags) -> None:
    """Search for better settings of a recipe on in-distribution images alone; rerun the command to resume."""
    from maple.options import read_names
    from maple.runs.setup.request import default_out
    from maple.runs.tune.plan import TuneRequest, make_plan
    from maple.runs.tune.search import tune_recipe

    default = default_out(given.source)
    request = cli.to_request(
        given,
        TuneRequest,
        out=given.out or default.with_name(f"{default.name}-tune"),
        parameters=None if given.parameters is None else read_names(given.parameters),
        values=cli.named_values(given.values),
        flags=flags,
        file=cli.read_config(given.config),
    )
    print_described(make_plan(request) if given.dry_run else tune_recipe(request), given.as_json)
