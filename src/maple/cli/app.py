"""The command line: one command per verb. Heavy imports happen inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from maple import __version__
from maple.cli.overview import Overview
from maple.data.options import DataOptions
from maple.decisions.options import DecisionOptions
from maple.deploy.serve.options import ServeOptions
from maple.detectors.options import DetectorOptions
from maple.errors import MapleError, UsageError, naming_extras
from maple.networks.options import ModelOptions
from maple.options import read_names, read_toml
from maple.progress import is_first_process
from maple.runs.presets import list_presets
from maple.training.options import MapleOptions, TrainOptions

app = typer.Typer(
    cls=Overview,
    help="Class, probability, uncertainty and an out-of-distribution decision from one forward pass.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
output = Console()

INTERRUPTED = 130  # the exit code after Ctrl-C
DRIFT = 3  # the exit code of maple monitor when images have drifted

DataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets, <name>/<split>.parquet [dim]\\[default: environment MAPLE_DATA][/]"),
]
RunDataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets [dim]\\[default: the one the run was trained with][/]"),
]
Workers = Annotated[int, typer.Option(min=0, help="processes that decode images too many to hold in memory")]
OodSources = Annotated[list[str] | None, typer.Option(help="NAME=SOURCE of unknown images; may be repeated")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


Trust = Annotated[
    bool,
    typer.Option("--trust", help="allow a network that runs code: TorchScript, .pt2 and python:"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OWNER.OPTION=VALUE", help="any option of a method or a section; may be repeated"),
]
FLAG_GROUPS: dict[str, type] = {
    "data": DataOptions,
    "model": ModelOptions,
    "train": TrainOptions,
    "recipe": MapleOptions,
    "detector": DetectorOptions,
    "decision": DecisionOptions,
    "serve": ServeOptions,
}
PANELS = {name: name.capitalize() for name in FLAG_GROUPS} | {"train": "Training", "serve": "Serving"}
START_PANEL = "Start from a trained network"


def _values(annotation: Any) -> str | None:
    """What a flag takes, for its help: ``sgd|adam``, ``NUMBER``, ``auto|NUMBER``, or None for plain text.

    >>> _values(Literal["auto"] | int)
    'auto|NUMBER'
    """
    if annotation in (int, float):
        return "NUMBER"
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "NAME,..." if str in get_args(annotation) else "NUMBER,..."
    return "|".join(filter(None, map(_values, get_args(annotation)))) or None


def read_settings(pairs: list[str]) -> dict[str, str]:
    """Values of ``--set`` by ``owner.option``.

    >>> read_settings(["sngp.features=1024"])
    {'sngp.features': '1024'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        owner, dot, option = key.strip().rpartition(".")
        if not (separator and dot and owner and option):
            raise UsageError(f"--set takes OWNER.OPTION=VALUE, such as sngp.features=1024; got '{pair}'")
        found[f"{owner}.{option}"] = value.strip()
    return found


def with_options(*sections: str, default: str | None = None) -> Callable[[Callable], Callable]:
    """Give a command one flag per option of these sections; those that were set arrive in ``flags``.

    ``default`` is what the help says of flags that are left out, where that is not the option's own default.
    """

    def decorate(command: Callable) -> Callable:
        command_hints = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=command_hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "flags"
        ]
        names, lists = [], []
        for section in sections:
            hints = get_type_hints(FLAG_GROUPS[section], include_extras=True)
            for f in fields(FLAG_GROUPS[section]):
                if not f.metadata.get("flag", True):
                    continue
                names.append(f.name)
                if isinstance(f.default, tuple):
                    lists.append(f.name)
                shown = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
                own = default is None or section == "serve"  # whose defaults are no run's
                shown = (shown if shown != "" else None) if own else default
                text = f.metadata["help"] + ("" if shown is None else f" [dim]\\[default: {shown}][/]")
                flag = typer.Option(
                    help=text, rich_help_panel=PANELS[section], metavar=_values(hints[f.name]), show_default=False
                )
                kind: Any = bool | None if f.type == "bool" else str | None
                parameters.append(
                    inspect.Parameter(
                        f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, flag]
                    )
                )

        settable = "train" in sections
        if settable:
            parameters.append(
                inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Settings)
            )

        def wrapper(**given: Any) -> Any:
            flags = {name: given.pop(name) for name in names}
            flags |= read_settings(given.pop("settings") or []) if settable else {}
            set_flags = {name: value for name, value in flags.items() if value is not None}
            set_flags |= {name: read_names(set_flags[name]) for name in lists if name in set_flags}
            return command(**given, flags=set_flags)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _version(show: bool) -> None:
    if show:
        output.print(f"maple {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="run folder to write")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa: about two minutes."""
    from maple.runs.demo import run_demo

    _finish(run_demo(out, seed), as_json)


@app.command()
@with_options("model", "train", "recipe", "detector", "decision", "data")
def train(
    data: Annotated[str, typer.Argument(help="image folder, .parquet, .npz, or the name of a data set")],
    flags: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="run folder to write [dim]\\[default: runs/<name of DATA>][/]")
    ] = None,
    data_root: DataRoot = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with options; flags go before it")] = None,
    preset: Annotated[str | None, typer.Option(help=f"settings by name: {', '.join(list_presets())}")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="trained network to start from: a run, or what maple fit opens but for compiled graphs; its --preset "
            "is finetune unless another is given",
            rich_help_panel=START_PANEL,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="weights of that network: .safetensors or a torch file", rich_help_panel=START_PANEL),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="its layer that gives the logits [dim]\\[default: found][/]", rich_help_panel=START_PANEL),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="allow a network that runs code: python:",
            rich_help_panel=START_PANEL,
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing run")] = False,
    validation: Annotated[str | None, typer.Option(help="validation images, instead of a share of DATA")] = None,
    calibration: Annotated[str | None, typer.Option(help="calibration images, instead of a share of DATA")] = None,
    test: Annotated[str | None, typer.Option(help="test images, instead of a share of DATA")] = None,
    ood: OodSources = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on DATA, fit its detector and test it; the run folder holds everything.

    With --init a trained network learns on: its weights, its normalisation and the size of its images are kept, and its
    head if it has one output per class. That wants a lower learning rate than a new network, with a warm-up: where no
    --preset is given it is finetune; for transformers add --optimizer adam --learning-rate 0.0001 --weight-decay 0.
    """
    from maple.runs.request import default_out
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
        ood=_named_sources(ood or []),
        flags=flags,
        file=read_toml(config) if config else {},
        preset=preset,
        resume=resume,
        overwrite=overwrite,
        command=_command_line(),
    )
    results = train_run(request)
    if results is not None:
        _finish(results, as_json)


@app.command()
@with_options("detector", "decision", "data")
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
            help="labelled images that it has not seen: --splits divides them into validation and calibration"
        ),
    ] = None,
    test: Annotated[str | None, typer.Option(help="labelled test images, which it has not seen either")] = None,
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
        bool, typer.Option("--drop-head", help="use only the embedding: for classes that the network does not know")
    ] = False,
    mean: Annotated[
        str | None,
        typer.Option(metavar="R,G,B", help="what it subtracts from images in 0..1 [dim]\\[default: its own, or 0][/]"),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(metavar="R,G,B", help="what it then divides by [dim]\\[default: its own, or 1][/]"),
    ] = None,
    shallow: Annotated[
        str | None,
        typer.Option(help="layer half-way up, whose channels the score listens to [dim]\\[default: none][/]"),
    ] = None,
    trust: Trust = False,
    ood: OodSources = None,
    data_root: DataRoot = None,
    workers: Workers = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing run")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a run of a network that someone else trained, without training; the run folder holds everything."""
    from maple.runs.fit import FitRequest, fit_run
    from maple.runs.request import default_out

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
        mean=_channels(mean, "--mean"),
        std=_channels(std, "--std"),
        shallow=shallow,
        trust=trust,
        ood=_named_sources(ood or []),
        data_root=data_root,
        flags={**flags, "workers": workers},
        overwrite=overwrite,
        command=_command_line(),
    )
    results = fit_run(request)
    if results is not None:
        _finish(results, as_json)


def _channels(text: str | None, flag: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} takes three numbers, such as 0.485,0.456,0.406; got '{text}'") from None
    return red, green, blue


@app.command()
@with_options("model", "train", "recipe", "detector", "decision", "data")
def tune(
    data: Annotated[str, typer.Argument(help="image folder, .parquet, .npz, or the name of a data set")],
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
        list[str] | None, typer.Option(help="NAME=VALUE,... to search instead of the usual range; may be repeated")
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(help="what is minimised, on in-distribution validation images", metavar="nll|gaussian|errors"),
    ] = "nll",
    prune: Annotated[bool, typer.Option(help="stop trials early whose validation loss falls behind")] = True,
    storage: Annotated[
        str | None, typer.Option(help="Optuna URL of the study [dim]\\[default: an SQLite file in OUT][/]")
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="name of the study in its storage [dim]\\[default: the name of OUT][/]")
    ] = None,
    data_root: DataRoot = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with options; flags go before it")] = None,
    preset: Annotated[str | None, typer.Option(help=f"settings by name: {', '.join(list_presets())}")] = None,
    validation: Annotated[str | None, typer.Option(help="validation images, instead of a share of DATA")] = None,
    calibration: Annotated[str | None, typer.Option(help="calibration images, which are kept aside")] = None,
    test: Annotated[str | None, typer.Option(help="test images, which are kept aside")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and do nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Search for better settings of a recipe on in-distribution images alone; the same command goes on with a study."""
    from maple.runs.request import default_out
    from maple.runs.tune.search import TuneRequest, make_plan, tune_recipe

    default = default_out(data)
    request = TuneRequest(
        source=data,
        out=out or default.with_name(f"{default.name}-tune"),
        search=search,  # type: ignore[arg-type]  # make_plan checks it
        trials=trials,
        criterion=criterion,
        parameters=None if parameters is None else read_names(parameters),
        values=_named_values(values or []),
        prune=prune,
        storage=storage,
        study=study,
        data_root=data_root,
        validation=validation,
        calibration=calibration,
        test=test,
        flags=flags,
        file=read_toml(config) if config else {},
        preset=preset,
    )
    found = make_plan(request) if dry_run else tune_recipe(request)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        output.print(found.describe(), markup=False, highlight=False, soft_wrap=True)


def _named_values(pairs: list[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for pair in pairs:
        name, separator, listed = pair.partition("=")
        if not separator or not read_names(listed):
            raise UsageError(f"--values takes NAME=VALUE,..., such as max_clusters=3,5; got '{pair}'")
        values[name.strip()] = read_names(listed)
    return values


@app.command()
@with_options("decision", default="the run's")
def predict(
    run: Annotated[Path, typer.Argument(help="run folder, or a graph exported from one (.onnx)")],
    images: Annotated[list[str], typer.Argument(help="images, folders, globs, .parquet or names of data sets")],
    flags: dict[str, Any],
    out: Annotated[str, typer.Option(help="file to write or replace, .csv, .jsonl or .parquet; - prints CSV")] = "-",
    fdr: Annotated[
        float | None,
        typer.Option(
            help="decide over all images together: of those flagged, at most this share is in-distribution on average",
            rich_help_panel="Decision",
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="add a column prediction_set: classes among which the true one is with this probability",
            rich_help_panel="Decision",
        ),
    ] = None,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="add a column p_<class> for every class")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="images per forward pass")] = 256,
    workers: Annotated[int, typer.Option(min=0, help="processes that decode images ahead")] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="start anew where another request was interrupted")
    ] = False,
    data_root: DataRoot = None,
    trust: Trust = False,
) -> None:
    """Class, probability, uncertainty and in/out decision for each image: one row each.

    Memory does not grow with the number of images. A command that was interrupted, or killed, goes on when it is given
    again.
    """
    from maple.runs.predict import predict_images

    predict_images(
        run,
        images,
        out,
        flags,
        fdr=fdr,
        coverage=coverage,
        all_probabilities=all_probabilities,
        batch_size=batch_size,
        data_root=data_root,
        workers=workers,
        overwrite=overwrite,
        trust=trust,
    )


@app.command()
@with_options("decision", default="the run's")
def explain(
    run: Annotated[Path, typer.Argument(help="run folder")],
    images: Annotated[list[str], typer.Argument(help="images, folders, globs, .parquet or names of data sets")],
    flags: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write, with pictures [dim]\\[default: print sentences][/]")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="explain only the images with the highest scores, so many")] = None,
    workers: Workers = 2,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of sentences")] = False,
) -> None:
    """Why each image was called what it was: nearest cluster, runner-up, and what sets the image apart."""
    from maple.runs.explain import explain_images, to_json, to_text

    cases = explain_images(
        run, images, out, decision=flags, limit=limit, data_root=data_root, workers=workers, trust=trust
    )
    if as_json or out is None:
        print(to_json(cases) if as_json else to_text(cases))
    else:
        output.print(f"explanations: {out}", markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_options("decision", default="the run's")
def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
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
        str | None, typer.Option(help="unknown images for the one detector that is tuned on such, lee-md-ood")
    ] = None,
    workers: Workers = 2,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, calibration and detection of unknown images, and update the report."""
    from maple.runs.evaluate import EvaluateRequest, evaluate_run

    request = EvaluateRequest(
        run=run,
        ind=ind,
        ood=_named_sources(ood or []),
        decision=flags,
        detectors=None if detector is None else _names(detector),
        ood_validation=ood_validation,
        data_root=data_root,
        workers=workers,
        trust=trust,
        command=_command_line(),
    )
    _finish(evaluate_run(request), as_json)


@app.command()
def update(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[str | None, typer.Option(help="labelled images to learn from, of known or of new classes")] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="labelled images of all classes that nothing was learned from: a half teaches temperature and score, "
            "the other half thresholds"
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="classes of --data to learn [dim]\\[default: all][/]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder to write [dim]\\[default: replace RUN][/]")] = None,
    workers: Workers = 2,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of sentences")] = False,
) -> None:
    """Add images or whole new classes to a run, without retraining and without the old images.

    Thresholds are void then: nothing is flagged until --calibrate, in the same command or a later one.
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
    )
    done = update_run(request)
    if as_json:
        print(json.dumps(done.to_dict(), indent=1))
    else:
        output.print(done.describe(), markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_options("train", default="the profile's")
def benchmark(
    flags: dict[str, Any],
    names: Annotated[list[str] | None, typer.Argument(help="suites; 'all' for all of them")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="what suites there are")] = False,
    profile: Annotated[str, typer.Option(help="how networks are trained: paper, cpu or tiny")] = "cpu",
    seeds: Annotated[str | None, typer.Option(help="seeds, such as 0,1,2 [dim]\\[default: the profile's][/]")] = None,
    out: Annotated[Path, typer.Option(help="folder for trainings and tables")] = Path("runs/benchmark"),
    data_root: DataRoot = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, with an estimate of the time")] = False,
    as_json: AsJson = False,
) -> None:
    """A table or figure of the paper, next to the paper's figures; what was done before is not done again."""
    from maple.evaluation.paper.tables import to_dict, to_rows
    from maple.progress import say
    from maple.runs.benchmark.suites import BenchmarkRequest, list_suites, plan_suites, run_suites

    if show_list or not names:
        _print_rows(list_suites(), as_json)
        return
    request = BenchmarkRequest(
        tuple(names), profile, _seeds(seeds), out, data_root, changes=flags, command=_command_line()
    )
    if dry_run:
        _print_rows(plan_suites(request), as_json)
        return
    done = []
    for page, found in run_suites(request):
        done.append(to_dict(found))
        if not as_json:
            _print_rows(to_rows(found), as_json)
            say(f"report: {page}")
    if as_json:
        print(json.dumps(done, indent=1))


def _names(text: str) -> list[str]:
    names = read_names(text)
    if not names:
        raise UsageError("--detector names none: give some, such as rmd,energy (maple methods lists them)")
    return names


def _seeds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds takes numbers such as 0,1,2; got '{text}'") from None


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows of the same keys as a table."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.markup import escape
    from rich.table import Table

    texts = [{name: "–" if value is None else str(value) for name, value in row.items()} for row in rows]
    blocks = _fitting_columns(texts, output.width) if texts else []
    for first, *others in blocks:
        names = [first, *others]
        table = Table(escape(first))  # which takes the width that the others leave
        for name in others:
            table.add_column(escape(name), width=_longest_word(texts, name) if len(blocks) > 1 else None)
        for text in texts:
            table.add_row(*(escape(text[name]) for name in names))
        output.print(table)


def _fitting_columns(rows: list[dict[str, str]], width: int) -> list[list[str]]:
    """Columns that fit next to each other without breaking a word; the first is repeated in front of each block.

    >>> _fitting_columns([{"method": "energy", "AUROC svhn": "0.946", "AUROC cifar100": "0.858"}], 24)
    [['method', 'AUROC svhn'], ['method', 'AUROC cifar100']]
    """
    need = {
        name: 3 + _longest_word(rows, name) for name in (rows[0] if rows else ())
    }  # a line, and a space at each side
    blocks: list[list[str]] = []
    first, *others = need or [""]
    for name in others:
        if not blocks or 1 + sum(need[each] for each in (*blocks[-1], name)) > width:
            blocks.append([first])
        blocks[-1].append(name)
    return blocks or [[first]]


def _longest_word(rows: list[dict[str, str]], name: str) -> int:
    return max(len(word) for text in (name, *(row[name] for row in rows)) for word in text.split() or [""])


@app.command()
def methods(as_json: AsJson = False) -> None:
    """All recipes (how a network learns) and detectors (what ranks images), with their papers and what they cost."""
    from maple.runs.listings import list_methods

    rows = list_methods()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.markup import escape
    from rich.table import Table

    for kind, heading in (("recipe", "maple train --recipe NAME"), ("detector", "maple evaluate --detector NAME,...")):
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold")
        for row in rows:
            if row["kind"] == kind:
                facts = [f"{key} {row[key]}" for key in ("needs", "adds") if row[key]]
                cost = "; ".join([f"{row['passes']} pass" if row["passes"] == "1" else row["passes"], *facts])
                paper = f" ({row['paper']})" if row["paper"] else ""
                table.add_row(row["name"], escape(row["title"] + paper) + f"\n[dim]{escape(cost)}[/]")
        output.print(f"\n{heading}", highlight=False)
        output.print(table)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="run folder")],
    predictions: Annotated[Path | None, typer.Argument(help="predictions to include, .csv, .jsonl or .parquet")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: report.html in the run")] = None,
) -> None:
    """Write one self-contained HTML file about a run."""
    from maple.runs.report import report_run

    path = report_run(run, out, predictions, _command_line())
    output.print(f"report: {path}", highlight=False, soft_wrap=True)


@app.command()
def monitor(
    run: Annotated[Path, typer.Argument(help="run folder, or a graph exported from one (.onnx)")],
    images: Annotated[list[str], typer.Argument(help="images, folders, globs, .parquet or names of data sets")],
    level: Annotated[
        float | None, typer.Option(help="chance of an alarm without drift, at most [dim]\\[default: 0.01][/]")
    ] = None,
    false_alarm: Annotated[
        float | None, typer.Option(help="share of images flagged without drift [dim]\\[default: the run's][/]")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="file that carries a stream on from call to call: give each time only the new images"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="plot to write, .svg")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="images per forward pass")] = 256,
    workers: Workers = 2,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of sentences")] = False,
) -> None:
    """Have the images drifted away from the calibration images? The exit code tells.

    Exit codes: 0 no drift seen, 3 drift, 2 wrong use, 1 failure.

    Without --state the images are one batch, whose order does not matter.

    With --state they are the next of a stream, in the order in which they came; its alarm is valid however often one
    asks, and stays.
    """
    from maple.runs.monitor import monitor_images

    found = monitor_images(
        run,
        images,
        level=level,
        false_alarm=false_alarm,
        state=state,
        out=out,
        data_root=data_root,
        batch_size=batch_size,
        workers=workers,
        trust=trust,
    )
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        output.print(found.describe(), markup=False, highlight=False, soft_wrap=True)
    if found.drift:
        raise typer.Exit(DRIFT)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    out: Annotated[Path, typer.Argument(help="file to write or replace: .onnx, or .pt2 for torch.export")],
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="take uint8 images (N, S, S, 3) instead of float32 (N, 3, S, S)")
    ] = False,
    exemplars: Annotated[
        bool, typer.Option("--exemplars/--no-exemplars", help="let four training images of each cluster travel along")
    ] = True,
    quantise: Annotated[
        bool, typer.Option("--quantise", help="weights in 8 bits; says what that changes of accuracy, ECE and AUROC")
    ] = False,
    ood: OodSources = None,
    data_root: RunDataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write network, Gaussians and decision as one graph, and check on images that it agrees with the run."""
    from maple.deploy.export import export_run

    report = export_run(
        run,
        out,
        preprocess=preprocess,
        exemplars=exemplars,
        quantise=quantise,
        ood=_named_sources(ood or []),
        data_root=data_root,
        trust=trust,
    )
    print(json.dumps(report.to_dict()) if as_json else report.describe())


@app.command()
@with_options("serve", "decision", default="the model's")
def serve(
    model: Annotated[Path, typer.Argument(help="run folder, or the .onnx file that maple export wrote")],
    flags: dict[str, Any],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MAPLE_API_KEY",
            help="what requests must send in the header X-API-Key; better set in the environment",
            rich_help_panel=PANELS["serve"],
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Answer requests over HTTP, and show a page in the browser, until Ctrl-C or SIGTERM.

    What was accepted by then is answered. Without --host only this machine can ask.
    """
    from maple.deploy.serve.app import serve_model
    from maple.options import build_options

    decision = {f.name: flags.pop(f.name) for f in fields(DecisionOptions) if f.name in flags}
    options = build_options(ServeOptions, {**flags, "api_key": api_key}, where=None)
    serve_model(model, options, decision, trust=trust)


@app.command()
def data(
    source: Annotated[str | None, typer.Argument(help="data set to describe; without it, what there is")] = None,
    get: Annotated[bool, typer.Option("--get", help="fetch the original files and convert them, if missing")] = False,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """What data sets there are, where they are looked for, what is in one of them, and how to get it."""
    from maple.runs.listings import describe_source, list_sources

    if get:
        from maple.data.catalogue import get_data_set

        if source is None:
            raise UsageError("--get needs the name of a data set: maple data cifar10 --get")
        get_data_set(source, data_root)
    found = list_sources(data_root) if source is None else describe_source(source, data_root)
    if as_json:
        print(json.dumps(found, indent=1))
    elif isinstance(found, dict):
        _print_facts(found)
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table("source", "splits", "where")
        for row in found:
            table.add_row(
                *(escape(row[key]) for key in ("source", "splits", "where")), style=None if row["found"] else "dim"
            )
        output.print(table)
        root = data_root or os.environ.get("MAPLE_DATA") or "none: set MAPLE_DATA or give --data-root"
        output.print(f"data root: {root}", markup=False, highlight=False, soft_wrap=True)


def _print_facts(facts: dict[str, Any]) -> None:
    """One fact per line, several lines where it is a list; nothing is broken, so that addresses can be copied."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        lines = (
            value if isinstance(value, list) else ["yes" if value is True else "no" if value is False else str(value)]
        )
        for i, line in enumerate(lines):
            label = (name if i == 0 else "").ljust(width)
            output.print(label + line, markup=False, highlight=False, soft_wrap=True)


def _named_sources(pairs: list[str]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise UsageError(f"--ood takes NAME=SOURCE, such as svhn=svhn or debris=folder/debris; got '{pair}'")
        if name in sources:
            raise UsageError(f"--ood names '{name}' twice: give each set its own name")
        sources[name] = source
    return sources


def _finish(results: Any, as_json: bool) -> None:
    """Print the results of a run."""
    if as_json:
        print(results.to_json())
        return
    from maple.evaluation.table import format_table

    output.print(format_table(results))


def _command_line() -> str:
    return shlex.join(["maple", *sys.argv[1:]])


def main() -> None:
    """Entry point: errors are one sentence on standard error, with exit code 2 for wrong use and 1 for failure.

    Of several processes only the first one speaks.
    """
    errors = Console(stderr=True, quiet=not is_first_process())
    try:
        with naming_extras():
            app(prog_name="maple")
    except MapleError as error:
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # where Typer does not see it
        _say_interrupted(errors)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _say_interrupted(errors)
        if not stop.code and not is_first_process():
            _leave()
        raise


def _leave() -> None:
    """End a process that has done its share, without taking its threads apart.

    Those of torch.distributed have been seen to abort a process that ends before the first one; torchrun would then
    end the first one too, in the middle of its evaluation.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say_interrupted(errors: Console) -> None:
    errors.print(
        "\ninterrupted: what was saved is intact; the same command goes on (maple train: with --resume)",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
