"""Fit a predictor: Gaussians on training, probability and score on validation, thresholds on calibration images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from maple.data.decode import Fit
from maple.data.image_set import ImageSet, Progress
from maple.data.sources import open_images, open_like
from maple.data.splits import Images
from maple.decisions.options import DecisionOptions
from maple.decisions.pool import ClassRule
from maple.decisions.probability import Probability
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.networks import Backbone, embed, embed_batches
from maple.networks.embedding import EmbedOptions
from maple.prediction.engine import LOCAL, Engine
from maple.prediction.normalisation import PYTHON, find_disagreement
from maple.prediction.predictor import Predictor
from maple.training.processes import embed_shared, share_of, sum_over_ranks, together
from maple.types import Outputs, Relabelling


def fit_predictor(
    backbone: Backbone,
    train: Images,
    validation: Images | Outputs,
    calibration: Images | Outputs | None = None,
    *,
    relabelling: Relabelling | None = None,
    detector: MapleDetector | None = None,
    fit: Fit = "pad",
    options: DecisionOptions | None = None,
    class_rule: ClassRule = "sum",
    fabric: Any = None,
    workers: int = 0,
    progress: Progress | None = None,
    engine: Engine = LOCAL,
) -> Predictor:
    """Fit the Gaussians on training images, probability and score on validation, thresholds on calibration images.

    Images are embedded without augmentation, batch by batch, so memory does not grow with their number; validation and
    calibration images may be given as outputs of the backbone. Paths and torch data sets are opened as by
    ``open_images``, in the size of the backbone if it knows it; validation and calibration images in the classes of the
    training images. With a ``fabric`` of several processes each embeds its share, and moments are summed over all of
    them. ``progress`` counts the training images; ``engine`` runs the network over them. Where the head is less
    accurate on validation images than the Gaussians, common normalisations of images are tried, and a warning names the
    one to use.

    >>> import maple
    >>> splits = maple.load_splits("digits")
    >>> backbone = maple.create_backbone("resnet9", 10).eval()  # random weights: a trained one says more
    >>> predictor = fit_predictor(backbone, splits.train.subset(range(200)), splits.validation, splits.calibration)
    >>> predictor(splits.test).probabilities.shape
    (178, 10)
    """
    known = _open_training(train, backbone, fit)
    held_out = _open_like(validation, known, fit)
    unseen = embed_if_needed(backbone, held_out, workers, fabric)
    if unseen.labels is None:
        raise UsageError("the validation outputs have no labels: embed labelled images")
    detector = detector or MapleDetector()
    relabelling = relabelling or Relabelling.initial(known.labels, len(known.class_names))
    _check_logits(unseen, relabelling, backbone)
    how: EmbedOptions = {
        "cluster_ids": relabelling.cluster_ids,
        "cluster_to_class": relabelling.cluster_to_class,
        "workers": workers,
        "logits": False,
        "progress": progress,
    }
    if fabric is None or fabric.world_size == 1:
        detector.fit(engine.training(backbone, known, **how), unseen)
    else:
        share = share_of(len(known), fabric.global_rank, fabric.world_size)
        how["indices"] = share if len(share) else np.arange(1)
        in_step = _in_step(fabric, partial(embed_batches, backbone, known, **how), has_share=len(share) > 0)
        detector.fit(in_step, unseen, sum_over_ranks=partial(sum_over_ranks, fabric))
    probability = Probability(class_rule=class_rule).fit(detector.describe(unseen), unseen.labels)
    predictor = Predictor(
        backbone, detector, known.class_names, size=known.size, fit=fit, probability=probability, options=options
    )
    if isinstance(held_out, ImageSet) and (fabric is None or fabric.is_global_zero):
        _warn_of_head(predictor, held_out, unseen)
    held = _open_like(calibration, known, fit)
    if held is not None and len(held):
        predictor.calibrate(embed_if_needed(backbone, held, workers, fabric))
    return predictor


def _check_logits(outputs: Outputs, relabelling: Relabelling, backbone: Backbone) -> None:
    if outputs.logits is not None and outputs.logits.shape[1] != relabelling.n_clusters:
        raise UsageError(
            f"the head of '{backbone.name}' gives {outputs.logits.shape[1]} logits for {relabelling.n_clusters} "
            "classes or clusters of the training images: give a network with a head for them, or set its head to "
            "None, which leaves the Gaussians"
        )


def _warn_of_head(predictor: Predictor, images: ImageSet, outputs: Outputs) -> None:
    """Warn if the head is less accurate than the Gaussians, for a reason that can be named."""
    found = find_disagreement(predictor, images, outputs)
    if found is not None and (text := found.describe(predictor.backbone, PYTHON)) is not None:
        warnings.warn(text, stacklevel=3)


class Described(Subset[Any]):
    """The training images of an own loop, read as that loop reads them, with what fitting needs of an ``ImageSet``."""

    def __init__(self, dataset: Dataset[Any], class_names: Sequence[str], size: int) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]
        self.class_names, self.size = tuple(class_names), size


def _open_training(images: Any, backbone: Backbone, fit: Fit) -> Any:
    """Paths and torch data opened; images that are open as they are."""
    if isinstance(images, ImageSet | Described):
        return images
    return open_images(images, size=backbone.size or "auto", fit=fit)


def _open_like(images: Any, train: ImageSet | Described, fit: Fit) -> Any:
    """Paths and torch data opened as images of the size and classes of ``train``; anything else as it is."""
    return images if isinstance(train, Described) else open_like(images, train.class_names, size=train.size, fit=fit)


def embed_if_needed(backbone: Backbone, images: Any, workers: int, fabric: Any = None, finite: bool = True) -> Outputs:
    """The outputs for ``images``, which may be outputs already; the processes of ``fabric`` share the work."""
    if isinstance(images, Outputs):
        return images
    if isinstance(images, ImageSet):
        return embed_shared(fabric, backbone, images, workers=workers, finite=finite)
    return embed(backbone, images, workers=workers, finite=finite)


def _in_step(fabric: Any, start: Callable[[], Iterator[Outputs]], has_share: bool) -> Callable[[], Iterator[Outputs]]:
    """The same batches; an image that one process cannot read is an error in all processes, before any sum.

    A process without a share embeds an image for the width of its outputs, and adds none.
    """

    def batches() -> Iterator[Outputs]:
        with together(fabric):
            yield from start() if has_share else (outputs[:0] for outputs in start())

    return batches
