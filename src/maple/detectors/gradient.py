r"""Detectors that need the gradient of the image: their interface, and ODIN (Lee et al.: :mod:`maple.detectors.lee`).

Both move an image one small step in the direction in which it would look *more* in-distribution, and score what comes
out: images of known classes gain more by the step than others do. Outputs cannot tell that direction. So these
detectors derive from :class:`ImageDetector`, which is handed the backbone and the images themselves.

**The step, and its unit.** The networks of both papers see z = (x - mean) / std. Their code takes the sign of the
gradient with respect to z and divides it by std, channel by channel: z' = z - epsilon sign(dL/dz) / std. Our backbones
normalise inside, and the gradient with respect to x in [0, 1] is dL/dx = (dL/dz) / std, which has the same sign, since
std > 0. Hence x' = mean + std z' = x - epsilon sign(dL/dx): one step of epsilon on the scale of the image *is* the step
of the papers, whatever the normalisation, and their values of epsilon hold as they are (0.0014 is a third of a grey
level out of 255). Where a gradient is exactly 0 the pixel stays; the published code moves it up. As there, x' may leave
[0, 1].

**Two halves of a gradient.** What is scored is a function of a few numbers per image: logits, or the averages of a
layer. Its derivative with respect to them is written down, in float64, from the same arrays that score
(:func:`log_odds_gradient`, :func:`~maple.detectors.lee.distance_gradient`); the network's half is a vector-Jacobian
product by autograd. So no algebra is done twice, and the direction is right where a softmax has rounded to 1.

Letters for shapes, besides those of ``types``: B images in a batch, F features of a layer, S sizes of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from maple.data.image_set import ImageSet, Progress
from maple.detectors._shared import LearnedNumbers
from maple.detectors.logits import ColumnDetector, probability_of_others
from maple.detectors.registry import register_detector
from maple.errors import DataError, FitError, NotFittedError, UsageError
from maple.networks import Backbone, Images, count_images, evaluating, read_batches
from maple.options import AboveZero, NonNegative, as_dict, build_options, option
from maple.stats.arrays import count_broken
from maple.stats.gaussians import class_logsumexp
from maple.types import About, Outputs

EPSILONS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # ODIN chooses among them: those of Hsu et al. 2020, and none


# ------------------------------------------------------------------------------------------- running the backbone


@contextmanager
def image_gradients(backbone: Backbone) -> Iterator[None]:
    """Evaluation mode in float32, with gradients of images but none of parameters, whatever the caller's modes.

    Afterwards every layer is in the mode it was in, and every parameter learns that did, also after an exception.
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
    of 1, which changes no sign and keeps float32 from underflowing: in evaluation mode an image's outputs depend on
    that image alone.

    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> gradient_sign(x**2, x, np.array([[1e-60, -1e-60]]))
    tensor([[ 1., -1.]])
    """
    if not outputs.requires_grad:
        raise UsageError(
            "the backbone's outputs have no gradient with respect to the images: let its forward compute with torch "
            "operations only, without no_grad and detach"
        )
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
    """A copy of the images whose gradient can be asked for."""
    return images.detach().clone().requires_grad_()


def to_numpy(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


class ImageReader:
    """Goes over images in order, unaugmented, on the device of the backbone, and reports how far it is."""

    def __init__(self, backbone: Backbone, batch_size: int, workers: int, progress: Progress | None) -> None:
        if batch_size < 1:
            raise UsageError(f"a batch size of {batch_size}: it must be at least 1")
        self.backbone, self.batch_size, self.workers, self.progress = backbone, batch_size, workers, progress
        self.done = self.total = 0

    def plan(self, *sets: Images | None) -> None:
        """Say how many images there will be in all."""
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
    """A detector that is handed the backbone and the images: ``fit_images`` learns, ``score_images`` ranks.

    To add one, fill in ``_fit_images``, ``_score_batch`` (within :func:`image_gradients`) and the state. The backbone
    is left as it was: modes, statistics, parameters and their gradients.
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
        batch_size: int = 128,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> Self:
        """Learn from training images, and from ``validation`` images what needs images the network has not learned.

        ``ood`` holds out-of-distribution images for the detector that is tuned on them; no other one looks at them.
        ``cluster_to_class`` (M,) says which class each logit belongs to where classes are split. ``progress`` is called
        after each batch with the numbers of images done and in all.
        """
        self._check_options()
        if self.learns_from_ood and ood is None:
            raise UsageError(
                f"the '{self.name}' detector is tuned on out-of-distribution images: give fit_images(..., ood=images), "
                "or use 'lee-md', which needs none"
            )
        reader = ImageReader(backbone, batch_size, workers, progress)
        self.fitted_ = False
        self.cluster_to_class_ = self._read_classes(reader, train, cluster_to_class)
        self._fit_images(reader, train, validation, ood if self.learns_from_ood else None)
        self.fitted_ = True
        return self

    def score_images(
        self,
        backbone: Backbone,
        images: Images,
        *,
        batch_size: int = 128,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """One score per image (N,), float64, in order; higher is more out-of-distribution."""
        self._check_fitted()
        reader = ImageReader(backbone, batch_size, workers, progress)
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

    # -- outputs are not enough

    def fit(self, *args: Any, **kwargs: Any) -> Self:
        """Not possible: see :meth:`fit_images`."""
        self._refuse("fit_images")

    def score(self, outputs: Outputs) -> np.ndarray:
        """Not possible: see :meth:`score_images`."""
        self._refuse("score_images")

    def _score(self, outputs: Outputs) -> np.ndarray:
        self._refuse("score_images")

    def _refuse(self, instead: str) -> NoReturn:
        raise UsageError(
            f"the '{self.name}' detector needs image gradients, which outputs do not have: give it the backbone and "
            f"the images ({instead}), or use maple evaluate RUN"
        )

    def _check_fitted(self) -> None:
        if not self.fitted_:
            raise NotFittedError(f"the '{self.name}' detector has not learned anything yet: call fit_images first")

    def _check_options(self) -> None:
        """Constructors only remember."""
        if is_dataclass(self):
            build_options(type(self), as_dict(self), where=type(self).__name__)

    # -- logits and their classes

    def _read_classes(self, reader: ImageReader, train: ImageSet, cluster_to_class: np.ndarray | None) -> np.ndarray:
        with image_gradients(reader.backbone), torch.no_grad():
            n_logits = reader.backbone(reader.examples(train))[1].shape[1]
        if cluster_to_class is None:
            return np.arange(n_logits)
        if len(cluster_to_class) != n_logits:
            raise UsageError(
                f"{len(cluster_to_class)} clusters have a class, but the backbone gives {n_logits} logits: use the "
                "clusters it was trained with"
            )
        return np.asarray(cluster_to_class, dtype=np.int64)

    def _read_logits(self, logits: Tensor) -> np.ndarray:
        """Logits (B, M) in float64."""
        self._check_columns(logits.shape[1])
        array = to_numpy(logits).astype(np.float64)
        if n_broken := count_broken(array):
            raise DataError(f"the logits of {n_broken} of {len(array)} images hold NaN or infinity: leave them out")
        return array


# ----------------------------------------------------------------------------------------------------------- ODIN


def log_odds_gradient(logits: np.ndarray, cluster_to_class: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    r"""Derivative with respect to the logits (N, M) of the log odds of the most probable class.

    The logit of a class is :math:`g_c = \log \sum_{m \in c} e^{l_m}`, its probability :math:`S_c =
    \mathrm{softmax}(g / T)_c`. With k the most probable class, its log odds are :math:`g_k / T - \log \sum_{c \ne k}
    e^{g_c / T}`, and for a cluster m of class c

    .. math:: \frac{1}{T} \, e^{l_m - g_c} \cdot
              \begin{cases} 1 & c = k \\ -S_c / (1 - S_k) & c \ne k. \end{cases}

    The gradient of :math:`\log S_k` is this times :math:`1 - S_k > 0`: the same signs, but no underflow where the
    network is so sure that 1 - S_k rounds to 0.

    >>> log_odds_gradient(np.array([[0.0, 0.0, 9999.0]]), np.arange(3))
    array([[-0.5, -0.5,  1. ]])
    """
    log_class = class_logsumexp(logits, cluster_to_class)  # (N, C)
    if log_class.shape[1] < 2:
        raise UsageError("the probability of the only class is 1 whatever the image: give at least two classes")
    best = (np.arange(len(logits)), log_class.argmax(axis=1))
    others = log_class / temperature
    others[best] = -np.inf
    per_class = -softmax(others, axis=1)
    per_class[best] = 1.0
    shares = np.exp(logits - log_class[:, cluster_to_class])  # (N, M) of each cluster in its class
    return per_class[:, cluster_to_class] * shares / temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class OdinOptions:
    """ODIN."""

    temperature: AboveZero = option(1000.0, "temperature of the softmax")
    epsilon: Literal["auto"] | NonNegative = option(
        0.0014, "size of the step on images in [0, 1]; 'auto' takes the one that makes validation images most confident"
    )


@register_detector("odin")
class OdinDetector(OdinOptions, LearnedNumbers, ImageDetector):
    r"""ODIN (Liang et al. 2018, https://arxiv.org/abs/1706.02690): softmax at a high temperature, after one step.

    With :math:`S_c(x; T) = \mathrm{softmax}(g(x) / T)_c` and k the most probable class,

    .. math:: \tilde x = x - \epsilon \, \mathrm{sign}(-\nabla_x \log S_k(x; T)), \qquad
              \mathrm{score} = 1 - \max_c S_c(\tilde x; T).

    The score is the probability of all *other* classes, in float64: at T = 1000 all probabilities are close to 1/C,
    where float32 would tie images. The paper tunes epsilon on out-of-distribution images; ``epsilon="auto"`` tunes it
    on in-distribution images only, as Generalized ODIN does (Hsu et al. 2020, https://arxiv.org/abs/2002.11297): it
    takes the step after which the mean of max S over the validation images is largest.

    Where classes are split, :math:`g_c` is the log-sum-exp of the logits of the clusters of class c, and the
    temperature divides that: had it divided the logits, a class of two clusters would have probability 2/M for any
    image. So splitting a class without changing its probability leaves the score as it is.

    >>> from maple.networks import create_backbone
    >>> train = ImageSet.from_arrays(np.random.default_rng(0).random((4, 8, 8, 3)))
    >>> backbone = create_backbone("resnet9", n_classes=3)
    >>> detector = OdinDetector().fit_images(backbone, train)
    >>> detector.score_images(backbone, train).shape
    (4,)
    """

    about: ClassVar[About] = About(
        "softmax at a high temperature, after a step towards the predicted class",
        "Liang et al. 2018",
        "https://arxiv.org/abs/1706.02690",
        passes="2 forward, 1 backward",
        needs="image gradients, logits",
    )
    numbers: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon_: float

    def _fit_images(
        self, reader: ImageReader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None
    ) -> None:
        if self.epsilon != "auto":
            self.epsilon_ = float(self.epsilon)
            return
        if validation is None or len(validation) == 0:
            raise UsageError(
                "epsilon 'auto' of the 'odin' detector is learned from validation images: give fit_images some, or "
                "give epsilon a number"
            )
        reader.plan(validation)
        parts = []
        for x, _ in reader.batches(validation):
            with image_gradients(reader.backbone):
                parts.append(self._score_steps(reader.backbone, x, EPSILONS))
        self.epsilon_ = EPSILONS[int(np.concatenate(parts, axis=1).mean(axis=1).argmin())]

    def _score_batch(self, backbone: Backbone, images: Tensor) -> np.ndarray:
        return self._score_steps(backbone, images, (self.epsilon_,))[0]

    def _score_steps(self, backbone: Backbone, images: Tensor, epsilons: Sequence[float]) -> np.ndarray:
        """Scores after a step of each size (S, B)."""
        images = as_leaf(images)
        outputs = backbone(images)[1]
        unmoved = self._read_logits(outputs)
        derivative = -log_odds_gradient(unmoved, self.cluster_to_class_, self.temperature)
        scores = []
        for epsilon, moved in zip(epsilons, move_images(images, outputs, derivative, epsilons)):
            logits = self._read_logits(backbone(moved)[1]) if epsilon else unmoved
            scores.append(self._score_logits(logits))
        return np.stack(scores)

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        return probability_of_others(class_logsumexp(logits, self.cluster_to_class_) / self.temperature)
