"""``maple update``: more images, or whole new classes, for a run that is fitted, without retraining or the old images.

The Gaussians follow from moments, and moments add up. After an update everything that follows from them (deviation,
PCA, covariance, means, priors) is what a fit on all images together would have found. What else there is:

==========================  =========================================================================================
exponent of the norm        stays what validation images chose when the run was fitted
a new class                 one cluster, behind all others; classes are matched by name
the network                 is as it was: its own class (``softmax_class``) is never a new one, and it gives such a
                            class the probability 0
class probabilities         the network has a say in which of its own classes an image belongs to, none in whether it
                            belongs to one of them: see :func:`maple.decisions.probability.pool`
energy                      counts beside the classes of the network only: see
:attr:`maple.detectors.description.Description.energy`
temperature, score          stay what they were, or are learned anew from validation images (``--calibrate``)
thresholds, p-values, sets  are void, since scores changed, until images calibrate them anew (``--calibrate``): p-values
                            are NaN and nothing is flagged
==========================  =========================================================================================
"""

from __future__ import annotations

import copy
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet, Progress
from maple.data.shares import split_indices
from maple.data.sources import open_images
from maple.decisions.calibration import Calibration
from maple.detectors.base import Source
from maple.errors import DataError, RunError, UsageError, suggest
from maple.files import RunFile, load_json, save_json
from maple.networks import embed, embed_batches, use_fast_allocator
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.progress import counting, say, warn
from maple.reporting.gallery import (
    CLUSTER_THUMBNAIL,
    EXEMPLARS_PER_CLUSTER,
    ClusterExemplars,
    read_gallery,
    remove_components,
    remove_examples,
    save_clusters,
    thumbnail,
)
from maple.reporting.report import write_report
from maple.runs._finish import GALLERY_SAMPLE, sample_rows
from maple.runs.folder import RunFolder
from maple.runs.loading import describe_skipped, warn_if_nothing_is_flagged
from maple.runs.request import absolute_source
from maple.runs.splits import digest_images
from maple.text import join_names, plural
from maple.types import Outputs, Skipped

TEACHING_SHARE = 0.5  # of the images of --calibrate: they teach temperature and score, the others calibrate
MEASURED = (RunFile.RESULTS, RunFile.REPORT)  # what an earlier evaluation wrote, void after an update


# --- predictors -------------------------------------------------------------------------------------------------------


def update_predictor(
    predictor: Predictor,
    images: ImageSet | None = None,
    calibration: ImageSet | None = None,
    validation: ImageSet | None = None,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """A predictor that has also learned from ``images``, labelled, of known classes or new ones; the given one stays.

    ``validation`` images teach temperature and score anew, ``calibration`` images the thresholds; neither may be among
    the images learned from, nor among one another (:func:`cut_calibration`). Images are embedded batch by batch, so
    that memory does not grow with their number. Without images of any kind nothing changes.
    """
    for given in (images, validation, calibration):
        if given is not None:
            _check_images(given, predictor)
    names = predictor.class_names if images is None else join_class_names(predictor.class_names, images)
    read = partial(embed, predictor.backbone, workers=workers)
    batches = None
    if images is not None and len(images):
        batches = embed_batches(
            predictor.backbone, images.with_class_names(names), workers=workers, logits=False, progress=progress
        )
    return update_from_outputs(
        predictor,
        batches,
        names,
        calibration=None if calibration is None else read(calibration.with_class_names(names)),
        validation=None if validation is None else read(validation.with_class_names(names)),
    )


def update_from_outputs(
    predictor: Predictor,
    outputs: Source | None = None,
    class_names: Sequence[str] = (),
    *,
    calibration: Outputs | None = None,
    validation: Outputs | None = None,
) -> Predictor:
    """As :func:`update_predictor`, from what the network said; all labels index ``class_names``.

    These begin with the names that the predictor knows; the names behind them are those of new classes.
    """
    names = tuple(class_names) or predictor.class_names
    if names[: len(predictor.class_names)] != predictor.class_names:
        raise UsageError("the class names of an update begin with those known, in their order: see join_class_names")
    updated = copy.copy(predictor)
    updated.detector, updated.class_names = copy.deepcopy(predictor.detector), names
    if outputs is not None:
        updated.detector.extend(outputs)
    if (n_classes := len(updated.detector.learned_.head_classes)) < len(names):
        raise DataError(f"there are no images of the new class '{names[n_classes]}': add some, or leave out its name")
    if validation is not None:
        _teach(updated, validation)
    learned = _cluster_sizes(updated).sum() > _cluster_sizes(predictor).sum()
    if learned or validation is not None:  # scores are others now
        updated.calibration = Calibration.empty(len(names))
    if calibration is not None:
        return updated.calibrate(calibration)
    return updated.decide()


def _teach(predictor: Predictor, validation: Outputs) -> None:
    """Score and class probabilities, from validation images."""
    if (labels := validation.labels) is None:
        raise DataError("validation images need labels, which teach the temperature: give Outputs with labels")
    found = predictor.detector.learn_score(validation).describe(validation)
    predictor.probability = predictor.probability.fit(found, labels)


# --- images -----------------------------------------------------------------------------------------------------------


def join_class_names(known: Sequence[str], images: ImageSet) -> tuple[str, ...]:
    """The names known, then those of new classes, in the order of ``images``; classes without images do not count.

    >>> images = ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8), [2, 0], ["emu", "fox", "cat"])
    >>> join_class_names(["cat", "dog"], images)
    ('cat', 'dog', 'emu')
    """
    present = np.unique(images.labels[images.labels >= 0])
    return (*known, *(images.class_names[i] for i in present if images.class_names[i] not in known))


def cut_calibration(images: ImageSet, class_names: Sequence[str], seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Validation and calibration images: a half each of every class, by content; no image is in both.

    Each class of ``class_names`` must have two different images at least: thresholds hold for images drawn like those
    that calibrated them, and a run sees all of its classes.
    """
    images = images.with_class_names(class_names)
    n_distinct = [len(np.unique(images.keys[images.labels == label])) for label in range(len(class_names))]
    if few := [name for name, n in zip(class_names, n_distinct) if n < 2]:
        more = f" and {plural(len(few) - 1, 'other class')} have" if len(few) > 1 else " has"
        raise DataError(
            f"class '{few[0]}'{more} fewer than two different images in '{images.name}': calibrate with images of all "
            f"{len(class_names)} classes of the run"
        )
    shares = (TEACHING_SHARE, 1 - TEACHING_SHARE)
    validation, calibration = split_indices(images.labels, images.keys, shares, seed, class_names)
    return images.subset(validation), images.subset(calibration)


def _check_images(images: ImageSet, predictor: Predictor) -> None:
    if images.size != predictor.size:
        raise UsageError(
            f"'{images.name}' is open with {images.size} px, but the run reads images of {predictor.size} px: open its "
            f"source with size={predictor.size}"
        )
    if unlabelled := int((images.labels < 0).sum()):
        raise DataError(
            f"{unlabelled} of {len(images)} images of '{images.name}' have no label: an update needs the class of "
            "every image"
        )


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateRequest:
    """What ``maple update`` was asked to do."""

    run: Path
    data: str | None = None  # source of images to learn from
    calibrate: str | None = None  # source of images that teach temperature, score and thresholds
    out: Path | None = None  # another run folder to write; the run itself stays
    only: tuple[str, ...] = ()  # classes of ``data`` to learn; all of them where none is named
    data_root: Path | None = None
    workers: int = 0
    trust: bool = False
    report: bool = True


@dataclass(frozen=True)
class Update:
    """What an update did: an entry of ``updates`` in the run's ``classes.json``."""

    source: str | None
    images: dict[str, int]  # learned from, by class
    new_classes: tuple[str, ...]
    digest: str | None  # of the images learned from
    calibration_source: str | None
    validation_images: int
    calibration_images: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return {**asdict(self), "new_classes": list(self.new_classes)}

    def describe(self) -> str:
        """In words, for people.

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
                f"{plural(self.validation_images, 'image')} taught temperature and score, "
                f"{self.calibration_images:,} others calibrated"
            )
        return "\n".join(parts)


def update_run(request: UpdateRequest) -> Update:
    """Add images to a run, calibrate it anew, or both; what was done.

    The folder is replaced as a whole once all is well, or written to ``out``. What an earlier evaluation measured is
    void and not kept.
    """
    target = _check_request(request)
    predictor = load_predictor(request.run, trust=request.trust)
    settings = RunFolder(request.run).read_config()
    classes = load_json(request.run / RunFile.CLASSES)
    root = request.data_root or settings.origin.root
    use_fast_allocator()
    held = None if request.calibrate is None else _open(predictor, request.calibrate, root, "validation")
    images = None if request.data is None else _open(predictor, request.data, root, "train")
    skipped = [*(images.skipped if images else ()), *(held.skipped if held else ())]
    if images is not None:
        images, repeated = _choose(images, held, request.only)
        skipped += repeated
        _check_new(images, classes)
    names = predictor.class_names if images is None else join_class_names(predictor.class_names, images)
    validation = calibration = None
    if held is not None:
        validation, calibration = cut_calibration(held, names, settings.sections.get("data", {}).get("split_seed", 0))
    if skipped:
        warn(f"{describe_skipped(tuple(skipped))}; all are listed in {RunFile.CLASSES} of the run")
    with counting("embedding") as progress:
        updated = update_predictor(
            predictor, images, calibration, validation, workers=request.workers, progress=progress
        )
    update = Update(
        source=absolute_source(request.data),
        images={} if images is None else _count(images),
        new_classes=names[len(predictor.class_names) :],
        digest=None if images is None else digest_images(images),
        calibration_source=absolute_source(request.calibrate),
        validation_images=len(validation or ()),
        calibration_images=len(calibration or ()),
    )
    with _draft(request.run, target) as folder:
        updated.save(folder)
        save_json(folder / RunFile.CLASSES, _updated_classes(classes, updated, update, skipped))
        _update_gallery(folder / RunFile.GALLERY, updated, images)
        for name in MEASURED:
            (folder / name).unlink(missing_ok=True)
    if request.report:
        say(f"report: {write_report(target)}")
    if len(updated.calibration):
        warn_if_nothing_is_flagged(updated)
    else:
        command = shlex.join(["maple", "update", str(target), "--calibrate"])
        warn(
            "the thresholds of the run are void since images were added: p-values are missing, nothing is flagged and "
            f"probabilities keep their old temperature until {command} IMAGES, with labelled images of all classes "
            "that nothing was learned from"
        )
    return update


def _check_request(request: UpdateRequest) -> Path:
    """The folder to write."""
    if request.data is None and request.calibrate is None:
        raise UsageError("there is nothing to do: give images to learn from with --data, to calibrate with --calibrate")
    if request.only and request.data is None:
        raise UsageError("--only chooses among the classes of --data: give both")
    run, target = request.run.resolve(), (request.out or request.run).resolve()
    if target == run and run.is_dir() and Path.cwd().is_relative_to(run):
        raise UsageError(f"'{request.run}' is the current folder, which cannot be replaced: start in another folder")
    if target != run and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--out '{request.out}' exists already: choose another folder")
    return request.run if target == run or request.out is None else request.out


def _open(predictor: Predictor, source: str, data_root: Path | None, split: str) -> ImageSet:
    """Labelled images as the predictor wants them; of a data set that has splits, this one."""
    with counting("decoding") as progress:
        return open_images(
            source, size=predictor.size, fit=predictor.fit, data_root=data_root, split=split, progress=progress
        )


def _choose(images: ImageSet, held: ImageSet | None, only: Sequence[str]) -> tuple[ImageSet, list[Skipped]]:
    """The images to learn from: those of the classes ``only``, less those that are to calibrate, which are listed."""
    for name in only:
        if name not in images.class_names:
            raise UsageError(f"--only: '{images.name}' has no class '{name}': {suggest(name, images.class_names)}")
    if only:
        asked = np.array([name in only for name in images.class_names])
        images = images.subset(asked[images.labels])
    again = np.isin(images.keys, np.zeros(0, dtype="S32") if held is None else held.keys)
    if len(images) and again.all():
        raise DataError(f"every image of '{images.name}' is also among those to calibrate with: give other images")
    repeated = [Skipped(images.files[i], "not learned from: it is to calibrate") for i in np.flatnonzero(again)]
    return images.subset(~again), repeated


def _check_new(images: ImageSet, classes: dict[str, Any]) -> None:
    """Refuse to count the same images twice, as far as that can be known."""
    known = {entry["digest"] for entry in classes.get("updates", [])} | set(classes.get("digests", {}).values())
    if digest_images(images) in known:
        raise UsageError(f"the run has seen the images of '{images.name}' already: give others")


def _count(images: ImageSet) -> dict[str, int]:
    counts = np.bincount(images.labels, minlength=len(images.class_names))
    return {name: int(n) for name, n in zip(images.class_names, counts) if n}


def _updated_classes(
    classes: dict[str, Any], predictor: Predictor, update: Update, skipped: Sequence[Skipped]
) -> dict[str, Any]:
    """``classes.json`` after an update; the splits of the training, and their digests, are what they were."""
    return {
        **classes,
        "classes": list(predictor.class_names),
        "skipped": [*classes.get("skipped", []), *([item.file, item.reason] for item in skipped)],
        "left_out": [name for name in classes.get("left_out", []) if name not in update.new_classes],
        "cluster_to_class": predictor.cluster_to_class,
        "cluster_sizes": _cluster_sizes(predictor),
        "updates": [*classes.get("updates", []), update.to_dict()],
    }


def _cluster_sizes(predictor: Predictor) -> np.ndarray:
    """Images learned from in each cluster (M,)."""
    return predictor.detector.learned_.cluster_sizes


# --- the run folder ---------------------------------------------------------------------------------------------------


@contextmanager
def _draft(run: Path, target: Path) -> Iterator[Path]:
    """A copy of a run folder, which takes the place of ``target`` in the end; an error leaves all as it was."""
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
        ) as beside:
            draft = Path(beside) / "new"
            shutil.copytree(run, draft)
            yield draft
            _replace(target, draft, Path(beside) / "old")
    except OSError as error:
        raise RunError(
            f"cannot write '{target}': {error.strerror or error}; free some space or choose another --out: the run is "
            "as it was"
        ) from None


def _replace(target: Path, draft: Path, old: Path) -> None:
    """Put ``draft`` in the place of ``target``, which goes to ``old``, or comes back if that fails."""
    if target.exists():
        target.replace(old)
    try:
        draft.replace(target)
    except BaseException:
        if old.exists():
            old.replace(target)
        raise


def _update_gallery(folder: Path, predictor: Predictor, images: ImageSet | None) -> None:
    """Drop the pictures that are of earlier Gaussians or an earlier evaluation, and add exemplars of new clusters."""
    remove_examples(folder)
    if images is None:
        return
    remove_components(folder)
    clusters = read_gallery(folder).clusters
    if not clusters:
        return
    sizes = _cluster_sizes(predictor)  # (M,)
    class_sizes = np.bincount(predictor.cluster_to_class, sizes)[predictor.cluster_to_class]  # (M,)
    shares = sizes / np.maximum(class_sizes, 1)
    shown = [*clusters, *_find_exemplars(predictor, images, len(clusters))]
    save_clusters(
        folder,
        [replace(each, count=int(sizes[each.cluster]), share=float(shares[each.cluster])) for each in shown],
    )


def _find_exemplars(predictor: Predictor, images: ImageSet, n_clusters: int) -> list[ClusterExemplars]:
    """The images nearest to the mean of each cluster from number ``n_clusters`` on, which is one class each."""
    named = images.with_class_names(predictor.class_names)
    found = []
    for cluster in range(n_clusters, len(predictor.cluster_to_class)):
        class_id = int(predictor.cluster_to_class[cluster])
        members = np.flatnonzero(named.labels == class_id)
        rows = members[sample_rows(np.zeros(len(members), dtype=np.int64), GALLERY_SAMPLE)]
        distances = predictor.detector.squared_distances(embed(predictor.backbone, named, indices=rows))
        nearest = rows[np.argsort(distances[:, cluster], kind="stable")[:EXEMPLARS_PER_CLUSTER]]
        pictures = np.stack([thumbnail(named.read(int(i)), CLUSTER_THUMBNAIL) for i in nearest])
        files = tuple(named.files[i] for i in nearest)
        found.append(ClusterExemplars(cluster, named.class_names[class_id], len(members), 1.0, files, pictures))
    return found
