r"""DUQ: one centroid per class, each in its own space, and a kernel of the distance to it.

van Amersfoort et al. 2020, https://arxiv.org/abs/2003.02037. Each class c has a matrix :math:`W_c` (K, D) and a
centroid :math:`e_c` (K,). The kernel of an image with embedding f is

.. math:: K_c = \exp\Big(-\frac{\lVert W_c f - e_c \rVert^2}{2 K \sigma^2}\Big) \in (0, 1].

The class is the one of the largest kernel, and that kernel is the certainty: away from all centroids every kernel
vanishes. The matrices are learned by gradients (binary cross-entropy, each class against the rest), the centroids are
moving averages of the projections of their class. A two-sided penalty keeps the norm of the gradient of the summed
kernels with respect to the image near 1, so that a change of the image changes the embedding.

The kernels of an image do not sum to 1. Its class probabilities, used for calibration error and likelihood, are the
kernels over their sum (the softmax of :math:`\log K_c`): they rank the classes but ignore the distance. The
method's own detector ranks images by its confidence :math:`\max_c K_c`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.options import AboveZero, NoneByName, NonNegative, Positive, Range, Share, option
from maple.training.loss import LossTerm
from maple.training.recipe import Recipe, Step, register_recipe
from maple.types import About

FIRST_SPREAD = 0.05  # standard deviation of the first centroids, as in the published code
FIRST_COUNT = 13.0  # images that a first centroid counts for: about its share of a batch of 128 from ten classes
SMALLEST_SQUARED_NORM = 1e-12  # keeps the slope of the root finite where a gradient vanishes


class DuqHead(nn.Module):
    r"""From embeddings (N, D) to :math:`\log K_c` (N, C); the centroids are buffers, moved by :meth:`update`.

    Memory and time are those of a linear layer with C K outputs.

    >>> head = DuqHead(embedding_size=8, n_classes=3, centroid_size=4, length_scale=0.1)
    >>> log_kernels = head(torch.randn(5, 8))
    >>> log_kernels.shape, bool((log_kernels <= 0).all())
    (torch.Size([5, 3]), True)
    """

    centroids: Tensor  # (C, K)
    counts: Tensor  # (C,)

    def __init__(self, embedding_size: int, n_classes: int, centroid_size: int, length_scale: float) -> None:
        super().__init__()
        self.length_scale = length_scale
        self.weight = nn.Parameter(torch.empty(n_classes, centroid_size, embedding_size))
        nn.init.normal_(self.weight, std=math.sqrt(2 / (n_classes * embedding_size)))
        self.register_buffer("centroids", FIRST_SPREAD * torch.randn(n_classes, centroid_size))
        self.register_buffer("counts", torch.full((n_classes,), FIRST_COUNT))

    def project(self, embeddings: Tensor) -> Tensor:
        """Embeddings (N, D) in the space of each class (N, C, K)."""
        return F.linear(embeddings, self.weight.flatten(0, 1)).unflatten(1, self.centroids.shape)

    def forward(self, embeddings: Tensor) -> Tensor:
        squared = (self.project(embeddings) - self.centroids).square().mean(2)  # (N, C)
        return squared / (-2 * self.length_scale**2)

    @torch.no_grad()
    def update(self, embeddings: Tensor, targets: Tensor, momentum: float) -> None:
        r"""Move each centroid towards the images of its class in this batch.

        With moving averages :math:`N_c` of the images per batch and :math:`m_c` of the sums of their projections, the
        centroid is :math:`m_c / N_c`. Stored are :math:`N_c` and the quotient, since both averages of a class that is
        absent for long approach zero.
        """
        members = F.one_hot(targets, len(self.counts)).to(self.centroids)  # (N, C)
        offsets = self.project(embeddings) - self.centroids  # (N, C, K)
        self.counts.mul_(momentum).add_(members.sum(0), alpha=1 - momentum)
        shift = torch.einsum("nc,nck->ck", members, offsets)
        smallest = torch.finfo(self.counts.dtype).tiny
        self.centroids += (1 - momentum) * shift / self.counts.clamp_min(smallest)[:, None]


def one_against_rest(log_kernels: Tensor, targets: Tensor) -> Tensor:
    r"""Binary cross-entropy, averaged over classes and images, of kernels given by their logarithms (N, C).

    .. math:: -\frac{1}{N C} \sum_{n,c} y_{nc} \log K_{nc} + (1 - y_{nc}) \log(1 - K_{nc})

    In logarithms a kernel may underflow and still have a gradient; :math:`\log(1 - K)` loses no digits near K = 1.

    >>> one_against_rest(torch.tensor([[0.9, 0.2]]).log(), torch.tensor([0]))  # -(log 0.9 + log 0.8) / 2
    tensor(0.1643)
    """
    members = F.one_hot(targets, log_kernels.shape[1]).bool()  # (N, C)
    return -torch.where(members, log_kernels, log_complement(log_kernels)).mean()


def log_complement(log_kernels: Tensor) -> Tensor:
    r"""log(1 - K) from log K <= 0; finite, also where K = 1.

    Below K = 1/2 it is ``log1p(-K)``, above ``log(-expm1(log K))`` (Mächler 2012, "Accurately computing
    log(1 - exp(-|a|))").

    >>> log_complement(torch.tensor([-1e-5, -1.0]))
    tensor([-11.5129,  -0.4587])
    """
    a = log_kernels.clamp_max(-torch.finfo(log_kernels.dtype).eps)
    return torch.where(a > -math.log(2), (-a.expm1()).log(), (-a.exp()).log1p())


def gradient_penalty(log_kernels: Tensor, images: Tensor, std: Tensor) -> Tensor:
    r"""Mean over the batch of :math:`(\lVert \nabla_x \sum_c K_c \rVert - 1)^2`, itself with gradients.

    Here x is the *normalised* image, as in the published experiments: a backbone normalises its images (N, 3, H, W)
    itself, so the gradient is multiplied by the ``std`` (3,) that it divides by. Without that factor the same weight
    would make the kernels four to five times flatter. The paper prints the square of the norm inside the parentheses;
    its published code, for which the weights were found, has the norm. The square grows with the fourth power of the
    gradients and makes a network diverge in its first steps.

    >>> images = torch.tensor([0.3, 0.1, 0.0]).reshape(1, 3, 1, 1).requires_grad_()
    >>> kernel = (-images.square().sum()).exp()  # its gradient is -2 x K: norm 2 sqrt(0.1) exp(-0.1) = 0.5723
    >>> gradient_penalty(kernel.log().reshape(1, 1), images, torch.ones(3)).detach()
    tensor(0.1830)
    """
    (gradients,) = torch.autograd.grad(log_kernels.exp().sum(), images, create_graph=True)  # (N, 3, H, W)
    squared = (gradients * std[:, None, None]).square().sum(dim=(1, 2, 3))
    return ((squared + SMALLEST_SQUARED_NORM).sqrt() - 1).square().mean()


@register_recipe("duq")
@dataclass(frozen=True, kw_only=True)
class DuqRecipe(Recipe):
    """DUQ (van Amersfoort et al. 2020): a :class:`DuqHead`, one class against the rest, and the gradient penalty.

    The defaults are those of the published CIFAR-10 experiment, ``train_duq_cifar.py`` in
    https://github.com/y0ast/deterministic-uncertainty-quantification at commit a4503d9: a penalty of 0.75, and
    centroids as large as the embedding. The code of the first publication had 0.5 and 512; runs keep the options that
    they were made with. The cross-entropy is a mean over the classes, as in that experiment: the weight of
    the penalty is relative to it. The centroids are moved by the embeddings of the step itself, computed in training
    mode before the update; the authors' code recomputes them after the update, by a second pass over the batch in
    evaluation mode (batch normalisation by running statistics). The penalty needs second derivatives; with weight 0
    they are not computed.

    >>> recipe = DuqRecipe(length_scale=0.3)
    >>> recipe.build_head(embedding_size=64, n_outputs=10).centroids.shape
    torch.Size([10, 64])
    """

    length_scale: AboveZero = option(
        0.1, "length scale of the kernel", search=Range((0.05, 0.1, 0.3), (0.03, 1.0), log=True)
    )
    gradient_penalty: NonNegative = option(
        0.75, "weight of the two-sided gradient penalty", search=Range((0.1, 0.5, 1.0), (0.01, 2.0), log=True)
    )
    centroid_momentum: Share = option(0.999, "momentum of the moving averages of the centroids")
    centroid_size: Annotated[Positive | None, NoneByName] = option(
        None, "size of the space of each class, where its centroid is, or 'none' (that of the embedding)"
    )

    about: ClassVar[About] = About(
        "Deterministic uncertainty quantification",
        "van Amersfoort et al. 2020",
        "https://arxiv.org/abs/2003.02037",
        needs="image gradients in training",
        adds="a matrix and a centroid per class",
    )
    former_prefix: ClassVar[str] = "duq_"
    own_head: ClassVar[bool] = True
    needs_image_gradients: ClassVar[bool] = True
    one_process: ClassVar[bool] = True
    own_detector: ClassVar[str] = "max-logit"
    remedy: ClassVar[str] = "lower --learning-rate or --set duq.gradient_penalty, or raise --set duq.length_scale"

    def build_head(self, embedding_size: int, n_outputs: int) -> DuqHead:
        return DuqHead(embedding_size, n_outputs, self.centroid_size or embedding_size, self.length_scale)

    def loss(self, step: Step) -> dict[str, LossTerm]:
        terms = {"binary_cross_entropy": LossTerm(one_against_rest(step.logits, step.targets))}
        if self.gradient_penalty:
            value = gradient_penalty(step.logits, step.images, step.backbone.std)
            terms["gradient_penalty"] = LossTerm(value, self.gradient_penalty)
        return terms

    def after_step(self, step: Step) -> None:
        assert isinstance(step.head, DuqHead)
        step.head.update(step.embeddings, step.targets, self.centroid_momentum)
