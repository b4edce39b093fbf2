r"""Mahalanobis distances of several layers (Lee et al. 2018, https://arxiv.org/abs/1807.03888), in two versions.

``lee-md`` is tuned on in-distribution images only, ``lee-md-ood`` on out-of-distribution ones. Their common part is
:class:`LayerDistances`; the step on the image is in :mod:`maple.detectors.gradients.base`.

Letters for shapes, besides those of ``types``: B images in a batch, F features of a layer, L layers, S sizes of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from maple.data.image_set import ImageSet
from maple.detectors.base import State, pack_records, unpack_records
from maple.detectors.gradients._layers import average_layers, find_layers
from maple.detectors.gradients.base import ImageDetector, ImageReader, as_leaf, image_gradients, move_images, to_numpy
from maple.detectors.gradients.odin import log_odds_gradient
from maple.detectors.registry import register_detector
from maple.errors import FitError, UsageError
from maple.networks import Backbone
from maple.options import NonNegative, option
from maple.stats.gaussians import Gaussians, class_logsumexp, fit_gaussians, squared_distances
from maple.stats.metrics import auroc
from maple.stats.moments import Moments
from maple.types import About

_MAGNITUDES = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.005, 0.01)  # candidates for 'auto': those of the authors
_ATTACK = 0.05  # size of the adversarial step, on images in [0, 1]
_TUNING_IMAGES = 1000  # of each kind, to choose the step and fit the weights of layers
_FAR = 1000.0
_ABOUT = About(
    "Mahalanobis distances of several layers",
    "Lee et al. 2018",
    "https://arxiv.org/abs/1807.03888",
    passes="1 forward; per layer 1 backward, 1 forward",
    needs="image gradients, several layers",
    adds="class means and a covariance per layer",
)
_MIN_EXAMPLES = 20  # images of each kind to fit the weights of layers


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

    Logistic regression on distances in units of their in-distribution deviation, both kinds weighted equally. Distances
    are clipped at ``_FAR`` deviations: beyond, they carry no further information.

    >>> ind = np.array([[1.0, 5.0], [1.0, 7.0], [2.0, 5.0], [2.0, 7.0]])
    >>> weights, intercept = weigh_layers(ind, ind + [3.0, 0.0])  # the second layer carries no information
    >>> weights.round(1) + 0.0, (ind @ weights + intercept).round(1)
    (array([2.1, 0. ]), array([-4.3, -4.3, -2.1, -2.1]))
    """
    centre, scale = ind.mean(axis=0), ind.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    distances = np.clip((np.concatenate([ind, ood]) - centre) / scale, -_FAR, _FAR)  # (N + N', L)
    is_ood = np.repeat([0, 1], [len(ind), len(ood)])
    fitted = LogisticRegression(class_weight="balanced", solver="newton-cholesky", max_iter=1000).fit(distances, is_ood)
    weights = fitted.coef_[0] / scale
    return weights, float(fitted.intercept_[0] - weights @ centre)


def _sample(images: ImageSet) -> ImageSet:
    """``_TUNING_IMAGES`` of the images, or all where there are fewer, in random order: the same in every call."""
    return images.subset(np.random.default_rng(0).permutation(len(images))[:_TUNING_IMAGES])


def choose_magnitude(ind: np.ndarray, ood: np.ndarray) -> int:
    """Index of the step (of S) that separates the two kinds best, from distances (S, N, L); the smallest among equals.

    Weights of layers are fitted on every second image, the AUROC is measured on the others; images are in random order.
    """
    separations = []
    for known, unknown in zip(ind, ood):
        weights, _ = weigh_layers(known[::2], unknown[::2])
        separations.append(auroc(known[1::2] @ weights, unknown[1::2] @ weights))
    return int(np.argmax(separations))


@dataclass(frozen=True, kw_only=True, eq=False)
class LeeOptions:
    """Options of Mahalanobis distances of several layers."""

    layers: Literal["auto"] | Annotated[tuple[str, ...], Field(min_length=1)] = option(
        "auto", "names of layers of the backbone's body, and 'embedding'; 'auto' takes one per stage and the embedding"
    )
    magnitude: Literal["auto"] | NonNegative = option(
        "auto", "size of the step on images in [0, 1]; 'auto' takes the one that separates images best"
    )


class LayerDistances(LeeOptions, ImageDetector):
    r"""Base of both versions of Lee et al.; they differ in the images that represent out-of-distribution ones.

    At each layer l, classes are Gaussians with one covariance over the averages f of its channels. With
    :math:`d_l(x) = \min_c (f_l - \mu_c)' \Sigma_l^{-1} (f_l - \mu_c)`, the score is the log odds

    .. math:: \sum_l w_l \, d_l(\tilde x_l) + b, \qquad \tilde x_l = x - \epsilon \, \mathrm{sign}(\nabla_x d_l(x)),

    with w and b from a logistic regression, and the epsilon that separates validation images best. In an ensemble, the
    features of a layer are those of all members, concatenated.

    Differences from the authors' code (https://github.com/pokaxpoka/deep_Mahalanobis_detector):

    - Layers are one per stage and the embedding, see :func:`~maple.detectors.gradients._layers.find_layers`; theirs are
      the first convolution and each stage of a ResNet-34 or a DenseNet, the last of which, averaged, is the embedding.
    - The covariance is the shrunk one of :mod:`maple.stats.gaussians`, theirs the empirical one.
    - The regression sees standardised distances and has scikit-learn's default penalty; they choose a penalty by
      cross-validation. Both weigh on one half of the images and judge the step on the other, we by the AUROC, they by
      the true-negative rate at 95 % true positives; then ours weighs again on all.
    """

    layers_: tuple[str, ...]
    gaussians_: dict[str, Gaussians]  # by layer
    magnitude_: float
    weights_: np.ndarray  # (L,)
    intercept_: float

    @abstractmethod
    def _compare(
        self, reader: ImageReader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distances (S, N, L) of in-distribution images, and of images that represent out-of-distribution ones."""

    def _fit_images(
        self, reader: ImageReader, train: ImageSet, validation: ImageSet | None, ood: ImageSet | None
    ) -> None:
        if validation is None or len(validation) == 0:
            raise UsageError(f"the '{self.name}' detector needs validation images: give fit_images(..., validation)")
        validation, ood = _sample(validation), None if ood is None else _sample(ood)
        reader.plan(train, validation, ood)
        automatic = self.layers == "auto"
        self.layers_ = find_layers(reader.backbone, reader.examples(train)) if automatic else tuple(self.layers)
        self.gaussians_ = self._fit_gaussians(reader, train)
        magnitudes = _MAGNITUDES if self.magnitude == "auto" else (float(self.magnitude),)
        ind, other = self._compare(reader, validation, ood, magnitudes)
        if (fewer := min(ind.shape[1], other.shape[1])) < _MIN_EXAMPLES:
            few = f"{fewer} images are too few to weigh the layers of the '{self.name}' detector"
            raise FitError(f"{few}: give at least {_MIN_EXAMPLES} of each kind")
        best = choose_magnitude(ind, other) if len(magnitudes) > 1 else 0
        self.magnitude_ = magnitudes[best]
        self.weights_, self.intercept_ = weigh_layers(ind[best], other[best])

    def _fit_gaussians(self, reader: ImageReader, train: ImageSet) -> dict[str, Gaussians]:
        if n_unknown := int((train.labels < 0).sum()):
            raise FitError(f"{n_unknown} of {len(train)} training images have no label: leave them out of the fit")
        classes = np.unique(train.labels)  # classes with images
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

        ``images`` are (B, 3, H, W) in [0, 1]; ``magnitudes`` default to the step of the score.
        """
        magnitudes = (self.magnitude_,) if magnitudes is None else magnitudes
        distances = np.empty((len(magnitudes), len(images), len(self.layers_)))
        with image_gradients(backbone):
            images = as_leaf(images.to(backbone.mean.device))
            features = average_layers(backbone, images, self.layers_)
            for i, layer in enumerate(self.layers_):
                gaussians, unmoved = self.gaussians_[layer], to_numpy(features[layer])
                derivative = distance_gradient(gaussians, unmoved)
                steps = move_images(images, features[layer], derivative, magnitudes, retain_graph=True)
                for k, (magnitude, moved) in enumerate(zip(magnitudes, steps)):
                    values = to_numpy(average_layers(backbone, moved, [layer])[layer]) if magnitude else unmoved
                    distances[k, :, i] = gaussians.squared_distances(values).min(axis=1)
        return distances

    def _score_batch(self, backbone: Backbone, images: Tensor) -> np.ndarray:
        return self.layer_distances(backbone, images)[0] @ self.weights_ + self.intercept_

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        by_layer = metadata.pop("gaussians").values()
        return arrays | pack_records({f"gaussians.{i}": each for i, each in enumerate(by_layer)}), metadata

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.layers_ = tuple(metadata["layers"])
        names = [f"gaussians.{i}" for i in range(len(detector.layers_))]
        found = unpack_records(Gaussians.from_arrays, arrays, names)
        detector.gaussians_ = dict(zip(detector.layers_, found.values()))
        return detector


@register_detector("lee-md")
class LeeDetector(LayerDistances):
    """Mahalanobis distances of several layers (Lee et al. 2018, https://arxiv.org/abs/1807.03888), no OOD image seen.

    Weights of the layers and size of the step come from validation images against adversarial versions of them, the
    paper's setting without out-of-distribution data: one step of 0.05 away from the predicted class (FGSM, Goodfellow
    et al. 2015, https://arxiv.org/abs/1412.6572), clipped to [0, 1]. Images that are classified correctly before the
    step and not after it are used, or all images if these are fewer than 20. See :class:`LayerDistances`.

    Unlike the authors' code, it uses no third kind of image: the same images with Gaussian noise, which count as
    in-distribution and have to be classified correctly for an image to be used; the code sets the noise level by hand
    for each attack, network and dataset. Their adversarial step goes away from the label, ours from the predicted
    class: the same for correctly classified images.

    >>> from maple.networks import create_backbone
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

    about = replace(_ABOUT, title="Mahalanobis distances of several layers, tuned on in-distribution images only")

    def _compare(
        self, reader: ImageReader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        clean, attacked, useful = [], [], []
        for x, labels in reader.batches(validation):
            adversarial, fooled = self._attack(reader.backbone, x, labels)
            clean.append(self.layer_distances(reader.backbone, x, magnitudes))
            attacked.append(self.layer_distances(reader.backbone, adversarial, magnitudes))
            useful.append(fooled)
        chosen = np.concatenate(useful)
        chosen |= chosen.sum() < _MIN_EXAMPLES  # all images if these are too few
        return np.concatenate(clean, axis=1)[:, chosen], np.concatenate(attacked, axis=1)[:, chosen]

    def _attack(self, backbone: Backbone, images: Tensor, labels: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Adversarial versions of the images, and whether each (B,) changed from a correct to a wrong class."""
        with image_gradients(backbone):
            images = as_leaf(images)
            logits = backbone(images)[1]
            derivative = log_odds_gradient(self._read_logits(logits), self.cluster_to_class_)
            adversarial = next(move_images(images, logits, derivative, [_ATTACK])).clamp(0, 1)
            before, after = self._classify(logits), self._classify(backbone(adversarial)[1])
        return adversarial, (after != before) & ((labels < 0) | (labels == before))

    def _classify(self, logits: Tensor) -> np.ndarray:
        return class_logsumexp(self._read_logits(logits), self.cluster_to_class_).argmax(axis=1)


@register_detector("lee-md-ood")
class LeeOodDetector(LayerDistances):
    """Mahalanobis distances of several layers (Lee et al. 2018), **tuned on out-of-distribution images**.

    Weights of the layers and size of the step come from validation images against the images ``ood`` of
    ``fit_images``. Most results of the paper were obtained this way, with images of the OOD test set. It is an upper
    bound with known OOD images, not comparable with detectors that see none: compare those with ``lee-md``. See
    :class:`LayerDistances`.

    >>> create = LeeOodDetector(magnitude=0.0)
    >>> create.learns_from_ood
    True
    """

    about = replace(
        _ABOUT,
        title="Mahalanobis distances of several layers, tuned on out-of-distribution images",
        needs="image gradients, several layers, out-of-distribution images to be tuned on",
    )
    learns_from_ood = True

    def _compare(
        self, reader: ImageReader, validation: ImageSet, ood: ImageSet | None, magnitudes: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        assert ood is not None  # checked by fit_images
        known, unknown = (
            [self.layer_distances(reader.backbone, x, magnitudes) for x, _ in reader.batches(images)]
            for images in (validation, ood)
        )
        return np.concatenate(known, axis=1), np.concatenate(unknown, axis=1)
