"""The chi-square tail as one sum of exponentials, since ONNX has no incomplete gamma function."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor, nn

from maple.deploy.graph._constants import Affine

ERFC_STEP, ERFC_LOW, ERFC_HIGH = 0.5, -16.0, 44.0  # of the integral in :func:`erfc_terms`


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
