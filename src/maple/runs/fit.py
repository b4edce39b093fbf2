"""``maple fit``: make a run of a trained network, without training it; and the last steps of every training.

These save the predictor, write the gallery, evaluate and report.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.data.splits import Splits
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.files import RunFile
from maple.networks import Backbone, Origin, open_model, use_fast_allocator
from maple.options import as_dict
from maple.prediction.components import component_coordinates
from maple.prediction.engine import LOCAL, Engine
from maple.prediction.fit import fit_predictor
from maple.prediction.normalisation import COMMAND, find_disagreement
from maple.prediction.predictor import Predictor
from maple.prediction.store import save_backbone
from maple.progress import counting, say, warn
from maple.reporting.gallery import write_training_gallery
from maple.reporting.report import write_report
from maple.runs.evaluate import EvaluationSets, measure_run, open_unknown
from maple.runs.folder import RunFolder, RunSettings
from maple.runs.loading import say_conditioning, warn_if_nothing_is_flagged
from maple.runs.requests import FitRequest, RunRequest
from maple.runs.setup.config import RunConfig, given_options, resolve_config
from maple.runs.setup.init import check_weights, describe_network, follow_network, try_image
from maple.runs.setup.request import absolute_source, check_unknown, describe_request
from maple.runs.setup.splits import announce_images, describe_classes, open_splits, order_like_head
from maple.training.head import count_outputs
from maple.training.recipe import RECIPES
from maple.training.resume import snapshot_rows
from maple.types import Outputs, Relabelling

GALLERY_SAMPLE = 200  # training images per cluster among which exemplars are sought
_SECTIONS = ("data", "detector", "decision")  # of the options, those that fitting reads


def fit_run(request: FitRequest, engine: Engine = LOCAL) -> Results | None:
    """Open the network, fit, calibrate, evaluate and report; the results, or ``None`` without test images.

    The Gaussians are fitted on all images of the source, which the network was trained on. The images of ``calibrate``,
    which it has not seen, are split: one part fits temperature and score, the other the thresholds. Without
    ``calibrate`` the source is split four ways, which is right only if the network has seen none of it. The request is
    checked before the run folder is touched; the folder is locked while it is written. A run that is replaced stays as
    it is until the new one is fitted. ``engine`` runs the network.
    """
    run = RunFolder(request.folder)
    run.check_unlocked()
    _check_folder(request)
    request, config, backbone, splits = _open_all(request)
    say(describe_network(backbone))
    announce_images(request, splits, config.data)
    with run.lock(request.command):
        _check_folder(request)  # again: another process may have written it meanwhile
        use_fast_allocator()
        fitted = _fit(backbone, splits, config, engine)
        sections = {name: values for name, values in config.sections().items() if name in _SECTIONS}
        prepare_folder(request, {"model": {"backbone": request.model}, **sections})
        return finish_run(request, config, splits, fitted, engine)


def _check_folder(request: FitRequest) -> None:
    if RunFolder(request.folder).holds_run() and not request.overwrite:
        raise UsageError(f"'{request.folder}' already holds a run: add --overwrite to replace it")


def _open_all(request: FitRequest) -> tuple[FitRequest, RunConfig, Backbone, Splits]:
    """Check the request, open network and images, and put the classes in the order of the head."""
    check_unknown(request)
    if request.calibrate is None and not request.drop_head:
        raise UsageError(
            "fitting needs images that the network has not seen: give some with --calibrate, or add --drop-head if it "
            "has seen none of these images"
        )
    check_weights(request.model, request.weights)
    workers = {} if "train.workers" in request.flags else {"workers": request.workers}
    config = resolve_config(workers | request.flags)
    backbone = open_model(
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
    origin = backbone.origin or Origin()
    given = given_options(request.flags, config.model.recipe)
    config = follow_network(config, backbone.size, origin.fit, given)
    splits = open_splits(request, config.data)
    if backbone.head is not None:
        request, splits = order_like_head(request, splits, origin.class_names)
    check_head(backbone, splits)
    try_image(backbone, splits.train)
    return request, config, backbone, splits


def _fit(backbone: Backbone, splits: Splits, config: RunConfig, engine: Engine) -> Fitted:
    workers = config.train.workers
    with counting("embedding unseen images") as progress:
        validation = engine.embed(backbone, splits.validation, workers=workers, progress=progress)
    with counting("embedding calibration images") as progress:
        calibration = engine.embed(backbone, splits.calibration, workers=workers, progress=progress)
    with counting("fitting") as progress:
        predictor = fit_as(config, backbone, splits.train, validation, calibration, progress=progress, engine=engine)
    _warn_of_head(predictor, splits.validation, validation)
    relabelling = Relabelling.initial(splits.train.labels, len(splits.class_names))
    return Fitted(predictor, relabelling, {"after": validation[snapshot_rows(len(validation))]}, {})


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


def _warn_of_head(predictor: Predictor, images: ImageSet, outputs: Outputs) -> None:
    """Warn if the head is less accurate than the Gaussians, for a reason that can be named."""
    found = find_disagreement(predictor, images, outputs)
    if found is not None and (text := found.describe(predictor.backbone, COMMAND)) is not None:
        warn(text)


# --- steps that training shares ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fitted:
    """A predictor with the clusters it was fitted on, and validation images as the network embedded them."""

    predictor: Predictor
    relabelling: Relabelling
    snapshots: Mapping[str, Outputs]  # "before" and "after"
    snapshot_epochs: Mapping[str, int]


def fit_as(
    config: RunConfig,
    backbone: Backbone,
    train: ImageSet,
    validation: ImageSet | Outputs,
    calibration: ImageSet | Outputs | None = None,
    **how: Any,
) -> Predictor:
    """Fit a predictor with the options of a run; ``how`` as for :func:`~maple.prediction.fit.fit_predictor`."""
    return fit_predictor(
        backbone,
        train,
        validation,
        calibration,
        detector=MapleDetector(**as_dict(config.detector)),
        fit=config.data.fit,
        options=config.decision,
        class_rule=config.recipe.class_rule,
        workers=config.train.workers,
        **how,
    )


def prepare_folder(
    request: RunRequest, sections: Mapping[str, Mapping[str, Any]], start: Backbone | None = None
) -> None:
    """Remove a run that is replaced, and write ``config.toml``, last: from then on the folder holds a run.

    ``start`` is the network that the training starts from; resuming needs it.
    """
    run = RunFolder(request.folder)
    if request.overwrite and (run / RunFile.CONFIG).exists():
        run.clear()
    if start is not None:
        save_backbone(run / RunFile.START, start)
    root = request.data_root or os.environ.get("MAPLE_DATA")
    origin = dataclasses.replace(
        describe_request(request),
        data_root=absolute_source(Path(root)) if root else None,
        command=request.command,
        plugin=RECIPES.plugin_of(sections.get("model", {}).get("recipe", "")) or None,
    )
    run.write_config(RunSettings(origin, {name: dict(values) for name, values in sections.items()}))


def finish_run(
    request: RunRequest, config: RunConfig, splits: Splits, fitted: Fitted, engine: Engine = LOCAL
) -> Results | None:
    """Save, evaluate and report; the results, or ``None`` without test images.

    The detector, with which the run is finished, is written when everything is there that later commands read.
    """
    run, predictor, relabelling = RunFolder(request.folder), fitted.predictor, fitted.relabelling
    sizes = np.bincount(relabelling.cluster_ids, minlength=relabelling.n_clusters)
    run.write_classes(
        dataclasses.replace(
            describe_classes(splits),
            cluster_to_class=relabelling.cluster_to_class,
            cluster_sizes=sizes,
            snapshot_epochs=dict(fitted.snapshot_epochs),
        )
    )
    _write_gallery(run, splits, fitted, engine)
    predictor.save(run.path)
    say_conditioning(predictor)
    warn_if_nothing_is_flagged(predictor)
    results = None
    if len(splits.test):
        sets = EvaluationSets(splits.test, open_unknown(predictor, request.ood, request.data_root, splits))
        results = measure_run(run, predictor, sets, config, request.command, engine=engine)
    else:
        warn(f"there are no test images, so nothing was measured: use maple evaluate {run.path} --ind IMAGES")
    if request.report:
        say(f"report: {write_report(run.path)}")
    return results


def _write_gallery(run: RunFolder, splits: Splits, fitted: Fitted, engine: Engine) -> None:
    """Exemplars of each cluster and projections of the snapshots, which the report draws."""
    predictor, relabelling = fitted.predictor, fitted.relabelling
    rows = sample_rows(relabelling.cluster_ids, GALLERY_SAMPLE)
    with counting("looking for exemplars") as progress:
        outputs = engine.embed(
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
        run / RunFile.GALLERY,
        splits.train.subset(rows),
        outputs,
        squared_distance=distances[np.arange(len(rows)), outputs.cluster_ids],
        cluster_sizes=np.bincount(relabelling.cluster_ids, minlength=relabelling.n_clusters),
        snapshots=fitted.snapshots,
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
