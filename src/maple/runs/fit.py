"""``maple fit``: a network that someone else trained becomes a run like any other, without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maple.data.splits import Splits
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.networks import Backbone, Origin, embed, open_model, use_fast_allocator
from maple.options import as_dict
from maple.prediction.predictor import Predictor, fit_predictor
from maple.progress import counting, say, warn
from maple.runs.config import RunConfig, resolve_config
from maple.runs.init import check_weights, describe_network, follow_network, try_image
from maple.runs.train import (
    LEFT_OUT,
    RunRequest,
    absolute_source,
    announce_images,
    check_unknown,
    finish_run,
    holds_run,
    left_out_images,
    load_run_splits,
    order_like_head,
    prepare_folder,
)
from maple.text import percent
from maple.training.loop import snapshot_rows
from maple.training.prepare import count_outputs
from maple.types import Outputs, Relabelling

SECTIONS = ("data", "detector", "decision")  # of the options, those that fitting reads


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
    trust: bool = False
    command: str = "maple fit"

    def origin(self) -> dict[str, Any]:
        return {
            **super().origin(),
            "calibrate": absolute_source(self.calibrate),
            "model": absolute_source(self.model),
            "weights": str(self.weights.expanduser().resolve()) if self.weights else None,
        }


def fit_run(request: FitRequest) -> Results | None:
    """Open the network, fit, calibrate, test and report; the results, or ``None`` without test images.

    All images of the source, which the network was trained on, teach the Gaussians. Those of ``calibrate``, which it
    has not seen, teach temperature and score with one part and thresholds with the other, disjoint and stratified.
    Without ``calibrate`` the source is split four ways, which is right only for a network that has seen none of it.
    Whatever can be wrong with the request is found before the run folder is touched.
    """
    if holds_run(request.out) and not request.overwrite:
        raise UsageError(f"'{request.out}' already holds a run: add --overwrite to replace it")
    check_unknown(request)
    if request.calibrate is None and not request.drop_head:
        raise UsageError(
            "there are no images that the network has not seen: give some with --calibrate, or add --drop-head where "
            "it was trained on other images altogether"
        )
    check_weights(request.model, request.weights)
    config = resolve_config(request.flags)
    backbone = _open_backbone(request, config)
    origin = backbone.origin or Origin()
    config = follow_network(config, backbone.size, origin.fit, request.flags)
    splits = load_run_splits(request.origin(), config, request.data_root)
    if backbone.head is not None:
        request, splits = order_like_head(request, splits, origin.class_names)
    if not len(splits.validation):
        raise UsageError("fitting needs validation images: give them a share of --splits, or --calibrate")
    if LEFT_OUT in request.ood.values():
        left_out_images(splits)
    check_head(backbone, splits)
    try_image(backbone, splits.train)
    _announce(request, backbone, splits, config)
    sections = {name: values for name, values in config.sections().items() if name in SECTIONS}
    prepare_folder(request, {"model": {"backbone": request.model}, **sections})
    use_fast_allocator()
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
    snapshots = {"after": validation[snapshot_rows(len(validation))]}
    return finish_run(request, config, splits, predictor, relabelling, snapshots, {})


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
    """Refuse a head that was made for another number of classes."""
    if backbone.head is None:
        return
    n_outputs, n_classes = count_outputs(backbone.head, backbone.embedding_size), len(splits.class_names)
    if n_outputs != n_classes:
        raise UsageError(
            f"the head of '{backbone.name}' gives {n_outputs} logits, but '{splits.train.name}' has {n_classes} "
            "classes: give images of just the classes that it was trained for, or add --drop-head to use its embedding "
            "for others"
        )


def _announce(request: FitRequest, backbone: Backbone, splits: Splits, config: RunConfig) -> None:
    say(describe_network(backbone))
    announce_images(request, splits, config.data)


def _warn_of_another_order(predictor: Predictor, validation: Outputs) -> None:
    """A head whose classes are in another order than those of the data is wrong where the Gaussians are right."""
    said = predictor.predict_outputs(validation)
    by_head, by_gaussians = (
        float((class_id == validation.labels).mean()) for class_id in (said.softmax_class_id, said.md_class_id)
    )
    if by_head < by_gaussians / 2:
        warn(
            f"the head is right about {percent(by_head)} of the validation images, the Gaussians about "
            f"{percent(by_gaussians)}: if its classes are in another order than those of the data, give them "
            "with --class-names"
        )
