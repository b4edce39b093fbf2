"""The nearest centroid of each image in bounded memory, without a table of all N x M distances.

Shapes: N images, M clusters, K projection, B images of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maple.stats.arrays import row_blocks

CENTROIDS = 1024  # compared with a block of images at a time
_UNIT = float(np.finfo(np.float32).eps) / 2  # largest relative error of one rounding to float32


class Nearest(NamedTuple):
    """What a score needs to know of the distances of N images to M clusters."""

    cluster: np.ndarray  # (N,) int64, the nearest
    squared_distance: np.ndarray  # (N,) to it
    mean: np.ndarray  # (N,) squared distance, over all clusters

    @classmethod
    def of(cls, squared_distances: np.ndarray) -> Nearest:
        """From all squared distances (N, M).

        >>> Nearest.of(np.array([[4.0, 2.0]]))
        Nearest(cluster=array([1]), squared_distance=array([2.]), mean=array([3.]))
        """
        cluster = squared_distances.argmin(axis=1)
        least = np.take_along_axis(squared_distances, cluster[:, None], axis=1)[:, 0]
        return cls(cluster, least, squared_distances.mean(axis=1))


def nearest_centroids(projection: np.ndarray, centroids: np.ndarray) -> Nearest:
    """The nearest of the centroids (M, K) to each row of a projection (B, K), in float64, exact to its rounding.

    Of -2 z c' + ||c||², which orders the centroids of one image, a float32 product finds the smallest. Where a second
    centroid is nearer than the error bound of that product, float64 decides. The distance itself is ||z - c||², which
    does not cancel, and the mean needs no table: ||z||² - 2 z mean(c)' + mean(||c||²).

    >>> found = nearest_centroids(np.array([[0.0, 0.0], [3.0, 1.0]]), np.array([[0.0, 1.0], [4.0, 1.0]]))
    >>> found.cluster, found.squared_distance
    (array([0, 1]), array([1., 1.]))
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.vecdot(projection, projection)  # (B,) squared
        cluster, is_open = _search(projection, centroids, norms)
        if is_open.any():
            cluster[is_open] = _search_exactly(projection[is_open], centroids)
        difference = projection - centroids[cluster]  # (B, K)
        least = np.vecdot(difference, difference)
        mean = norms - 2 * (projection @ centroids.mean(axis=0))
        mean += np.vecdot(centroids, centroids).mean()
    return Nearest(cluster, least, np.maximum(mean, least))


def _search(projection: np.ndarray, centroids: np.ndarray, norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each row by float32 products (B,), and whether it is open which one is nearest (B,).

    ``norms`` (B,) are the squared ones of the rows.
    """
    squares = np.vecdot(centroids, centroids)  # (M,)
    rows = np.ones((len(projection), projection.shape[1] + 1), dtype=np.float32)  # (B, K + 1)
    rows[:, :-1] = projection
    margin = _error_bound(norms, squares.max(), projection.shape[1])
    for columns in row_blocks(len(centroids), 1, elements=CENTROIDS):
        terms = np.column_stack([-2 * centroids[columns], squares[columns]]).astype(np.float32)  # (c, K + 1)
        found, there, several = _smallest(rows @ terms.T, margin)
        if columns.start == 0:
            least, cluster, is_open = found, there, several
            continue
        is_open = np.where(np.abs(found - least) > margin, np.where(found < least, several, is_open), True)
        cluster = np.where(found < least, there + columns.start, cluster)
        least = np.minimum(found, least)
    return cluster, is_open | ~np.isfinite(least + margin)


def _error_bound(norms: np.ndarray, largest: float, n_components: int) -> np.ndarray:
    """Twice the error of -2 z c' + ||c||² in float32 (B,), for z of squared ``norms`` and ||c||² up to ``largest``.

    An inner product of K + 1 terms errs by at most (K + 1) u sum |terms|, and each factor is rounded once; the sum is
    at most 2 ||z|| ||c|| + ||c||².
    """
    sizes = 2 * np.sqrt(norms * largest) + largest
    return (2 * (n_components + 4) * _UNIT * sizes).astype(np.float32)


def _smallest(values: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row of (B, c): the smallest value, its column, and whether another lies within ``margin`` (B,).

    The smallest is overwritten, since to ask for any other takes half the time of counting all.
    """
    column = values.argmin(axis=1)
    place = np.arange(len(values)), column
    least = values[place]
    values[place] = np.inf
    return least, column, (values <= (least + margin)[:, None]).any(axis=1)


def _search_exactly(projection: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each row (B,) in float64, in blocks of centroids."""
    least = np.full(len(projection), np.inf)
    cluster = np.zeros(len(projection), dtype=np.int64)
    for columns in row_blocks(len(centroids), 1, elements=CENTROIDS):
        part = centroids[columns]
        values = projection @ (-2 * part.T) + np.vecdot(part, part)  # (B, c)
        column = values.argmin(axis=1)
        found = np.take_along_axis(values, column[:, None], axis=1)[:, 0]
        cluster = np.where(found < least, column + columns.start, cluster)
        least = np.minimum(found, least)
    return cluster
