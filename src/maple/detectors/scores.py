"""One-pass scores of the same outputs: what distances and logits say about an image being out-of-distribution.

==============  ====================================================================================
``distance``    squared distance to the nearest cluster, embeddings as they are: the paper's
``relative``    ``distance`` less the squared distance to all images as one Gaussian (Ren et al. 2021)
``normalised``  squared distance to the nearest cluster, embeddings divided by a power of their norm
``residual``    squared length of the normalised embedding outside the principal components
``spread``      nearest over mean squared distance, normalised: is any cluster nearer than the rest?
``energy``      negative log-sum-exp of the logits (Liu et al. 2020)
``shallow``     squared distance of the responses of a shallow layer to those of all images as one Gaussian
``fused``       surprise of ``energy`` plus that of ``spread`` plus half that of ``shallow``; far out, of ``distance``
==============  ====================================================================================

All are higher for images more out-of-distribution. None needs an out-of-distribution image to be fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import logsumexp

from maple.errors import DataError
from maple.stats.arrays import as_array

Score = Literal["distance", "relative", "normalised", "residual", "spread", "energy", "shallow", "fused"]
SCORES: tuple[Score, ...] = get_args(Score)
NEEDS_PLAIN: tuple[Score, ...] = ("distance", "relative")  # distances of embeddings as they are
TAIL = 0.1  # share of the images in the exponential tail of a surprise
QUANTILES = 512  # points that hold the rest


def spread_score(squared_distances: np.ndarray) -> np.ndarray:
    """Nearest over mean squared distance (N,), from (N, M): near 0 beside a cluster, 1 amid all of them.

    >>> spread_score(np.array([[1.0, 99.0], [50.0, 50.0]]))
    array([0.02, 1.  ])
    """
    mean = squared_distances.mean(axis=1)
    return np.divide(squared_distances.min(axis=1), mean, out=np.ones_like(mean), where=mean > 0)


def energy_score(logits: np.ndarray) -> np.ndarray:
    """Negative log-sum-exp of the logits (N,), from (N, M).

    >>> energy_score(np.zeros((1, 2))).round(3)
    array([-0.693])
    """
    return -logsumexp(as_array(logits).astype(np.float64), axis=1)


@dataclass(frozen=True)
class Part:
    """What a score adds to ``fused``: its surprise beyond a level, times a weight.

    >>> Part(0.5, beyond=7.0).add(np.array([1.0, 6.0, 9.0]))
    array([0., 0., 1.])
    """

    weight: float
    beyond: float = 0.0

    def add(self, surprises: np.ndarray) -> np.ndarray:
        """What surprises (N,) add."""
        return self.weight * np.maximum(surprises - self.beyond, 0.0)

    def surprise_of(self, added: float) -> float:
        """The inverse of :meth:`add`; 0 where nothing was added."""
        return added / self.weight + self.beyond if added > 0 else 0.0


# What an image shows, read in two ways, counts twice as much as how it looks: many images look unusual and are not.
# Logits and directions alone can be at ease with images far from all that was seen; the paper's distance is not. It
# speaks only where fewer than one known image in a thousand lies, since among the others it ranks worse.
FUSED: dict[Score, Part] = {
    "energy": Part(1.0),
    "spread": Part(1.0),
    "shallow": Part(0.5),
    "distance": Part(1.0, beyond=7.0),
}


@dataclass(frozen=True, eq=False)
class Surprise:
    """-log of the share of in-distribution images that score as high: an empirical tail that never ends.

    Up to the quantile u that leaves a share of ``TAIL`` above it, the empirical distribution, interpolated; beyond u,
    where images are few and an empirical tail would saturate, an exponential one of the same mean excess:
    -log TAIL + (s - u) / mean(s' - u | s' > u). Strictly increasing beyond the lowest score, so that far images do not
    tie.
    """

    scores: np.ndarray  # (Q,) ascending; the last is u
    values: np.ndarray  # (Q,) surprise at them
    excess: float  # mean excess over u

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The surprise of each score (N,)."""
        beyond = np.maximum(scores - self.scores[-1], 0.0) / self.excess
        return np.interp(scores, self.scores, self.values) + beyond

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All there is, by name."""
        return {"scores": self.scores, "values": self.values, "excess": np.array([self.excess])}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Surprise:
        """The inverse of :meth:`to_arrays`."""
        return cls(arrays["scores"], arrays["values"], arrays["excess"].item())


def fit_surprise(scores: np.ndarray) -> Surprise:
    """The surprise of a score, from the scores of in-distribution images that the network has not learned from.

    >>> surprise = fit_surprise(np.random.default_rng(0).exponential(size=100_000))  # -log P(X > s) = s
    >>> surprise(np.array([0.5, 2.0, 20.0])).round(1)
    array([ 0.5,  2. , 20. ])
    """
    scores = as_array(scores).astype(np.float64)
    if len(scores) == 0 or not np.isfinite(scores).all():
        raise DataError("a surprise needs finite scores of validation images: add validation images")
    levels = np.linspace(0, 1 - TAIL, QUANTILES)
    ordered, first = np.unique(np.quantile(scores, levels)[::-1], return_index=True)  # of ties, the highest level
    values = -np.log1p(-levels[::-1][first])
    above = scores[scores > ordered[-1]] - ordered[-1]
    spread = above.mean() if len(above) else 0.0
    smallest = np.finfo(np.float64).eps * max(1.0, float(np.abs(ordered).max()))
    return Surprise(ordered, values, max(float(spread), smallest))
