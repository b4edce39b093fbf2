"""The last step of ``maple train`` and ``maple fit``: save the predictor, write the gallery, evaluate and report."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.splits import Splits
from maple.evaluation.results import Results
from maple.files import RunFile
from maple.networks import Backbone, embed
from maple.prediction.components import component_coordinates
from maple.prediction.predictor import Predictor
from maple.prediction.store import save_backbone
from maple.progress import counting, say, warn
from maple.reporting.gallery import write_training_gallery
from maple.reporting.report import write_report
from maple.runs.evaluate import EvaluationSets, measure_run, open_unknown
from maple.runs.folder import RunFolder, RunSettings
from maple.runs.loading import warn_if_nothing_is_flagged
from maple.runs.provenance import describe_origin
from maple.runs.setup.config import RunConfig
from maple.runs.setup.request import RunRequest
from maple.runs.setup.splits import describe_classes
from maple.training.recipe import RECIPES
from maple.types import Outputs, Relabelling

GALLERY_SAMPLE = 200  # training images per cluster among which exemplars are sought


@dataclass(frozen=True, eq=False)
class Fitted:
    """A predictor with the clusters it was fitted on, and validation images as the network embedded them."""

    predictor: Predictor
    relabelling: Relabelling
    snapshots: Mapping[str, Outputs]  # "before" and "after"
    snapshot_epochs: Mapping[str, int]


def prepare_folder(
    request: RunRequest, sections: Mapping[str, Mapping[str, Any]], start: Backbone | None = None
) -> None:
    """Remove a run that is replaced, and write ``config.toml``, last: from then on the folder holds a run.

    ``start`` is the network that the training starts from; resuming needs it.
    """
    run = RunFolder(request.out)
    if request.overwrite and (run / RunFile.CONFIG).exists():
        run.clear()
    if start is not None:
        save_backbone(run / RunFile.START, start)
    root = request.data_root or os.environ.get("MAPLE_DATA")
    origin = dataclasses.replace(request, data_root=Path(root) if root else None).origin()
    plugin = RECIPES.plugin_of(sections.get("model", {}).get("recipe", "")) or None
    origin = dataclasses.replace(origin, command=request.command, plugin=plugin)
    run.write_config(RunSettings(origin, {name: dict(values) for name, values in sections.items()}))


def finish_run(request: RunRequest, config: RunConfig, splits: Splits, fitted: Fitted) -> Results | None:
    """Save, evaluate and report; the results, or ``None`` without test images."""
    run, predictor, relabelling = RunFolder(request.out), fitted.predictor, fitted.relabelling
    predictor.save(run.path)
    sizes = np.bincount(relabelling.cluster_ids, minlength=relabelling.n_clusters)
    run.write_classes(
        dataclasses.replace(
            describe_classes(splits),
            cluster_to_class=relabelling.cluster_to_class,
            cluster_sizes=sizes,
            snapshot_epochs=dict(fitted.snapshot_epochs),
        )
    )
    _write_gallery(run, splits, fitted)
    warn_if_nothing_is_flagged(predictor)
    results = None
    if len(splits.test):
        provenance = describe_origin(config, run.read_config().sections, predictor, request.command)
        sets = EvaluationSets(splits.test, open_unknown(predictor, request.ood, request.data_root, splits))
        results = measure_run(run, predictor, sets, provenance, config.train)
    else:
        warn(f"nothing was measured, for lack of test images: use maple evaluate {run.path} --ind IMAGES")
    if request.report:
        say(f"report: {write_report(run.path)}")
    return results


def _write_gallery(run: RunFolder, splits: Splits, fitted: Fitted) -> None:
    """Exemplars of each cluster and projections of the snapshots, which the report draws."""
    predictor, relabelling = fitted.predictor, fitted.relabelling
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
