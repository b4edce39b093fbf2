"""Requests: what each command was asked to do, one record per command.

The command line is made from these records: a field with a :class:`~maple.options.Flag` is an argument or a flag, in
the order of the fields, with the field's default. Python callers fill the same records. This module imports nothing
heavy, so that ``--help`` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from maple.options import Flag, Values, flag, named_values, read_names, read_numbers
from maple.runs import flag_values
from maple.runs._engine import EngineFlags
from maple.runs.flag_values import (
    BatchSize,
    DataRoot,
    OodSources,
    Overwrite,
    Run,
    RunDataRoot,
    Trust,
    Workers,
)

_START = "Start from a trained network"
_DECISION = "Decision"
_FLAGGED = "Flagged images"

# --- commands that make a run or search settings ----------------------------------------------------------------------


class _Folder:
    """The folder that a request writes: ``out``, or one named after the source."""

    source: Any
    out: Any
    suffix: ClassVar[str] = ""

    @property
    def folder(self) -> Path:
        from maple.runs.setup.request import default_out

        default = default_out(self.source)
        return self.out or default.with_name(default.name + self.suffix)


@dataclass(frozen=True)
class _TrainingRequest(_Folder):
    """Images to train on, and where settings come from."""

    source: str = flag(
        MISSING,
        "image folder, .parquet, .npz, .csv with the columns file and label, or the name of a data set",
        metavar="DATA",
        positional=True,
    )
    _: KW_ONLY
    data_root: DataRoot = None
    file: Annotated[
        Values,
        Flag("TOML file with options; flags take precedence", "--config", takes=Path, read=flag_values.read_config),
    ] = field(default_factory=dict)  # its sections
    preset: str | None = flag(None, flag_values.describe_presets)
    validation: str | None = flag(None, "validation images, instead of a share of DATA")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(_TrainingRequest):
    """The arguments of ``maple train``; ``init``, ``weights`` and ``head`` as for
    :func:`~maple.runs.setup.init.open_start`."""

    calibration: str | None = flag(None, "calibration images, instead of a share of DATA")
    test: str | None = flag(None, "test images, instead of a share of DATA")
    ood: OodSources = field(default_factory=dict)
    out: Path | None = flag(None, "run folder to write", shown="runs/<name of DATA>")
    resume: bool | Literal["auto"] = flag(
        False,
        "continue an interrupted run; auto: start it if there is none, do nothing if it is finished",
        takes=str,
        read=flag_values.read_resume,
        word="auto",
    )
    overwrite: Overwrite = False
    init: str | None = flag(
        None,
        "trained network to start from: a run, anything that maple fit opens except compiled graphs, or auto, the best "
        "of the pretrained networks on this machine; the default of --preset is then finetune",
        panel=_START,
    )
    weights: Path | None = flag(None, "weights of that network: .safetensors or a torch file", panel=_START)
    head: str | None = flag(None, "layer of that network that gives the logits", shown="found", panel=_START)
    trust: bool = flag(False, "allow a network that runs code (python:...)", panel=_START)
    class_names: tuple[str, ...] = ()  # in the order of the head's outputs, if not that of the data
    flags: Values = field(default_factory=dict)
    report: bool = True  # whether to write the report; maple report does so at any time
    command: str = "maple train"


@dataclass(frozen=True, kw_only=True)
class FitRequest(EngineFlags, _Folder):
    """The arguments of ``maple fit``; options of the network as for :func:`~maple.networks.open_model`."""

    model: str = flag(
        MISSING,
        "timm/NAME, torchvision/NAME or resnet20, with --weights; a Hugging Face folder; a TorchScript, .pt2 or "
        ".onnx file; python:package.module:function",
        metavar="MODEL",
        positional=True,
    )
    source: str = flag(MISSING, "labelled images that the network was trained on", "--data")
    calibrate: str | None = flag(
        None, "labelled images that it was not trained on: --splits divides them into validation and calibration"
    )
    test: str | None = flag(None, "labelled test images that it was not trained on")
    out: Path | None = flag(None, "run folder to write", shown="runs/<name of the data>")
    weights: Path | None = flag(None, "weights of the network: .safetensors or a torch file")
    n_classes: int | None = flag(None, "number of classes", "--classes", shown="as in the weights", min=1)
    class_names: tuple[str, ...] = flag(
        (),
        "classes in the order of the logits, or @FILE with one per line",
        shown="the network's, if it names those of the data, else in the order of the data",
        metavar="NAME,...",
        takes=str,
        read=flag_values.list_names,
    )
    head: str | None = flag(None, "layer that gives the logits; of ONNX the tensor with the embedding", shown="found")
    drop_head: bool = flag(False, "use only the embedding: for classes that the network was not trained for")
    mean: tuple[float, ...] | None = flag_values.channels(
        "mean that the network subtracts from images in 0..1", "--mean", "0"
    )
    std: tuple[float, ...] | None = flag_values.channels("standard deviation that it divides by", "--std", "1")
    shallow: str = flag("auto", "intermediate layer for the `shallow` score; none does without", shown="found")
    trust: Trust = False
    ood: OodSources = field(default_factory=dict)
    data_root: DataRoot = None
    workers: Workers = 2
    overwrite: Overwrite = False
    flags: Values = field(default_factory=dict)
    report: bool = True
    command: str = "maple fit"


RunRequest = TrainRequest | FitRequest


@dataclass(frozen=True, kw_only=True)
class TuneRequest(_TrainingRequest):
    """The arguments of ``maple tune``; ``flags``, ``file`` and ``preset`` are common to all trials."""

    calibration: str | None = flag(None, "calibration images, which the search does not use")
    test: str | None = flag(None, "test images, which the search does not use")
    out: Annotated[Path | None, Flag("folder of the study", shown="runs/<name of DATA>-tune")] = field(
        default=None, kw_only=False
    )
    search: str = flag("bayes", "bayes (Optuna's TPE) or grid", metavar="bayes|grid")
    trials: int | None = flag(None, "trials of a Bayesian search, over all processes", shown="20")
    parameters: Sequence[str] | None = flag(
        None,
        "options to search, such as max_clusters,margin",
        shown="hard_class_error, relabel_every, max_clusters; bayes: also learning rate, margin and weights",
        metavar="NAME,...",
        takes=str,
        read=lambda text: None if text is None else read_names(text),
    )
    values: Annotated[
        Mapping[str, Sequence[Any]],
        Flag(
            "values to search instead of the default range; may be repeated",
            metavar="NAME=VALUE,...",
            takes=list[str],
            read=named_values,
        ),
    ] = field(default_factory=dict)
    criterion: str = flag(
        "nll", "criterion to minimise on in-distribution validation images", metavar="nll|gaussian|errors"
    )
    prune: bool = flag(True, "stop trials early whose validation loss falls behind")
    storage: str | None = flag(None, "Optuna URL of the study", shown="an SQLite file in OUT")
    study: str | None = flag(None, "name of the study in its storage", shown="the name of OUT")
    flags: Values = field(default_factory=dict)
    suffix: ClassVar[str] = "-tune"

    @property
    def study_name(self) -> str:
        return self.study or self.folder.resolve().name


# --- commands that ask a run about images -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagesRequest:
    """A model and images."""

    model: Path = flag(MISSING, "run folder, or a graph exported from one (.onnx)", metavar="RUN", positional=True)
    sources: list[str] = flag(
        MISSING, "images, folders, globs, .parquet or names of data sets", metavar="IMAGES", positional=True
    )


@dataclass(frozen=True)
class PredictRequest(EngineFlags, ImagesRequest):
    """The arguments of ``maple predict``; ``flags`` are decision options that differ from the model's."""

    out: str = flag("-", "file to write or replace, .csv, .jsonl or .parquet; on Ray also a folder; - prints CSV")
    _: KW_ONLY
    fdr: float | None = flag(
        None,
        "decide over all images together: of those flagged, at most this share is in-distribution on average",
        panel=_DECISION,
    )
    coverage: float | None = flag(
        None, "add a column prediction_set: classes that contain the true one with this probability", panel=_DECISION
    )
    all_probabilities: bool = flag(False, "add a column p_<class> for every class")
    copy_flagged: Path | None = flag(None, "new folder for the flagged images", metavar="FOLDER", panel=_FLAGGED)
    link: bool = flag(False, "symbolic links in that folder instead of copies", panel=_FLAGGED)
    label_flagged: Path | None = flag(
        None,
        "list of the flagged images to label: .csv with a column to fill in, or .json for Label Studio; maple update "
        "--data reads the labels",
        metavar="FILE",
        panel=_FLAGGED,
    )
    batch_size: BatchSize = 256
    workers: int = flag(2, "processes that decode images ahead; on Ray, workers with one model each", min=0)
    overwrite: bool = flag(False, "discard the unfinished predictions of another request")
    data_root: DataRoot = None
    trust: Trust = False
    flags: Values = field(default_factory=dict)

    @property
    def path(self) -> Path | None:
        return None if self.out == "-" else Path(self.out)


@dataclass(frozen=True)
class ExplainRequest(ImagesRequest):
    """The arguments of ``maple explain``; ``flags`` are decision options that differ from the run's."""

    model: Run
    out: Path | None = flag(None, "HTML file to write, with pictures", shown="print text")
    _: KW_ONLY
    limit: int | None = flag(None, "explain only this many images, those with the highest scores")
    workers: Workers = 2
    data_root: DataRoot = None
    trust: Trust = False
    flags: Values = field(default_factory=dict)


@dataclass(frozen=True)
class MonitorRequest(EngineFlags, ImagesRequest):
    """The arguments of ``maple monitor``."""

    _: KW_ONLY
    level: float | None = flag(None, "largest probability of an alarm without drift", shown="0.01")
    false_alarm: float | None = flag(None, "share of images flagged without drift", shown="the run's")
    state: Path | None = flag(None, "file with the state of a stream: each call takes only the new images")
    out: Path | None = flag(None, "plot to write, .svg")
    batch_size: BatchSize = 256
    workers: Workers = 2
    data_root: DataRoot = None
    trust: Trust = False


# --- commands on a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(EngineFlags):
    """The arguments of ``maple evaluate``.

    ``flags`` are decision options that differ from the run's, and options of the detectors by ``name.option``.
    """

    run: Run
    others: tuple[Path, ...] = flag_values.paths(
        "runs of other seeds, evaluated alike: figures become mean ± deviation", metavar="OTHER_RUNS", positional=True
    )
    ind: str | None = flag(None, "in-distribution test images", shown="the run's test split")
    ood: OodSources = field(default_factory=dict)
    near: tuple[str, ...] = flag_values.ood_group("near")
    far: tuple[str, ...] = flag_values.ood_group("far")
    tables: tuple[Path, ...] = flag_values.paths(
        "table to write: .tex (LaTeX, booktabs), .md, or .csv (every run, unrounded); may be repeated",
        name="--table",
        metavar="FILE",
    )
    detectors: Sequence[str] | None = flag(
        None,
        "detectors to compare with beside softmax and energy, such as rmd,knn (maple methods lists them); they are "
        "fitted on the run's training images",
        "--detector",
        metavar="NAME,...",
        takes=str,
        read=flag_values.list_detectors,
    )
    ood_validation: str | None = flag(None, "unknown images for lee-md-ood, the detector that is tuned on them")
    workers: Workers = 2
    data_root: RunDataRoot = None
    trust: Trust = False
    flags: Values = field(default_factory=dict)
    on_training: bool = False  # judge the training images of the run, not its test images
    keep: bool = True  # write results and gallery into the run
    report: bool = True
    command: str = "maple evaluate"


@dataclass(frozen=True)
class BenchmarkRequest:
    """The arguments of ``maple benchmark``."""

    names: tuple[str, ...] = flag(
        MISSING,
        "suites; 'all' for those of the paper",
        metavar="NAMES",
        positional=True,
        takes=list[str],
        read=flag_values.as_tuple,
    )
    profile: str = flag(
        "cpu",
        "how networks are trained: as in the paper, for accelerators; small ones, for hours on a CPU; or on "
        "simulated images, to check that everything runs",
        metavar="paper|cpu|resnet9|tiny",
    )
    _: KW_ONLY
    seeds: tuple[int, ...] | None = flag(
        None,
        "seeds, such as 0,1,2",
        shown="the profile's",
        metavar="NUMBER,...",
        takes=str,
        read=lambda text: read_numbers(text, "--seeds", int, "numbers such as 0,1,2"),
    )
    out: Path = flag(Path("runs/benchmark"), "folder for trainings and tables")
    data_root: DataRoot = None
    flags: Values = field(default_factory=dict)
    command: str = "maple benchmark"


@dataclass(frozen=True)
class UpdateRequest:
    """The arguments of ``maple update``."""

    run: Run
    data: str | None = flag(None, "labelled images to learn from, of known or new classes")
    calibrate: str | None = flag(
        None,
        "labelled images of all classes that the run has not seen: one half for temperature and score, the other "
        "half for thresholds",
    )
    _: KW_ONLY
    only: tuple[str, ...] = flag(
        (), "classes of --data to learn", shown="all", metavar="NAME,...", takes=str, read=flag_values.list_names
    )
    out: Path | None = flag(None, "run folder to write", shown="replace RUN")
    workers: Workers = 2
    data_root: RunDataRoot = None
    trust: Trust = False
    report: bool = True
    command: str = "maple update"


@dataclass(frozen=True)
class CleanRequest:
    """The arguments of ``maple clean``."""

    run: Run
    out: Path = flag(Path("labels.csv"), "list to write or replace, .csv")
    _: KW_ONLY
    data: str | None = flag(None, "other labelled images of the run's classes", shown="all images of the run")
    workers: Workers = 2
    data_root: RunDataRoot = None
    trust: Trust = False


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of ``maple export``."""

    run: Run
    out: Path | None = flag(
        None, "file to write or replace: .onnx, or .pt2 for torch.export", metavar="OUT", positional=True
    )
    _: KW_ONLY
    triton: Path | None = flag(None, "Triton model repository to write the graph and its configuration to, without OUT")
    preprocess: bool = flag(False, "take uint8 images (N, S, S, 3) instead of float32 (N, 3, S, S)")
    exemplars: bool = flag(True, "include four training images of each cluster")
    quantise: bool = flag(False, "store weights in 8 bits, and report the change of accuracy, ECE and AUROC")
    ood: OodSources = field(default_factory=dict)
    data_root: RunDataRoot = None
    trust: Trust = False
