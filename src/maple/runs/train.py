"""The commands as functions: from a request to a finished run folder or results; predicting is in ``predict_files``."""

from __future__ import annotations

import copy
import dataclasses
import glob
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from maple.baselines.ensemble import train_ensemble
from maple.baselines.sampling import EnsembleRecipe
from maple.data.batches import parse_augment, to_input
from maple.data.catalogue import CATALOGUE, describe_data_set, find_data_set, locate
from maple.data.image_set import ImageSet, Progress, channel_statistics
from maple.data.options import DataOptions
from maple.data.shares import split_indices
from maple.data.sources import (
    LOOSE,
    SPLIT_NAMES,
    clean_source,
    find_source,
    is_built_in,
    list_data_sets,
    open_images,
    split_files,
)
from maple.data.splits import Splits, load_splits
from maple.detectors.base import Detector
from maple.detectors.gradient import ImageDetector
from maple.detectors.learned import nearest_of_class
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector, find_detector, list_detectors
from maple.errors import DataError, MapleError, RunError, UsageError
from maple.evaluation.evaluate import Own, Scored, evaluate
from maple.evaluation.latency import measure_latency
from maple.evaluation.results import Results
from maple.files import FORMAT_VERSION, RunFile, check_format, load_json, save_json, write_atomic
from maple.networks import Backbone, create_backbone, embed, linear_head
from maple.options import as_dict, flag_name, read_toml, to_toml
from maple.prediction.explain import component_coordinates
from maple.prediction.predictor import (
    Predictor,
    fit_predictor,
    load_backbone,
    save_backbone,
)
from maple.progress import counting, is_first_process, say, track, warn
from maple.reporting.gallery import write_evaluation_gallery, write_training_gallery
from maple.reporting.report import write_report
from maple.runs.config import RunConfig, resolve_config
from maple.runs.folder import RunFolder
from maple.runs.init import (
    Start,
    describe_network,
    follow_network,
    leave_out_unused,
    open_start,
    try_image,
    try_recipe,
    why_new_head,
)
from maple.runs.loading import describe_skipped, open_like, ready_predictor, warn_if_nothing_is_flagged
from maple.training.distributed import make_fabric, together
from maple.training.loop import snapshot_rows, train_backbone
from maple.training.options import TrainOptions
from maple.training.prepare import prepare_backbone
from maple.training.recipe import find_recipe, list_recipes
from maple.training.resume import FREE_OPTIONS, started_otherwise
from maple.types import Outputs, Relabelling, Skipped

GALLERY_SAMPLE = 200  # training images per cluster among which exemplars are sought
LEFT_OUT = "left-out"  # as a source of unknown images: those of the classes that a run left out
DEMO_COMMAND = "maple demo"
DEMO_SOURCE = "simulated-diatoms?n=7000&size=32"
DEMO_EPOCHS = 14
DEMO_OOD = {"near": "simulated-diatoms/near?n=1000&size=32", "far": "simulated-diatoms/far?n=1000&size=32"}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What every command that makes a run is asked."""

    source: str
    out: Path
    data_root: Path | None = None
    test: str | None = None
    ood: dict[str, str] = field(default_factory=dict)  # sources of unknown images to be tried in the end, by name
    class_names: tuple[str, ...] = ()  # in the order of the head's outputs, where that is not the order of the data
    flags: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    report: bool = True  # whether to draw the report in the end; maple report does so at any time
    command: str

    def origin(self) -> dict[str, Any]:
        """Where the images come from, wherever the next command is started: section [origin] of ``config.toml``."""
        return {
            "source": absolute_source(self.source),
            "data_root": str(self.data_root.expanduser().resolve()) if self.data_root else None,
            "test": absolute_source(self.test),
            "classes": list(self.class_names) or None,
        }


AnyRequest = TypeVar("AnyRequest", bound=RunRequest)


@dataclass(frozen=True, kw_only=True)
class TrainRequest(RunRequest):
    """What ``maple train`` was asked to do; ``init`` and what belongs to it as for
    :func:`~maple.runs.init.open_start`."""

    validation: str | None = None
    calibration: str | None = None
    init: str | None = None  # network to start from
    weights: Path | None = None
    head: str | None = None
    trust: bool = False
    file: dict[str, Any] = field(default_factory=dict)
    preset: str | None = None
    resume: bool = False
    command: str = "maple train"

    def origin(self) -> dict[str, Any]:
        return {
            **super().origin(),
            "validation": absolute_source(self.validation),
            "calibration": absolute_source(self.calibration),
            "init": absolute_source(self.init),
            "weights": str(self.weights.expanduser().resolve()) if self.weights else None,
            "head": self.head,
            "preset": self.preset,
        }


def absolute_source(source: str | None) -> str | None:
    """A source that means the same from every folder: an existing path in full, a name of a data set as it is.

    >>> absolute_source("digits"), absolute_source(".") == str(Path.cwd())
    ('digits', True)
    """
    if source is None:
        return None
    clean = clean_source(source)
    if is_built_in(clean) or not Path(clean).expanduser().exists():
        return source
    return source.replace(clean, str(Path(clean).expanduser().resolve()), 1)


def default_out(source: str) -> Path:
    """The run folder for a source where none is named.

    >>> str(default_out("digits")), str(default_out("slides/diatoms/train")), str(default_out("simulated-diatoms?n=99"))
    ('runs/digits', 'runs/diatoms', 'runs/simulated-diatoms')
    """
    name = source.partition("?")[0] if is_built_in(source) else source
    path = Path(name).expanduser().resolve()
    path = path.with_suffix("") if path.is_file() else path
    return Path("runs") / (path.parent if path.name in SPLIT_NAMES["train"] else path).name


# --- train ----------------------------------------------------------------------------------------------------------


def train_run(request: TrainRequest) -> Results | None:
    """Train, fit, calibrate, test and report.

    The results; ``None`` without test images, and in all processes but the first. Whatever can be wrong with the
    request is found before the run folder is touched.
    """
    if is_first_process():
        _check_folder(request)
    request = _with_preset(request)
    config = resolve_config(request.flags, request.file, request.preset)
    if request.resume:
        request, config = _as_started(request)
    check_options(config.train)
    recipe = config.recipe
    check_unknown(request)
    if request.init is None and (request.weights or request.head):
        raise UsageError("--weights and --head are those of a network to start from: name it with --init")
    start = None if request.init is None else _open_start(request, config)
    if start is not None and not request.resume:
        config = _follow_start(request, config, start)
    splits = load_run_splits(request.origin(), config, request.data_root)
    if LEFT_OUT in request.ood.values():
        left_out_images(splits)
    if not len(splits.validation):
        raise UsageError("training needs validation images: give them a share of --splits, or --validation")
    if start is not None:
        request, splits = _settle_start(request, start, splits)
    mean, std = channel_statistics(splits.train) if start is None else (None, None)

    def make_backbone(seed: int) -> Backbone:
        torch.manual_seed(seed)
        if start is not None:
            return copy.deepcopy(start.backbone)
        return create_backbone(
            config.model.backbone,
            len(splits.class_names),
            embedding_size=config.model.embedding_size,
            mean=mean,
            std=std,
        )

    backbone = make_backbone(config.train.seed)
    fabric = make_fabric(config.train)
    if start is None:
        prepare_backbone(make_backbone(config.train.seed), recipe, len(splits.class_names), fabric)
    else:
        try_recipe(recipe, start.backbone, len(splits.class_names), fabric, splits.train)
    with together(fabric):
        if fabric.is_global_zero:
            _announce(request, splits, config)
            if not request.resume:
                prepare_folder(request, config.sections(), None if start is None else start.backbone)
            save_json(request.out / RunFile.CLASSES, _classes(splits))
    how: dict[str, Any] = {"folder": request.out, "resume": request.resume, "options": config.train, "fabric": fabric}
    if isinstance(recipe, EnsembleRecipe):
        run = train_ensemble(make_backbone, recipe, splits.train, splits.validation, **how)
    else:
        run = train_backbone(backbone, recipe, splits.train, splits.validation, **how)
    predictor = fit_predictor(
        run.backbone,
        splits.train,
        splits.validation if run.validation is None else run.validation,
        splits.calibration,
        relabelling=run.relabelling,
        detector=MapleDetector(**as_dict(config.detector)),
        fit=config.data.fit,
        options=config.decision,
        class_rule=config.recipe.class_rule,
        fabric=fabric,
        workers=config.train.workers,
    )
    if not fabric.is_global_zero:
        return None
    labels = splits.validation.labels[snapshot_rows(len(splits.validation))]
    snapshots = {name: Outputs(embeddings, labels=labels) for name, embeddings in run.snapshots.items()}
    results = finish_run(request, config, splits, predictor, run.relabelling, snapshots, run.snapshot_epochs)
    RunFolder(request.out).remove_training_state()
    return results


def _with_preset(request: TrainRequest) -> TrainRequest:
    """With a network to start from, the settings to continue one, unless others are asked for by name."""
    if request.init is None or request.preset is not None or request.resume:
        return request
    say("--init: what is not given is as in --preset finetune, such as a low learning rate")
    return dataclasses.replace(request, preset="finetune")


def _open_start(request: TrainRequest, config: RunConfig) -> Start:
    """The network that the training starts from; where it is resumed, as it was put into the run folder."""
    assert request.init is not None
    if request.resume:
        return Start(load_backbone(request.out / RunFile.START, trust=request.trust))
    for name in ("backbone", "embedding_size"):
        if name in request.flags or name in request.file.get("model", {}):
            raise UsageError(f"{flag_name(name)} is for new networks, and --init names a trained one: leave it out")
    if absolute_source(request.init) == str(request.out.expanduser().resolve()):
        raise UsageError(f"'{request.out}' is the run to start from: choose another --out")
    for path in (Path(request.init), request.weights):
        if path is not None and RunFolder(request.out).owns(path):
            raise UsageError(f"'{path}' is in the run folder and would be replaced: choose another --out, or move it")
    size = None if config.data.size == "auto" else config.data.size
    return open_start(request.init, weights=request.weights, head=request.head, size=size, trust=request.trust)


def _follow_start(request: TrainRequest, config: RunConfig, start: Start) -> RunConfig:
    """The options with images as the network has them; its name stands for the network."""
    assert request.init is not None
    given = {*request.flags, *request.file.get("data", {})}
    model = dataclasses.replace(config.model, backbone=request.init, embedding_size=None)
    return dataclasses.replace(follow_network(config, start.backbone.size, start.fit, given), model=model)


def _settle_start(request: TrainRequest, start: Start, splits: Splits) -> tuple[TrainRequest, Splits]:
    """Keep the head of the network or leave it out, in place; the classes in its order, where it names them."""
    backbone = start.backbone
    backbone.size = splits.train.size
    if backbone.origin is not None:
        backbone.origin = dataclasses.replace(backbone.origin, size=splits.train.size)
    if not request.resume:
        say(describe_network(backbone))
        reason = why_new_head(start, splits.class_names)
        if reason is None:
            say(f"its head is kept: {len(splits.class_names)} outputs")
            request, splits = order_like_head(request, splits, start.class_names)
        else:
            say(f"a new head for {len(splits.class_names)} classes: {reason}")
            backbone.head = None
    try_image(backbone, splits.train)
    leave_out_unused(backbone, splits.train)
    return request, splits


def check_unknown(request: RunRequest) -> None:
    """Refuse sources of unknown images that are not there: better missed now than after the training."""
    for source in map(clean_source, request.ood.values()):
        if source != LEFT_OUT and not is_built_in(source) and not glob.has_magic(source):
            find_source(source, request.data_root)


def finish_run(
    request: RunRequest,
    config: RunConfig,
    splits: Splits,
    predictor: Predictor,
    relabelling: Relabelling,
    snapshots: Mapping[str, Outputs],
    snapshot_epochs: Mapping[str, int],
) -> Results | None:
    """Save, test, draw; ``snapshots`` are validation images as the network saw them at ``snapshot_epochs``."""
    folder = request.out
    predictor.save(folder)
    save_json(
        folder / RunFile.CLASSES, {**_classes(splits), **_clusters(relabelling), "snapshot_epochs": snapshot_epochs}
    )
    _write_training_gallery(folder, splits, predictor, relabelling, snapshots)
    warn_if_nothing_is_flagged(predictor)
    results = None
    if len(splits.test):
        _, sections = read_run_config(folder)
        provenance = _provenance(config, sections, predictor, request.command)
        unknown = _open_unknown(predictor, request.ood, request.data_root, splits)
        results = _evaluate(folder, predictor, splits.test, unknown, provenance, config.train)
    else:
        warn(f"there are no test images, so that nothing was measured: use maple evaluate {folder} --ind IMAGES")
    if request.report:
        say(f"report: {write_report(folder)}")
    return results


def check_options(options: TrainOptions) -> None:
    """What the options themselves do not tell; better known now than after the images are read."""
    if options.augment != "auto":
        parse_augment(options.augment)
    if options.precision == "16-mixed" and (options.accelerator == "cpu" or not torch.cuda.is_available()):
        raise UsageError("--precision 16-mixed needs a CUDA device: use auto, bf16-mixed or 32-true")


def load_run_splits(origin: dict[str, Any], config: RunConfig, data_root: Path | None) -> Splits:
    """The splits of a run, as its section [origin] describes them.

    Where that has a key ``calibrate``, the source holds what a network of others was trained on, all of it for train;
    where it has ``classes``, these are the classes in the order of the head's outputs.
    """
    with counting("decoding") as progress:
        if origin.get("calibrate"):
            splits = _split_unseen(origin, config.data, data_root, progress)
        else:
            splits = load_splits(
                origin["source"],
                config.data,
                data_root=data_root,
                test=origin.get("test"),
                validation=origin.get("validation"),
                calibration=origin.get("calibration"),
                progress=progress,
            )
    return order_classes(splits, origin["classes"]) if origin.get("classes") else splits


def _split_unseen(
    origin: dict[str, Any], options: DataOptions, data_root: Path | None, progress: Progress | None
) -> Splits:
    """Images of ``calibrate``, which the network has not seen, as validation and calibration images.

    They are divided by the two shares of these in ``--splits``. What also is in the source has been seen: it counts
    neither as one of these nor as a test image.
    """
    how: dict[str, Any] = {"fit": options.fit, "data_root": data_root, "progress": progress}
    train = open_images(origin["source"], size=options.size, split="train", **how)

    def open_unseen(role: str, split: str) -> ImageSet:
        images = open_images(origin[role], size=train.size, split=split, **how)
        seen = np.isin(images.keys, train.keys)
        if seen.all():
            raise DataError(
                f"every image of --{role} '{images.name}' is among those that the network was trained on "
                f"('{train.name}'): give images that it has not seen"
            )
        reason = f"left out of {role}: the network was trained on it"
        repeated = tuple(Skipped(images.files[i], reason) for i in np.flatnonzero(seen))
        return dataclasses.replace(images.subset(~seen), skipped=images.skipped + repeated)

    unseen = open_unseen("calibrate", "validation")
    _, validation, calibration, _ = options.splits
    if not validation or not calibration:
        raise UsageError("--splits leaves no images for validation or calibration: give both shares above 0")
    shares = (validation / (validation + calibration), calibration / (validation + calibration))
    parts = split_indices(unseen.labels, unseen.keys, shares, options.split_seed, unseen.class_names)
    return load_splits(
        train,
        dataclasses.replace(options, splits=(1.0, 0.0, 0.0, 0.0)),
        data_root=data_root,
        test=open_unseen("test", "test") if origin.get("test") else None,
        validation=dataclasses.replace(unseen.subset(parts[0]), skipped=unseen.skipped),
        calibration=unseen.subset(parts[1]),
        progress=progress,
    )


def order_classes(splits: Splits, names: Sequence[str]) -> Splits:
    """The same splits with their classes in another order."""
    if set(names) != set(splits.class_names) or len(names) != len(splits.class_names):
        missing = sorted(set(names) ^ set(splits.class_names)) or ["a name given twice"]
        raise UsageError(
            f"the {len(names)} class names are not those of the {len(splits.class_names)} classes of the data, "
            f"first '{missing[0]}': give each class of the data once"
        )
    ordered = {role: getattr(splits, role).with_class_names(names) for role in SPLIT_NAMES}
    return dataclasses.replace(splits, **ordered)


def order_like_head(request: AnyRequest, splits: Splits, names: Sequence[str]) -> tuple[AnyRequest, Splits]:
    """Where a network names its classes, and they are those of the data, take them in its order."""
    if request.class_names or set(names) != set(splits.class_names):
        return request, splits
    return dataclasses.replace(request, class_names=tuple(names)), order_classes(splits, names)


# --- the run folder --------------------------------------------------------------------------------------------------


def _check_folder(request: TrainRequest) -> None:
    """Refuse what would lose a run, or continue none; nothing is changed yet."""
    folder = request.out
    if request.resume and request.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them")
    started, finished = holds_run(folder), RunFolder(folder).is_finished()
    if started and not request.resume and not request.overwrite:
        raise UsageError(f"'{folder}' already holds a run: add --resume to continue it, --overwrite to replace it")
    if not request.resume:
        return
    if not started:
        raise UsageError(f"there is no run in '{folder}' to resume: check --out, or leave out --resume to start one")
    if not RunFolder(folder).has_checkpoint():
        if finished:
            raise UsageError(f"'{folder}' is a finished run: there is nothing to resume; choose another --out")
        warn(f"'{folder}' has no checkpoint yet: the training starts from the beginning")


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder that was chosen for one."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"'{folder}' is a file: choose a folder for --out")
    started = (folder / RunFile.CONFIG).exists()
    if started:
        read_run_config(folder, oldest=1)  # a file of that name that is not ours is not to be replaced
    return started


def _as_started(request: TrainRequest) -> tuple[TrainRequest, RunConfig]:
    """What the run was started with. What is asked now may not differ from it, but for what changes no result."""
    origin, sections = read_run_config(request.out)
    for key, value in request.origin().items():
        if value is not None and not _same_source(value, origin.get(key)):
            raise started_otherwise(request.out, "DATA" if key == "source" else flag_name(key), origin.get(key), value)
    then = sections.get("model", {}).get("recipe", "maple")
    if (now_asked := request.flags.get("recipe", then)) != then:
        raise started_otherwise(request.out, "--recipe", then, now_asked)
    asked = {name: values | request.file.get(name, {}) for name, values in sections.items()}
    now = resolve_config(request.flags, {**request.file, **asked})
    for name, values in resolve_config(file=sections).sections().items():
        for key, value in values.items():
            if key not in FREE_OPTIONS and (other := now.sections()[name][key]) != value:
                raise started_otherwise(request.out, flag_name(key), value, other)
    kept = ("source", "validation", "calibration", "test", "init", "head")
    started: dict[str, Any] = {key: origin.get(key) for key in kept}
    for key in ("data_root", "weights"):
        started[key] = Path(origin[key]) if origin.get(key) else None
    return dataclasses.replace(request, **started, class_names=tuple(origin.get("classes", ()))), now


def _same_source(now: Any, then: Any) -> bool:
    """Whether two sources are the same: paths in full, be they there or not."""
    if not isinstance(now, str) or not isinstance(then, str):
        return now == then
    return now == then or Path(now).expanduser().resolve() == Path(then).expanduser().resolve()


def prepare_folder(
    request: RunRequest, sections: Mapping[str, Mapping[str, Any]], start: Backbone | None = None
) -> None:
    """Remove what is to be replaced, and write down what is known beforehand.

    A run is there from when its ``config.toml`` is. That comes last, so that there is no run without the network that
    it would ``start`` from.
    """
    folder = request.out
    if request.overwrite and (folder / RunFile.CONFIG).exists():
        RunFolder(folder).clear()
    if start is not None:
        save_backbone(folder / RunFile.START, start)
    root = request.data_root or os.environ.get("MAPLE_DATA")
    origin = {
        "format": FORMAT_VERSION,
        **dataclasses.replace(request, data_root=Path(root) if root else None).origin(),
        "command": request.command,
    }
    write_atomic(folder / RunFile.CONFIG, to_toml({"origin": origin, **sections}))


def read_run_config(folder: Path, oldest: int = FORMAT_VERSION) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of a run's ``config.toml``: where its images come from, and its options."""
    if not (folder / RunFile.CONFIG).is_file():
        raise RunError(f"'{folder}' is not a run folder: it has no {RunFile.CONFIG}")
    sections = read_toml(folder / RunFile.CONFIG)
    origin = sections.pop("origin", {})
    check_format(origin, folder / RunFile.CONFIG, oldest)
    return origin, sections


def _announce(request: TrainRequest, splits: Splits, config: RunConfig) -> None:
    augment = splits.train.augment if config.train.augment == "auto" else config.train.augment
    announce_images(request, splits, config.data, f"; augmentation {augment}")


def announce_images(request: RunRequest, splits: Splits, options: DataOptions, more: str = "") -> None:
    """Say what images there are, and what was left out."""
    sizes = {name: len(getattr(splits, name)) for name in SPLIT_NAMES}
    say(
        f"{splits.train.name}: {len(splits.class_names)} classes, {splits.train.size} x {splits.train.size} pixels, "
        + ", ".join(f"{n} {name}" for name, n in sizes.items())
        + more
    )
    say(f"run folder: {request.out}")
    if splits.skipped:
        warn(f"{describe_skipped(splits.skipped)}; all are listed in {RunFile.CLASSES} of the run")
    few = [name for name in splits.left_out if name not in options.leave_out]
    if few:
        warn(f"{len(few)} classes with fewer than {options.min_images} images are left out")


def _classes(splits: Splits) -> dict[str, Any]:
    """What is known of the data before training; the digests tell later whether it is still the same."""
    return {
        "classes": list(splits.class_names),
        "skipped": [[item.file, item.reason] for item in splits.skipped],
        "left_out": list(splits.left_out),
        "digests": {"train": digest_images(splits.train), "test": digest_images(splits.test)},
    }


def _clusters(relabelling: Relabelling) -> dict[str, Any]:
    sizes = np.bincount(relabelling.cluster_ids, minlength=relabelling.n_clusters)
    return {"cluster_to_class": relabelling.cluster_to_class, "cluster_sizes": sizes}


def digest_images(images: ImageSet) -> str:
    """A digest of content and classes, whatever the order of the images: renamed files are the same data.

    >>> images = open_images("digits")
    >>> digest_images(images) == digest_images(images.subset(np.arange(len(images))[::-1]))
    True
    >>> digest_images(images) == digest_images(images.subset(np.arange(100)))
    False
    """
    order = np.lexsort((images.labels, images.keys))
    parts = ("\0".join(images.class_names).encode(), images.keys[order].tobytes(), images.labels[order].tobytes())
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _write_training_gallery(
    folder: Path, splits: Splits, predictor: Predictor, relabelling: Relabelling, snapshots: Mapping[str, Outputs]
) -> None:
    """Exemplars of each cluster and the latent space before and after: what the report draws of the training."""
    rows = sample_rows(relabelling.cluster_ids, GALLERY_SAMPLE)
    with counting("looking for exemplars") as progress:
        outputs = embed(
            predictor.backbone,
            splits.train,
            indices=rows,
            cluster_ids=relabelling.cluster_ids,
            cluster_to_class=relabelling.cluster_to_class,
            logits=False,
            progress=progress,
        )
    distances = predictor.detector.squared_distances(outputs)
    assert outputs.cluster_ids is not None
    write_training_gallery(
        folder / RunFile.GALLERY,
        splits.train.subset(rows),
        outputs,
        squared_distance=distances[np.arange(len(rows)), outputs.cluster_ids],
        cluster_sizes=np.bincount(relabelling.cluster_ids, minlength=relabelling.n_clusters),
        snapshots=snapshots,
        components=component_coordinates(predictor.detector.gaussians_, outputs.embeddings),
    )


def sample_rows(cluster_ids: np.ndarray, per_cluster: int) -> np.ndarray:
    """At most ``per_cluster`` rows of each cluster, evenly spread, in order.

    >>> sample_rows(np.array([0, 0, 0, 1]), 2)
    array([0, 2, 3])
    """
    order = np.argsort(cluster_ids, kind="stable")
    starts = np.flatnonzero(np.diff(cluster_ids[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return np.sort(np.concatenate([part[:: -(-len(part) // per_cluster)] for part in parts]))


# --- evaluate --------------------------------------------------------------------------------------------------------


def evaluate_run(
    folder: Path,
    ind: str | None = None,
    ood: dict[str, str] | None = None,
    decision: dict[str, Any] | None = None,
    data_root: Path | None = None,
    command: str = "maple evaluate",
    workers: int | None = None,
    detectors: Sequence[str] | None = None,
    ood_validation: str | None = None,
    report: bool = True,
    trust: bool = False,
) -> Results:
    """Evaluate a run on its own test split, or on ``ind``, against named sources of unknown images.

    ``decision`` holds options of the decision that differ from the run's; ``detectors`` names those to compare with,
    which are fitted on the training images of the run, all in one pass; ``ood_validation`` is a source of unknown
    images for the one detector that is tuned on such.
    """
    detectors = None if detectors is None else [name for name in dict.fromkeys(detectors) if name != "maple"]
    tuned = [name for name in detectors or () if getattr(create_detector(name), "learns_from_ood", False)]
    if tuned and ood_validation is None:  # better missed now than after the images are read
        raise UsageError(f"'{tuned[0]}' is tuned on unknown images: give some with --ood-validation")
    if ood_validation is not None and not tuned:
        raise UsageError("--ood-validation is for detectors tuned on unknown images: add --detector lee-md-ood")
    origin, sections = read_run_config(folder)
    config = resolve_config({} if workers is None else {"workers": workers}, sections)
    predictor = ready_predictor(folder, decision, trust=trust)
    if detectors and predictor.detector.learned_.appended:
        raise UsageError(
            "--detector fits others on the training images of the run, and those of the classes that maple update "
            "added are not kept: leave it out"
        )
    root = data_root or (Path(origin["data_root"]) if origin.get("data_root") else None)
    needs_splits = ind is None or detectors or LEFT_OUT in (ood or {}).values()
    splits = own_splits(folder, origin, config, predictor.size, root) if needs_splits else None
    if ind is not None:
        test = open_like(predictor, ind, root, labelled=True).with_class_names(predictor.class_names)
    else:
        assert splits is not None
        if not len(splits.test):
            raise UsageError(f"'{folder}' was trained without test images: give some with --ind")
        test = splits.test
        if added := [name for name in predictor.class_names if name not in test.class_names]:
            warn(
                f"the test images of the run do not show '{added[0]}', which came with maple update: give test images "
                "of all classes with --ind"
            )
    if test.skipped:
        warn(describe_skipped(test.skipped, of=f" of '{test.name}'"))
    unknown = _open_unknown(predictor, ood or {}, root, splits)
    fitted = None
    if detectors is not None:
        tuning = open_like(predictor, ood_validation, root) if ood_validation else None
        fitted = fit_detectors(detectors, predictor, splits, tuning, workers=config.train.workers)
    provenance = _provenance(config, sections, predictor, command)
    results = _evaluate(folder, predictor, test, unknown, provenance, config.train, fitted)
    if report:
        say(f"report: {write_report(folder)}")
    return results


def fit_detectors(
    names: Sequence[str], predictor: Predictor, splits: Splits | None, tuning: ImageSet | None = None, workers: int = 0
) -> list[Detector]:
    """Detectors by name, fitted on the training images of a run in one pass of the network; order as given.

    A training image belongs to the nearest cluster of its own class. Detectors that read images go through them on
    their own; ``tuning`` holds unknown images for the one that is tuned on such.
    """
    found = [create_detector(name) for name in names]
    if not found:
        return found
    assert splits is not None
    backbone, cluster_to_class = predictor.backbone, predictor.cluster_to_class
    on_outputs = [detector for detector in found if not isinstance(detector, ImageDetector)]
    if on_outputs:
        head = linear_head(backbone) if any(detector.needs_head for detector in on_outputs) else None
        unseen = known = embed(backbone, splits.validation, cluster_to_class=cluster_to_class, workers=workers)
        if any(detector.needs_training_images for detector in on_outputs):
            with counting("embedding") as progress:
                known = embed(
                    backbone,
                    splits.train,
                    cluster_to_class=cluster_to_class,
                    progress=progress,
                    workers=workers,
                    logits=False,  # what is learned of logits is learned from images that the network has not seen
                )
            assert known.labels is not None
            own = nearest_of_class(predictor.detector.gaussians_, known.embeddings, known.labels, cluster_to_class)
            known = dataclasses.replace(known, cluster_ids=own)
        for detector in on_outputs:
            detector.fit(known if detector.needs_training_images else unseen, unseen, head=head)
    for detector in found:
        if isinstance(detector, ImageDetector):
            with counting(f"fitting {detector.name}") as progress:
                detector.fit_images(
                    backbone,
                    splits.train,
                    splits.validation,
                    ood=tuning,
                    cluster_to_class=cluster_to_class,
                    workers=workers,
                    progress=progress,
                )
    return found


def left_out_images(splits: Splits | None) -> ImageSet:
    """The images of the classes that were left out."""
    images = splits.left_out_images if splits else None
    if images is None or not len(images):
        raise UsageError(
            f"no class was left out, so that '{LEFT_OUT}' is empty: train with --leave-out or --min-images"
        )
    return images


def _open_unknown(
    predictor: Predictor, sources: dict[str, str], data_root: Path | None, splits: Splits | None
) -> dict[str, ImageSet]:
    unknown = {
        name: _still_unknown(predictor, left_out_images(splits))
        if source == LEFT_OUT
        else _open_ood(predictor, source, data_root)
        for name, source in sources.items()
    }
    for images in unknown.values():
        if images.skipped:
            warn(describe_skipped(images.skipped, of=f" of '{images.name}'"))
    return unknown


def _still_unknown(predictor: Predictor, images: ImageSet) -> ImageSet:
    """The images of classes that the run was not taught later on, by ``maple update``."""
    unknown = np.array([name not in predictor.class_names for name in images.class_names])[images.labels]
    if not unknown.any():
        raise UsageError(
            f"maple update added all classes that were left out, so that '{LEFT_OUT}' is empty: leave it out"
        )
    return images.subset(unknown)


def _open_ood(predictor: Predictor, source: str, data_root: Path | None) -> ImageSet:
    """All images of a source, with the names of their classes where it has them."""
    try:
        images = open_like(predictor, source, data_root, labelled=True)
    except MapleError:
        return open_like(predictor, source, data_root)
    some_are_loose = any(skipped.reason == LOOSE for skipped in images.skipped)
    return open_like(predictor, source, data_root) if some_are_loose else images


def own_splits(folder: Path, origin: dict[str, Any], config: RunConfig, size: int, data_root: Path | None) -> Splits:
    """The splits of a run, cut again from its source, if that is what it was."""
    same_size = dataclasses.replace(config, data=dataclasses.replace(config.data, size=size))
    try:
        splits = load_run_splits(origin, same_size, data_root)
    except UsageError as error:
        raise RunError(f"the images of the run cannot be opened again; give test images with --ind: {error}") from None
    digests = load_json(folder / RunFile.CLASSES).get("digests", {})
    if any(digest_images(getattr(splits, name)) != digest for name, digest in digests.items()):
        raise RunError(
            f"the data changed since training ('{origin['source']}'), so that the test images of the run are not known "
            "any more: give --ind"
        )
    return splits


def _evaluate(
    folder: Path,
    predictor: Predictor,
    test: ImageSet,
    unknown: dict[str, ImageSet],
    provenance: dict[str, Any],
    options: TrainOptions,
    detectors: Sequence[Detector] | None = None,
) -> Results:
    """Run the network over all sets once, then write results and gallery."""
    sets = {"test": test, **{f"ood/{name}": images for name, images in unknown.items()}}
    outputs = {
        name: embed(predictor.backbone, images, cluster_to_class=predictor.cluster_to_class, workers=options.workers)
        for name, images in track(sets.items(), "evaluating", total=len(sets))
    }
    ood = {name: outputs[f"ood/{name}"] for name in unknown}
    latency = measure_latency(predictor, to_input(torch.from_numpy(test.read(0)[None])), repeats=20)

    def score(detector: ImageDetector, images: ImageSet) -> np.ndarray:
        with counting(f"scoring by {detector.name}") as progress:
            return detector.score_images(predictor.backbone, images, workers=options.workers, progress=progress)

    scored = [
        Scored(
            detector.name,
            score(detector, test),
            {name: score(detector, images) for name, images in unknown.items()},
        )
        for detector in detectors or ()
        if isinstance(detector, ImageDetector)
    ]
    results = evaluate(
        predictor,
        outputs["test"],
        ood,
        detectors=detectors and [detector for detector in detectors if not isinstance(detector, ImageDetector)],
        own=_own_method(predictor.backbone),
        scored=scored,
        ood_classes={name: images.class_names for name, images in unknown.items()},
        latency_ms=latency.median_ms,
        seed=options.seed,
        provenance=provenance,
    )
    write_atomic(folder / RunFile.RESULTS, results.to_json())
    write_evaluation_gallery(
        folder / RunFile.GALLERY,
        test=(test, predictor.predict_outputs(outputs["test"])),
        ood={name: (unknown[name], predictor.predict_outputs(part)) for name, part in ood.items()},
    )
    return results


def _own_method(backbone: Backbone) -> Own | None:
    if backbone.made_by is None:
        return None
    recipe = backbone.made_by.recipe
    return Own(recipe, find_recipe(recipe).kind.own_detector)


def _provenance(config: RunConfig, own: Mapping[str, Any], predictor: Predictor, command: str) -> dict[str, Any]:
    """How results came about; of the options, those of the sections that the run's own ``config.toml`` has."""
    return {
        "command": command,
        "config": {name: values for name, values in config.sections().items() if name in own},
        "false_alarm": predictor.false_alarm,
        "calibration_images": len(predictor.calibration),
        "decision": predictor.decision.describe(),
        "promise": predictor.decision.sentence(),
        "score": predictor.detector.score_,
        "norm_exponent": predictor.detector.exponent_,
        "temperature": predictor.probability.temperature,
        "network_weight": predictor.probability.network_weight,
        "odds_exponent": predictor.probability.odds_exponent,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


# --- demo and data ---------------------------------------------------------------------------------------------------


def run_demo(out: Path, seed: int = 0) -> Results:
    """The whole method on simulated diatoms, with unknown taxa that resemble the known ones and with debris."""
    again = (out / RunFile.CONFIG).exists()
    if again and not str(read_run_config(out, oldest=1)[0].get("command")).startswith(DEMO_COMMAND):
        raise UsageError(f"'{out}' holds a run that is not a demo: choose another --out")
    results = train_run(
        TrainRequest(
            source=DEMO_SOURCE,
            out=out,
            ood=DEMO_OOD,
            flags={"epochs": DEMO_EPOCHS, "batch_size": 64, "relabel_every": 8, "hard_class_error": 0.1, "seed": seed},
            overwrite=again,
            command=DEMO_COMMAND,
        )
    )
    assert results is not None  # the demo has test images, and one process
    return results


def list_methods() -> list[dict[str, str]]:
    """All recipes and detectors: what they are, whose they are, what they cost and need."""
    rows = []
    for name in list_recipes():
        rows.append({"kind": "recipe", "name": name, **dataclasses.asdict(find_recipe(name).about)})
    for name in list_detectors():
        rows.append({"kind": "detector", "name": name, **dataclasses.asdict(find_detector(name).about)})
    return rows


def list_sources(data_root: Path | None = None) -> list[dict[str, Any]]:
    """The data sets of the catalogue, found or not, and whatever else is built in or lies under the data root."""
    rows: dict[str, dict[str, Any]] = {}
    for name in (*list_data_sets(data_root), *CATALOGUE):
        if name in rows or (name.rpartition("/")[0] in rows and not is_built_in(name)):  # cifar10 tells of cifar10/test
            continue
        path = locate(name, data_root)
        splits = list(split_files(path)) if path is not None and path.is_dir() else []
        where = str(path.resolve()) if path is not None else f"not found, see maple data {name}"
        rows[name] = {
            "source": name,
            "splits": ", ".join(splits if len(splits) < 8 else [*splits[:3], f"{len(splits) - 3} more"]),
            "where": "built in" if is_built_in(name) else where,
            "found": is_built_in(name) or path is not None,
        }
    return list(rows.values())


def describe_source(source: str, data_root: Path | None = None) -> dict[str, Any]:
    """What is in a source; for one of the catalogue also what it is, where it was looked for and how to get it."""
    data_set = find_data_set(source)
    about = {} if data_set is None else describe_data_set(data_set, data_root)
    if data_set is not None and not is_built_in(source) and locate(source, data_root) is None:
        return {"source": source, "found": False, **about}
    with counting("decoding") as progress:
        images = open_images(source, data_root=data_root, progress=progress)
    counts = np.bincount(images.labels[images.labels >= 0], minlength=len(images.class_names))
    return {
        "source": images.name,
        "found": True,
        "images": len(images),
        "classes": len(images.class_names),
        "per class": f"{counts.min()} to {counts.max()}" if len(counts) else "",
        "size": images.size,
        "skipped": len(images.skipped),
        **about,
    }
