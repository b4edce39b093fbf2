"""ODIN: softmax at a high temperature, after one step towards the predicted class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import softmax
from torch import Tensor

from maple.data.image_set import ImageSet
from maple.detectors.gradients.base import ImageDetector, ImageReader, as_leaf, image_gradients, move_images
from maple.detectors.logits import probability_of_others
from maple.detectors.registry import register_detector
from maple.errors import UsageError
from maple.networks import Backbone
from maple.options import AboveZero, NonNegative, option
from maple.stats.gaussians import class_logsumexp
from maple.types import About

_EPSILONS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # candidates for 'auto': those of Hsu et al. 2020, and 0


def log_odds_gradient(logits: np.ndarray, cluster_to_class: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    r"""Derivative with respect to the logits (N, M) of the log odds of the most probable class.

    The logit of a class is :math:`g_c = \log \sum_{m \in c} e^{l_m}`, its probability :math:`S_c =
    \mathrm{softmax}(g / T)_c`. With k the most probable class, its log odds are :math:`g_k / T - \log \sum_{c \ne k}
    e^{g_c / T}`, and for a cluster m of class c

    .. math:: \frac{1}{T} \, e^{l_m - g_c} \cdot
              \begin{cases} 1 & c = k \\ -S_c / (1 - S_k) & c \ne k. \end{cases}

    The gradient of :math:`\log S_k` is this times :math:`1 - S_k > 0`: the same signs, but no underflow where
    1 - S_k rounds to 0.

    >>> log_odds_gradient(np.array([[0.0, 0.0, 9999.0]]), np.arange(3))
    array([[-0.5, -0.5,  1. ]])
    """
    log_class = class_logsumexp(logits, cluster_to_class)  # (N, C)
    if log_class.shape[1] < 2:
        raise UsageError("a single class has probability 1 for every image: give at least two classes")
    best = (np.arange(len(logits)), log_class.argmax(axis=1))
    others = log_class / temperature
    others[best] = -np.inf
    per_class = -softmax(others, axis=1)
    per_class[best] = 1.0
    shares = np.exp(logits - log_class[:, cluster_to_class])  # (N, M) of each cluster in its class
    return per_class[:, cluster_to_class] * shares / temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class OdinOptions:
    """Options of ODIN."""

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

    >>> from maple.networks import create_backbone
    >>> train = ImageSet.from_arrays(np.random.default_rng(0).random((4, 8, 8, 3)))
    >>> backbone = create_backbone("resnet9", n_classes=3)
    >>> detector = OdinDetector().fit_images(backbone, train)
    >>> detector.score_images(backbone, train).shape
    (4,)
    """

    about = About(
        "softmax at a high temperature, after a step towards the predicted class",
        "Liang et al. 2018",
        "https://arxiv.org/abs/1706.02690",
        passes="2 forward, 1 backward",
        needs="image gradients, logits",
    )
    epsilon_: float

    def _fit_images(
        self, reader: ImageReader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None
    ) -> None:
        if self.epsilon != "auto":
            self.epsilon_ = float(self.epsilon)
            return
        if validation is None or len(validation) == 0:
            raise UsageError("epsilon 'auto' needs validation images: give fit_images(..., validation), or a number")
        reader.plan(validation)
        parts = []
        for x, _ in reader.batches(validation):
            with image_gradients(reader.backbone):
                parts.append(self._score_steps(reader.backbone, x, _EPSILONS))
        self.epsilon_ = _EPSILONS[int(np.concatenate(parts, axis=1).mean(axis=1).argmin())]

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
            log_class = class_logsumexp(logits, self.cluster_to_class_) / self.temperature
            scores.append(probability_of_others(log_class))
        return np.stack(scores)
