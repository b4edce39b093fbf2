r"""SNGP: spectral normalisation, and a Gaussian process of random features instead of the linear head.

Liu et al. 2020, https://arxiv.org/abs/2006.10108. The head is a Gaussian process with the kernel
:math:`a^2 \exp(-\lVert x - x' \rVert^2 / 2 \ell^2)`, in the form of a linear model with R random features (Rahimi &
Recht 2007):

.. math:: \phi(x) = a \sqrt{2 / R}\, \cos(W x + b), \qquad f_c(x) = \beta_c^\top \phi(x),

where the entries of W are normal with standard deviation :math:`1 / \ell` and those of b uniform in
:math:`[0, 2 \pi)`; both are drawn once. The weights :math:`\beta` are learned by gradients like those of any head. The
uncertainty comes from the Laplace approximation of their posterior, over the images of one epoch:

.. math:: \Sigma^{-1} = s I + \sum_n w_n\, \phi_n \phi_n^\top, \qquad v(x) = \phi(x)^\top \Sigma\, \phi(x),

where s is the prior precision. In the paper the weight of an image is :math:`w_n = p_n (1 - p_n)`, with the probability
:math:`p_n` of its most probable class: the curvature of the cross-entropy (likelihood 'multinomial'). In the authors'
code it is 1, as in a regression (likelihood 'gaussian', the default here too). With the former, confidently classified
images contribute nothing, and variances stay large near the training images. The variance v grows with the distance
from them, up to :math:`a^2 / s`, and scales the logits down (mean-field approximation):

.. math:: \bar f_c(x) = f_c(x) / \sqrt{1 + \lambda\, v(x)}.

Defaults are those of the authors' CIFAR-10 experiment, ``baselines/cifar/sngp.py`` and ``wide_resnet_sngp.py`` in
https://github.com/google/uncertainty-baselines as of 2024 (commit d72a5a9): 1024 features of raw embeddings,
frequencies with standard deviation 0.05 (:math:`\ell = 20`) and features without a factor
(:math:`a = \sqrt{R / 2}` = 22.627), likelihood 'gaussian', an exact sum that starts again with each epoch, s = 1,
:math:`\lambda = 20`, no bias, and layers bounded by 6. Differences:

- No dropout; the authors drop a tenth of the filters in every block in training (filter-wise dropout).
- The entries of W are independent; theirs are orthogonal in blocks of rows.
- Weight decay applies to the whole network; theirs does not apply to :math:`\beta`.

Their code of 2021 had other defaults: :math:`\lambda = 25`, and embeddings projected to 128 numbers and normalised
before a kernel of length scale 1.77. Runs keep the options that they were made with. For embeddings whose scale
differs from that of a wide ResNet, ``space="normalised", kernel_scale=1`` makes the length scale independent of it.

Like theirs, this code does not bound batch normalisation. That can stretch distances, so the bound holds for single
layers, not for the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn import functional as F

from maple.baselines.base import CrossEntropy
from maple.baselines.spectral import BoundedRecipe
from maple.errors import TrainError
from maple.networks import Backbone
from maple.options import AboveZero, NonNegative, Positive, Range, option
from maple.training.recipe import Step, register_recipe
from maple.types import About


@dataclass(frozen=True, kw_only=True)
class SngpOptions:
    """Options of the recipe and of its head."""

    spectral_bound: AboveZero = option(
        6.0,
        "largest factor by which a layer may stretch its input",
        search=Range((0.95, 2.0, 6.0), (0.5, 8.0), log=True),
    )
    power_iterations: Positive = option(1, "power iterations per step")
    features: Annotated[int, Interval(ge=1, le=2**15)] = option(1024, "random features of the Gaussian process")
    space: Literal["normalised", "raw"] = option("raw", "embeddings that its kernel compares")
    kernel_scale: AboveZero = option(20.0, "length scale of its kernel; about 1 for normalised embeddings")
    amplitude: AboveZero = option(
        22.627,
        "amplitude of its kernel: how large logits are expected to be",
        search=Range((5.0, 10.0, 20.0), (2.0, 50.0), log=True),
    )
    likelihood: Literal["gaussian", "multinomial"] = option(
        "gaussian", "how images count in its variance: all alike (the authors' code), or by p (1 - p) (their paper)"
    )
    ridge: AboveZero = option(1.0, "prior precision of its weights")
    mean_field: NonNegative = option(
        20.0, "factor of the variance in the mean-field logits; 20 suits about 50,000 images; use less for fewer"
    )


class RandomFeatureHead(nn.Module):
    r"""From embeddings (N, D) to logits (N, C): the mean in training mode, the mean-field logits in evaluation mode.

    The precision matrix is a buffer that :meth:`accumulate` adds to and :meth:`reset` clears; its factor, which gives
    variances, is computed on first use.

    The option ``likelihood`` sets the term that an image adds to that matrix: 'gaussian' the square of its features,
    'multinomial' that square times p (1 - p).

    ``space`` 'normalised' brings each embedding to mean 0 and length 1 (layer normalisation without parameters) before
    the kernel. On the unit sphere, where distances are at most 2, a length scale of about 1 suits any network; the
    kernel then ignores the lengths of embeddings. With ``raw`` the length scale must suit those lengths.

    >>> head = RandomFeatureHead(embedding_size=8, n_outputs=3, options=SngpOptions(features=64))
    >>> embeddings = torch.randn(5, 8)
    >>> head.accumulate(embeddings, head(embeddings))
    >>> head.eval()(embeddings).shape, head.variance(embeddings).shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    frequencies: Tensor  # (R, D)
    phases: Tensor  # (R,)
    precision: Tensor  # (R, R) float64, without the ridge: small beside a sum over many images
    n_images: Tensor  # (), number of images in the precision
    factor: Tensor | None  # (R, R) lower triangular L, with L' L = inverse of the precision and its ridge

    def __init__(self, embedding_size: int, n_outputs: int, options: SngpOptions) -> None:
        super().__init__()
        self.out_features, self.options = n_outputs, options
        self.output = nn.Linear(options.features, n_outputs, bias=False)
        self.register_buffer("frequencies", torch.randn(options.features, embedding_size) / options.kernel_scale)
        self.register_buffer("phases", 2 * math.pi * torch.rand(options.features))
        self.register_buffer("precision", torch.zeros(options.features, options.features, dtype=torch.float64))
        self.register_buffer("n_images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", None, persistent=False)

    def features(self, embeddings: Tensor) -> Tensor:
        """Random features (N, R) of embeddings (N, D)."""
        if self.options.space == "normalised":
            size = embeddings.shape[1:]
            embeddings = F.layer_norm(embeddings, size) / math.sqrt(size.numel())
        turns = F.linear(embeddings, self.frequencies, self.phases)
        return self.options.amplitude * math.sqrt(2 / len(self.phases)) * turns.cos()

    def forward(self, embeddings: Tensor) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            features = self.features(embeddings.float())
            logits = self.output(features)
            if self.training:
                return logits
            return mean_field_logits(logits, self._variance(features), self.options.mean_field)

    def variance(self, embeddings: Tensor) -> Tensor:
        """Posterior variance (N,) of the logits of embeddings (N, D); the same for all classes."""
        return self._variance(self.features(embeddings))

    def _variance(self, features: Tensor) -> Tensor:
        if self.factor is None:
            self.factor = self._invert()
        return F.linear(features, self.factor).square().sum(1)

    def _invert(self) -> Tensor:
        """The inverse of the Cholesky factor of the precision matrix (R, R)."""
        if not self.n_images:
            raise TrainError("recipe 'sngp' has no variances before its first epoch: train before predicting")
        identity = torch.eye(len(self.precision)).to(self.precision)
        lower, failed = torch.linalg.cholesky_ex(self.precision + self.options.ridge * identity)
        if failed or not lower.isfinite().all():
            raise TrainError(
                "the precision matrix of recipe 'sngp' is not positive definite, the training has diverged: "
                f"start again with --overwrite and {SngpRecipe.remedy}, or raise --set sngp.ridge"
            )
        return torch.linalg.solve_triangular(lower, identity, upper=False).to(self.phases)

    def reset(self) -> None:
        """Remove all images: the precision is that of the prior."""
        self.precision.zero_()
        self.n_images.zero_()
        self.factor = None

    @torch.no_grad()
    def accumulate(self, embeddings: Tensor, logits: Tensor) -> None:
        """Add images to the precision matrix: embeddings (N, D) and their logits (N, C) in training mode."""
        features = self.features(embeddings).to(self.precision)  # products of float32 would round away the ridge
        if self.options.likelihood == "multinomial":
            top = logits.softmax(1).amax(1)  # (N,)
            features = (top * (1 - top)).sqrt()[:, None] * features
        self.precision += features.T @ features
        self.n_images += len(features)
        self.factor = None

    def _load_from_state_dict(self, *args: object, **keywords: object) -> None:
        self.factor = None  # of the former precision
        super()._load_from_state_dict(*args, **keywords)


def mean_field_logits(logits: Tensor, variance: Tensor, factor: float) -> Tensor:
    r"""Logits (N, C) divided by :math:`\sqrt{1 + \lambda v}`, from their variances (N,).

    Their softmax approximates the mean of the softmax over the posterior (Lu et al. 2020,
    https://arxiv.org/abs/2006.07584). :math:`\lambda = \pi / 8` comes from the probit approximation of the logistic;
    the authors of SNGP tune it instead, to 20 on CIFAR-10. Variances fall with the number of training images, so fewer
    images need a smaller factor.

    >>> mean_field_logits(torch.tensor([[2.0, 4.0]]), torch.tensor([3.0]), factor=1.0)
    tensor([[1., 2.]])
    """
    return logits / (1 + factor * variance).sqrt()[:, None]


@register_recipe("sngp")
@dataclass(frozen=True, kw_only=True)
class SngpRecipe(SngpOptions, BoundedRecipe, CrossEntropy):
    """SNGP (Liu et al. 2020): cross-entropy, bounded layers, and a Gaussian process of random features as head.

    The precision matrix is that of the last epoch: it is cleared before each epoch and grows with every step. The
    equations of the paper are ``likelihood="multinomial"`` with ``mean_field=0.39``. Defaults: uncertainty-baselines as
    of 2024 (see the module).

    >>> SngpRecipe(features=256).build_head(embedding_size=128, n_outputs=10)(torch.randn(4, 128)).shape
    torch.Size([4, 10])
    """

    about: ClassVar[About] = About(
        "SNGP: bounded layers, random-feature Gaussian process",
        "Liu et al. 2020",
        "https://arxiv.org/abs/2006.10108",
        adds="R (D + C) weights and an R x R matrix, R = 1024",
    )
    former_prefix: ClassVar[str] = "sngp_"
    own_head: ClassVar[bool] = True
    one_process: ClassVar[bool] = True  # each process would have the precision of its own images only
    own_detector: ClassVar[str] = "energy"  # ranks as the Dempster-Shafer score C / (C + sum exp f) of the authors does
    remedy: ClassVar[str] = "lower --learning-rate or --set sngp.spectral_bound"

    def build_head(self, embedding_size: int, n_outputs: int) -> RandomFeatureHead:
        return RandomFeatureHead(embedding_size, n_outputs, self)

    def begin_epoch(self, backbone: Backbone, epoch: int, epochs: int) -> None:
        assert isinstance(backbone.head, RandomFeatureHead)
        backbone.head.reset()

    def after_step(self, step: Step) -> None:
        assert isinstance(step.head, RandomFeatureHead)
        step.head.accumulate(step.embeddings, step.logits)
