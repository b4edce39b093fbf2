"""Commands that make a run or search settings: demo, train, fit, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from maple.cli._flags import (
    AsJson,
    ConfigFile,
    DataRoot,
    OodSources,
    Overwrite,
    TextAsJson,
    Trust,
    Workers,
    command_line,
    named_sources,
    named_values,
    read_channels,
    read_config,
    with_options,
)
from maple.cli._output import print_described, print_results
from maple.options import read_names
from maple.runs.setup.presets import list_presets

Images = Annotated[str, typer.Argument(help="image folder, .parquet, .npz, or the name of a data set")]
Preset = Annotated[str | None, typer.Option(help=f"settings by name: {', '.join(list_presets())}")]
_START = "Start from a trained network"
_TRAINING = ("data", "model", "train", "maple", "detector", "decision")  # panels of flags, in this order


def demo(
    out: Annotated[Path, typer.Option(help="run folder to write")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa: about two minutes."""
    from maple.runs.train import run_demo

    print_results(run_demo(out, seed), as_json)


@with_options(*_TRAINING, settable=True)
def train(
    data: Images,
    flags: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="run folder to write [dim]\\[default: runs/<name of DATA>][/]")
    ] = None,
    data_root: DataRoot = None,
    config: ConfigFile = None,
    preset: Preset = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="trained network to start from: a run, or anything that maple fit opens except compiled graphs; the "
            "default of --preset is then finetune",
            rich_help_panel=_START,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="weights of that network: .safetensors or a torch file", rich_help_panel=_START),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="layer of that network that gives the logits [dim]\\[default: found][/]", rich_help_panel=_START
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="allow a network that runs code: python:", rich_help_panel=_START)
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    overwrite: Overwrite = False,
    validation: Annotated[str | None, typer.Option(help="validation images, instead of a share of DATA")] = None,
    calibration: Annotated[str | None, typer.Option(help="calibration images, instead of a share of DATA")] = None,
    test: Annotated[str | None, typer.Option(help="test images, instead of a share of DATA")] = None,
    ood: OodSources = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on DATA, fit its detector and test it; the run folder holds everything.

    --init continues the training of a network: its weights, normalisation and image size are kept, and its head if it
    has one output per class. The default preset is then finetune, with a lower learning rate and a warm-up; for
    transformers add --optimizer adam --learning-rate 0.0001 --weight-decay 0.

    Options that are not listed here are set with --set or in a TOML file (--config); maple methods NAME lists those of
    a method.
    """
    from maple.runs.setup.request import default_out
    from maple.runs.train import TrainRequest, train_run

    request = TrainRequest(
        source=data,
        out=out or default_out(data),
        data_root=data_root,
        validation=validation,
        calibration=calibration,
        test=test,
        init=init,
        weights=weights,
        head=head,
        trust=trust,
        ood=named_sources(ood),
        flags=flags,
        file=read_config(config),
        preset=preset,
        resume=resume,
        overwrite=overwrite,
        command=command_line(),
    )
    print_results(train_run(request), as_json)


@with_options("data", "detector", "decision", settable=True)
def fit(
    model: Annotated[
        str,
        typer.Argument(
            help="timm/NAME, torchvision/NAME or resnet20, with --weights; a Hugging Face folder; a TorchScript, .pt2 "
            "or .onnx file; python:package.module:function"
        ),
    ],
    flags: dict[str, Any],
    data: Annotated[str, typer.Option(help="labelled images that the network was trained on")],
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="labelled images that it was not trained on: --splits divides them into validation and calibration"
        ),
    ] = None,
    test: Annotated[str | None, typer.Option(help="labelled test images, which it was not trained on either")] = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder to write [dim]\\[default: runs/<name of the data>][/]")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="weights of the network: .safetensors or a torch file")] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="number of classes [dim]\\[default: as in the weights][/]")
    ] = None,
    class_names: Annotated[
        str | None,
        typer.Option(
            help="classes in the order of the logits, or @FILE with one per line [dim]\\[default: the network's, if it "
            "names those of the data, else in the order of the data][/]"
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="layer that gives the logits; of ONNX the tensor with the embedding [dim]\\[default: found][/]"
        ),
    ] = None,
    drop_head: Annotated[
        bool,
        typer.Option("--drop-head", help="use only the embedding: for classes that the network was not trained for"),
    ] = False,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="mean that the network subtracts from images in 0..1 [dim]\\[default: its own, or 0][/]",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(metavar="R,G,B", help="standard deviation that it divides by [dim]\\[default: its own, or 1][/]"),
    ] = None,
    shallow: Annotated[
        str | None,
        typer.Option(help="intermediate layer for the `shallow` score [dim]\\[default: none][/]"),
    ] = None,
    trust: Trust = False,
    ood: OodSources = None,
    data_root: DataRoot = None,
    workers: Workers = 2,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a run of an already trained network, without training; the run folder holds everything."""
    from maple.runs.fit import FitRequest, fit_run
    from maple.runs.setup.request import default_out

    request = FitRequest(
        model=model,
        source=data,
        calibrate=calibrate,
        test=test,
        out=out or default_out(data),
        weights=weights,
        n_classes=classes,
        class_names=() if class_names is None else tuple(read_names(class_names)),
        head=head,
        drop_head=drop_head,
        mean=read_channels(mean, "--mean"),
        std=read_channels(std, "--std"),
        shallow=shallow,
        trust=trust,
        ood=named_sources(ood),
        data_root=data_root,
        flags={**flags, "workers": workers},
        overwrite=overwrite,
        command=command_line(),
    )
    print_results(fit_run(request), as_json)


@with_options(*_TRAINING, settable=True)
def tune(
    data: Images,
    flags: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="folder of the study [dim]\\[default: runs/<name of DATA>-tune][/]")
    ] = None,
    search: Annotated[str, typer.Option(help="bayes (Optuna's TPE) or grid", metavar="bayes|grid")] = "bayes",
    trials: Annotated[
        int | None, typer.Option(help="trials of a Bayesian search, over all processes [dim]\\[default: 20][/]")
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(
            help="options to search, such as max_clusters,margin [dim]\\[default: hard_class_error,relabel_every,"
            "max_clusters; bayes: also learning rate, margin and weights][/]"
        ),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,... to search instead of the default range; may be repeated")
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(help="criterion to minimise on in-distribution validation images", metavar="nll|gaussian|errors"),
    ] = "nll",
    prune: Annotated[bool, typer.Option(help="stop trials early whose validation loss falls behind")] = True,
    storage: Annotated[
        str | None, typer.Option(help="Optuna URL of the study [dim]\\[default: an SQLite file in OUT][/]")
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="name of the study in its storage [dim]\\[default: the name of OUT][/]")
    ] = None,
    data_root: DataRoot = None,
    config: ConfigFile = None,
    preset: Preset = None,
    validation: Annotated[str | None, typer.Option(help="validation images, instead of a share of DATA")] = None,
    calibration: Annotated[str | None, typer.Option(help="calibration images, which are kept aside")] = None,
    test: Annotated[str | None, typer.Option(help="test images, which are kept aside")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and do nothing")] = False,
    as_json: TextAsJson = False,
) -> None:
    """Search for better settings of a recipe on in-distribution images alone; rerun the command to resume."""
    from maple.runs.setup.request import default_out
    from maple.runs.tune.plan import TuneRequest, make_plan
    from maple.runs.tune.search import tune_recipe

    default = default_out(data)
    request = TuneRequest(
        source=data,
        out=out or default.with_name(f"{default.name}-tune"),
        search=search,  # type: ignore[arg-type]  # make_plan checks it
        trials=trials,
        criterion=criterion,
        parameters=None if parameters is None else read_names(parameters),
        values=named_values(values),
        prune=prune,
        storage=storage,
        study=study,
        data_root=data_root,
        validation=validation,
        calibration=calibration,
        test=test,
        flags=flags,
        file=read_config(config),
        preset=preset,
    )
    print_described(make_plan(request) if dry_run else tune_recipe(request), as_json)
