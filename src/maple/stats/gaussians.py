"""Gaussians over embeddings: squared distances to clusters, and the class posterior.

From embeddings to a distance (N images, D embedding, K projection, C classes, M clusters):

1. :class:`~maple.stats.moments.Moments` accumulates counts, sums and second moments, batch by batch, in float64.
   They are sufficient statistics: memory is O(D² + MD), independent of N.
2. :func:`fit_gaussians` turns moments into :class:`Gaussians`: standardise, PCA, covariance and whitening folded into
   one (D, K) matrix and one (K,) offset, and M centroids in the whitened space.
3. :meth:`Gaussians.squared_distances` is then two matrix products: embeddings to projection, projection to centroids.
   :meth:`Gaussians.nearest` keeps only the nearest cluster, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import log_softmax

from maple.errors import FitError
from maple.stats.arrays import BLOCK_ELEMENTS, ArrayRecord, as_embeddings, check_rows, norm_factors, row_blocks
from maple.stats.covariance import RELATIVE_FLOOR, oas_covariance, principal_axes, shrink_if_few, whitening
from maple.stats.moments import Moments
from maple.stats.nearest import CENTROIDS, Nearest, nearest_centroids

# The smallest number of images for which a cluster gets its own (shrunk) covariance.
_MIN_IMAGES_FULL = 4
# Squared distance of images whose own would overflow: sums, means and multiples of it are still finite.
FARTHEST = 1e300
# Largest rounding error of whitened coordinates (standard deviation 1) for which float32 products are used.
_FLOAT32_ROUNDING = 1e-3
_SEARCH_ELEMENTS = 2**17  # of the tables of a search: they stay in the cache, and a call of NumPy pays


@dataclass(frozen=True, eq=False)
class Gaussians(ArrayRecord):
    """M Gaussians over embeddings, as the arrays that a score needs; exported graphs contain the same arrays.

    The projection of an embedding e is ``(e / ||e||^norm_exponent) @ matrix + offset``; in it, squared distances are
    Euclidean. With one covariance per cluster, ``whitenings[c]`` is applied to the projection first.
    """

    matrix: np.ndarray  # (D, K) standardise, rotate, whiten
    offset: np.ndarray  # (K,)
    centroids: np.ndarray  # (M, K) cluster means in the projection
    log_priors: np.ndarray  # (M,) log share of the images
    norm_exponent: float = 0.0
    float32: bool = True  # whether float32 products are accurate enough
    whitenings: np.ndarray | None = None  # (M, K, K), one covariance per cluster only
    log_determinants: np.ndarray | None = None  # (M,), one covariance per cluster only

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    @property
    def n_components(self) -> int:
        """K, which is also the degrees of freedom of the chi-square tail."""
        return self.matrix.shape[1]

    @property
    def n_clusters(self) -> int:
        return len(self.centroids)

    @property
    def log_weights(self) -> np.ndarray:
        """Log density of each cluster (M,) without -d²/2, up to a common constant."""
        return self.log_priors if self.log_determinants is None else self.log_priors - self.log_determinants / 2

    @cached_property
    def map_axes(self) -> np.ndarray:
        """The plane of the projection that separates the clusters best (K, 2), for plots.

        The principal axes of the centroids, weighted by their share of the images. Within a cluster the projection
        has unit covariance, so these are Fisher's first two linear discriminants, and every cluster is a unit Gaussian
        in the plane (unless each cluster has its own covariance).

        >>> x = np.repeat(6 * np.eye(3), 4, axis=0) + np.random.default_rng(0).normal(size=(12, 3))
        >>> gaussians = fit_gaussians(Moments(3, 3).update(x, np.repeat([0, 1, 2], 4)))
        >>> gaussians.on_map(gaussians.project(x)).shape
        (12, 2)
        """
        shares = np.exp(self.log_priors)  # (M,)
        centred = (self.centroids - self._map_centre) * np.sqrt(shares)[:, None]
        axes = np.linalg.svd(centred)[2][:2].T  # (K, 2), or (1, 1)
        axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])] < 0, -1.0, 1.0)  # fix the sign
        return np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))

    @property
    def _map_centre(self) -> np.ndarray:
        shares = np.exp(self.log_priors)  # (M,)
        return shares @ self.centroids / shares.sum()

    def on_map(self, projection: np.ndarray) -> np.ndarray:
        """Coordinates (N, 2) of projections (N, K) in the plane of :attr:`map_axes`."""
        return (projection - self._map_centre) @ self.map_axes

    def project(self, embeddings: Any) -> np.ndarray:
        """The projection (N, K), float64."""
        embeddings = as_embeddings(embeddings, self.dim)
        projection = np.empty((len(embeddings), self.n_components))
        for rows, block in self._projected_blocks(embeddings):
            projection[rows] = block
        return projection

    def squared_distances(self, embeddings: Any) -> np.ndarray:
        """Squared distance of each embedding to each cluster (N, M), float64, never negative."""
        embeddings = as_embeddings(embeddings, self.dim)
        distances = np.empty((len(embeddings), self.n_clusters))
        for rows, block in self._projected_blocks(embeddings):
            distances[rows] = self._block_distances(block)
        if not distances.max(initial=0.0) < FARTHEST:  # also catches NaN
            self._repair(embeddings, distances)
        return distances

    def nearest(self, embeddings: Any) -> Nearest:
        """The nearest cluster of each embedding, in memory that does not grow with N x M.

        The same clusters and distances as those of :meth:`squared_distances`, to the rounding of float64.

        >>> x = np.repeat(6 * np.eye(3), 4, axis=0) + np.random.default_rng(0).normal(size=(12, 3))
        >>> gaussians = fit_gaussians(Moments(3, 3).update(x, np.repeat([0, 1, 2], 4)))
        >>> gaussians.nearest(x).cluster
        array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
        """
        embeddings = as_embeddings(embeddings, self.dim)
        n = len(embeddings)
        found = Nearest(np.empty(n, dtype=np.int64), np.empty(n), np.empty(n))
        width = max(self.n_components, min(self.n_clusters, CENTROIDS))  # of the tables that the search makes
        step = max(512, BLOCK_ELEMENTS // self.dim)  # whole blocks of the projection, which rounds by block
        for rows in row_blocks(n, width, elements=_SEARCH_ELEMENTS, min_rows=step):
            part = self._block_nearest(self.project(embeddings[rows]))
            if not np.isfinite(part.mean).all():
                part = Nearest.of(self.squared_distances(embeddings[rows]))
            for values, new in zip(found, part):
                values[rows] = new
        return found

    def _block_nearest(self, projection: np.ndarray) -> Nearest:
        if self.whitenings is None:
            return nearest_centroids(projection, self.centroids)
        return Nearest.of(_full_squared_distances(projection, self.centroids, self.whitenings))

    def _projected_blocks(self, embeddings: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        single = self.float32 and embeddings.dtype == np.float32
        matrix = self.matrix.astype(np.float32) if single else self.matrix
        for rows in row_blocks(*embeddings.shape):
            block = embeddings[rows]
            with np.errstate(over="ignore", invalid="ignore"):
                # Norms first: they load the block into the cache. Scaling K columns is cheaper than scaling D.
                factors = norm_factors(block, self.norm_exponent)[:, None] if self.norm_exponent else 1.0
                projection = np.multiply(block @ matrix, factors, dtype=np.float64)  # (B, K)
            yield rows, np.add(projection, self.offset, out=projection)

    def _block_distances(self, projection: np.ndarray) -> np.ndarray:
        if self.whitenings is None:
            return squared_distances(projection, self.centroids)
        return _full_squared_distances(projection, self.centroids, self.whitenings)

    def _repair(self, embeddings: np.ndarray, distances: np.ndarray) -> None:
        """Recompute rows that overflowed in float32 in float64; NaN and infinite embeddings are an error."""
        check_rows(embeddings, "embeddings")
        overflowed = ~(distances < FARTHEST).all(axis=1)
        exact = replace(self, float32=False)
        blocks = exact._projected_blocks(embeddings[overflowed].astype(np.float64))
        repaired = np.concatenate([exact._block_distances(block) for _, block in blocks])
        distances[overflowed] = np.minimum(np.nan_to_num(repaired, nan=FARTHEST, posinf=FARTHEST), FARTHEST)


# ---------------------------------------------------------------------------------------------------------- fitting


def fit_gaussians(
    moments: Moments,
    *,
    explained_variance: float = 0.95,
    pca: bool = True,
    covariance: str = "tied",
    distance: str = "mahalanobis",
    standardise: bool = True,
) -> Gaussians:
    """Standardise, PCA, covariance and whitening from ``moments``, folded into one affine map.

    Standardised, the covariance of all images is a correlation matrix; PCA keeps its leading axes that explain
    ``explained_variance`` of it, all axes but null directions without ``pca``. In that space the covariance is

    - ``tied``: around the cluster means, shared by all clusters (the paper's Eq. 1); shrunk by OAS where there are
      fewer than 10 images per component;
    - ``global``: around the common mean;
    - ``full``: one per cluster, which needs a second pass: see :func:`with_full_covariances`; this gives the tied one.

    ``distance="euclidean"`` leaves the standardised components unwhitened. Without ``standardise`` PCA sees the
    covariance itself, as in the published code: features with large variance then dominate the components.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(2000) % 2
    >>> x = rng.normal(size=(2000, 3)) + 5 * labels[:, None]
    >>> gaussians = fit_gaussians(Moments(2, 3).update(x, labels), pca=False)
    >>> squared = gaussians.squared_distances(x)  # (N, M)
    >>> bool(abs(squared[np.arange(2000), labels].mean() - 3) < 1e-9)  # K = 3, exactly, by definition of Sigma
    True
    """
    check_enough(moments, needs_within=covariance != "global" and distance == "mahalanobis")
    eigenvalues, matrix = principal_components(moments, explained_variance if pca else 1.0, standardise)
    mean = moments.mean
    deviations = moments.means - mean  # (M, D)
    if distance == "mahalanobis" and covariance == "global":
        matrix = matrix / np.sqrt(eigenvalues)
    elif distance == "mahalanobis":
        within = _within_components(eigenvalues, deviations @ matrix, moments)
        matrix = matrix @ whitening(within, RELATIVE_FLOOR * eigenvalues[0])[0]
    return Gaussians(
        matrix=matrix,
        offset=-mean @ matrix,
        centroids=deviations @ matrix,
        log_priors=np.log(moments.counts / moments.n_images),
        norm_exponent=moments.norm_exponent,
        float32=float32_suffices(moments, matrix),
    )


def fit_ridged_gaussians(moments: Moments, ridge: float) -> Gaussians:
    r"""Gaussians with one covariance S in all D directions, and a small ``ridge`` on its diagonal.

    .. math:: d_c^2 = (e - m_c)^\top (S + r I)^{-1} (e - m_c)

    A direction without variance is kept and has the variance r: an image that leaves it is 1 / r times as far away as
    its squared deviation, so r = 1e-20 decides the distance of every image that has a feature which is constant among
    training images. Variances that are rounding noise count as zero.

    >>> x = np.array([[1.0, 0.0], [-1.0, 0.0], [3.0, 0.0], [5.0, 0.0]])
    >>> gaussians = fit_ridged_gaussians(Moments(2, 2).update(x, [0, 0, 1, 1]), ridge=0.01)
    >>> gaussians.squared_distances(np.array([[0.0, 0.5]])).round(3)  # 0.25 / 0.01, and 4^2 / 1.01 further
    array([[25.   , 40.842]])
    """
    check_enough(moments, needs_within=True)
    variances, axes = np.linalg.eigh(moments.within_covariance)
    variances = np.where(variances > RELATIVE_FLOOR * variances[-1], variances, 0.0)  # (D,)
    matrix = axes / np.sqrt(variances + ridge)
    return Gaussians(
        matrix=matrix,
        offset=-moments.mean @ matrix,
        centroids=(moments.means - moments.mean) @ matrix,
        log_priors=np.log(moments.counts / moments.n_images),
        norm_exponent=moments.norm_exponent,
        float32=False,
    )


def principal_components(moments: Moments, explained: float, standardise: bool) -> tuple[np.ndarray, np.ndarray]:
    """Variances (K,) of the principal components of scaled embeddings, and the map (D, K) onto them."""
    scale = feature_scale(moments, standardise)  # (D,)
    correlation = moments.total_covariance * np.outer(scale, scale)  # (D, D)
    variances, axes = principal_axes(correlation, explained)
    return variances, scale[:, None] * axes


def _within_components(eigenvalues: np.ndarray, centroids: np.ndarray, moments: Moments) -> np.ndarray:
    """Covariance within clusters in the principal components (K, K), shrunk if there are few images.

    It is the total covariance, diagonal here, minus the covariance between the ``centroids`` (M, K).
    """
    weighted = centroids * np.sqrt(moments.counts / moments.n_images)[:, None]
    within = np.diag(eigenvalues) - weighted.T @ weighted
    if np.trace(within) <= RELATIVE_FLOOR * eigenvalues[0] * len(within):
        remedy = "add different images, or use covariance='global'"
        raise FitError(f"the covariance within clusters is zero, since the embeddings of each are equal: {remedy}")
    return shrink_if_few(within, moments.n_images - moments.n_clusters)


def check_enough(moments: Moments, needs_within: bool) -> None:
    if moments.n_images == 0:
        raise FitError("there are no images to fit: add images")
    if (empty := np.flatnonzero(moments.counts == 0)).size:
        which = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        found = f"{len(empty)} of {moments.n_clusters} clusters have no images (cluster {which})"
        raise FitError(f"{found}: add images or leave the cluster out")
    if needs_within and moments.n_images <= moments.n_clusters:
        found = f"{moments.n_images} images in {moments.n_clusters} clusters are too few to estimate a covariance"
        raise FitError(f"{found}: add images, or use covariance='global'")


def feature_scale(moments: Moments, standardise: bool = True) -> np.ndarray:
    """Factor of each feature (D,): 1 / standard deviation, or 1 without ``standardise``; 0 drops constant ones."""
    deviation = moments.deviation
    if not deviation.any():
        remedy = "train again with a lower learning_rate or triplet_weight, or add different images"
        raise FitError(f"all {moments.n_images} embeddings are equal, the network has collapsed: {remedy}")
    return np.divide(1.0, deviation if standardise else 1.0, out=np.zeros_like(deviation), where=deviation > 0)


def float32_suffices(moments: Moments, matrix: np.ndarray) -> bool:
    """Whether rounding e @ matrix to float32 moves whitened coordinates by less than ``_FLOAT32_ROUNDING``.

    The bound is eps sum_d |e_d| |matrix_dk| for a typical e: large if embeddings lie far from 0 relative to their
    standard deviation, or if clusters are very tight.
    """
    typical = np.sqrt(moments.mean**2 + moments.deviation**2)  # (D,)
    rounding = np.finfo(np.float32).eps * (typical @ np.abs(matrix))  # (K,)
    return bool(rounding.max() < _FLOAT32_ROUNDING)


def with_full_covariances(gaussians: Gaussians, covariances: np.ndarray, counts: np.ndarray) -> Gaussians:
    """Gaussians with one covariance per cluster, from ``covariances`` (M, K, K) of projections around the centroids.

    The projection is whitened by the tied covariance, so OAS shrinks towards a multiple of the tied covariance.
    """
    for cluster, (covariance, count) in enumerate(zip(covariances, counts)):
        if count < _MIN_IMAGES_FULL or np.trace(covariance) <= RELATIVE_FLOOR * len(covariance):
            found = f"cluster {cluster} has {count} images, too few or too alike for its own covariance"
            raise FitError(f"{found}: add images or use covariance='tied'")
    shrunk = map(oas_covariance, covariances, counts)
    whitenings, logs = zip(*(whitening(covariance, RELATIVE_FLOOR * np.trace(covariance)) for covariance in shrunk))
    return replace(gaussians, whitenings=np.stack(whitenings), log_determinants=np.array(logs))


def add_scatter(scatter: np.ndarray, projection: np.ndarray, cluster_ids: np.ndarray, centroids: np.ndarray) -> None:
    """Add sum (z - centroid)(z - centroid)' of each cluster to ``scatter`` (M, K, K), in place."""
    for cluster in np.unique(cluster_ids):
        centred = projection[cluster_ids == cluster] - centroids[cluster]
        scatter[cluster] += centred.T @ centred


# ------------------------------------------------------------------------------------------ distances and posterior


def squared_distances(projection: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances (N, M) as one product: ||z||² - 2 z c' + ||c||², never negative.

    >>> squared_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0.0, 0.0]]))
    array([[ 0.],
           [25.]])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        distances = projection @ (-2 * centroids.T)  # (N, M)
        distances += np.vecdot(projection, projection)[:, None]
        distances += np.vecdot(centroids, centroids)
    return np.maximum(distances, 0.0, out=distances)


def _full_squared_distances(projection: np.ndarray, centroids: np.ndarray, whitenings: np.ndarray) -> np.ndarray:
    """||(z - c_m) W_m||² for every image and cluster (N, M), as one product per row block."""
    n_clusters, n_components = centroids.shape
    stacked = np.concatenate(list(whitenings), axis=1)  # (K, M K)
    offsets = np.einsum("mk,mkj->mj", centroids, whitenings).ravel()  # (M K)
    distances = np.empty((len(projection), n_clusters))
    for rows in row_blocks(len(projection), n_clusters * n_components, min_rows=16):
        with np.errstate(over="ignore", invalid="ignore"):
            whitened = (projection[rows] @ stacked - offsets).reshape(-1, n_clusters, n_components)  # (B, M, K)
            distances[rows] = np.einsum("bmk,bmk->bm", whitened, whitened)
    return distances


def class_maximum(values: np.ndarray, cluster_to_class: np.ndarray) -> np.ndarray:
    """The largest value among the clusters of each class: (N, M) to (N, C); -inf for a class without clusters.

    >>> class_maximum(np.array([[1.0, 5.0, 2.0]]), np.array([0, 1, 0]))
    array([[2., 5.]])
    """
    order = np.argsort(cluster_to_class, kind="stable")
    classes, starts = np.unique(cluster_to_class[order], return_index=True)
    largest = np.full((len(values), int(classes[-1]) + 1), -np.inf)
    largest[:, classes] = np.maximum.reduceat(values[:, order], starts, axis=1)
    return largest


def class_logsumexp(values: np.ndarray, cluster_to_class: np.ndarray) -> np.ndarray:
    """log sum exp over the clusters of each class: (N, M) to (N, C); -inf for a class without clusters.

    >>> np.exp(class_logsumexp(np.log([[0.2, 0.5, 0.3]]), np.array([0, 1, 0])))
    array([[0.5, 0.5]])
    """
    largest = class_maximum(values, cluster_to_class)  # (N, C)
    order = np.argsort(cluster_to_class, kind="stable")
    classes, starts = np.unique(cluster_to_class[order], return_index=True)
    safe = np.where(np.isfinite(largest), largest, 0.0)
    terms = np.exp(values - safe[:, cluster_to_class])[:, order]  # (N, M), the largest of each class is 1
    with np.errstate(divide="ignore"):  # log 0 of a class whose clusters are all at -inf
        largest[:, classes] = safe[:, classes] + np.log(np.add.reduceat(terms, starts, axis=1))
    return largest


def log_posterior(
    squared_distances: np.ndarray, log_weights: np.ndarray, cluster_to_class: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log class probabilities (N, C) of the Gaussians: Bayes over clusters, summed over the clusters of a class.

    log p(class | e) = log sum over its clusters of exp(w_c - d_c² / 2T), normalised; w_c is ``log_weights``: the log
    prior, less half the log determinant where covariances differ.

    >>> d2 = np.array([[2.0, 2.0, 2.0]])
    >>> np.exp(log_posterior(d2, np.log([0.2, 0.3, 0.5]), np.array([0, 0, 1]))).round(3)
    array([[0.5, 0.5]])
    """
    log_joint = log_weights - squared_distances / (2 * temperature)  # (N, M)
    log_joint = log_joint - log_joint.max(axis=1, keepdims=True)  # far away, log 2 would be lost beside d²
    return log_softmax(class_logsumexp(log_joint, cluster_to_class), axis=1)  # (N, C)
