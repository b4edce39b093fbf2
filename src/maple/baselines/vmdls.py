r"""VMDLS-like: a latent space in which each class is an isotropic Gaussian, far from the others and from the origin.

A simplification of VMDLS (Dinari & Freifeld 2022, "Variational- and metric-based deep latent space for
out-of-distribution detection", https://openreview.net/forum?id=ScLeuUUi9gq). The head maps an embedding f to a
Gaussian over latent points z,

.. math:: q(z \mid x) = \mathcal N\big(m(f), \operatorname{diag} s^2(f)\big),

which a Kullback-Leibler divergence pulls to the prior :math:`\mathcal N(\mu_y, \sigma^2 I)` of its class. The class is
that of the nearest :math:`\mu_c`, and the squared distance to it is the score: images unlike any class lie between the
Gaussians and around the origin.

It keeps the latent space of VMDLS, computed by one pass through one network, but neither its loss nor its score:

- In the paper the means are those of the latent points of the previous epoch, and a triplet and a distancing loss push
  the classes apart; there is no cross-entropy. Here the means are fixed and orthonormal, the arrangement those losses
  aim at, so no class can drift or merge with another; the cross-entropy of the class posteriors :math:`p(c \mid z)`
  pulls a point to its own mean and away from the others.
- In the paper the score is the log-likelihood under one Gaussian with a full covariance per class, fitted after the
  training to latent means concatenated with features of earlier layers. Here it is the distance in the latent space.
- In the paper the reconstruction error of a separate autoencoder weights the log-likelihoods. Here there is none.

Its figures therefore do not measure VMDLS, and it bears another name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.options import AboveZero, NonNegative, Positive, Range, option
from maple.training.loss import LossTerm
from maple.training.recipe import Recipe, Step, register_recipe
from maple.types import About

FIRST_NARROWING = -2.0  # softplus of it is 0.13: posteriors start at 0.94 of the width of the prior


class VmdlsHead(nn.Module):
    r"""From embeddings (N, D) to :math:`-\lVert z - \mu_c \rVert^2 / 2 \sigma^2` (N, C).

    These are the log densities of the classes but for a constant. In training mode z is a sample of the posterior, in
    evaluation mode its mean. The class means (C, L) have length 1, so only ``prior_scale`` :math:`\sigma` matters:
    they lie :math:`\sqrt 2 / \sigma` standard deviations apart (up to L classes are orthogonal, more nearly so).

    The mean is :math:`m = \sigma^2 (A f + b)`: with that factor the logits have the slopes of a linear head with rows
    :math:`\mu_c^\top A` for any :math:`\sigma`, and suit its learning rates. The posterior is no wider than the
    prior, :math:`\log s^2 = \log \sigma^2 - \operatorname{softplus}(\cdot)`: the divergence favours equal width, the
    cross-entropy only narrower ones.

    >>> head = VmdlsHead(embedding_size=8, n_classes=3, latent_size=4, prior_scale=0.2).eval()
    >>> head(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    """

    class_means: Tensor  # (C, L)

    def __init__(self, embedding_size: int, n_classes: int, latent_size: int, prior_scale: float) -> None:
        super().__init__()
        self.prior_scale = prior_scale
        self.mean = nn.Linear(embedding_size, latent_size)
        self.narrowing = nn.Linear(embedding_size, latent_size)
        nn.init.zeros_(self.narrowing.weight)
        nn.init.zeros_(self.narrowing.bias)
        directions = nn.init.orthogonal_(torch.empty(n_classes, latent_size))
        self.register_buffer("class_means", F.normalize(directions, dim=1))

    def posterior(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent points, (N, L) each."""
        mean = self.prior_scale**2 * self.mean(embeddings)
        narrowing = F.softplus(self.prior_scale * self.narrowing(embeddings) + FIRST_NARROWING)
        return mean, 2 * math.log(self.prior_scale) - narrowing

    def forward(self, embeddings: Tensor) -> Tensor:
        mean, log_variance = self.posterior(embeddings)
        z = sample_gaussian(mean, log_variance) if self.training else mean
        squared = (z[:, None] - self.class_means).square().sum(2)  # (N, C, L) -> (N, C)
        return squared / (-2 * self.prior_scale**2)


def sample_gaussian(mean: Tensor, log_variance: Tensor) -> Tensor:
    """One point of each Gaussian (N, L), with gradients to its mean and log variance."""
    return mean + (log_variance / 2).exp() * torch.randn_like(mean)


def kl_divergence(mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_scale: float) -> Tensor:
    r"""KL(N(m, diag s²) || N(μ, σ² I)) in nats (N,), from means and log variances (N, L).

    .. math:: \frac{1}{2} \sum_l r_l - 1 - \log r_l + \frac{(m_l - \mu_l)^2}{\sigma^2}, \quad r_l = s_l^2 / \sigma^2

    >>> zero = torch.zeros(1, 2)
    >>> kl_divergence(zero, zero, zero + 3, prior_scale=1.0)  # equal widths: half the squared distance
    tensor([9.])
    """
    log_ratio = log_variance - 2 * math.log(prior_scale)
    squared = ((mean - prior_mean) / prior_scale).square()
    return (log_ratio.expm1() - log_ratio + squared).sum(1) / 2


@register_recipe("vmdls-like", was="vmdls")
@dataclass(frozen=True, kw_only=True)
class VmdlsRecipe(Recipe):
    r"""After VMDLS (Dinari & Freifeld 2022): a :class:`VmdlsHead`, cross-entropy and the divergence from the prior.

    The width of the prior is set by hand. At the default 0.2 the means lie 7 standard deviations apart and 5 from the
    origin: a sample is nearer to a wrong mean in 0.02 % of the cases, and the logits differ by 25 between a mean and
    the others, which a network can reach (at 0.1 they would by 100). The divergence is in nats, summed over
    the latent dimensions. At weight 0.1 the posteriors stay about as wide as the prior; at 0.01 they shrink to half of
    it where classes are hard to tell apart. It acts from the first step on, since posteriors that have shrunk hardly
    widen again. With 128 latent dimensions up to 128 classes have orthogonal means.

    >>> recipe = VmdlsRecipe(latent_size=32)
    >>> recipe.build_head(embedding_size=64, n_outputs=10).class_means.shape
    torch.Size([10, 32])
    """

    latent_size: Positive = option(128, "size of the latent space")
    kl_weight: NonNegative = option(
        0.1, "weight of the Kullback-Leibler divergence", search=Range((0.01, 0.1, 1.0), (1e-3, 3.0), log=True)
    )
    prior_scale: AboveZero = option(
        0.2,
        "standard deviation of a class, whose mean has length 1",
        search=Range((0.1, 0.2, 0.4), (0.05, 1.0), log=True),
    )

    about: ClassVar[About] = About(
        "VMDLS-like: isotropic Gaussian classes in a latent space; no metric losses, earlier layers or autoencoder",
        "after Dinari & Freifeld 2022",
        "https://openreview.net/forum?id=ScLeuUUi9gq",
        adds="two linear layers to the latent space",
    )
    former_prefix: ClassVar[str] = "vmdls_"
    own_head: ClassVar[bool] = True
    own_detector: ClassVar[str] = "max-logit"
    remedy: ClassVar[str] = "lower --learning-rate or --set vmdls-like.kl_weight, or raise --set vmdls-like.prior_scale"

    def build_head(self, embedding_size: int, n_outputs: int) -> VmdlsHead:
        return VmdlsHead(embedding_size, n_outputs, self.latent_size, self.prior_scale)

    def loss(self, step: Step) -> dict[str, LossTerm]:
        assert isinstance(step.head, VmdlsHead)
        means = step.head.class_means[step.targets]  # (N, L)
        divergence = kl_divergence(*step.head.posterior(step.embeddings), means, step.head.prior_scale)
        return {
            "cross_entropy": LossTerm(F.cross_entropy(step.logits, step.targets)),
            "kl_divergence": LossTerm(divergence.mean(), self.kl_weight),
        }
