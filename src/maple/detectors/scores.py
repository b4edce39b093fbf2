"""OOD scores of one forward pass, from squared distances, logits and responses of a shallow layer.

==============  ====================================================================================
``distance``    squared distance to the nearest cluster, embeddings not normalised: the paper's
``relative``    ``distance`` minus the squared distance to the background Gaussian (Ren et al. 2021)
``normalised``  squared distance to the nearest cluster, embeddings divided by a power of their norm
``residual``    squared length of the normalised embedding outside the principal components
``spread``      smallest over mean squared distance to the clusters, normalised embeddings
``energy``      negative log-sum-exp of the logits (Liu et al. 2020)
``shallow``     squared distance of the responses of a shallow layer to their background Gaussian
``fused``       surprise of ``energy`` + 0.5 ``spread``, plus ``shallow`` and ``distance`` in their far tails
==============  ====================================================================================

All are higher for images more out-of-distribution. None is fitted on out-of-distribution images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import logsumexp

from maple.errors import DataError
from maple.stats.arrays import ArrayRecord, as_array

Score = Literal["distance", "relative", "normalised", "residual", "spread", "energy", "shallow", "fused"]
SCORES: tuple[Score, ...] = get_args(Score)
NEEDS_PLAIN: tuple[Score, ...] = ("distance", "relative")  # distances of embeddings that are not normalised
TAIL = 0.1  # share of the images modelled by the exponential tail of a surprise
QUANTILES = 512  # points of the empirical distribution below the tail


def spread_score(smallest: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Smallest over mean squared distance (N,): near 0 close to a cluster, 1 if all are equally far.

    >>> spread_score(smallest=np.array([1.0, 50.0]), mean=np.array([50.0, 50.0]))
    array([0.02, 1.  ])
    """
    return np.divide(smallest, mean, out=np.ones_like(mean), where=mean > 0)


def energy_score(logits: np.ndarray) -> np.ndarray:
    """Negative log-sum-exp of the logits (N,), from (N, M).

    >>> energy_score(np.zeros((1, 2))).round(3)
    array([-0.693])
    """
    return -logsumexp(as_array(logits).astype(np.float64), axis=1)


@dataclass(frozen=True)
class Part:
    """Contribution of a score to ``fused``: its surprise above a level, times a weight.

    >>> Part(0.5, beyond=7.0).add(np.array([1.0, 6.0, 9.0]))
    array([0., 0., 1.])
    """

    weight: float
    beyond: float = 0.0

    def add(self, surprises: np.ndarray) -> np.ndarray:
        """The contribution of surprises (N,)."""
        return self.weight * np.maximum(surprises - self.beyond, 0.0)

    def surprise_of(self, added: float) -> float:
        """The inverse of :meth:`add`; 0 for a contribution of 0."""
        return added / self.weight + self.beyond if added > 0 else 0.0


# The spread mostly repeats the energy and weighs half. Low-level statistics alone are weak evidence unless they are
# rare: they contribute beyond the range of 6 of 7 in-distribution images. Logits and directions may miss images far
# from all training images; the paper's distance does not. It contributes only beyond the range of 999 of 1,000, since
# within it ranks worse. Known images alone chose the weights: docs/scores.md.
FUSED: dict[Score, Part] = {
    "energy": Part(1.0),
    "spread": Part(0.5),
    "shallow": Part(1.0, beyond=2.0),
    "distance": Part(1.0, beyond=7.0),
}


@dataclass(frozen=True, eq=False)
class Surprise(ArrayRecord):
    """-log of the share of in-distribution images with at least this score: an empirical tail, extrapolated.

    Up to u, the quantile with a share of ``TAIL`` above it, it interpolates the empirical distribution. Beyond u, where
    an empirical tail would saturate, it is an exponential tail of the same mean excess:
    -log TAIL + (s - u) / mean(s' - u | s' > u). It is strictly increasing above the lowest score, so that far images do
    not tie.
    """

    scores: np.ndarray  # (Q,) ascending; the last is u
    values: np.ndarray  # (Q,) surprise at them
    excess: float  # mean excess over u

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The surprise of each score (N,)."""
        beyond = np.maximum(scores - self.scores[-1], 0.0) / self.excess
        return np.interp(scores, self.scores, self.values) + beyond


def fit_surprise(scores: np.ndarray) -> Surprise:
    """Fit the surprise of a score to scores of in-distribution images that the network was not trained on.

    >>> surprise = fit_surprise(np.random.default_rng(0).exponential(size=100_000))  # -log P(X > s) = s
    >>> surprise(np.array([0.5, 2.0, 20.0])).round(1)
    array([ 0.5,  2. , 20. ])
    """
    scores = as_array(scores).astype(np.float64)
    if len(scores) == 0 or not np.isfinite(scores).all():
        raise DataError("the fused score needs finite scores of validation images: add validation images")
    levels = np.linspace(0, 1 - TAIL, QUANTILES)
    ordered, first = np.unique(np.quantile(scores, levels)[::-1], return_index=True)  # ties keep the highest level
    values = -np.log1p(-levels[::-1][first])
    above = scores[scores > ordered[-1]] - ordered[-1]
    spread = above.mean() if len(above) else 0.0
    smallest = np.finfo(np.float64).eps * max(1.0, float(np.abs(ordered).max()))
    return Surprise(ordered, values, max(float(spread), smallest))
