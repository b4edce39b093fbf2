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

from maple.errors import check_integer
from maple.stats.clustering._means import bisect_points, cluster_means, lloyd, within_sum_of_squares

_SERIAL_SIZE = 2**24  # values below which multithreading does not pay


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


class _Model(NamedTuple):
    """A clustering of all points."""

    labels: np.ndarray  # (n,) int64
    centers: np.ndarray  # (k, D)
    n_iter: int  # iterations of the last K-Means run

    @classmethod
    def of(cls, clusters: Sequence[_Cluster], n_iter: int) -> _Model:
        labels = np.empty(sum(len(cluster.indices) for cluster in clusters), np.int64)
        for j, cluster in enumerate(clusters):
            labels[cluster.indices] = j
        return cls(labels, np.stack([cluster.center for cluster in clusters]), n_iter)


@dataclass(eq=False)
class _Cluster:
    """One of the current clusters, and its bisection once it is tested."""

    center: np.ndarray  # (D,)
    indices: np.ndarray  # rows of its points
    is_tested: bool = False
    gain: float = 0.0  # of the bisection; accepted if positive
    halves: Sequence[_Cluster] = ()

    def move(self, center: np.ndarray, indices: np.ndarray) -> None:
        """Take over the result of K-Means; a cluster whose points are unchanged is not tested again."""
        self.is_tested = self.is_tested and np.array_equal(indices, self.indices)
        self.center, self.indices = center, indices


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
    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        """Evidence for splitting the points (n, D) of one cluster, bisected by ``labels``; positive accepts.

        ``room`` is the number of clusters they may become before ``max_clusters`` is reached.
        """

    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        """Score of a model; the search returns the model with the highest score. Default: the number of clusters."""
        return len(centers)

    def _grow(self, X: Any) -> np.ndarray:
        """Find the clusters, set the fitted attributes, and return ``X`` as a validated array (n, D)."""
        for name in ("max_clusters", "min_cluster_size", "n_init", "max_iter"):
            check_integer(name, getattr(self, name), 1)
        points = validate_data(self, X, dtype=[np.float64, np.float32], order="C")
        with serial_if_small(points):
            centered = points - cluster_means(points, np.zeros(len(points), np.int64))
            model = self._search(centered, check_random_state(self.random_state))
        self.labels_, self.n_iter_ = model.labels, model.n_iter
        self.cluster_centers_ = cluster_means(points, model.labels)
        self.n_clusters_ = self._n_features_out = len(self.cluster_centers_)
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
        clusters = [_Cluster(cluster_means(points, np.zeros_like(everything))[0], everything)]
        models = [_Model.of(clusters, n_iter=1)]  # one cluster: its mean
        while len(clusters) < self.max_clusters:
            n_before = len(clusters)
            clusters = self._improve_structure(points, clusters, random)
            if len(clusters) == n_before:
                break
            clusters, n_iter = self._improve_parameters(points, clusters)
            if len(clusters) <= n_before:  # the new clusters were removed as too small
                break
            models.append(_Model.of(clusters, n_iter))
        return max(models, key=lambda model: self._score(points, model.labels, model.centers))

    def _improve_structure(
        self, points: np.ndarray, clusters: list[_Cluster], random: np.random.RandomState
    ) -> list[_Cluster]:
        """Replace the clusters with a positive gain by their halves, largest gain first, up to ``max_clusters``."""
        room = self.max_clusters - len(clusters)
        for cluster in clusters:
            if not cluster.is_tested:
                self._test(points, cluster, room + 1, random)
        by_gain = sorted(clusters, key=lambda cluster: cluster.gain, reverse=True)
        split = [cluster for cluster in by_gain if cluster.gain > 0][:room]
        return [part for cluster in clusters for part in (cluster.halves if cluster in split else [cluster])]

    def _test(self, points: np.ndarray, cluster: _Cluster, room: int, random: np.random.RandomState) -> None:
        """Bisect a cluster, and measure the gain."""
        own = points[cluster.indices]
        labels = self._bisect(own, random)
        cluster.is_tested, cluster.gain = True, 0.0
        if labels is not None:
            rows = [cluster.indices[labels == side] for side in (0, 1)]
            cluster.halves = [_Cluster(*half) for half in zip(cluster_means(own, labels), rows)]
            cluster.gain = self._gain(own, labels, room, random)

    def _improve_parameters(self, points: np.ndarray, clusters: list[_Cluster]) -> tuple[list[_Cluster], int]:
        """Run K-Means from the centres of the clusters; remove the smallest and repeat while it is too small.

        Returns the clusters and the number of iterations of the last run.
        """
        while True:
            centers = np.stack([cluster.center for cluster in clusters])
            model = lloyd(points, centers, self.max_iter)
            for j, cluster in enumerate(clusters):
                cluster.move(model.centers[j], np.flatnonzero(model.labels == j))
            smallest = min(clusters, key=lambda cluster: len(cluster.indices))
            if len(clusters) == 1 or len(smallest.indices) >= self.min_cluster_size:
                return clusters, model.n_iter
            clusters = [cluster for cluster in clusters if cluster is not smallest]

    def _bisect(self, points: np.ndarray, random: np.random.RandomState) -> np.ndarray | None:
        """Labels (n,) of the best bisection; ``None`` if points are too few or equal, or one side is too small.

        At least three points are required: with two, both clusters have zero variance.
        """
        if len(points) < max(2 * self.min_cluster_size, 3):
            return None
        labels = bisect_points(points, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        if labels is None or np.bincount(labels, minlength=2).min() < self.min_cluster_size:
            return None
        return labels
