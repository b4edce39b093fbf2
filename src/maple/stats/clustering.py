"""X-Means, G-Means and T-Means: K-Means that finds the number of clusters itself.

All grow a tree of clusters from a single root. Each round bisects the leaves and keeps the bisections that a test
approves ("improve structure"), then runs K-Means over all points from the centres so found ("improve parameters").
They differ in the test: X-Means compares two values of the Bayesian information criterion (Pelleg & Moore, "X-means",
ICML 2000), G-Means asks whether a cluster looks Gaussian (Hamerly & Elkan, "Learning the k in k-means", NIPS 2003),
T-Means whether two Gaussians of a tied covariance describe points that were held out better than one.

Where a class has clusters depends on how distances are measured: :func:`map_class` offers four geometries.

Shapes: n points, D dimensions, K components, k clusters.
"""

from __future__ import annotations

import math
import warnings
from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from scipy.special import log_ndtr
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import pairwise_distances_argmin
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.extmath import randomized_svd
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from maple.errors import DataError, UsageError, suggest
from maple.stats.gaussians import (
    IMAGES_PER_COMPONENT,
    RELATIVE_FLOOR,
    Moments,
    as_embeddings,
    normalise,
    oas_covariance,
    principal_axes,
    row_blocks,
    squared_distances,
    whitening,
)

ClusterMethod = Literal["xmeans", "gmeans", "tmeans", "kmeans"]
ClusterSpace = Literal["raw", "normalised", "projected", "whitened"]

EXPLAINED_VARIANCE = 0.95  # share of a class's variance in the components that are whitened, as detectors keep

_BLOCK = 1024  # rows that are held in float64 at a time
_N_COMPONENTS = 16  # principal components in which clusters are cut in two
_SERIAL_SIZE = 2**24  # values below which a second thread costs more than it saves
_SMALLEST_NORMAL_SAMPLE = 8  # points below which the tail of the Anderson-Darling statistic is not known

# ---------------------------------------------------------------------------------------------------------------------
# Spherical Gaussians: likelihood and information criterion
# ---------------------------------------------------------------------------------------------------------------------


def within_sum_of_squares(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Sum of ||x - mu||^2 over all points, mu being the centre of the point's cluster, in float64 by blocks of rows.

    Args:
        points: (n, D), float32 or float64; never copied as a whole.
        labels: (n,) rows of ``centers``.
        centers: (k, D).

    >>> within_sum_of_squares(np.array([[0.0, 0.0], [2.0, 0.0]]), np.array([0, 0]), np.array([[1.0, 0.0]]))
    2.0
    """
    total = 0.0
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        residuals = np.subtract(points[rows], centers[labels[rows]], dtype=np.float64)  # (block, D)
        total += float(np.vdot(residuals, residuals))
    return total


def spherical_log_likelihood(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Log-likelihood of points under k spherical Gaussians that share one variance, each point in its own cluster.

    A point of cluster c, which holds n_c of the n points, contributes log(n_c / n) + log N(x; mu_c, sigma^2 I), with

        sigma^2 = sum ||x - mu||^2 / (D (n - k)).

    Pelleg & Moore print sigma^2 without the 1/D, which makes it D times too large: the density they write down has
    one variance *per dimension*. Two slips in their log-likelihood go with it: the constant is n D / 2 log(2 pi), not
    n / 2 log(2 pi), and the exponents add up to D (n - k) / 2 over all clusters, not to (n_c - k) / 2 for each. Here
    the density is evaluated as it stands.

    The variance is kept above the rounding error of the points, so that repeated points give a finite number.

    Args:
        points: (n, D).
        labels: (n,) rows of ``centers``.
        centers: (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> round(spherical_log_likelihood(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]])), 4)
    -8.8346
    """
    n, dimension = points.shape
    counts = np.bincount(labels, minlength=len(centers))
    counts = counts[counts > 0]
    squares = within_sum_of_squares(points, labels, centers)
    variance = max(squares / (dimension * max(n - len(centers), 1)), _variance_floor(points))
    log_shares = float(counts @ np.log(counts / n))
    return log_shares - 0.5 * n * dimension * math.log(2 * math.pi * variance) - 0.5 * squares / variance


def bic(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Bayesian information criterion in the sign of Pelleg & Moore: log-likelihood - p / 2 log n; higher is better.

    p = k (D + 1) counts k - 1 shares, k D coordinates and one variance, as they do. What differs from their page is in
    :func:`spherical_log_likelihood`. ``points`` (n, D), ``labels`` (n,), ``centers`` (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> one = bic(points, np.array([0, 0, 0, 0]), np.array([[5.0]]))
    >>> two = bic(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]]))
    >>> two > one
    True
    """
    n, dimension = points.shape
    free_parameters = len(centers) * (dimension + 1)
    return spherical_log_likelihood(points, labels, centers) - 0.5 * free_parameters * math.log(n)


def _variance_floor(points: np.ndarray) -> float:
    """The square of a few rounding errors of a typical coordinate: smaller variances are noise of the arithmetic."""
    mean_square = float(np.vdot(points, points)) / points.size
    return max((4 * np.finfo(points.dtype).eps) ** 2 * mean_square, np.finfo(np.float64).tiny)


# ---------------------------------------------------------------------------------------------------------------------
# Anderson-Darling test of normality
# ---------------------------------------------------------------------------------------------------------------------


def anderson_darling(sample: np.ndarray) -> float:
    """Anderson-Darling statistic against the normal family, corrected for mean and variance estimated from the sample.

    With y the standardised, sorted sample,

        A^2 = -n - 1/n sum_i (2 i - 1) (log Phi(y_i) + log Phi(-y_{n+1-i}))

    and the correction is A^2 (1 + 0.75 / n + 2.25 / n^2) (Stephens 1986, the form whose tail is tabulated; Hamerly &
    Elkan print the older 1 + 4 / n - 25 / n^2). The logarithms stay finite however far an outlier lies.

    Args:
        sample: (n,), not constant.

    >>> quantiles = np.array([-1.5, -1.0, -0.7, -0.3, 0.0, 0.3, 0.7, 1.0, 1.5])
    >>> round(anderson_darling(quantiles), 2)
    0.12
    """
    n = len(sample)
    y = np.sort(sample).astype(np.float64)
    y = (y - y.mean()) / y.std(ddof=1)
    weights = 2 * np.arange(1, n + 1) - 1
    statistic = -n - float(weights @ (log_ndtr(y) + log_ndtr(-y[::-1]))) / n
    return statistic * (1 + 0.75 / n + 2.25 / n**2)


def anderson_darling_critical_value(significance: float) -> float:
    """The value that the corrected statistic of a normal sample exceeds with probability ``significance`` (<= 0.1).

    It inverts the tail p = exp(1.2937 - 5.709 A + 0.0186 A^2) of D'Agostino & Stephens (1986, table 4.9).

    >>> round(anderson_darling_critical_value(0.05), 3), round(anderson_darling_critical_value(1e-4), 3)
    (0.753, 1.851)
    """
    a, b, c = 0.0186, -5.709, 1.2937 - math.log(significance)
    return (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)


# ---------------------------------------------------------------------------------------------------------------------
# Gaussians of a tied covariance: likelihood of points that were held out
# ---------------------------------------------------------------------------------------------------------------------


def held_out_gain(points: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> float:
    """Log-likelihood per held-out point that clusters gain over one, as a detector sees both; above 0, they pay.

    As for a detector, each cluster c is a Gaussian with the share n_c / n of the points, all have one covariance Sigma,
    an image belongs to the nearest of them, and only principal components that explain 95 % of the variance count (the
    first n / 10 of them at most, where points are few):

        mean over held-out x of  max_c [log(n_c / n) - (x - mu_c)' Sigma^-1 (x - mu_c) / 2] - log det Sigma / 2,

    for the clusters less for all points as one. Since they were held out, there is no penalty for parameters: a cut
    that fits nothing but noise loses.

    Within its components no linear map of the points changes this. So length, which a criterion for spherical clusters
    takes for several clusters, is no evidence: the halves of one Gaussian, of any covariance, pay log 2 for saying
    which half, and gain log(1 / (1 - 2 / pi)) / 2 for being narrower; in all they lose 0.19. Two equal Gaussians gain
    from a distance of 3.04 deviations on.

    Args:
        points: (n, D); where they have no variance, nothing is gained.
        labels: (n,) clusters 0..k-1 of the points, each with a point.
        held_out: (m, D).

    >>> rng = np.random.default_rng(0)
    >>> points, held_out = rng.standard_normal((2, 4000, 1))
    >>> round(held_out_gain(points, (points[:, 0] > 0).astype(int), held_out), 1)
    -0.2
    >>> apart, held_out_apart = (x + 6 * (np.arange(4000) % 2)[:, None] for x in (points, held_out))
    >>> held_out_gain(apart, np.arange(4000) % 2, held_out_apart) > 0
    True
    """
    whole = np.zeros_like(labels)
    moments = Moments(1, points.shape[1]).update(points, whole)
    variances, axes = principal_axes(moments.total_covariance, EXPLAINED_VARIANCE)
    if len(variances) == 0:
        return 0.0
    floor = RELATIVE_FLOOR * variances[0]
    axes = axes[:, : max(1, len(points) // IMAGES_PER_COMPONENT)]
    points, held_out = (points - moments.mean) @ axes, (held_out - moments.mean) @ axes  # (n, K), (m, K)
    split, unsplit = (tied_log_likelihood(points, clusters, held_out, floor) for clusters in (labels, whole))
    return split - unsplit


def tied_log_likelihood(points: np.ndarray, labels: np.ndarray, held_out: np.ndarray, floor: float) -> float:
    """Mean log-likelihood of ``held_out`` (m, D) under the Gaussians of ``points`` (n, D), up to a constant.

    One Gaussian per cluster of ``labels`` (n,), one covariance for all, each image in its most likely cluster; see
    :func:`held_out_gain`. No variance counts as less than ``floor``.
    """
    moments = Moments(int(labels.max()) + 1, points.shape[1]).update(points, labels)
    matrix, log_determinant = whitening(moments.within_covariance, floor)
    distances = squared_distances(held_out @ matrix, moments.means @ matrix)  # (m, k)
    log_joint = np.log(moments.counts / moments.n_images) - distances / 2
    return float(log_joint.max(axis=1).mean() - log_determinant / 2)


# ---------------------------------------------------------------------------------------------------------------------
# Bisection
# ---------------------------------------------------------------------------------------------------------------------


def cluster_means(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Means (k, D) of the clusters 0..k-1, summed in float64, in the type of the points; each cluster has a point.

    >>> cluster_means(np.array([[0.0], [2.0], [5.0]]), np.array([0, 0, 1]))
    array([[1.],
           [5.]])
    """
    n_clusters = int(labels.max()) + 1
    sums = np.zeros((n_clusters, points.shape[1]))
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        members = labels[rows] == np.arange(n_clusters)[:, None]  # (k, block)
        sums += members.astype(np.float64) @ points[rows].astype(np.float64)
    return (sums / np.bincount(labels)[:, None]).astype(points.dtype)


def bisect_points(
    points: np.ndarray, *, n_init: int = 4, max_iter: int = 100, random_state: Any = None
) -> np.ndarray | None:
    """Cut points in two by 2-Means: labels (n,) of 0 and 1, or ``None`` where all points are the same.

    2-Means sees the 16 leading principal components only, which is a mere rotation up to 16 dimensions and many times
    faster in 640. The best cut lies along them: the first component is the relaxed solution of 2-Means (Ding & He, ICML
    2004). The first of ``n_init`` starts has the means of the two halves of a Gaussian, +- sqrt(2 lambda / pi) along
    that component, lambda being its variance (Hamerly & Elkan); the others are drawn by k-means++. The cut with the
    least inertia is kept.

    >>> bisect_points(np.array([[0.0, 1.0], [0.0, 1.1], [5.0, 1.0]]), random_state=0)
    array([0, 0, 1])
    """
    if (points == points[0]).all():
        return None
    random = check_random_state(random_state)
    centered = points - cluster_means(points, np.zeros(len(points), np.int64))
    n_components = min(_N_COMPONENTS, *points.shape)
    left, singular_values, _ = randomized_svd(centered, n_components, n_iter=2, random_state=random)
    projection = left * singular_values  # (n, K)
    start = np.zeros((2, n_components), projection.dtype)
    start[:, 0] = np.array([-1, 1]) * singular_values[0] * math.sqrt(2 / (math.pi * len(points)))
    model = _run_k_means(projection, 2, init=start, n_init=1, max_iter=max_iter)
    if n_init > 1:
        drawn = _run_k_means(projection, 2, n_init=n_init - 1, max_iter=max_iter, random_state=random)
        model = min(model, drawn, key=lambda candidate: candidate.inertia_)
    # the first point is on side 0 whichever centre came first, so that equal cuts have equal labels
    return (model.labels_ != model.labels_[0]).astype(np.int64)


def _run_k_means(points: np.ndarray, n_clusters: int, **options: Any) -> KMeans:
    """Fitted K-Means, without the warning that repeated points leave a cluster empty: callers expect that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(n_clusters, **options).fit(points)


class _Model(NamedTuple):
    """Clusters of all points."""

    labels: np.ndarray  # (n,) int64
    centers: np.ndarray  # (k, D)
    n_iter: int  # iterations of the K-Means run that placed the centres


@dataclass(frozen=True, eq=False)
class _Split:
    """Two children proposed for one cluster, and the evidence for them (above 0: approved)."""

    labels: np.ndarray  # (n,) 0 or 1, for the points of that cluster
    centers: np.ndarray  # (2, D)
    gain: float


class _ClusterTree:
    """A cluster and, once it is split, its two children. The leaves are the clusters there are."""

    def __init__(self, center: np.ndarray, indices: np.ndarray) -> None:
        self.center = center  # (D,)
        self.indices = indices  # rows of the points that belong to it
        self.children: tuple[_ClusterTree, ...] = ()
        self.is_tested = False
        self.proposal: _Split | None = None

    def __len__(self) -> int:
        return len(self.leaves())

    def leaves(self) -> list[_ClusterTree]:
        """The clusters, siblings side by side."""
        return [leaf for child in self.children for leaf in child.leaves()] if self.children else [self]

    def split(self) -> None:
        """Make the proposed children."""
        assert self.proposal is not None
        self.children = tuple(
            _ClusterTree(center, self.indices[self.proposal.labels == side])
            for side, center in enumerate(self.proposal.centers)
        )

    def move(self, center: np.ndarray, indices: np.ndarray) -> None:
        """Take the points that K-Means gives this leaf; a leaf whose points stay need not be tested again."""
        self.is_tested = self.is_tested and np.array_equal(indices, self.indices)
        self.center, self.indices = center, indices

    def without(self, leaf: _ClusterTree) -> _ClusterTree:
        """The tree without ``leaf``, whose sibling takes their parent's place."""
        if leaf in self.children:
            return self.children[1 - self.children.index(leaf)]
        self.children = tuple(child.without(leaf) for child in self.children)
        return self

    def model(self, n_iter: int) -> _Model:
        """The leaves, as they are after ``n_iter`` iterations of K-Means."""
        leaves = self.leaves()
        labels = np.empty(sum(len(leaf.indices) for leaf in leaves), np.int64)
        for j, leaf in enumerate(leaves):
            labels[leaf.indices] = j
        return _Model(labels, np.stack([leaf.center for leaf in leaves]), n_iter)


def _serial_if_small(points: np.ndarray) -> threadpool_limits:
    """One thread while the work is small: threads that wait for each other on a busy machine are slower than one."""
    return threadpool_limits(1 if points.size < _SERIAL_SIZE else None)


# ---------------------------------------------------------------------------------------------------------------------
# Estimators
# ---------------------------------------------------------------------------------------------------------------------


class _GrowingMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator, metaclass=ABCMeta):
    """The search that all three share. They fill two holes: the test of a cut and the score of a model."""

    max_clusters: int
    min_cluster_size: int
    n_init: int
    max_iter: int
    random_state: Any

    @abstractmethod
    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        """Evidence that the points (n, D) of one cluster are several, say two as in ``labels``; above 0 approves.

        ``room`` is how many clusters they may become before ``max_clusters`` is reached.
        """

    @abstractmethod
    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        """Score of a model of all points; the search returns the model with the highest."""

    def _grow(self, X: Any) -> np.ndarray:
        """Find the clusters, set the attributes, and return ``X`` as an array (n, D)."""
        for name in ("max_clusters", "min_cluster_size", "n_init", "max_iter"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise UsageError(f"{name} is {value!r}: give a whole number of at least 1")
        points = validate_data(self, X, dtype=[np.float64, np.float32], order="C")
        with _serial_if_small(points):
            model = self._search(points, check_random_state(self.random_state))
        self.labels_, self.cluster_centers_, self.n_iter_ = model
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
        """Alternate between better structure and better parameters; the best model passed."""
        everything = np.arange(len(points))
        tree = _ClusterTree(cluster_means(points, np.zeros_like(everything))[0], everything)
        models = [tree.model(n_iter=1)]  # one cluster: its mean
        while len(tree) < self.max_clusters:
            n_before = len(tree)
            self._improve_structure(points, tree, random)
            if len(tree) == n_before:
                break
            tree, n_iter = self._improve_parameters(points, tree)
            if len(tree) <= n_before:  # whatever was split, K-Means made too small again
                break
            models.append(tree.model(n_iter))
        return max(models, key=lambda model: self._score(points, model.labels, model.centers))

    def _improve_structure(self, points: np.ndarray, tree: _ClusterTree, random: np.random.RandomState) -> None:
        """Split the leaves whose cut is approved; the best first, where there is not room for all."""
        leaves = tree.leaves()
        room = self.max_clusters - len(leaves)
        for leaf in leaves:
            if not leaf.is_tested:
                leaf.proposal, leaf.is_tested = self._propose(points[leaf.indices], room + 1, random), True
        approved = [(leaf.proposal.gain, leaf) for leaf in leaves if leaf.proposal and leaf.proposal.gain > 0]
        for _, leaf in sorted(approved, key=lambda pair: pair[0], reverse=True)[:room]:
            leaf.split()

    def _improve_parameters(self, points: np.ndarray, tree: _ClusterTree) -> tuple[_ClusterTree, int]:
        """K-Means over all points from the centres of the leaves, again without the smallest while that is too small;
        the tree and the iterations of the last run."""
        while True:
            leaves = tree.leaves()
            centers = np.stack([leaf.center for leaf in leaves])
            model = _run_k_means(points, len(leaves), init=centers, n_init=1, max_iter=self.max_iter)
            for j, leaf in enumerate(leaves):
                leaf.move(model.cluster_centers_[j], np.flatnonzero(model.labels_ == j))
            smallest = min(leaves, key=lambda leaf: len(leaf.indices))
            if len(leaves) == 1 or len(smallest.indices) >= self.min_cluster_size:
                return tree, model.n_iter_
            tree = tree.without(smallest)

    def _propose(self, points: np.ndarray, room: int, random: np.random.RandomState) -> _Split | None:
        """A cut of the points (n, D) of one cluster, tested; ``None`` where they cannot be cut."""
        labels = self._bisect(points, random)
        if labels is None:
            return None
        return _Split(labels, cluster_means(points, labels), self._gain(points, labels, room, random))

    def _bisect(self, points: np.ndarray, random: np.random.RandomState) -> np.ndarray | None:
        """Labels (n,) of the best cut; ``None`` where the points are too few, all the same, or a side is too small.

        Two clusters need three points, or there is no variance to speak of.
        """
        if len(points) < max(2 * self.min_cluster_size, 3):
            return None
        labels = bisect_points(points, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        if labels is None or np.bincount(labels, minlength=2).min() < self.min_cluster_size:
            return None
        return labels


class XMeans(_GrowingMeans):
    """K-Means with the number of clusters chosen by the Bayesian information criterion (Pelleg & Moore 2000).

    From one cluster on, each round cuts every cluster in two and keeps the cuts that raise the criterion of that
    cluster's points, then runs K-Means over all points from the new centres, until nothing is cut or there are
    ``max_clusters``. Of the models so passed, the one with the highest criterion over all points is the result.

    One look-ahead is added. Clusters at the corners of a square, say, are worth finding, but no single cut is: half the
    variance is gained, and as much lost by saying which half. So where a cut is rejected, its halves are cut
    too, as often as ``max_clusters`` leaves room for, before the cluster is declared to be one.

    The criterion assumes spherical clusters of equal variance (see :func:`bic`): an elongated cluster is cut into
    several along its length. Use :class:`TMeans` where all may have one covariance, :class:`GMeans` where each may have
    its own.

    Args:
        max_clusters: clusters at most.
        min_cluster_size: points per cluster at least; smaller clusters are not made.
        n_init: starts of each cut in two.
        max_iter: iterations of each K-Means run at most.
        random_state: seed; the same seed gives the same clusters.

    Attributes:
        labels_: (n,) int64, cluster of each point.
        cluster_centers_: (k, D).
        n_clusters_: k.
        inertia_: sum of squared distances to the centres.
        bic_: criterion of the result, higher is better.
        n_iter_: iterations of the K-Means run that placed the centres; 1 for a single cluster.
        n_features_in_: D.

    >>> rng = np.random.default_rng(0)
    >>> corners = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    >>> points = np.repeat(corners, 50, axis=0) + rng.standard_normal((200, 2))
    >>> model = XMeans(random_state=0).fit(points)
    >>> model.n_clusters_, sorted(np.bincount(model.labels_).tolist())
    (4, [50, 50, 50, 50])
    """

    def __init__(
        self,
        max_clusters: int = 5,
        min_cluster_size: int = 1,
        n_init: int = 4,
        max_iter: int = 100,
        random_state: Any = None,
    ) -> None:
        self.max_clusters = max_clusters
        self.min_cluster_size = min_cluster_size
        self.n_init = n_init
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        points = self._grow(X)
        self.bic_ = bic(points, self.labels_, self.cluster_centers_)
        return self

    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        whole = np.zeros_like(labels)
        as_one = bic(points, whole, cluster_means(points, whole))
        gain = bic(points, labels, cluster_means(points, labels)) - as_one
        while gain <= 0 and 2 * (labels.max() + 1) <= room:
            finer = self._bisect_each(points, labels, random)
            if finer.max() == labels.max():
                break
            labels = finer
            gain = bic(points, labels, cluster_means(points, labels)) - as_one
        return gain

    def _bisect_each(self, points: np.ndarray, labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Labels (n,) after every cluster that can be cut is cut."""
        finer = labels.copy()
        for j in range(labels.max() + 1):
            rows = np.flatnonzero(labels == j)
            sides = self._bisect(points[rows], random)
            if sides is not None:
                finer[rows[sides == 1]] = finer.max() + 1
        return finer

    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        return bic(points, labels, centers)


class GMeans(_GrowingMeans):
    """K-Means that cuts clusters until each looks Gaussian (Hamerly & Elkan 2003).

    A cluster is cut in two by 2-Means, its points are projected onto the vector between the two centres, and the cut is
    kept if an Anderson-Darling test rejects that the projection is normal. K-Means over all points follows each round.

    In many dimensions that vector fits the very points it is then tested on: along it, 5,000 points of one Gaussian in
    640 dimensions look like two clusters. So, other than in the paper, the vector comes from one half of the points,
    drawn at random, and the other half is tested, both ways round, each at half the significance. This keeps the level
    in any dimension; a cluster of fewer than 16 points is left alone.

    Clusters may have any covariance, but only deviations along the cut are seen.

    Args:
        max_clusters: clusters at most.
        min_cluster_size: points per cluster at least; smaller clusters are not made.
        significance: probability at most with which a Gaussian cluster is cut; up to 0.1.
        n_init: starts of each cut in two.
        max_iter: iterations of each K-Means run at most.
        random_state: seed; the same seed gives the same clusters.

    Attributes: those of :class:`XMeans` but for ``bic_``.

    >>> rng = np.random.default_rng(0)
    >>> one_long_cluster = rng.standard_normal((200, 2)) * [10.0, 1.0]
    >>> GMeans(random_state=0).fit(one_long_cluster).n_clusters_
    1
    >>> GMeans(random_state=0).fit(np.concatenate([one_long_cluster, one_long_cluster + [0.0, 40.0]])).n_clusters_
    2
    """

    def __init__(
        self,
        max_clusters: int = 5,
        min_cluster_size: int = 1,
        significance: float = 1e-4,
        n_init: int = 4,
        max_iter: int = 100,
        random_state: Any = None,
    ) -> None:
        self.max_clusters = max_clusters
        self.min_cluster_size = min_cluster_size
        self.significance = significance
        self.n_init = n_init
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        if not isinstance(self.significance, Real) or not 0 < self.significance <= 0.1:
            raise UsageError(f"significance is {self.significance!r}: give a probability above 0 and at most 0.1")
        self._grow(X)
        return self

    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        critical_value = anderson_darling_critical_value(self.significance / 2)
        order = random.permutation(len(points))
        halves = points[order[::2]], points[order[1::2]]
        statistics = (self._statistic(*pair, random) for pair in (halves, halves[::-1]))
        return max(statistics) - critical_value

    def _statistic(self, fitted: np.ndarray, tested: np.ndarray, random: np.random.RandomState) -> float:
        """Anderson-Darling statistic of ``tested`` along the vector between the two clusters of ``fitted``; 0 where
        there are too few points or no spread."""
        if min(len(fitted), len(tested)) < _SMALLEST_NORMAL_SAMPLE:
            return 0.0
        sides = bisect_points(fitted, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        if sides is None:
            return 0.0
        first, second = cluster_means(fitted, sides)
        sample = (tested - first) @ (second - first)  # (n,)
        rounding = 8 * np.finfo(sample.dtype).eps * np.abs(sample).max()
        return anderson_darling(sample) if np.ptp(sample) > rounding else 0.0

    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        return len(centers)


class TMeans(_GrowingMeans):
    """K-Means that cuts a cluster where two Gaussians of a tied covariance describe held-out points better than one.

    This is the question that a detector with one covariance for all clusters asks of a split, see
    :func:`held_out_gain`. One half of the points, drawn at random, is cut in two by 2-Means and the other half judges,
    both ways round; the cut is kept if they gain on average. K-Means over all points follows each round.

    Clusters may have any covariance, but only the cuts that 2-Means proposes are judged: clusters that lie apart in a
    direction of little variance are not seen.

    Args:
        max_clusters: clusters at most.
        min_cluster_size: points per cluster at least; smaller clusters are not made.
        n_init: starts of each cut in two.
        max_iter: iterations of each K-Means run at most.
        random_state: seed; the same seed gives the same clusters.

    Attributes: those of :class:`XMeans` but for ``bic_``.

    >>> rng = np.random.default_rng(0)
    >>> one_long_cluster = rng.standard_normal((200, 2)) * [10.0, 1.0]
    >>> TMeans(random_state=0).fit(one_long_cluster).n_clusters_
    1
    >>> TMeans(random_state=0).fit(np.concatenate([one_long_cluster, one_long_cluster + [0.0, 40.0]])).n_clusters_
    2
    """

    def __init__(
        self,
        max_clusters: int = 5,
        min_cluster_size: int = 1,
        n_init: int = 4,
        max_iter: int = 100,
        random_state: Any = None,
    ) -> None:
        self.max_clusters = max_clusters
        self.min_cluster_size = min_cluster_size
        self.n_init = n_init
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        self._grow(X)
        return self

    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        order = random.permutation(len(points))
        halves = points[order[::2]], points[order[1::2]]
        return sum(self._judged(*pair, random) for pair in (halves, halves[::-1]))

    def _judged(self, fitted: np.ndarray, held_out: np.ndarray, random: np.random.RandomState) -> float:
        """What the cut of ``fitted`` gains on ``held_out``; minus infinity where ``fitted`` cannot be cut."""
        sides = bisect_points(fitted, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        return -math.inf if sides is None else held_out_gain(fitted, sides, held_out)

    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        return len(centers)


# ---------------------------------------------------------------------------------------------------------------------
# One class of a data set
# ---------------------------------------------------------------------------------------------------------------------


def map_class(embeddings: Any, space: ClusterSpace = "raw", n_components: int = 5) -> np.ndarray:
    """The embeddings (n, D) of one class in the space in which it is clustered, (n, D) or (n, K).

    - ``raw``: as they are (the paper).
    - ``normalised``: on the unit sphere, where detectors measure.
    - ``projected``: normalised, then the first ``n_components`` principal components of this class. Fewer dimensions
      make a criterion for spherical clusters ask for more evidence.
    - ``whitened``: normalised, then all principal components of this class that explain 95 % of its variance, each with
      variance 1; shrunk (OAS) where images are few.

    A class without variance becomes a single column of zeros.

    Whitening takes length away, and with it what X-Means could find: the variance between clusters is part of the
    variance of the class. Of K >= 2 components, each of variance 1, two clusters explain one at most, for a
    gain of K / 2 log(K / (K - 1)) <= log 2 per image, which saying which of two equal halves an image is in costs
    already. So :func:`bic` never prefers two clusters of about the same size to one, however far apart they are.

    >>> embeddings = np.array([[5.0, 0.0], [0.6, 0.8], [3.0, -4.0]])
    >>> map_class(embeddings, "normalised")
    array([[ 1. ,  0. ],
           [ 0.6,  0.8],
           [ 0.6, -0.8]])
    >>> abs(map_class(embeddings, "projected", n_components=1).ravel()).round(6)
    array([0. , 0.8, 0.8])
    >>> many = np.random.default_rng(0).standard_normal((100, 3)) * [1, 2, 5]
    >>> map_class(many, "whitened").std(axis=0).round(6)
    array([1., 1., 1.])
    """
    if space not in get_args(ClusterSpace):
        raise UsageError(f"unknown space '{space}' for clustering: {suggest(space, get_args(ClusterSpace))}")
    embeddings = as_embeddings(embeddings)
    if space == "raw":
        return embeddings
    if space == "normalised":
        return normalise(embeddings)
    n, dimension = embeddings.shape
    rounding = (4 * np.finfo(embeddings.dtype).eps) ** 2  # of vectors of length 1
    moments = Moments(1, dimension, norm_exponent=1.0).update(embeddings, np.zeros(n, np.int64))
    if n == 0 or np.trace(moments.total_covariance) <= rounding:
        return np.zeros((n, 1))
    matrix = _component_map(moments, space, n_components)
    mapped = np.empty((n, matrix.shape[1]))
    for rows in row_blocks(n, dimension):
        mapped[rows] = (normalise(embeddings[rows]) - moments.mean) @ matrix
    return mapped


def _component_map(moments: Moments, space: ClusterSpace, n_components: int) -> np.ndarray:
    """The map (D, K) from centred embeddings to principal components, of variance 1 where ``space`` is whitened."""
    if space == "projected":
        return principal_axes(moments.total_covariance)[1][:, :n_components]
    variances, axes = principal_axes(moments.total_covariance, EXPLAINED_VARIANCE)
    covariance = np.diag(variances)
    if moments.n_images < IMAGES_PER_COMPONENT * len(variances):
        covariance = oas_covariance(covariance, moments.n_images)
    return axes / np.sqrt(np.diag(covariance))


def cluster_points(
    points: np.ndarray, method: ClusterMethod = "xmeans", *, max_clusters: int, min_cluster_size: int, seed: int
) -> np.ndarray:
    """Clusters of the points (n, D) of one class: labels (n,) int64 in 0..k-1, with k at most ``max_clusters`` and
    each cluster at least ``min_cluster_size`` points, unless all are one cluster.

    ``"kmeans"`` makes as many clusters as allowed and merges those that come out too small with the nearest big one.

    >>> points = np.array([[0.0], [0.1], [0.2], [7.0], [7.1], [7.2]])
    >>> cluster_points(points, max_clusters=2, min_cluster_size=3, seed=0)
    array([0, 0, 0, 1, 1, 1])
    >>> cluster_points(points, max_clusters=2, min_cluster_size=4, seed=0)
    array([0, 0, 0, 0, 0, 0])
    """
    if method not in get_args(ClusterMethod):
        raise UsageError(f"unknown clustering method '{method}': {suggest(method, get_args(ClusterMethod))}")
    points = np.asarray(points)
    if not np.isfinite(points).all():
        raise DataError("the embeddings to be clustered hold NaN or infinity: lower the learning rate and train again")
    if max_clusters < 2 or len(points) < 2 * min_cluster_size:
        return np.zeros(len(points), np.int64)
    points = check_array(points, dtype=[np.float64, np.float32], order="C")
    if method == "kmeans":
        return _k_means_labels(points, max_clusters, min_cluster_size, seed)
    estimator = {"xmeans": XMeans, "gmeans": GMeans, "tmeans": TMeans}[method]
    return estimator(max_clusters, min_cluster_size, random_state=seed).fit(points).labels_


def merge_small_clusters(points: np.ndarray, labels: np.ndarray, min_cluster_size: int) -> np.ndarray:
    """Give each cluster of fewer than ``min_cluster_size`` points, the smallest first, to the big cluster with the
    nearest centre (to any, where none is big); labels (n,) in 0..k-1.

    >>> points = np.array([[0.0], [1.0], [2.0], [9.0], [10.0]])
    >>> merge_small_clusters(points, np.array([0, 0, 1, 2, 2]), 2)
    array([0, 0, 0, 1, 1])
    """
    while True:
        labels = np.unique(labels, return_inverse=True)[1].astype(np.int64)
        counts = np.bincount(labels)
        smallest = int(counts.argmin())
        if len(counts) < 2 or counts[smallest] >= min_cluster_size:
            return labels
        centers = cluster_means(points, labels)
        distances = euclidean_distances(centers[smallest : smallest + 1], centers)[0]  # (k,)
        distances[smallest] = np.inf
        if counts.max() >= min_cluster_size:
            distances[counts < min_cluster_size] = np.inf
        labels = np.where(labels == smallest, distances.argmin(), labels)


def _k_means_labels(points: np.ndarray, max_clusters: int, min_cluster_size: int, seed: int) -> np.ndarray:
    n_clusters = min(max_clusters, len(points) // min_cluster_size)
    with _serial_if_small(points):
        labels = _run_k_means(points, n_clusters, n_init=4, random_state=seed).labels_
    return merge_small_clusters(points, labels, min_cluster_size)
