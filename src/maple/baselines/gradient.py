r"""Detectors that need the gradient of the image: ODIN, and Mahalanobis distances of several layers (Lee et al.).

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
layer. Its derivative with respect to them is written down here, in float64, from the same arrays that score
(:func:`log_odds_gradient`, :func:`distance_gradient`); the network's half is a vector-Jacobian product by
autograd. So no algebra is done twice, and the direction is right where a softmax has rounded to 1.

Letters for shapes, besides those of ``types``: B images in a batch, F features of a layer, L layers, S sizes of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self

import numpy as np
import torch
from pydantic import Field
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maple.backbone import Backbone, Images, count_images, evaluating, read_batches, same_values
from maple.config import AboveZero, NonNegative, as_dict, build_options, option
from maple.detector import ColumnDetector, State, probability_of_others, register_detector
from maple.errors import DataError, FitError, NotFittedError, UsageError, suggest
from maple.gaussian import Gaussians, Moments, class_logsumexp, fit_gaussians, squared_distances
from maple.images import ImageSet, Progress
from maple.metrics import auroc
from maple.types import About, Outputs

EPSILONS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # ODIN chooses among them: those of Hsu et al. 2020, and none
MAGNITUDES = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.005, 0.01)  # Lee et al. choose among them
ATTACK = 0.05  # size of the adversarial step of Lee et al., on images in [0, 1]
EMBEDDING = "embedding"  # the name of the embedding among the layers
TUNING_IMAGES = 1000  # of each kind, from which Lee et al. choose the step and weigh the layers
FAR = 1000.0
MIN_EXAMPLES = 20  # images on each side, in- and out-of-distribution, from which layers are weighed


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


def _as_leaf(images: Tensor) -> Tensor:
    """A copy of the images whose gradient can be asked for."""
    return images.detach().clone().requires_grad_()


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


class _Reader:
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
        reader = _Reader(backbone, batch_size, workers, progress)
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
        reader = _Reader(backbone, batch_size, workers, progress)
        reader.plan(images)
        parts = [np.empty(0)]
        for x, _ in reader.batches(images):
            with image_gradients(backbone):
                parts.append(self._score_batch(backbone, x))
        return np.concatenate(parts)

    @abstractmethod
    def _fit_images(
        self, reader: _Reader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None
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

    def _read_classes(self, reader: _Reader, train: ImageSet, cluster_to_class: np.ndarray | None) -> np.ndarray:
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
        array = _numpy(logits).astype(np.float64)
        if n_broken := int((~np.isfinite(array)).any(axis=1).sum()):
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
class OdinDetector(OdinOptions, ImageDetector):
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

    >>> from maple.backbone import create_backbone
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
    epsilon_: float

    def _fit_images(self, reader: _Reader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None) -> None:
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
        images = _as_leaf(images)
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

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        return arrays, metadata | {"epsilon": self.epsilon_}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.epsilon_ = float(metadata["epsilon"])
        return detector


# -------------------------------------------------------------------------------------------- features of layers


class _Call(NamedTuple):
    """What a layer put out: its name, the height and width of its output, whether it has layers inside."""

    name: str
    size: tuple[int, int]
    is_block: bool


def find_layers(backbone: Backbone, images: Tensor) -> tuple[str, ...]:
    """One layer per stage, from shallow to deep, and the embedding.

    A stage is all that has the same height and width; it is represented by the layer that finishes last in it, of
    those that consist of layers themselves (a block) if there are any: what follows the last block of a stage are the
    first single layers of the block that shrinks the image. Names are those of the modules of ``backbone.body``. Left
    out are single pixels, and a stage whose average is that of a later one or the embedding.

    >>> from maple.backbone import create_backbone
    >>> find_layers(create_backbone("resnet20", n_classes=10), torch.rand(2, 3, 32, 32))
    ('layer1', 'layer2', 'embedding')
    >>> find_layers(create_backbone("wrn-10-1", n_classes=10), torch.rand(2, 3, 32, 32))
    ('blocks.0', 'blocks.1', 'blocks', 'embedding')
    """
    with image_gradients(backbone), torch.no_grad():
        calls = _watch(backbone, images)
        last = {call.size: call for call in calls if not call.is_block}  # later calls replace earlier ones
        last |= {call.size: call for call in calls if call.is_block}
        names = [call.name for call in calls if last[call.size] is call]
        names.append(EMBEDDING)
        features = average_layers(backbone, images, names)
    repeated = {a for a, b in combinations(names, 2) if same_values(features[a], features[b])}
    return tuple(name for name in names if name not in repeated)


def _watch(backbone: Backbone, images: Tensor) -> list[_Call]:
    """The layers of the body with channels (B, F, H, W), in the order in which they finish, each called once."""
    calls: list[_Call] = []
    height, width = images.shape[2:]

    def watch(name: str, layer: nn.Module, output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim != 4:
            return
        h, w = output.shape[2:]
        if h * w > 1 and abs(h * width - w * height) <= max(height, width):  # else not laid out as (B, F, H, W)
            calls.append(_Call(name, (h, w), is_block=next(layer.children(), None) is not None))

    with _listening(_named_layers(backbone), watch):
        backbone.embed(images)
    times = Counter(call.name for call in calls)
    return [call for call in calls if times[call.name] == 1]


def average_layers(backbone: Backbone, images: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Features (B, F) of each layer of the body: averages over height and width; ``embedding`` is the embedding.

    >>> from maple.backbone import create_backbone
    >>> found = average_layers(create_backbone("resnet20", n_classes=10), torch.rand(2, 3, 32, 32), ["layer1"])
    >>> found["layer1"].shape
    torch.Size([2, 16])
    """
    known = _named_layers(backbone)
    if unknown := [name for name in layers if name not in known and name != EMBEDDING]:
        raise UsageError(f"the backbone has no layer '{unknown[0]}': {suggest(unknown[0], [*known, EMBEDDING])}")
    found: dict[str, Tensor] = {}

    def average(name: str, layer: nn.Module, output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim not in (2, 4):
            raise UsageError(
                f"layer '{name}' gives neither channels (N, F, H, W) nor features (N, F): name another one"
            )
        found[name] = (output.mean(dim=(2, 3)) if output.ndim == 4 else output).float()

    with _listening({name: known[name] for name in layers if name != EMBEDDING}, average):
        found[EMBEDDING] = backbone.embed(images)
    if silent := [name for name in layers if name not in found]:
        raise UsageError(f"layer '{silent[0]}' takes no part in the embedding: name another one")
    return {name: found[name] for name in layers}


def _named_layers(backbone: Backbone) -> dict[str, nn.Module]:
    """The layers of the body by name."""
    return {name: layer for name, layer in backbone.body.named_modules() if name}


@contextmanager
def _listening(layers: dict[str, nn.Module], hear: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """While it lasts, ``hear`` gets the name, the layer and the output whenever one of the layers has finished."""

    def listen(name: str, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_hook(lambda layer, inputs, output: hear(name, layer, output))

    handles = [listen(name, layer) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ----------------------------------------------------------------------------- Mahalanobis distances of layers (Lee)


def distance_gradient(gaussians: Gaussians, features: np.ndarray) -> np.ndarray:
    """Derivative of the squared distance to the nearest cluster with respect to the features (N, F).

    In the projection z = f A + b the squared distance is ||z - c||², hence 2 (z - c) A'.

    >>> plane = Gaussians(np.diag([1.0, 2.0]), np.zeros(2), np.array([[0.0, 0.0], [9.0, 9.0]]), np.log([0.5, 0.5]))
    >>> distance_gradient(plane, np.array([[1.0, 1.0]]))  # of f_1² + 4 f_2²
    array([[2., 8.]])
    """
    projection = gaussians.project(features)
    nearest = squared_distances(projection, gaussians.centroids).argmin(axis=1)
    return 2 * (projection - gaussians.centroids[nearest]) @ gaussians.matrix.T


def weigh_layers(ind: np.ndarray, ood: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights (L,) and intercept of the log odds of being out-of-distribution, from distances (N, L) of both kinds.

    Logistic regression on distances in units of their in-distribution deviation, both kinds counting the same. Images
    further out than ``FAR`` deviations count as that far: it is known that they are out, and there is no more to learn.

    >>> ind = np.array([[1.0, 5.0], [1.0, 7.0], [2.0, 5.0], [2.0, 7.0]])
    >>> weights, intercept = weigh_layers(ind, ind + [3.0, 0.0])  # the second layer tells nothing
    >>> weights.round(1) + 0.0, (ind @ weights + intercept).round(1)
    (array([2.1, 0. ]), array([-4.3, -4.3, -2.1, -2.1]))
    """
    centre, scale = ind.mean(axis=0), ind.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    distances = np.clip((np.concatenate([ind, ood]) - centre) / scale, -FAR, FAR)  # (N + N', L)
    is_ood = np.repeat([0, 1], [len(ind), len(ood)])
    fitted = LogisticRegression(class_weight="balanced", solver="newton-cholesky", max_iter=1000).fit(distances, is_ood)
    weights = fitted.coef_[0] / scale
    return weights, float(fitted.intercept_[0] - weights @ centre)


def _sample(images: ImageSet) -> ImageSet:
    """``TUNING_IMAGES`` of the images, or all where there are fewer, in random order: the same in every call."""
    return images.subset(np.random.default_rng(0).permutation(len(images))[:TUNING_IMAGES])


def choose_magnitude(ind: np.ndarray, ood: np.ndarray) -> int:
    """Which of S steps tells the two kinds apart best, from distances (S, N, L): an index; the smallest among equals.

    Layers are weighed on every second image, and the AUROC is measured on the others; images are in random order.
    """
    separations = []
    for known, unknown in zip(ind, ood):
        weights, _ = weigh_layers(known[::2], unknown[::2])
        separations.append(auroc(known[1::2] @ weights, unknown[1::2] @ weights))
    return int(np.argmax(separations))


@dataclass(frozen=True, kw_only=True, eq=False)
class LeeOptions:
    """Mahalanobis distances of several layers."""

    layers: Literal["auto"] | Annotated[tuple[str, ...], Field(min_length=1)] = option(
        "auto", "names of layers of the backbone's body, and 'embedding'; 'auto' takes one per stage and the embedding"
    )
    magnitude: Literal["auto"] | NonNegative = option(
        "auto", "size of the step on images in [0, 1]; 'auto' takes the one that tells validation images apart best"
    )


class LayerDistances(LeeOptions, ImageDetector):
    r"""What both versions of Lee et al. share; they differ in the images that stand for out-of-distribution ones.

    At each layer l, classes are Gaussians with one covariance over the averages f of its channels. With
    :math:`d_l(x) = \min_c (f_l - \mu_c)' \Sigma_l^{-1} (f_l - \mu_c)`, the score is the log odds

    .. math:: \sum_l w_l \, d_l(\tilde x_l) + b, \qquad \tilde x_l = x - \epsilon \, \mathrm{sign}(\nabla_x d_l(x)),

    with w and b from a logistic regression, and epsilon the one after which it tells validation images apart best.
    """

    layers_: tuple[str, ...]
    gaussians_: dict[str, Gaussians]  # by layer
    magnitude_: float
    weights_: np.ndarray  # (L,)
    intercept_: float

    @abstractmethod
    def _compare(
        self, reader: _Reader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distances (S, N, L) of in-distribution images, and of images that stand for out-of-distribution ones."""

    def _fit_images(self, reader: _Reader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None) -> None:
        if validation is None or len(validation) == 0:
            raise UsageError(
                f"the '{self.name}' detector weighs layers by validation images: give fit_images(backbone, train, "
                "validation)"
            )
        validation, ood = _sample(validation), None if ood is None else _sample(ood)
        reader.plan(train, validation, ood)
        self.layers_ = (
            find_layers(reader.backbone, reader.examples(train)) if self.layers == "auto" else tuple(self.layers)
        )
        self.gaussians_ = self._fit_gaussians(reader, train)
        magnitudes = MAGNITUDES if self.magnitude == "auto" else (float(self.magnitude),)
        ind, other = self._compare(reader, validation, ood, magnitudes)
        if (fewer := min(ind.shape[1], other.shape[1])) < MIN_EXAMPLES:
            raise FitError(
                f"the '{self.name}' detector weighs layers by {fewer} images, which are too few: give at least "
                f"{MIN_EXAMPLES} of each kind"
            )
        best = choose_magnitude(ind, other) if len(magnitudes) > 1 else 0
        self.magnitude_ = magnitudes[best]
        self.weights_, self.intercept_ = weigh_layers(ind[best], other[best])

    def _fit_gaussians(self, reader: _Reader, train: ImageSet) -> dict[str, Gaussians]:
        if n_unknown := int((train.labels < 0).sum()):
            raise FitError(f"{n_unknown} of {len(train)} training images have no label: leave them out of the fit")
        classes = np.unique(train.labels)  # those there are
        moments: dict[str, Moments] = {}
        for x, labels in reader.batches(train):
            with image_gradients(reader.backbone), torch.no_grad():
                features = average_layers(reader.backbone, x, self.layers_)
            for layer, values in features.items():
                moments.setdefault(layer, Moments(len(classes), values.shape[1]))
                moments[layer].update(values, np.searchsorted(classes, labels))
        return {layer: fit_gaussians(each, pca=False) for layer, each in moments.items()}

    def layer_distances(
        self, backbone: Backbone, images: Tensor, magnitudes: Sequence[float] | None = None
    ) -> np.ndarray:
        """Squared distance to the nearest class at each layer, after a step of each size (S, B, L).

        ``images`` are (B, 3, H, W) in [0, 1]; without ``magnitudes`` the one step is that of the score.
        """
        magnitudes = (self.magnitude_,) if magnitudes is None else magnitudes
        distances = np.empty((len(magnitudes), len(images), len(self.layers_)))
        with image_gradients(backbone):
            images = _as_leaf(images.to(backbone.mean.device))
            features = average_layers(backbone, images, self.layers_)
            for i, layer in enumerate(self.layers_):
                gaussians, unmoved = self.gaussians_[layer], _numpy(features[layer])
                derivative = distance_gradient(gaussians, unmoved)
                steps = move_images(images, features[layer], derivative, magnitudes, retain_graph=True)
                for k, (magnitude, moved) in enumerate(zip(magnitudes, steps)):
                    values = _numpy(average_layers(backbone, moved, [layer])[layer]) if magnitude else unmoved
                    distances[k, :, i] = gaussians.squared_distances(values).min(axis=1)
        return distances

    def _score_batch(self, backbone: Backbone, images: Tensor) -> np.ndarray:
        return self.layer_distances(backbone, images)[0] @ self.weights_ + self.intercept_

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        arrays |= {"weights": self.weights_, "intercept": np.array([self.intercept_])}
        for i, layer in enumerate(self.layers_):
            saved = self.gaussians_[layer].to_arrays()
            arrays |= {f"gaussians.{i}.{name}": array for name, array in saved.items()}
        return arrays, metadata | {"layers": list(self.layers_), "magnitude": self.magnitude_}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.layers_, detector.magnitude_ = tuple(metadata["layers"]), float(metadata["magnitude"])
        detector.weights_, detector.intercept_ = arrays["weights"], arrays["intercept"].item()
        detector.gaussians_ = {}
        for i, layer in enumerate(detector.layers_):
            prefix = f"gaussians.{i}."
            saved = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            detector.gaussians_[layer] = Gaussians.from_arrays(saved)
        return detector


@register_detector("lee-md")
class LeeDetector(LayerDistances):
    """Mahalanobis distances of several layers (Lee et al. 2018, https://arxiv.org/abs/1807.03888), no OOD image seen.

    Weights of the layers and size of the step come from validation images against adversarial versions of them, the
    paper's setting without out-of-distribution data: one step of 0.05 away from the predicted class (FGSM, Goodfellow
    et al. 2015, https://arxiv.org/abs/1412.6572), kept within [0, 1]. Used are the images that were right before the
    step and change class by it; all of them where these are fewer than 20. See :class:`LayerDistances`.

    >>> from maple.backbone import create_backbone
    >>> pixels, labels = np.random.default_rng(0).random((120, 8, 8, 3)), np.arange(120) % 2
    >>> train = ImageSet.from_arrays(pixels[:80], labels[:80])
    >>> validation = ImageSet.from_arrays(pixels[80:], labels[80:])
    >>> backbone = create_backbone("resnet9", n_classes=2)
    >>> detector = LeeDetector(magnitude=0.001).fit_images(backbone, train, validation)
    >>> detector.layers_
    ('blocks.0', 'blocks.2', 'blocks.3', 'embedding')
    >>> detector.score_images(backbone, validation).shape
    (40,)
    """

    about: ClassVar[About] = About(
        "Mahalanobis distances of several layers, tuned on in-distribution images only",
        "Lee et al. 2018",
        "https://arxiv.org/abs/1807.03888",
        passes="1 forward; per layer 1 backward, 1 forward",
        needs="image gradients, several layers",
        adds="class means and a covariance per layer",
    )

    def _compare(
        self, reader: _Reader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        clean, attacked, useful = [], [], []
        for x, labels in reader.batches(validation):
            adversarial, fooled = self._attack(reader.backbone, x, labels)
            clean.append(self.layer_distances(reader.backbone, x, magnitudes))
            attacked.append(self.layer_distances(reader.backbone, adversarial, magnitudes))
            useful.append(fooled)
        chosen = np.concatenate(useful)
        if chosen.sum() < MIN_EXAMPLES:
            chosen[:] = True
        return np.concatenate(clean, axis=1)[:, chosen], np.concatenate(attacked, axis=1)[:, chosen]

    def _attack(self, backbone: Backbone, images: Tensor, labels: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Adversarial versions of the images, and which of them (B,) were right, as far as known, and now are not."""
        with image_gradients(backbone):
            images = _as_leaf(images)
            logits = backbone(images)[1]
            derivative = log_odds_gradient(self._read_logits(logits), self.cluster_to_class_)
            adversarial = next(move_images(images, logits, derivative, [ATTACK])).clamp(0, 1)
            before, after = self._classify(logits), self._classify(backbone(adversarial)[1])
        return adversarial, (after != before) & ((labels < 0) | (labels == before))

    def _classify(self, logits: Tensor) -> np.ndarray:
        return class_logsumexp(self._read_logits(logits), self.cluster_to_class_).argmax(axis=1)


@register_detector("lee-md-ood")
class LeeOodDetector(LayerDistances):
    """Mahalanobis distances of several layers (Lee et al. 2018), **tuned on out-of-distribution images**.

    Weights of the layers and size of the step come from validation images against the images ``ood`` of
    ``fit_images``. This is how most figures of the paper were made, with images of the very set that is tested on. It
    says what layers can tell when the unknown is known beforehand, and is no match for detectors that see none of it:
    compare those with ``lee-md``. See :class:`LayerDistances`.

    >>> create = LeeOodDetector(magnitude=0.0)
    >>> create.learns_from_ood
    True
    """

    about: ClassVar[About] = About(
        "Mahalanobis distances of several layers, tuned on out-of-distribution images",
        "Lee et al. 2018",
        "https://arxiv.org/abs/1807.03888",
        passes="1 forward; per layer 1 backward, 1 forward",
        needs="image gradients, several layers, out-of-distribution images to be tuned on",
        adds="class means and a covariance per layer",
    )
    learns_from_ood: ClassVar[bool] = True

    def _compare(
        self, reader: _Reader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        assert ood is not None  # checked by fit_images
        known, unknown = (
            [self.layer_distances(reader.backbone, x, magnitudes) for x, _ in reader.batches(images)]
            for images in (validation, ood)
        )
        return np.concatenate(known, axis=1), np.concatenate(unknown, axis=1)
