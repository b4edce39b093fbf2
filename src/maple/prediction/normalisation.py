"""Find out why the head of a network is worse than the Gaussians of its own embeddings.

Gaussians are fitted on embeddings as they come; the head expects those of its training. The usual reason why it fails
is another normalisation of the images than in training, so the common ones are tried first; another order of the
classes is the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from maple.data.image_set import ImageSet
from maple.decisions.pool import class_probabilities
from maple.networks import Backbone, embed
from maple.networks.backbone import IMAGENET_MEAN, IMAGENET_STD
from maple.prediction.predictor import Predictor
from maple.text import percent
from maple.types import Outputs

TRIED_IMAGES = 500  # evenly spread over the classes
GAP = 0.02  # head behind Gaussians from which on normalisations are tried, and by which one must be better

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Normalisation:
    """(x - mean) / std of images x in [0, 1]."""

    name: str  # behind "with"
    mean: Channels
    std: Channels


COMMON = (
    Normalisation("the mean and deviation of ImageNet", IMAGENET_MEAN, IMAGENET_STD),
    Normalisation("the mean and deviation of CIFAR-10", (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    Normalisation("the mean and deviation of CIFAR-100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    Normalisation("a mean and deviation of 0.5", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    Normalisation("images in 0..1", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    Normalisation("images in 0..255", (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
)


class Trial(NamedTuple):
    """A normalisation, and how the head classifies images with it."""

    normalisation: Normalisation
    accuracy: float
    log_likelihood: float  # per image


@dataclass(frozen=True)
class Disagreement:
    """A head that is worse than the Gaussians, on labelled images that neither has learned from."""

    head: float  # accuracy
    gaussians: float
    n_images: int
    tried: tuple[Trial, ...] = ()

    @property
    def better(self) -> Trial | None:
        """The normalisation with which the head is clearly better and as good as the Gaussians; the likelier of equals.

        A head whose classes are in another order gains by chance with any input that disturbs it.
        """
        best = max(self.tried, key=lambda trial: (round(trial.accuracy, 2), trial.log_likelihood), default=None)
        if best is None or best.accuracy <= self.head + _margin(self.head, self.n_images):
            return None
        return best if best.accuracy >= self.gaussians - _margin(self.gaussians, self.n_images) else None

    def describe(self, backbone: Backbone, remedy: Remedy) -> str | None:
        """A warning that names the normalisation to use, else the order of the classes; ``None`` if neither helps."""
        found = f"the head classifies {percent(self.head)} of {self.n_images} validation images correctly"
        if (trial := self.better) is not None:
            now = f"mean {_numbers(backbone.mean.tolist())} and deviation {_numbers(backbone.std.tolist())}"
            better = f"{percent(trial.accuracy)} with {trial.normalisation.name}{self._others(trial)}"
            return f"{found} with {now}, and {better}: {remedy.normalise(trial.normalisation)}"
        if self.head < self.gaussians / 2:
            return (
                f"{found}, the Gaussians {percent(self.gaussians)}, and no common normalisation of images explains it: "
                f"if its classes are in another order than those of the data, {remedy.order}"
            )
        return None

    def _others(self, best: Trial) -> str:
        """Normalisations that are as good: those of natural images differ little, and a network may not tell them."""
        least = best.accuracy - _margin(best.accuracy, self.n_images)
        names = [each.normalisation.name for each in self.tried if each is not best and each.accuracy >= least]
        return f" (within chance as good: {'; '.join(names)})" if names else ""


class Remedy(NamedTuple):
    """What to do, in the words of the command line or of Python."""

    numbers: str  # with the fields {mean} and {std}
    order: str

    def normalise(self, how: Normalisation) -> str:
        return self.numbers.format(mean=_numbers(how.mean), std=_numbers(how.std))


COMMAND = Remedy("give --mean {mean} --std {std}", "give them with --class-names")
PYTHON = Remedy(
    "pass mean=({mean}), std=({std}) to wrap_backbone or open_model", "number the labels of the images as its logits"
)


def find_disagreement(predictor: Predictor, images: ImageSet, outputs: Outputs) -> Disagreement | None:
    """Compare head and Gaussians on ``outputs`` of labelled ``images``; try normalisations where the head is behind."""
    if outputs.logits is None or not len(outputs):
        return None
    said = predictor.predict_outputs(outputs)
    labels = images.labels
    head, gaussians = (float((ids == labels).mean()) for ids in (said.softmax_class_id, said.md_class_id))
    if gaussians <= head + _margin(head, len(labels)):
        return None
    rows = _spread_rows(labels)
    tried = tuple(_try(predictor, images, rows, each) for each in COMMON)
    head = float((said.softmax_class_id[rows] == labels[rows]).mean())
    gaussians = float((said.md_class_id[rows] == labels[rows]).mean())
    return Disagreement(head, gaussians, len(rows), tried)


def _try(predictor: Predictor, images: ImageSet, rows: np.ndarray, how: Normalisation) -> Trial:
    with normalised_by(predictor.backbone, how):
        outputs = embed(predictor.backbone, images, indices=rows, cluster_to_class=predictor.cluster_to_class)
    complete = predictor.detector.complete(outputs)
    assert complete.logits is not None
    labels, rule = images.labels[rows], predictor.probability.class_rule
    found = class_probabilities(complete.logits, predictor.cluster_to_class, rule)  # (N, C)
    likelihood = np.log(np.maximum(found[np.arange(len(rows)), labels], 1e-30)).mean()
    return Trial(how, float((found.argmax(1) == labels).mean()), float(likelihood))


@contextmanager
def normalised_by(backbone: Backbone, how: Normalisation) -> Iterator[None]:
    """Another normalisation inside the block."""
    before = backbone.mean.clone(), backbone.std.clone()
    try:
        _set_normalisation(backbone, torch.tensor(how.mean), torch.tensor(how.std))
        yield
    finally:
        _set_normalisation(backbone, *before)


def _set_normalisation(backbone: Backbone, mean: torch.Tensor, std: torch.Tensor) -> None:
    with torch.no_grad():
        backbone.mean.copy_(mean)
        backbone.std.copy_(std)


def _spread_rows(labels: np.ndarray) -> np.ndarray:
    """At most ``TRIED_IMAGES`` rows, evenly spread over the classes."""
    order = np.argsort(labels, kind="stable")
    return np.sort(order[np.linspace(0, len(labels) - 1, min(len(labels), TRIED_IMAGES)).astype(np.int64)])


def _margin(accuracy: float, n: int) -> float:
    """Difference of accuracies that is not chance: two standard errors, at least ``GAP``."""
    return max(GAP, 2 * math.sqrt(accuracy * (1 - accuracy) / n))


def _numbers(values: Sequence[float]) -> str:
    """Numbers as the command line takes them.

    >>> _numbers((0.5, 1 / 255, 1.0))
    '0.5,0.00392157,1'
    """
    return ",".join(f"{value:.6g}" for value in values)
