"""Add images or whole new classes to a fitted predictor, without retraining and without the old images.

The Gaussians follow from moments, and moments add up: after an update, deviation, PCA, covariance and means equal those
of a fit on all images together. Everything else:

==========================  =========================================================================================
exponent of the norm        stays as chosen on the validation images of the first fit
a new class                 is one cluster, after all others; classes are matched by name. It counts as an average
                            class, or as its own images if they are more:
                            see :func:`maple.detectors.learned.log_priors_of_update`
the network                 stays as it is: ``softmax_class`` is never a new class, whose probability it puts at 0
class probabilities         the network helps decide among its own classes, not whether an image belongs to one of them:
                            see :func:`maple.decisions.pool.pool`
energy                      covers the classes of the network only:
                            see :attr:`maple.detectors.description.Description.energy`
temperature, score          stay, or are fitted again on validation images
thresholds, p-values, sets  are void, since scores change, until calibration images fit them again: p-values are NaN and
                            nothing is flagged
==========================  =========================================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import numpy as np

from maple.data.image_set import ImageSet, Progress
from maple.data.shares import split_indices
from maple.data.sources import open_like
from maple.data.splits import Images
from maple.decisions.calibration import Calibration
from maple.detectors.base import Source
from maple.errors import DataError, UsageError
from maple.networks import embed, embed_batches
from maple.prediction.predictor import Predictor
from maple.text import plural
from maple.types import Outputs

VALIDATION_SHARE = 0.5  # of the images of --calibrate: they fit temperature and score, the others the thresholds


def update_predictor(
    predictor: Predictor,
    images: Images | None = None,
    calibration: Images | None = None,
    validation: Images | None = None,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """A new predictor that has also learned from labelled ``images`` of known or new classes.

    ``validation`` images fit temperature and score again, ``calibration`` images the thresholds; the three sets must be
    disjoint (:func:`cut_calibration`). Paths and torch data sets are opened in the size of the predictor. Images are
    embedded batch by batch, so memory does not grow with their number. Without images of any kind nothing changes.
    """
    new, calibrating, unseen = (_open_for(predictor, given) for given in (images, calibration, validation))
    names = predictor.class_names if new is None else join_class_names(predictor.class_names, new)
    batches = None
    if new is not None and len(new):
        start = partial(embed_batches, predictor.backbone, workers=workers, logits=False, progress=progress)
        batches = start(new.with_class_names(names))
    held = {
        role: embed(predictor.backbone, given.with_class_names(names), workers=workers)
        for role, given in (("calibration", calibrating), ("validation", unseen))
        if given is not None
    }
    return update_from_outputs(predictor, batches, names, **held)


def update_from_outputs(
    predictor: Predictor,
    outputs: Source | None = None,
    class_names: Sequence[str] = (),
    *,
    calibration: Outputs | None = None,
    validation: Outputs | None = None,
) -> Predictor:
    """As :func:`update_predictor`, from outputs of the network; labels index ``class_names``.

    These begin with the names that the predictor knows; the others are new classes.
    """
    names = tuple(class_names) or predictor.class_names
    if names[: len(predictor.class_names)] != predictor.class_names:
        raise UsageError("class_names must begin with the known classes, in their order: use join_class_names")
    updated = copy.copy(predictor)
    updated.detector, updated.class_names = copy.deepcopy(predictor.detector), names
    if outputs is not None:
        updated.detector.extend(outputs)
    if (n_classes := len(updated.detector.learned_.head_classes)) < len(names):
        raise DataError(f"there are no images of the new class '{names[n_classes]}': add some, or leave out its name")
    if validation is not None:
        _refit(updated, validation)
    learned = updated.detector.learned_.cluster_sizes.sum() > predictor.detector.learned_.cluster_sizes.sum()
    if learned or validation is not None:  # scores have changed
        updated.calibration = Calibration.empty(len(names))
    if calibration is not None:
        return updated.calibrate(calibration)
    return updated.decide()


def _refit(predictor: Predictor, validation: Outputs) -> None:
    """Fit score and class probabilities again, on validation images."""
    if (labels := validation.labels) is None:
        raise DataError("validation images need labels to fit the temperature: give Outputs with labels")
    found = predictor.detector.learn_score(validation).describe(validation)
    predictor.probability = predictor.probability.fit(found, labels)


# --- images -----------------------------------------------------------------------------------------------------------


def join_class_names(known: Sequence[str], images: ImageSet) -> tuple[str, ...]:
    """The known names, then those of new classes in the order of ``images``; classes without images are left out.

    >>> images = ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8), [2, 0], ["emu", "fox", "cat"])
    >>> join_class_names(["cat", "dog"], images)
    ('cat', 'dog', 'emu')
    """
    present = np.unique(images.labels[images.labels >= 0])
    return (*known, *(images.class_names[i] for i in present if images.class_names[i] not in known))


def cut_calibration(images: ImageSet, class_names: Sequence[str], seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Validation and calibration images: one half of every class each, split by content.

    Each class of ``class_names`` needs at least two different images: thresholds hold for images drawn like those that
    calibrated them, and a run sees all of its classes.
    """
    images = images.with_class_names(class_names)
    n_distinct = [len(np.unique(images.keys[images.labels == label])) for label in range(len(class_names))]
    if few := [name for name, n in zip(class_names, n_distinct) if n < 2]:
        more = f" and {plural(len(few) - 1, 'other class')} have" if len(few) > 1 else " has"
        remedy = f"calibrate with images of all {len(class_names)} classes of the run"
        raise DataError(f"class '{few[0]}'{more} fewer than two different images in '{images.name}': {remedy}")
    shares = (VALIDATION_SHARE, 1 - VALIDATION_SHARE)
    validation, calibration = split_indices(images.labels, images.keys, shares, seed, class_names)
    return images.subset(validation), images.subset(calibration)


def _open_for(predictor: Predictor, given: Images | None) -> ImageSet | None:
    """Labelled images in the size of the predictor; labels that are only numbers count its classes, then new ones."""
    if given is None:
        return None
    images = open_like(given, predictor.class_names, size=predictor.size, fit=predictor.fit, may_be_new=True)
    _check_images(images, predictor)
    return images


def _check_images(images: ImageSet, predictor: Predictor) -> None:
    if images.size != predictor.size:
        remedy = f"open them with size={predictor.size}, the size of the run"
        raise UsageError(f"the images of '{images.name}' have {images.size} px: {remedy}")
    if unlabelled := int((images.labels < 0).sum()):
        count = f"{unlabelled} of {len(images)} images of '{images.name}'"
        raise DataError(f"{count} have no label: an update needs the class of every image")
