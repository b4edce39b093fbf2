"""Squared distances: to clusters, to a single Gaussian of all images, and outside the principal components.

The chi-square tail of a squared distance is one sum of exponentials, since ONNX has no incomplete gamma function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor, nn
from torch.nn import functional as F

from maple.deploy.graph._constants import SMALLEST, Affine, constant
from maple.detectors.learned import Densities
from maple.stats.background import Background
from maple.stats.gaussians import Gaussians, float32_suffices

ERFC_STEP, ERFC_LOW, ERFC_HIGH = 0.5, -16.0, 44.0  # of the integral in :func:`erfc_terms`


class _UnitRows(torch.autograd.Function):
    """Rows (N, D) divided by their norms, zero rows unchanged: a single ONNX node, which torch would not emit."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1, eps=SMALLEST)

    @staticmethod
    def symbolic(g: Any, rows: Any) -> Any:
        return g.op("LpNormalization", rows, axis_i=1, p_i=2)


class _SquaredLengths(torch.autograd.Function):
    """Squared norms (N, 1) of rows (N, K), also a single ONNX node."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.square().sum(1, keepdim=True)

    @staticmethod
    def symbolic(g: Any, rows: Any) -> Any:
        return g.op("ReduceSumSquare", rows, g.op("Constant", value_t=torch.tensor([1])), keepdims_i=1)


class Project(nn.Module):
    """e / ||e||^exponent W + b (N, K) for embeddings e (N, D); product in ``dtype``, result in float64."""

    weight: Tensor  # (D, K)
    bias: Tensor  # (K,)

    def __init__(self, weight: np.ndarray, bias: np.ndarray, exponent: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.exponent = exponent
        self.register_buffer("weight", constant(weight, dtype))
        self.register_buffer("bias", constant(bias, dtype))

    def forward(self, embedding: Tensor) -> Tensor:
        e = embedding.to(self.weight.dtype)
        if self.exponent == 1:
            e = _UnitRows.apply(e)
        elif self.exponent:
            e = e * torch.linalg.vector_norm(e, dim=1, keepdim=True).clamp_min(SMALLEST) ** -self.exponent
        return torch.addmm(self.bias, e, self.weight).double()


def projection(gaussians: Gaussians) -> Project:
    """From embeddings (N, D) to z = (projection, 1) (N, K + 1); the 1 puts offsets into later products."""
    weight, bias = np.pad(gaussians.matrix, ((0, 0), (0, 1))), np.append(gaussians.offset, 1.0)
    return Project(weight, bias, gaussians.norm_exponent, torch.float32 if gaussians.float32 else torch.float64)


class Distances(nn.Module):
    """Squared distances (N, M) to the clusters of Gaussians, from z = (projection, 1) (N, K + 1).

    With c' = (c, (1 - |c|²) / 2) for a centroid c, a squared distance is |z|² - 2 z c'. With one covariance per
    cluster, it is the squared length of z W, which whitens the deviation from the centroid.
    """

    matrix: Tensor  # (K + 1, M), or (K + 1, M K)

    def __init__(self, gaussians: Gaussians) -> None:
        super().__init__()
        self.shape = gaussians.centroids.shape
        self.full = gaussians.whitenings is not None
        self.register_buffer("matrix", constant(_whitened(gaussians) if self.full else _linear(gaussians)))

    def forward(self, z: Tensor) -> Tensor:
        if self.full:
            return (z @ self.matrix).reshape(-1, *self.shape).square().sum(2)
        return torch.addmm(_SquaredLengths.apply(z), z, self.matrix)


def _linear(gaussians: Gaussians) -> np.ndarray:
    """The matrix (K + 1, M) whose product with z, plus |z|², is the squared distance."""
    centroids = gaussians.centroids
    return np.vstack([-2 * centroids.T, (centroids**2).sum(axis=1) - 1])


def _whitened(gaussians: Gaussians) -> np.ndarray:
    """The matrix (K + 1, M K) from z to its deviations from the centroids, whitened by each covariance."""
    whitenings = gaussians.whitenings
    assert whitenings is not None
    offsets = np.einsum("mk,mkj->mj", gaussians.centroids, whitenings)  # (M, K)
    return np.vstack([np.concatenate(list(whitenings), axis=1), -offsets.ravel()])


def on_map(gaussians: Gaussians) -> np.ndarray:
    """The matrix (K + 1, 2) from z to its position on the map."""
    return np.vstack([gaussians.map_axes, gaussians.on_map(np.zeros((1, gaussians.n_components)))])


class SquaredLength(nn.Module):
    """Squared norm (N, 1) of (e / ||e||^exponent - mean) W for e (N, D); see :class:`Project`."""

    def __init__(
        self, mean: np.ndarray, weight: np.ndarray, exponent: float, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.inside = Project(weight, -mean @ weight, exponent, dtype)

    def forward(self, embedding: Tensor) -> Tensor:
        return _SquaredLengths.apply(self.inside(embedding))


def background_distance(background: Background) -> SquaredLength:
    """The squared distance to a single Gaussian of all images."""
    weight = background.matrix / np.sqrt(background.variances)
    return SquaredLength(background.mean, weight, background.norm_exponent)


def shallow_distance(densities: Densities) -> SquaredLength:
    """The same for the responses of the shallow layer, in float32 if its rounding errors are small enough."""
    background, moments = densities.shallow_background, densities.moments.shallow
    assert moments is not None
    weight = background.matrix / np.sqrt(background.variances)
    single = densities.gaussians.float32 and float32_suffices(moments, weight)
    return SquaredLength(background.mean, weight, 0.0, torch.float32 if single else torch.float64)


class Residual(nn.Module):
    """Squared norm (N, 1) of the part of an embedding outside the principal components: total minus inside."""

    def __init__(self, background: Background) -> None:
        super().__init__()
        self.whole = SquaredLength(background.mean, np.diag(background.scale), background.norm_exponent)
        self.inside = SquaredLength(background.mean, background.matrix, background.norm_exponent)

    def forward(self, embedding: Tensor) -> Tensor:
        return (self.whole(embedding) - self.inside(embedding)).clamp_min(0)


def tail_terms(degrees_of_freedom: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Powers p, rates r and logarithms c (J,) with P(X >= d²) = sum_j exp(p_j log d² - r_j d² + c_j), X chi-square.

    With z = d²/2 the tail is :math:`\sum_i e^{-z} z^i / \Gamma(i + 1)` over i = 0, 1, .., k/2 - 1 for even k; for odd k
    over i = 1/2, 3/2, .., k/2 - 1, plus :func:`erfc_terms`. All terms lie between 0 and 1, so nothing cancels or
    overflows.

    >>> from scipy.stats import chi2
    >>> p, r, c = tail_terms(7)
    >>> abs(np.exp(p * np.log(9.0) - r * 9.0 + c).sum() - chi2.sf(9.0, 7)) < 1e-9
    np.True_
    """
    odd = degrees_of_freedom % 2
    i = np.arange(odd / 2, degrees_of_freedom / 2)
    powers, rates, logs = i, np.full(len(i), 0.5), -i * math.log(2) - gammaln(i + 1)
    if odd:
        more, weights = erfc_terms()
        powers = np.append(powers, np.zeros(len(more)))
        rates, logs = np.append(rates, more / 2), np.append(logs, np.log(weights))
    return powers, rates, logs


def erfc_terms() -> tuple[np.ndarray, np.ndarray]:
    r"""Rates and weights of a sum of exponentials equal to erfc(√z) for all z >= 0, to 1e-9; ONNX Runtime has no erfc.

    .. math:: \mathrm{erfc}(\sqrt z) = \frac 1 \pi \int e^{-z (1 + e^u)} \frac{e^{u/2}}{1 + e^u} du

    by the trapezoidal rule, whose error falls as exp(-π² / step): the integrand is analytic in the strip |Im u| < π/2
    and decays at both ends. The part below the lower end is a geometric series of the same rate.
    """
    u = np.arange(ERFC_LOW, ERFC_HIGH, ERFC_STEP)
    weights = ERFC_STEP / np.pi * np.exp(u / 2) / (1 + np.exp(u))
    weights[0] /= 1 - np.exp(-ERFC_STEP / 2)
    return 1 + np.exp(u), weights


class Tail(nn.Module):
    """The chi-square tail (N,) of squared distances (N, 1)."""

    def __init__(self, degrees_of_freedom: int) -> None:
        super().__init__()
        powers, rates, logs = tail_terms(degrees_of_freedom)
        self.exponents = Affine(np.stack([powers, -rates]), logs)

    def forward(self, squared_distance: Tensor) -> Tensor:
        both = torch.cat([squared_distance.log(), squared_distance], dim=1)  # (N, 2)
        return self.exponents(both).exp().sum(1).clamp_max(1)
