"""Relabelling, head growth and fit for training loops outside the package.

:func:`~maple.training.loop.train_backbone` is a complete loop. To add MAPLE to an existing one, with its own data,
augmentation, optimiser and schedule, use a :class:`Relabeller`::

    session = Relabeller(MapleRecipe(), labels, n_classes=10, epochs=30)
    for epoch in range(1, 31):
        for x, y, index in loader:  # of Indexed(images)
            loss = session.loss(backbone, x, session.labels[index])
            ...  # your steps
        session.end_epoch(epoch, backbone, train, validation, optimizer)
    predictor = session.fit(backbone, train, validation, calibration)

``examples/plain_pytorch.py`` is a complete program. Both loops use the same step (:mod:`maple.training.step`) and
relabelling (:mod:`maple.training.relabel`). This module is in ``prediction`` because :meth:`Relabeller.fit` returns a
predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from maple.data.batches import to_input
from maple.data.image_set import ImageSet
from maple.errors import DataError, TrainError, UsageError
from maple.networks import Backbone, Images, as_image_batch, embed
from maple.prediction.fit import Described, embed_if_needed, fit_predictor
from maple.prediction.predictor import Predictor
from maple.training.head import check_optimizes, named_state, replace_head
from maple.training.loss import weighted_sum
from maple.training.maple import MapleRecipe
from maple.training.recipe import Recipe
from maple.training.relabel import PseudoLabels
from maple.training.step import forward_batch
from maple.types import Outputs, Relabelling

OVERSHOOT = 0.25  # tolerated beyond [0, 1], from augmentation by noise or contrast


class Indexed(Dataset):
    """A data set of items (x, label, index), made from items (x, label) or an ``ImageSet``.

    >>> images = ImageSet.from_arrays(np.zeros((3, 8, 8), np.uint8), [1, 0, 1])
    >>> x, label, index = Indexed(images)[2]
    >>> x.shape, label, index
    (torch.Size([3, 8, 8]), 1, 2)
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        if isinstance(self.data, ImageSet):
            image = to_input(torch.from_numpy(self.data.read(index)[None]))[0]  # (3, S, S) in [0, 1]
            return image, int(self.data.labels[index]), index
        x, label, *_ = self.data[index]
        return x, int(label), index


@dataclass(frozen=True)
class EpochEnd:
    """Result of the end of an epoch."""

    epoch: int
    validation_accuracy: float
    relabelled: tuple[int, ...]  # classes whose clusters changed; if there are any, the head is a new one
    n_clusters: int
    relabel_shift: float = 0.0  # largest change of any class probability


class Relabeller:
    """The MAPLE steps of a training, called by any loop.

    ``labels`` (N,) are those of the training images; batches refer to images by position. ``epochs`` is the length of
    the training: the triplet loss warms up over a share of it, and no class is split after the last epoch. ``seed`` is
    that of the clustering. The attribute :attr:`labels` holds the pseudo-labels to train with.

    >>> session = Relabeller(MapleRecipe(), [0, 1, 1, 0], n_classes=2, epochs=10)
    >>> session.labels[torch.tensor([2, 0])]
    tensor([1, 0])
    """

    def __init__(
        self,
        recipe: Recipe,
        labels: np.ndarray | Tensor | Sequence[int],
        n_classes: int,
        *,
        epochs: int,
        seed: int = 0,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(recipe, MapleRecipe):
            raise UsageError(f"recipe '{recipe.name}' works only in train_backbone: use that, or MapleRecipe")
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}: give the length of the training, at least 1")
        self.class_labels = _as_labels(labels, n_classes)  # (N,)
        if class_names is not None and len(class_names) != n_classes:
            raise UsageError(f"{len(class_names)} class_names for {n_classes} classes: give one name per class")
        self.recipe, self.epochs = recipe, epochs
        self.class_names = tuple(map(str, range(n_classes))) if class_names is None else tuple(class_names)
        self.clusters = PseudoLabels(recipe, Relabelling.initial(self.class_labels, n_classes), seed)
        self.epoch = 0  # epochs done
        self._seen = 0  # images seen in this epoch
        self._checked = False  # whether a batch has been checked

    @property
    def relabelling(self) -> Relabelling:
        """The current clusters."""
        return self.clusters.current

    @property
    def labels(self) -> Tensor:
        """The pseudo-label of each training image (N,): its cluster; its class before any split."""
        return torch.from_numpy(self.relabelling.cluster_ids)

    @property
    def n_clusters(self) -> int:
        return self.relabelling.n_clusters

    @property
    def progress(self) -> float:
        """The share of the training that is done, counted in images that :meth:`loss` has seen."""
        return min(1.0, (self.epoch + self._seen / len(self.class_labels)) / self.epochs)

    def loss(self, backbone: Backbone, images: Tensor, pseudo_labels: Tensor) -> Tensor:
        """Run a batch of images (B, 3, H, W) in [0, 1] with pseudo-labels (B,) forward; returns the loss ().

        It is the loss of the recipe: cross-entropy, and the weighted triplet and prototype terms. The head has one
        output per cluster. The values of the first batch are checked.
        """
        check_cluster_head(getattr(backbone, "_orig_mod", backbone), self.n_clusters)  # torch.compile wraps it
        if not self._checked:
            _check_batch(images)
            self._checked = True
        progress = self.progress
        if torch.is_grad_enabled():
            self._seen += len(images)
        step = forward_batch(self.recipe, backbone, images, pseudo_labels, progress)
        return weighted_sum(self.recipe.loss(step))

    def end_epoch(
        self,
        epoch: int,
        backbone: Backbone,
        train: Images,
        validation: Images | Outputs,
        optimizer: torch.optim.Optimizer,
        *,
        workers: int = 0,
    ) -> EpochEnd:
        """After ``epoch`` (counted from 1), split hard classes if the recipe is due, and grow the head, in place.

        ``train`` holds the training images in the order of the labels and without augmentation, in any form that
        :func:`~maple.networks.embed` takes except a loader; ``validation`` images with labels, or outputs. The
        optimiser continues with the new head, whose rows keep the state of their parents. Modules that hold parameters
        of the backbone themselves (DistributedDataParallel, an average of weights) must be created again after a split.
        """
        if not 1 <= epoch <= self.epochs:
            raise UsageError(f"epoch is {epoch}: count from 1 to epochs={self.epochs}, the length given to Relabeller")
        check_training_images(train, self.class_labels)
        check_cluster_head(backbone, self.n_clusters)
        seen, labels = self._validate(epoch, embed_if_needed(backbone, validation, workers, finite=False))
        probabilities = self.recipe.class_probabilities(seen)  # (N, C)
        accuracy = float((probabilities.argmax(1) == labels).mean())
        self.epoch, self._seen = epoch, 0
        read = partial(embed, backbone, train, workers=workers, logits=False)
        after = None
        if epoch < self.epochs:
            after = self.clusters.propose(epoch, probabilities, labels, lambda rows: read(indices=rows).embeddings)
        if after is None:
            return EpochEnd(epoch, accuracy, (), self.n_clusters)
        head = backbone.head
        assert head is not None
        check_optimizes(optimizer, head)
        adopted = self.clusters.adopt(after, backbone, named_state(optimizer, backbone), seen, probabilities)
        replace_head(optimizer, head, backbone, adopted.state)
        return EpochEnd(epoch, accuracy, adopted.classes, self.n_clusters, adopted.shift)

    def _validate(self, epoch: int, outputs: Outputs) -> tuple[Outputs, np.ndarray]:
        """Outputs of the validation images with the current clusters, and their labels; refuses unusable ones."""
        if outputs.labels is None or outputs.logits is None:
            raise UsageError("the validation images have no labels: give an ImageSet, or a Dataset of (x, label)")
        if not np.isin(outputs.labels, self.relabelling.cluster_to_class).all():
            known = f"0 to {len(self.class_names) - 1}"
            raise UsageError(f"some validation labels are not in {known}: leave out images of other classes")
        if not np.isfinite(outputs.logits).all():
            raise TrainError(f"the logits are no longer finite in epoch {epoch}: lower the learning rate")
        cluster_to_class = self.relabelling.cluster_to_class
        return Outputs(outputs.embeddings, outputs.logits, cluster_to_class=cluster_to_class), outputs.labels

    def fit(
        self,
        backbone: Backbone,
        train: Images,
        validation: Images | Outputs,
        calibration: Images | Outputs | None = None,
        *,
        workers: int = 0,
        **options: Any,
    ) -> Predictor:
        """The predictor of the trained network.

        Images as for :meth:`end_epoch`; calibration images must not have been used for any choice before. Further
        options are those of :func:`~maple.prediction.fit.fit_predictor`.
        """
        check_training_images(train, self.class_labels)
        check_cluster_head(backbone, self.n_clusters)
        images = train if isinstance(train, ImageSet) else _describe(train, self.class_names)
        read = partial(embed_if_needed, backbone, workers=workers)
        seen, held = read(validation), None if calibration is None else read(calibration)
        own: dict[str, Any] = {"relabelling": self.relabelling, "class_rule": self.recipe.class_rule}
        return fit_predictor(backbone, images, seen, held, workers=workers, **own, **options)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, to be saved with the states of network and optimiser: tensors and a number."""
        arrays = {field.name: getattr(self.relabelling, field.name) for field in fields(self.relabelling)}
        return {"epoch": self.epoch, **{name: torch.from_numpy(array) for name, array in arrays.items()}}

    def load_state_dict(self, state: Mapping[str, Any], backbone: Backbone) -> None:
        """Continue from a checkpoint; the backbone gets a head for its clusters, into which its weights fit.

        Create the optimiser afterwards, so that its state fits too.
        """
        arrays = {name: np.asarray(value) for name, value in state.items() if name != "epoch"}
        relabelling = Relabelling(**arrays)
        classes = relabelling.cluster_to_class[relabelling.cluster_ids]
        if not np.array_equal(classes, self.class_labels):
            raise UsageError("the checkpoint has other training labels: resume with the same images and labels")
        self.clusters.current, self.epoch, self._seen = relabelling, state["epoch"], 0
        resize_head(backbone, relabelling.n_clusters)


def resize_head(backbone: Backbone, n_outputs: int) -> None:
    """Give the backbone a linear head of ``n_outputs`` unless it has one; the weights are loaded afterwards."""
    require_head(backbone)
    if isinstance(backbone.head, nn.Linear) and backbone.head.out_features != n_outputs:
        backbone.head = nn.Linear(backbone.head_size, n_outputs).to(backbone.head.weight)


def require_head(backbone: Any) -> None:
    """Raise ``UsageError`` unless ``backbone`` is a :class:`Backbone` with a head."""
    if not isinstance(backbone, Backbone) or backbone.head is None:
        remedy = "use maple.wrap_backbone(model), and give its parameters() to the optimiser"
        raise UsageError(f"the loop must train a Backbone with a head: {remedy}")


def check_cluster_head(backbone: Any, n_clusters: int) -> None:
    """Raise ``UsageError`` for a backbone without a linear head of one output per cluster."""
    require_head(backbone)
    head = backbone.head
    if isinstance(head, nn.Linear) and head.out_features == n_clusters:
        return
    what = f"has {head.out_features} outputs" if isinstance(head, nn.Linear) else f"is a {type(head).__name__}"
    raise UsageError(
        f"the head of the backbone {what}, but must be linear with {n_clusters} outputs, one per cluster: "
        f"set backbone.head = torch.nn.Linear(backbone.embedding_size, {n_clusters}) before creating the optimiser, or "
        "load the clusters of the weights with load_state_dict"
    )


def check_training_images(train: Images, labels: np.ndarray) -> None:
    """Raise ``UsageError`` for training images that differ from those of the labels."""
    if not hasattr(train, "__getitem__") and not isinstance(train, ImageSet):
        raise UsageError("the training images are read by position: give the Dataset, not its DataLoader")
    same = len(train) == len(labels)  # type: ignore[arg-type]
    if not same or (isinstance(train, ImageSet) and not np.array_equal(train.labels, labels)):
        raise UsageError("the training images are not those of the labels: give the same images in the same order")


def _as_labels(given: np.ndarray | Tensor | Sequence[int], n_classes: int) -> np.ndarray:
    """Labels (N,) int64; raises an error if a class has no image."""
    labels = given.numpy(force=True) if isinstance(given, Tensor) else np.asarray(given)
    if labels.dtype.kind not in "biu":
        raise UsageError(f"labels of type {labels.dtype}: give class numbers as integers")
    labels = labels.astype(np.int64)
    if labels.ndim != 1 or not len(labels) or labels.min() < 0 or labels.max() >= n_classes:
        raise UsageError(f"labels must be one number from 0 to {n_classes - 1} per image: check labels and n_classes")
    missing = np.flatnonzero(np.bincount(labels, minlength=n_classes) == 0)
    if len(missing):
        raise DataError(f"class {missing[0]} has no training image: add images of it or leave the class out")
    return labels


def _check_batch(images: Tensor) -> None:
    """Raise ``UsageError`` for images that are normalised or not in [0, 1]; augmentation may exceed it slightly."""
    if not images.is_floating_point():
        raise UsageError(f"images of type {images.dtype}: give float in [0, 1], x.float() / 255 for uint8")
    if images.numel() and not (images.min() >= -OVERSHOOT and images.max() <= 1 + OVERSHOOT):
        raise UsageError(
            f"the images of the first batch have values from {float(images.min()):.3g} to {float(images.max()):.3g}: "
            "give float in [0, 1], before any normalisation, since the backbone normalises them itself"
        )


def _describe(images: Any, class_names: tuple[str, ...]) -> Described:
    """Any data set with the attributes of an ``ImageSet`` that fitting needs: class names and image size."""
    arrays = isinstance(images, Tensor | np.ndarray)
    data = TensorDataset(torch.as_tensor(images)) if arrays else images
    first = data[0]
    image = torch.as_tensor(first[0] if isinstance(first, tuple | list) else first)
    return Described(data, class_names, size=int(as_image_batch(image[None]).shape[-1]))
