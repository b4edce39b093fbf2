"""Leading principal components of points, and the nearest centres with their help.

Shapes: n points, D dimensions, K components, k clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from maple.stats.arrays import row_blocks

N_COMPONENTS = 24
_STEPS = (4, 1)  # rounds of the subspace iteration that finds them: every fourth row is enough for the first
_SMALL_PRODUCT = 2**16  # elements of the larger factor of a product that BLAS does not pack


@dataclass(frozen=True, eq=False)
class Leading:
    """Centred points in D dimensions and in K directions of large variance, and how much these leave out."""

    points: np.ndarray  # (n, D)
    squares: np.ndarray  # (n,) ||x||^2, float64
    basis: np.ndarray  # (D, K) orthonormal
    inside: np.ndarray  # (n, K) coordinates in the basis
    outside: np.ndarray  # (n,) norms of the parts orthogonal to the basis

    @classmethod
    def of(cls, points: np.ndarray, random: np.random.RandomState) -> Self:
        """The leading components of centred points, by two rounds of subspace iteration on X'X.

        >>> points = np.random.default_rng(0).normal(size=(200, 30)) * 0.8 ** np.arange(30)
        >>> found = Leading.of(points - points.mean(axis=0), np.random.RandomState(0))
        >>> found.inside.shape, bool(found.outside.max() < 0.1)
        ((200, 24), True)
        """
        squares = np.vecdot(points, points).astype(np.float64)
        width = min(N_COMPONENTS, points.shape[1])
        if width == points.shape[1]:
            return cls(points, squares, np.eye(width, dtype=points.dtype), points, np.zeros_like(points[:, 0]))
        basis = random.standard_normal((points.shape[1], width)).astype(points.dtype)
        for step in _STEPS:
            basis = np.linalg.qr(_times_gram(points[::step], basis))[0]
        inside = points @ basis
        outside = np.sqrt(np.maximum(squares - np.vecdot(inside, inside), 0.0)).astype(points.dtype)
        return cls(points, squares, basis, inside, outside)

    def take(self, rows: np.ndarray) -> Leading:
        """Some of the points, in the same components."""
        return Leading(self.points[rows], self.squares[rows], self.basis, self.inside[rows], self.outside[rows])

    def own(self, rows: np.ndarray, random: np.random.RandomState) -> Leading:
        """Some of the points as they are, in the leading components around their own mean."""
        points = self.points[rows]
        found = Leading.of(points - points.mean(axis=0, dtype=np.float64).astype(points.dtype), random)
        return replace(found, points=points, squares=self.squares[rows])

    def nearest(self, centers: np.ndarray) -> np.ndarray:
        """The nearest of the centres (k, D) of each point: (n,) int64, that with the largest x c' - ||c||^2 / 2.

        With the parts u of a point and a_c of a centre outside the basis, the difference between two centres there is
        at most ||u|| ||a_c - a_d||. Points for which the components alone decide by more are not read.
        """
        centers = centers.astype(self.points.dtype)
        halves = np.vecdot(centers, centers) / 2
        inner = centers @ self.basis  # (k, K)
        affinity = self.inside @ inner.T - halves  # (n, k)
        best = affinity.argmax(axis=1)
        outer = centers - inner @ self.basis.T  # (k, D)
        apart = np.sqrt(np.maximum(_squared_distances(outer), 0)).astype(centers.dtype)  # (k, k)
        largest = np.take_along_axis(affinity, best[:, None], axis=1)
        affinity += self.outside[:, None] * apart[best]
        open_rows = np.flatnonzero((affinity > largest).any(axis=1))
        if len(open_rows):
            points = self.points if 2 * len(open_rows) > len(best) else self.points[open_rows]
            found = (points @ centers.T - halves).argmax(axis=1)
            best[open_rows] = found[open_rows] if len(found) == len(best) else found
        return best


def _squared_distances(vectors: np.ndarray) -> np.ndarray:
    """Between all pairs of few vectors (k, D): (k, k)."""
    return np.stack([np.vecdot(vectors - each, vectors - each) for each in vectors])


def _times_gram(points: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """X'X B (D, K), each block of X read once."""
    product = np.zeros_like(basis)
    for rows in row_blocks(*points.shape, elements=_SMALL_PRODUCT, min_rows=128):
        product += points[rows].T @ (points[rows] @ basis)
    return product
