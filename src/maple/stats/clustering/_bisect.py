"""Search shared by X-Means, G-Means and T-Means: clusters that grow in number by bisection.

Each round bisects the clusters and keeps the bisections that pass a test ("improve structure"), then runs K-Means over
all points from the resulting centres ("improve parameters"). Shapes: n points, D dimensions, k clusters.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.metrics import pairwise_distances_argmin
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import ThreadpoolController

from maple.errors import FitError, check_integer
from maple.stats.clustering._leading import Leading
from maple.stats.clustering._means import cluster_means, cluster_sums, lloyd, within_sum_of_squares
from maple.stats.clustering._starts import bisect_components, many_means

_SERIAL_SIZE = 2**24  # values below which multithreading does not pay
_COARSE = 10  # iterations of K-Means between two rounds; the result is improved until it converges
_CLEAR = 4  # iterations up to which clusters are clear: other starts would not find better ones


def serial_if_small(points: np.ndarray) -> AbstractContextManager[Any]:
    """Limit small problems to one thread: thread barriers on a busy machine cost more than they save."""
    return _thread_pools().limit(limits=1 if points.size < _SERIAL_SIZE else None)


@cache
def _thread_pools() -> ThreadpoolController:
    """The thread pools of BLAS and OpenMP; looking for them takes milliseconds, as long as a small clustering."""
    return ThreadpoolController()


def random_halves(points: np.ndarray, random: np.random.RandomState) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two random halves of the points, in both orders."""
    order = random.permutation(len(points))
    first, second = points[order[::2]], points[order[1::2]]
    return [(first, second), (second, first)]


def _centre(points: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The points around their mean, in float64 where the sum of their squares is too large for float32."""
    for wide in (points.dtype, np.dtype(np.float64)):
        with np.errstate(over="ignore", invalid="ignore"):
            centred = points.astype(wide, copy=False) - mean
            if np.isfinite(4 * np.vdot(centred, centred)):
                return centred
    raise FitError("squared points overflow: scale the points down")


class Cut(NamedTuple):
    """Points of one cluster that are several clusters instead."""

    points: np.ndarray  # (n, D) centred for all clusters, not for this one
    components: np.ndarray  # (n, K) leading components of the points
    squares: float  # sum ||x||^2
    labels: np.ndarray  # (n,) int64
    sums: np.ndarray  # (k, D) of the points of each


class _Model(NamedTuple):
    """A clustering of all points."""

    labels: np.ndarray  # (n,) int64
    sums: np.ndarray  # (k, D) of the points of each cluster
    n_iter: int  # iterations of the last K-Means run

    @classmethod
    def of(cls, clusters: Sequence[_Cluster], n_points: int, n_iter: int) -> _Model:
        """The model of all points, -1 being the label of those that are in no cluster."""
        labels = np.full(n_points, -1)
        for j, cluster in enumerate(clusters):
            labels[cluster.indices] = j
        return cls(labels, np.stack([cluster.sum for cluster in clusters]), n_iter)

    def clusters(self) -> list[_Cluster]:
        """The clusters that have points."""
        rows = [np.flatnonzero(self.labels == j) for j in range(len(self.sums))]
        return [_Cluster(total, each) for total, each in zip(self.sums, rows) if len(each)]


@dataclass(eq=False)
class _Cluster:
    """One of the current clusters, and its bisection once it is tested."""

    sum: np.ndarray  # (D,) of its points
    indices: np.ndarray  # rows of its points
    is_tested: bool = False
    gain: float = 0.0  # of the bisection; accepted if positive
    halves: Sequence[_Cluster] = ()

    def move(self, total: np.ndarray, indices: np.ndarray) -> None:
        """Take over the result of K-Means; a cluster whose points are unchanged is not tested again."""
        if not np.array_equal(indices, self.indices):
            self.is_tested, self.gain = False, 0.0
        self.sum, self.indices = total, indices


@dataclass(eq=False, repr=False)
class GrowingMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator, metaclass=ABCMeta):
    """Base class: subclasses implement the test of a bisection (``_gain``); X-Means also scores models (``_score``)."""

    max_clusters: int = 5
    min_cluster_size: int = 1
    _: KW_ONLY
    n_init: int = 4
    max_iter: int = 100
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        self._grow(X)
        return self

    @abstractmethod
    def _gain(self, cut: Cut, room: int, random: np.random.RandomState) -> float:
        """Evidence for splitting the points of one cluster, bisected by ``cut``; positive accepts.

        ``room`` is the number of clusters they may become before ``max_clusters`` is reached.
        """

    def _score(self, leading: Leading, model: _Model) -> float:
        """Score of a model; the search returns the model with the highest score. Default: the number of clusters."""
        return len(model.sums)

    def _grow(self, X: Any) -> np.ndarray:
        """Find the clusters, set the fitted attributes, and return ``X`` as a validated array (n, D)."""
        for name in ("max_clusters", "min_cluster_size", "n_init", "max_iter"):
            check_integer(name, getattr(self, name), 1)
        points = validate_data(self, X, dtype=[np.float64, np.float32], order="C")
        with serial_if_small(points):
            mean = cluster_means(points, np.zeros(len(points), np.int64))
            model = self._search(_centre(points, mean), check_random_state(self.random_state))
            counts = np.bincount(model.labels)[:, None]
            self.labels_, self.n_iter_ = model.labels, model.n_iter
            self.cluster_centers_ = (mean + model.sums / counts).astype(points.dtype)
            self.n_clusters_ = self._n_features_out = len(counts)
            self.inertia_ = within_sum_of_squares(points, self.labels_, self.cluster_centers_)
        return points

    def predict(self, X: Any) -> np.ndarray:
        """The nearest cluster of each point: (n,) int64."""
        check_is_fitted(self)
        points = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return pairwise_distances_argmin(points, self.cluster_centers_).astype(np.int64)

    def transform(self, X: Any) -> np.ndarray:
        """Euclidean distances to the centres: (n, k)."""
        check_is_fitted(self)
        points = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return euclidean_distances(points, self.cluster_centers_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _search(self, points: np.ndarray, random: np.random.RandomState) -> _Model:
        """Alternate between improving structure and parameters; return the best model visited."""
        everything = np.arange(len(points))
        leading = Leading.of(points, random)
        clusters = [_Cluster(cluster_sums(points, np.zeros_like(everything))[0], everything)]
        models = [_Model.of(clusters, len(points), n_iter=1)]  # one cluster: its mean
        while len(clusters) < self.max_clusters:
            n_before = len(clusters)
            clusters = self._improve_structure(leading, clusters, random)
            if len(clusters) == n_before:
                break
            clusters, n_iter = self._improve_parameters(leading, clusters, min(_COARSE, self.max_iter))
            if len(clusters) <= n_before:  # the new clusters were removed as too small
                break
            models.append(_Model.of(clusters, len(points), n_iter))
        best = max(models, key=lambda model: self._score(leading, model))
        return self._refine(leading, best, random) if len(best.sums) > 1 else best

    def _refine(self, leading: Leading, model: _Model, random: np.random.RandomState) -> _Model:
        """Run K-Means until it converges; unless the clusters are clear, from the best of some starts beside them."""
        if model.n_iter > _CLEAR:
            centers = model.sums / np.bincount(model.labels)[:, None] @ leading.basis  # (k, K)
            labels = many_means(leading.inside, centers, 2 * self.n_init, self.max_iter, random)
            model = _Model(labels, cluster_sums(leading.points, labels, len(centers)), n_iter=0)
        clusters, n_iter = self._improve_parameters(leading, model.clusters(), self.max_iter)
        return _Model.of(clusters, len(leading.points), n_iter)

    def _improve_structure(
        self, leading: Leading, clusters: list[_Cluster], random: np.random.RandomState
    ) -> list[_Cluster]:
        """Replace the clusters with a positive gain by their halves, largest gain first, up to ``max_clusters``.

        Clusters are bisected in the leading components of all points, which cost nothing more; if that leaves room,
        those that it did not split are bisected in leading components of their own.
        """
        room = self.max_clusters - len(clusters)
        for is_own in (False, True):
            for cluster in clusters:
                if not cluster.is_tested and cluster.gain <= 0:
                    self._test(leading, cluster, is_own, room + 1, random)
            by_gain = sorted(clusters, key=lambda cluster: cluster.gain, reverse=True)
            split = [cluster for cluster in by_gain if cluster.gain > 0][:room]
            if len(split) == room:
                break
        return [part for cluster in clusters for part in (cluster.halves if cluster in split else [cluster])]

    def _test(
        self, leading: Leading, cluster: _Cluster, is_own: bool, room: int, random: np.random.RandomState
    ) -> None:
        """Bisect a cluster, in leading components of its own or in those of all points, and measure the gain."""
        rows = cluster.indices
        is_all = len(rows) == len(leading.points)
        if not is_all:
            leading = leading.own(rows, random) if is_own else leading.take(rows)
        cluster.is_tested, cluster.gain = is_own or is_all, 0.0
        labels = self._bisect(leading.inside, random)
        if labels is not None:
            sums = cluster_sums(leading.points, labels)
            cluster.halves = [_Cluster(total, rows[labels == side]) for side, total in enumerate(sums)]
            cut = Cut(leading.points, leading.inside, float(leading.squares.sum()), labels, sums)
            cluster.gain = self._gain(cut, room, random)

    def _improve_parameters(
        self, leading: Leading, clusters: list[_Cluster], max_iter: int
    ) -> tuple[list[_Cluster], int]:
        """Run K-Means from the clusters; remove empty ones, else the smallest, and repeat while it is too small.

        Returns the clusters and the number of iterations of the last run.
        """
        while True:
            start = _Model.of(clusters, len(leading.points), n_iter=0)
            found = lloyd(leading, start.labels, start.sums, max_iter)
            for j, cluster in enumerate(clusters):
                cluster.move(found.sums[j], np.flatnonzero(found.labels == j))
            smallest = min(clusters, key=lambda cluster: len(cluster.indices))
            if len(clusters) == 1 or len(smallest.indices) >= self.min_cluster_size:
                return clusters, found.n_iter
            clusters = [cluster for cluster in clusters if cluster is not smallest and len(cluster.indices)]

    def _bisect(self, components: np.ndarray, random: np.random.RandomState) -> np.ndarray | None:
        """Labels (n,) of the best bisection; ``None`` if points are too few or equal, or one side is too small.

        At least three points are required: with two, both clusters have zero variance.
        """
        if len(components) < max(2 * self.min_cluster_size, 3):
            return None
        labels = bisect_components(components, self.n_init, self.max_iter, random)
        if labels is None or np.bincount(labels, minlength=2).min() < self.min_cluster_size:
            return None
        return labels
