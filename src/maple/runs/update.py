"""``maple update``: add images or whole new classes to a run, calibrate it again, or both.

:mod:`maple.prediction.update` says what changes and what stays.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.errors import DataError, RunError, UsageError, suggest
from maple.files import RunFile, check_links, draft_folder, is_full
from maple.networks import embed, use_fast_allocator
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.prediction.update import cut_calibration, join_class_names, update_predictor
from maple.progress import counting, say, warn
from maple.reporting.gallery import (
    ClusterExemplars,
    count_images,
    find_exemplars,
    read_gallery,
    remove_components,
    remove_examples,
    save_clusters,
)
from maple.runs.fit import GALLERY_SAMPLE, sample_rows
from maple.runs.folder import RunFolder, RunSettings
from maple.runs.loading import open_like, warn_if_nothing_is_flagged, warn_of_skipped
from maple.runs.report import report_run
from maple.runs.requests import UpdateRequest
from maple.runs.setup.request import absolute_source
from maple.runs.setup.splits import digest_images
from maple.text import join_names, plural
from maple.types import RunClasses, Skipped


@dataclass(frozen=True)
class Update:
    """The record of an update: an entry of ``updates`` in ``classes.json``."""

    source: str | None
    images: dict[str, int]  # learned from, by class
    new_classes: tuple[str, ...]
    digest: str | None  # of the images learned from
    calibration_source: str | None
    validation_images: int
    calibration_images: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return asdict(self)

    def describe(self) -> str:
        """One line per step.

        >>> print(Update("x", {"cat": 2, "emu": 9}, ("emu",), None, None, 0, 0).describe())
        learned from 11 images of 2 classes; new: emu
        """
        parts = []
        if self.images:
            n, classes = sum(self.images.values()), plural(len(self.images), "class")
            new = f"; new: {join_names(self.new_classes)}" if self.new_classes else ""
            parts.append(f"learned from {plural(n, 'image')} of {classes}{new}")
        if self.calibration_images:
            parts.append(
                f"{plural(self.validation_images, 'image')} fit temperature and score, "
                f"{self.calibration_images:,} others the thresholds"
            )
        return "\n".join(parts)


def update_run(request: UpdateRequest) -> Update:
    """Add images to a run, calibrate it again, or both.

    The folder is replaced as a whole on success, or written to ``out``; results and report of an earlier evaluation
    are removed. The run is locked from before it is read until it is written or copied, unless it is read-only.
    """
    target, run = _check_request(request), RunFolder(request.run)
    locked = target == run.path or os.access(run.path, os.W_OK)
    with run.changing(request.command) if locked else nullcontext(run.read_config()) as settings:
        update, updated = _update(request, settings, target)
    if request.report:
        say(f"report: {report_run(target, command=request.command)}")
    if len(updated.calibration):
        warn_if_nothing_is_flagged(updated)
    else:
        command = shlex.join(["maple", "update", str(target), "--calibrate"])
        warn(
            f"images were added, so the thresholds are void: until you run {command} IMAGES, nothing is flagged, "
            "p-values are missing and probabilities keep the old temperature; IMAGES are labelled, of all classes, and "
            "not among those that the run was fitted on"
        )
    return update


def _update(request: UpdateRequest, settings: RunSettings, target: Path) -> tuple[Update, Predictor]:
    """Read the run and the images, update the predictor and write the run to ``target``."""
    run = RunFolder(request.run)
    check_links(run.path)
    predictor, classes = load_predictor(run.path, trust=request.trust), run.read_classes()
    images = _open_all(request, settings, predictor, classes)
    warn_of_skipped(images.skipped, where=f"; all are listed in {RunFile.CLASSES} of the run")
    with counting("embedding") as progress:
        updated = update_predictor(
            predictor, images.data, images.calibration, images.validation, workers=request.workers, progress=progress
        )
    update = Update(
        source=absolute_source(request.data),
        images={} if images.data is None else _count(images.data),
        new_classes=updated.class_names[len(predictor.class_names) :],
        digest=None if images.data is None else digest_images(images.data),
        calibration_source=absolute_source(request.calibrate),
        validation_images=len(images.validation or ()),
        calibration_images=len(images.calibration or ()),
    )
    with _draft(run, target) as draft:
        updated.save(draft.path)
        draft.write_classes(_updated_classes(classes, updated, update, images.skipped))
        _update_gallery(draft / RunFile.GALLERY, updated, images.data)
        draft.remove(RunFile.RESULTS, RunFile.LABELS, RunFile.REPORT)
    return update, updated


@contextmanager
def _draft(run: RunFolder, target: Path) -> Iterator[RunFolder]:
    """A copy of the run that takes the place of ``target`` on success; an error changes nothing."""
    try:
        with draft_folder(target, replace=target == run.path) as draft:
            shutil.copytree(run.path, draft, ignore=shutil.ignore_patterns(RunFile.LOCK, RunFile.HOLDER))
            yield RunFolder(draft)
    except OSError as error:
        remedy = "free some space or choose" if is_full(error) else "choose"
        raise RunError(
            f"cannot write '{target}': {error.strerror or error}; {remedy} another --out: the run is unchanged"
        ) from None


def _check_request(request: UpdateRequest) -> Path:
    """The folder to write."""
    if request.data is None and request.calibrate is None:
        raise UsageError("nothing to do: give images to learn from with --data, or to calibrate with in --calibrate")
    if request.only and request.data is None:
        raise UsageError("--only chooses among the classes of --data: give both")
    run, target = request.run.resolve(), (request.out or request.run).resolve()
    if target == run and run.is_dir() and Path.cwd().is_relative_to(run):
        raise UsageError(f"'{request.run}' is the current folder, which cannot be replaced: change to another folder")
    if target != run and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--out '{request.out}' exists already: choose another folder")
    return request.run if target == run or request.out is None else request.out


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of an update."""

    data: ImageSet | None  # to learn from
    validation: ImageSet | None
    calibration: ImageSet | None
    skipped: tuple[Skipped, ...]


def _open_all(request: UpdateRequest, settings: RunSettings, predictor: Predictor, classes: RunClasses) -> _Images:
    root = request.data_root or settings.origin.root
    use_fast_allocator()
    open_split = partial(open_like, predictor, data_root=root, labelled=True)
    held = None if request.calibrate is None else open_split(request.calibrate, split="validation")
    data = None if request.data is None else open_split(request.data, split="train")
    skipped = [*(data.skipped if data else ()), *(held.skipped if held else ())]
    if data is not None:
        data, repeated = _choose(data, held, request.only)
        skipped += repeated
        _check_new(data, classes)
    names = predictor.class_names if data is None else join_class_names(predictor.class_names, data)
    validation = calibration = None
    if held is not None:
        validation, calibration = cut_calibration(held, names, settings.sections.get("data", {}).get("split_seed", 0))
    return _Images(data, validation, calibration, tuple(skipped))


def _choose(images: ImageSet, held: ImageSet | None, only: Sequence[str]) -> tuple[ImageSet, list[Skipped]]:
    """The images to learn from: of the classes ``only``, without those held for calibration, which are listed."""
    for name in only:
        if name not in images.class_names:
            raise UsageError(f"--only: '{images.name}' has no class '{name}': {suggest(name, images.class_names)}")
    if only:
        asked = np.array([name in only for name in images.class_names])
        images = images.subset(asked[images.labels])
    again = np.isin(images.keys, np.zeros(0, dtype="S32") if held is None else held.keys)
    if len(images) and again.all():
        raise DataError(f"every image of '{images.name}' is also among those of --calibrate: give other images")
    reason = "not learned from: it is among those of --calibrate"
    return images.subset(~again), [Skipped(images.files[i], reason) for i in np.flatnonzero(again)]


def _check_new(images: ImageSet, classes: RunClasses) -> None:
    """Refuse images that the run has learned from already, as a whole set."""
    known = {entry["digest"] for entry in classes.updates} | set(classes.digests.values())
    if digest_images(images) in known:
        raise UsageError(f"the run has learned from the images of '{images.name}' already: give others")


def _count(images: ImageSet) -> dict[str, int]:
    counts = np.bincount(images.labels, minlength=len(images.class_names))
    return {name: int(n) for name, n in zip(images.class_names, counts) if n}


def _updated_classes(
    classes: RunClasses, predictor: Predictor, update: Update, skipped: Sequence[Skipped]
) -> RunClasses:
    """``classes.json`` after an update; splits and digests of the training stay."""
    return replace(
        classes,
        classes=predictor.class_names,
        skipped=(*classes.skipped, *skipped),
        left_out=tuple(name for name in classes.left_out if name not in update.new_classes),
        cluster_to_class=predictor.cluster_to_class,
        cluster_sizes=predictor.detector.learned_.cluster_sizes,
        updates=(*classes.updates, update.to_dict()),
    )


# --- gallery ----------------------------------------------------------------------------------------------------------


def _update_gallery(folder: Path, predictor: Predictor, images: ImageSet | None) -> None:
    """Remove images of earlier Gaussians and evaluations, and add exemplars of new clusters."""
    remove_examples(folder)
    if images is None:
        return
    remove_components(folder)
    clusters = read_gallery(folder).clusters
    if not clusters:
        return
    shown = [*clusters, *_find_exemplars(predictor, images, len(clusters))]
    save_clusters(folder, count_images(shown, predictor.detector.learned_.cluster_sizes))


def _find_exemplars(predictor: Predictor, images: ImageSet, n_clusters: int) -> list[ClusterExemplars]:
    """The images nearest to the mean of each new cluster, from number ``n_clusters`` on; each is one class."""
    named = images.with_class_names(predictor.class_names)
    found = []
    for cluster in range(n_clusters, len(predictor.cluster_to_class)):
        class_id = int(predictor.cluster_to_class[cluster])
        members = np.flatnonzero(named.labels == class_id)
        rows = members[sample_rows(np.zeros(len(members), dtype=np.int64), GALLERY_SAMPLE)]
        distances = predictor.detector.squared_distances(embed(predictor.backbone, named, indices=rows))
        found.append(find_exemplars(named, rows, distances[:, cluster], cluster, named.class_names[class_id]))
    return found
