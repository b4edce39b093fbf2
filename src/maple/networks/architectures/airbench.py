"""Airbench: a short network for small images (Jordan 2024, https://arxiv.org/abs/2404.00498).

A frozen 2x2 convolution whitens patches of the image; three groups of two 3x3 convolutions follow, each group halving
the image. The frozen filters are eigenvectors of patches of training images, so :meth:`Airbench.fit_whitening` must
see some of them before the first step. The defaults are those of the publication, except average pooling and ReLU,
which take less time on a CPU. With optimiser ``muon`` and a few epochs it is more accurate than residual
networks of equal cost.

Letters for shapes: N images, H x W their size, P values in a patch (12 for 2x2 pixels in 3 colours).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.errors import DataError, UsageError
from maple.networks.architectures.base import Network, register_family
from maple.text import plural

Pooling = Literal["max", "average"]

KERNEL = 2  # side of a whitened patch
PATCH_VALUES = 3 * KERNEL**2
PATCHES_PER_VALUE = 10  # the covariance of fewer patches is mostly noise
WHITENING_EPSILON = 5e-4  # added to the eigenvalues: bounds the gain of directions with little variance
RELATIVE_FLOOR = 1e-7  # of the largest eigenvalue: smaller ones are rounding
NORM_MOMENTUM = 0.4  # of batch normalisation, in torch's sense: the running statistics follow the last few steps
NORM_EPSILON = 1e-5  # grey images make channels constant, whose rounding the published 1e-12 would amplify


# --- whitening -------------------------------------------------------------------------------------------------------


def whitening_filters(images: Tensor, epsilon: float = WHITENING_EPSILON) -> tuple[Tensor, Tensor]:
    r"""Filters (2P, 3, 2, 2) and biases (2P,) that whiten the patches of images (N, 3, H, W), with both signs.

    With eigenvalues :math:`\lambda` and eigenvectors v of the covariance of all patches x with mean :math:`\mu`, the
    outputs :math:`\pm v^\top (x - \mu) / \sqrt{\lambda + \epsilon}` have mean 0 and covariance 1, unless
    :math:`\lambda` is not much larger than :math:`\epsilon`. Directions without variance (constant or equal channels)
    get filters of zeros, since their outputs would be rounding errors. Directions are sorted by variance, largest
    first, each with both signs, so the identity filters of a network narrower than 2P pass on the largest.

    >>> filters, biases = whitening_filters(torch.rand(20, 3, 8, 8))
    >>> filters.shape, biases.shape
    (torch.Size([24, 3, 2, 2]), torch.Size([24]))
    """
    _check_images(images)
    mean, covariance = _patch_moments(images)  # (P,), (P, P)
    values, vectors = torch.linalg.eigh(covariance)
    varies = values > RELATIVE_FLOOR * values[-1]  # (P,)
    rows = torch.where(varies[:, None], vectors.T / (values.clamp_min(1e-30) + epsilon).sqrt()[:, None], 0)  # (P, P)
    rows = torch.stack([rows, -rows], dim=1).flip(0).reshape(-1, PATCH_VALUES)  # (2P, P), largest eigenvalue first
    return rows.reshape(-1, 3, KERNEL, KERNEL).float(), -(rows @ mean).float()


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < KERNEL:
        raise UsageError(f"whitening of images {tuple(images.shape)}: give (N, 3, H, W), H and W at least {KERNEL}")
    needed = -(-PATCH_VALUES * PATCHES_PER_VALUE // _patches_per_image(images))
    if len(images) < needed:
        raise DataError(
            f"{plural(len(images), 'training image')}, but whitening needs {needed}: add some or use resnet9"
        )


def _patches_per_image(images: Tensor) -> int:
    return (images.shape[2] - KERNEL + 1) * (images.shape[3] - KERNEL + 1)


def _patch_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (P,) and covariance (P, P) of all patches, float64."""
    sums = torch.zeros(PATCH_VALUES, dtype=torch.float64)
    products = torch.zeros(PATCH_VALUES, PATCH_VALUES, dtype=torch.float64)
    for batch in images.cpu().split(500):
        patches = F.unfold(batch, KERNEL).transpose(1, 2).reshape(-1, PATCH_VALUES).double()
        sums += patches.sum(0)
        products += patches.T @ patches
    n = len(images) * _patches_per_image(images)
    mean = sums / n
    return mean, products / n - torch.outer(mean, mean)


# --- layers ----------------------------------------------------------------------------------------------------------


class DiracConv(nn.Conv2d):
    """A 3x3 convolution whose first ``n_in`` filters start as the identity."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, 3, padding=1, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.dirac_(self.weight.data[: self.in_channels])


class BiasNorm(nn.BatchNorm2d):
    """Batch normalisation that learns a bias but no scale, with a high momentum of the running statistics."""

    def __init__(self, n_channels: int) -> None:
        super().__init__(n_channels, eps=NORM_EPSILON, momentum=NORM_MOMENTUM)
        self.weight.requires_grad = False


class Halve(nn.MaxPool2d):
    """2x2 max pooling; the identity for images with a single row or column."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if min(x.shape[2:]) > 1 else x


class ConvGroup(nn.Sequential):
    """Two convolutions, each with normalisation and activation; the image is halved after the first."""

    def __init__(self, n_in: int, n_out: int, activation: type[nn.Module]) -> None:
        super().__init__(
            DiracConv(n_in, n_out),
            Halve(),
            BiasNorm(n_out),
            activation(),
            nn.Dropout(0.0),
            DiracConv(n_out, n_out),
            BiasNorm(n_out),
            activation(),
            nn.Dropout(0.0),
        )


# --- the network -----------------------------------------------------------------------------------------------------


class Airbench(Network):
    """Whitening, three convolution groups and a global pooling.

    The published widths are 64, 256, 256 with max pooling and GELU: 2.0 M parameters and 0.24 GFLOP per 32 x 32 image.
    """

    shallow = "groups.1"

    def __init__(
        self, widths: tuple[int, int, int] = (64, 256, 256), *, pooling: Pooling = "average", gelu: bool = False
    ) -> None:
        super().__init__()
        activation: type[nn.Module] = nn.GELU if gelu else nn.ReLU
        self.embedding_size = widths[-1]
        self.pooling = pooling
        self.whiten = nn.Conv2d(3, 2 * PATCH_VALUES, KERNEL)
        self.whiten.requires_grad_(False)
        self.activation = activation()
        inputs = (2 * PATCH_VALUES, *widths)
        self.groups = nn.Sequential(*(ConvGroup(i, o, activation) for i, o in zip(inputs, widths)))
        self.is_whitened: Tensor
        self.register_buffer("is_whitened", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_whitened:
            raise UsageError(
                "the network whitens its input and has seen no images: call maple.networks.fit_whitening(backbone, "
                "images) with training images before the first step"
            )
        x = self.groups(self.activation(self.whiten(x)))  # (N, D, H/8, W/8)
        return x.amax(dim=(2, 3)) if self.pooling == "max" else x.mean(dim=(2, 3))  # (N, D)

    @torch.no_grad()
    def fit_whitening(self, images: Tensor) -> None:
        """Set the frozen filters from normalised training images (N, 3, H, W); later calls change nothing."""
        if self.is_whitened:
            return
        filters, biases = whitening_filters(images)
        self.whiten.weight.copy_(filters)
        assert self.whiten.bias is not None
        self.whiten.bias.copy_(biases)
        self.is_whitened.fill_(True)

    def initialise_head(self, head: nn.Linear) -> None:
        """Start with small logits (weights of deviation 1 / D): the convolutions then learn before the head grows."""
        nn.init.normal_(head.weight, std=1 / head.in_features)
        if head.bias is not None:
            nn.init.zeros_(head.bias)


MAX_WIDTH = 1024  # as for wide ResNets


@register_family(r"airbench(?:-(\d+))?(-max|-average)?(-gelu|-relu)?", examples=("airbench", "airbench-32"))
def airbench(digits: str | None, pooling: str | None, activation: str | None) -> Airbench:
    """The network ``airbench[-WIDTH][-max|-average][-gelu|-relu]``.

    WIDTH is the width of the first group (default 64); the other groups are four times as wide.

    >>> airbench("32", "-max", None).embedding_size
    128
    """
    width = int(digits or 64)
    if width < 1:
        raise UsageError(f"'airbench-{digits}' has no channels: the width must be at least 1, such as airbench-32")
    if width > MAX_WIDTH:
        raise UsageError(f"'airbench-{digits}' is too large: the width is at most {MAX_WIDTH}")
    widths = (width, 4 * width, 4 * width)
    return Airbench(widths, pooling="max" if pooling == "-max" else "average", gelu=activation == "-gelu")
