"""Contract of detectors that use input gradients, and their common step on the image.

They move an image one small step in the direction that makes it *more* in-distribution, and score the moved image:
in-distribution images gain more by the step than others. The direction cannot be computed from outputs, so these
detectors derive from :class:`ImageDetector`, which receives the backbone and the images.

**The step and its unit.** The networks of both papers see z = (x - mean) / std. Their code takes the sign of the
gradient with respect to z and divides it by std, channel by channel: z' = z - epsilon sign(dL/dz) / std. Our backbones
normalise inside, and the gradient with respect to x in [0, 1] is dL/dx = (dL/dz) / std, which has the same sign, since
std > 0. Hence x' = mean + std z' = x - epsilon sign(dL/dx): one step of epsilon on the scale of the image *is* the step
of the papers for any normalisation, and their values of epsilon apply unchanged (0.0014 is a third of a grey level out
of 255). A pixel with a gradient of exactly 0 is not moved; the published code moves it up. As there, x' may leave
[0, 1].

**Two factors of the gradient.** The score is a function of a few numbers per image: logits, or the averages of a layer.
Its derivative with respect to them is analytic, in float64, from the same arrays as the score
(:func:`~maple.detectors.gradients.odin.log_odds_gradient`, :func:`~maple.detectors.gradients.lee.distance_gradient`);
the factor of the network is a vector-Jacobian product by autograd. So the direction is correct even where a softmax
rounds to 1.

Letters for shapes, besides those of ``types``: B images in a batch, F features of a layer, S sizes of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from maple.data.image_set import ImageSet, Progress
from maple.detectors.logits import ColumnDetector
from maple.errors import FitError, NotFittedError, UsageError
from maple.networks import Backbone, Images, count_images, evaluating, read_batches
from maple.stats.arrays import check_rows
from maple.types import Outputs

# ------------------------------------------------------------------------------------------- running the backbone


@contextmanager
def image_gradients(backbone: Backbone) -> Iterator[None]:
    """Evaluation mode in float32, with gradients of images but not of parameters, in any mode of the caller.

    Modes of layers and ``requires_grad`` of parameters are restored on exit, also after an exception.
    """
    learning = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    device = backbone.mean.device.type
    with evaluating(backbone), torch.autocast(device, enabled=False), torch.inference_mode(False), torch.enable_grad():
        for parameter in learning:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)


def gradient_sign(outputs: Tensor, images: Tensor, derivative: np.ndarray, retain_graph: bool = False) -> Tensor:
    """Sign of the gradient with respect to ``images`` (B, 3, H, W) of a function of ``outputs`` (B, F).

    ``derivative`` (B, F) is that of the function with respect to the outputs. Its rows are scaled to a largest entry
    of 1, which changes no sign and avoids underflow in float32: in evaluation mode the outputs of an image depend on
    that image alone.

    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> gradient_sign(x**2, x, np.array([[1e-60, -1e-60]]))
    tensor([[ 1., -1.]])
    """
    if not outputs.requires_grad:
        raise UsageError("outputs have no gradient: use only torch operations in forward, without no_grad and detach")
    largest = np.abs(derivative).max(axis=1, keepdims=True)
    scaled = np.divide(derivative, largest, out=np.zeros_like(derivative), where=largest > 0)
    weights = torch.as_tensor(scaled, dtype=outputs.dtype, device=outputs.device)
    (gradient,) = torch.autograd.grad(outputs, images, weights, retain_graph=retain_graph)
    return gradient.sign()


def move_images(
    images: Tensor, outputs: Tensor, derivative: np.ndarray, sizes: Sequence[float], retain_graph: bool = False
) -> Iterator[Tensor]:
    """The images after one step of each size down the gradient: x - size sign(gradient), see :func:`gradient_sign`."""
    step = gradient_sign(outputs, images, derivative, retain_graph) if any(sizes) else torch.zeros_like(images)
    for size in sizes:
        yield images.detach() - size * step


def as_leaf(images: Tensor) -> Tensor:
    """A copy of the images that requires gradients."""
    return images.detach().clone().requires_grad_()


def to_numpy(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


@dataclass(eq=False)
class ImageReader:
    """Reads images in order, unaugmented, onto the device of the backbone.

    ``progress`` is called after each batch with the number of images done and in total.
    """

    backbone: Backbone
    batch_size: int = 128
    workers: int = 0
    progress: Progress | None = None
    done: int = field(default=0, init=False)
    total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}: give at least 1")

    def plan(self, *sets: Images | None) -> None:
        """Set the total number of images for progress reports."""
        self.done, self.total = 0, sum(count_images(images, None) for images in sets if images is not None)

    def batches(self, images: Images) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Images (B, 3, H, W) in [0, 1] and their labels (B,), -1 where unknown."""
        for x, _, labels in read_batches(images, self.batch_size, self.workers, None, ordered=False):
            yield x.to(self.backbone.mean.device), np.full(len(x), -1) if labels is None else labels
            self.done += len(x)
            if self.progress is not None:
                self.progress(self.done, self.total)

    def examples(self, images: ImageSet) -> Tensor:
        """The first two images."""
        if len(images) == 0:
            raise FitError("there are no images to fit: add images")
        x, _, _ = next(read_batches(images.subset(range(min(2, len(images)))), 2, 0, None, ordered=False))
        return x.to(self.backbone.mean.device)


# ------------------------------------------------------------------------------------------------------- contract


class ImageDetector(ColumnDetector):
    """A detector that reads the backbone and the images: ``fit_images`` learns, ``score_images`` ranks.

    To add one, implement ``_fit_images`` and ``_score_batch`` (called within :func:`image_gradients`). Modes,
    statistics, parameters and gradients of the backbone are left unchanged.
    """

    learns_from_ood: ClassVar[bool] = False

    def fit_images(
        self,
        backbone: Backbone,
        train: ImageSet,
        validation: ImageSet | None = None,
        *,
        ood: ImageSet | None = None,
        cluster_to_class: np.ndarray | None = None,
        **reading: Any,
    ) -> Self:
        """Learn from training images and from ``validation`` images, which the network was not trained on.

        ``ood`` holds out-of-distribution images, used only by detectors with ``learns_from_ood``. ``cluster_to_class``
        (M,) is the class of each logit if classes are split. ``reading`` are options of :class:`ImageReader`:
        ``batch_size``, ``workers`` and ``progress``.
        """
        self._check_options()
        if self.learns_from_ood and ood is None:
            raise UsageError(f"the '{self.name}' detector needs fit_images(..., ood=images); 'lee-md' needs none")
        reader = ImageReader(backbone, **reading)
        self.fitted_ = False
        self.cluster_to_class_ = self._read_classes(reader, train, cluster_to_class)
        self._fit_images(reader, train, validation, ood if self.learns_from_ood else None)
        self.fitted_ = True
        return self

    def score_images(self, backbone: Backbone, images: Images, **reading: Any) -> np.ndarray:
        """One score per image (N,), float64, in order; higher is more out-of-distribution.

        ``reading`` as for :meth:`fit_images`.
        """
        self._check_fitted()
        reader = ImageReader(backbone, **reading)
        reader.plan(images)
        parts = [np.empty(0)]
        for x, _ in reader.batches(images):
            with image_gradients(backbone):
                parts.append(self._score_batch(backbone, x))
        return np.concatenate(parts)

    @abstractmethod
    def _fit_images(
        self, reader: ImageReader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None
    ) -> None: ...

    @abstractmethod
    def _score_batch(self, backbone: Backbone, images: Tensor) -> np.ndarray:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""

    # -- outputs do not suffice

    def fit(self, *args: Any, **kwargs: Any) -> Self:
        """Not possible: see :meth:`fit_images`."""
        self._refuse("fit_images")

    def score(self, outputs: Outputs) -> np.ndarray:
        """Not possible: see :meth:`score_images`."""
        self._refuse("score_images")

    def _score(self, outputs: Outputs) -> np.ndarray:
        self._refuse("score_images")

    def _refuse(self, instead: str) -> NoReturn:
        needs = f"the '{self.name}' detector needs image gradients, not outputs"
        raise UsageError(f"{needs}: call {instead} with the backbone and the images, or use maple evaluate RUN")

    def _check_fitted(self) -> None:
        if not self.fitted_:
            raise NotFittedError(f"the '{self.name}' detector is not fitted: call fit_images first")

    # -- logits and their classes

    def _read_classes(self, reader: ImageReader, train: ImageSet, cluster_to_class: np.ndarray | None) -> np.ndarray:
        with image_gradients(reader.backbone), torch.no_grad():
            n_logits = reader.backbone(reader.examples(train))[1].shape[1]
        if cluster_to_class is None:
            return np.arange(n_logits)
        if len(cluster_to_class) != n_logits:
            sizes = f"cluster_to_class has {len(cluster_to_class)} entries for {n_logits} logits"
            raise UsageError(f"{sizes}: give the clusters that the backbone was trained with")
        return np.asarray(cluster_to_class, dtype=np.int64)

    def _read_logits(self, logits: Tensor) -> np.ndarray:
        """Logits (B, M) in float64."""
        self._check_columns(logits.shape[1])
        return check_rows(to_numpy(logits).astype(np.float64), "logits")
