"""``maple fit``: make a run of a trained network, without training it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from maple.data.splits import Splits
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.networks import Backbone, Origin, embed, open_model, use_fast_allocator
from maple.options import as_dict
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.progress import counting, say, warn
from maple.runs._finish import Fitted, finish_run, prepare_folder
from maple.runs.folder import RunFolder, RunOrigin
from maple.runs.setup.config import RunConfig, resolve_config
from maple.runs.setup.init import check_weights, describe_network, follow_network, try_image
from maple.runs.setup.request import LEFT_OUT, RunRequest, absolute_path, absolute_source, check_unknown
from maple.runs.setup.splits import announce_images, left_out_images, load_run_splits, order_like_head
from maple.text import percent
from maple.training.head import count_outputs
from maple.training.loop import snapshot_rows
from maple.types import Outputs, Relabelling

_SECTIONS = ("data", "detector", "decision")  # of the options, those that fitting reads


@dataclass(frozen=True, kw_only=True)
class FitRequest(RunRequest):
    """What ``maple fit`` was asked to do; options of the network as for :func:`~maple.networks.open_model`."""

    model: str
    calibrate: str | None = None  # images that the network has not seen, for validation and calibration
    weights: Path | None = None
    n_classes: int | None = None
    head: str | None = None
    drop_head: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    shallow: str | None = None
    command: str = "maple fit"

    def origin(self) -> RunOrigin:
        return dataclasses.replace(
            super().origin(),
            calibrate=absolute_source(self.calibrate),
            model=absolute_source(self.model),
            weights=absolute_path(self.weights),
        )


def fit_run(request: FitRequest) -> Results | None:
    """Open the network, fit, calibrate, evaluate and report; the results, or ``None`` without test images.

    The Gaussians are fitted on all images of the source, which the network was trained on. The images of ``calibrate``,
    which it has not seen, are split: one part fits temperature and score, the other the thresholds. Without
    ``calibrate`` the source is split four ways, which is right only if the network has seen none of it. The request is
    checked before the run folder is touched; the folder is locked while it is written.
    """
    run = RunFolder(request.out)
    run.check_unlocked()
    _check_folder(request)
    request, config, backbone, splits = _open_all(request)
    say(describe_network(backbone))
    announce_images(request, splits, config.data)
    with run.lock(request.command):
        _check_folder(request)  # again: another process may have written it meanwhile
        sections = {name: values for name, values in config.sections().items() if name in _SECTIONS}
        prepare_folder(request, {"model": {"backbone": request.model}, **sections})
        use_fast_allocator()
        fitted = _fit(backbone, splits, config)
        return finish_run(request, config, splits, fitted)


def _check_folder(request: FitRequest) -> None:
    if RunFolder(request.out).holds_run() and not request.overwrite:
        raise UsageError(f"'{request.out}' already holds a run: add --overwrite to replace it")


def _open_all(request: FitRequest) -> tuple[FitRequest, RunConfig, Backbone, Splits]:
    """Check the request, open network and images, and put the classes in the order of the head."""
    check_unknown(request)
    if request.calibrate is None and not request.drop_head:
        raise UsageError(
            "fitting needs images that the network has not seen: give some with --calibrate, or add --drop-head if it "
            "was trained on other images altogether"
        )
    check_weights(request.model, request.weights)
    config = resolve_config(request.flags)
    backbone = _open_backbone(request, config)
    origin = backbone.origin or Origin()
    config = follow_network(config, backbone.size, origin.fit, request.flags)
    splits = load_run_splits(request.origin(), config.data, request.data_root)
    if backbone.head is not None:
        request, splits = order_like_head(request, splits, origin.class_names)
    if not len(splits.validation):
        raise UsageError("fitting needs validation images: give them a share of --splits, or --calibrate")
    if LEFT_OUT in request.ood.values():
        left_out_images(splits)
    check_head(backbone, splits)
    try_image(backbone, splits.train)
    return request, config, backbone, splits


def _fit(backbone: Backbone, splits: Splits, config: RunConfig) -> Fitted:
    workers = config.train.workers
    with counting("embedding unseen images") as progress:
        validation = embed(backbone, splits.validation, workers=workers, progress=progress)
    with counting("embedding calibration images") as progress:
        calibration = embed(backbone, splits.calibration, workers=workers, progress=progress)
    with counting("fitting") as progress:
        predictor = fit_predictor(
            backbone,
            splits.train,
            validation,
            calibration,
            detector=MapleDetector(**as_dict(config.detector)),
            fit=config.data.fit,
            options=config.decision,
            workers=workers,
            progress=progress,
        )
    _warn_of_another_order(predictor, validation)
    relabelling = Relabelling.initial(splits.train.labels, len(splits.class_names))
    return Fitted(predictor, relabelling, {"after": validation[snapshot_rows(len(validation))]}, {})


def _open_backbone(request: FitRequest, config: RunConfig) -> Backbone:
    return open_model(
        request.model,
        weights=request.weights,
        n_classes=request.n_classes,
        head=request.head,
        size=None if config.data.size == "auto" else config.data.size,
        mean=request.mean,
        std=request.std,
        shallow=request.shallow,
        drop_head=request.drop_head,
        trust=request.trust,
    )


def check_head(backbone: Backbone, splits: Splits) -> None:
    """Refuse a head for another number of classes."""
    if backbone.head is None:
        return
    n_outputs, n_classes = count_outputs(backbone.head, backbone.head_size), len(splits.class_names)
    if n_outputs != n_classes:
        raise UsageError(
            f"the head of '{backbone.name}' gives {n_outputs} logits, but '{splits.train.name}' has {n_classes} "
            "classes: give images of the classes that it was trained for, or add --drop-head to use only its embedding"
        )


def _warn_of_another_order(predictor: Predictor, validation: Outputs) -> None:
    """Warn if the head is much less accurate than the Gaussians: its classes may be in another order."""
    said = predictor.predict_outputs(validation)
    by_head, by_gaussians = (
        float((class_id == validation.labels).mean()) for class_id in (said.softmax_class_id, said.md_class_id)
    )
    if by_head < by_gaussians / 2:
        warn(
            f"the head classifies {percent(by_head)} of the validation images correctly, the Gaussians "
            f"{percent(by_gaussians)}: if its classes are in another order than those of the data, give them "
            "with --class-names"
        )
