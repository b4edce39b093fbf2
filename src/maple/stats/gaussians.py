"""Gaussians over embeddings: moments, PCA, covariances, squared distances and the chi-square tail.

The way from embeddings to a distance, for the letters of ``types`` (N images, D embedding, K projection, M clusters):

1. :class:`Moments` adds up counts, sums and second moments, batch by batch, in float64. Nothing else of the training
   images is needed, so that memory is O(D² + MD) whatever N is.
2. :func:`fit_gaussians` turns moments into :class:`Gaussians`: standardise, PCA, covariance and whitening folded into
   one (D, K) matrix and one (K,) offset, and M centroids in the whitened space.
3. :meth:`Gaussians.squared_distances` is then two matrix products: embeddings to projection, projection to centroids.

Everything is NumPy and SciPy; torch tensors are accepted wherever an array is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.sparse import csr_array
from scipy.special import gammainc, gammaln, log_ndtr, logsumexp

from maple.errors import DataError, FitError, UsageError

# Directions whose variance is below this share of the largest one are rounding noise: nothing is divided by less.
RELATIVE_FLOOR = 1e-10
# A feature whose deviation is below this share of its mean is a constant that was rounded.
CONSTANT_FEATURE = 1e-12
# Fewer images per component than this, and the covariance is shrunk (OAS).
IMAGES_PER_COMPONENT = 10
# A cluster with fewer images has no covariance of its own, however much it is shrunk.
MIN_IMAGES_FULL = 4
# Whitened coordinates have deviation 1: float32 products serve while their rounding stays below this.
FLOAT32_ROUNDING = 1e-3
# Elements per row block of what is done element by element: it should stay in the cache.
BLOCK_ELEMENTS = 1 << 20
# Elements per panel of matrix products: BLAS minds the cache itself, and threads that wait for each other, on a busy
# machine above all, should do so rarely.
PANEL_ELEMENTS = 1 << 22


# ---------------------------------------------------------------------------------------------------------- arrays


def as_array(values: Any) -> np.ndarray:
    """A NumPy array from an array, a list or a torch tensor (of any device and float type)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # NumPy has none
            values = values.float()
    return np.asarray(values)


def as_embeddings(values: Any) -> np.ndarray:
    """An (N, D) array of float32 or float64; half precision and integers become float32."""
    array = as_array(values)
    if array.ndim != 2:
        raise UsageError(f"embeddings must be a table of N rows and D columns, but have shape {array.shape}")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def row_blocks(n_rows: int, n_columns: int, *, elements: int | None = None, min_rows: int = 512) -> Iterator[slice]:
    """Consecutive slices over the rows, each of at most ``elements`` (``BLOCK_ELEMENTS``), or ``min_rows`` rows.

    The step is a power of two: BLAS works in panels, and a block that is not a whole number of them costs a tenth more.

    >>> list(row_blocks(5000, 512))
    [slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None)]
    """
    rows = max(min_rows, (elements or BLOCK_ELEMENTS) // max(1, n_columns))
    step = 1 << (rows.bit_length() - 1)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def row_norms(embeddings: np.ndarray) -> np.ndarray:
    """Euclidean norm of each row (N,); rows that over- or underflow in float32 are done again in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = np.vecdot(embeddings, embeddings)  # one BLAS call per row: faster than einsum
        norms = np.sqrt(squares)
        extreme = ~((squares > 1e-30) & (squares < 1e30))  # also catches NaN
        if extreme.any():
            norms = norms.astype(np.float64)
            norms[extreme] = np.linalg.norm(embeddings[extreme].astype(np.float64), axis=1)
    return norms


def _norm_factors(embeddings: np.ndarray, exponent: float) -> np.ndarray:
    """1 / ||e||^exponent for each row (N,); 1 for a zero vector, which stays zero."""
    norms = row_norms(embeddings)
    norms[norms == 0] = 1
    return norms**-exponent


def normalise(embeddings: Any, exponent: float = 1.0) -> np.ndarray:
    """Each embedding divided by its norm to the power ``exponent``: e / ||e||^exponent; zero vectors stay zero.

    0 leaves embeddings as they are (the paper), 1 puts them on the unit sphere (Mahalanobis++).

    >>> normalise([[3.0, 4.0], [0.0, 0.0]])
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    embeddings = as_embeddings(embeddings)
    if exponent == 0:
        return embeddings
    factors = _norm_factors(embeddings, exponent)
    with np.errstate(invalid="ignore"):  # an infinite embedding becomes NaN here and is reported where it is used
        return (embeddings * factors[:, None]).astype(embeddings.dtype, copy=False)


# --------------------------------------------------------------------------------------------------------- moments


class Moments:
    """Counts, sums and second moment of the embeddings of M clusters, accumulated batch by batch in float64.

    All sums are taken around ``shift`` (by default the mean of the first batch), since E[x²] - E[x]² loses every digit
    when the mean is large next to the deviation. Two ``Moments`` add up, whatever their shifts. Embeddings are divided
    by their norm to the power ``norm_exponent`` on the way in (see :func:`normalise`).

    >>> x = np.array([[0.0, 0.0], [2.0, 0.0], [10.0, 4.0], [12.0, 4.0]])
    >>> moments = Moments(2, 2).update(x, [0, 0, 1, 1])
    >>> moments.means
    array([[ 1.,  0.],
           [11.,  4.]])
    >>> moments.within_covariance.round(9)
    array([[1., 0.],
           [0., 0.]])
    """

    def __init__(
        self, n_clusters: int, dim: int, *, shift: ArrayLike | None = None, norm_exponent: float = 0.0
    ) -> None:
        self.counts = np.zeros(n_clusters, dtype=np.int64)  # (M,)
        self.sums = np.zeros((n_clusters, dim))  # (M, D) sum of x - shift
        self.second = np.zeros((dim, dim))  # (D, D) sum of (x - shift)(x - shift)'
        self.shift = None if shift is None else np.array(shift, dtype=np.float64)  # (D,)
        self.norm_exponent = float(norm_exponent)

    def __repr__(self) -> str:
        return f"Moments(n_clusters={self.n_clusters}, dim={self.dim}, n_images={self.n_images})"

    # -- adding images

    def update(self, embeddings: Any, cluster_ids: Any) -> Moments:
        """Add a batch: ``embeddings`` (N, D) and ``cluster_ids`` (N,) in 0..M-1. Returns itself."""
        embeddings = as_embeddings(embeddings)
        cluster_ids = as_array(cluster_ids)
        self._check(embeddings, cluster_ids)
        if len(embeddings) == 0:
            return self
        if self.shift is None:
            first = embeddings[next(row_blocks(*embeddings.shape))]
            self.shift = normalise(first, self.norm_exponent).mean(axis=0, dtype=np.float64)
        panels = list(row_blocks(*embeddings.shape, elements=PANEL_ELEMENTS))
        centred = np.empty((panels[0].stop, self.dim))  # one panel at a time, float64
        for panel in panels:
            self._add_panel(embeddings[panel], cluster_ids[panel], self.shift, centred[: panel.stop - panel.start])
        self.counts += np.bincount(cluster_ids, minlength=self.n_clusters)
        return self

    def _add_panel(
        self, embeddings: np.ndarray, cluster_ids: np.ndarray, shift: np.ndarray, centred: np.ndarray
    ) -> None:
        for rows in row_blocks(*embeddings.shape):  # blocks are still in the cache when they are summed
            np.subtract(normalise(embeddings[rows], self.norm_exponent), shift, out=centred[rows])
            self._add_sums(centred[rows], cluster_ids[rows])
        self.second += centred.T @ centred  # NumPy sees that this is symmetric: half the work

    def _add_sums(self, centred: np.ndarray, cluster_ids: np.ndarray) -> None:
        """Sums by cluster, as a sparse product: N x D additions, whatever M is."""
        present, index = np.unique(cluster_ids, return_inverse=True)
        n = len(cluster_ids)
        members = csr_array((np.ones(n), (index, np.arange(n))), shape=(len(present), n))
        self.sums[present] += members @ centred

    def _check(self, embeddings: np.ndarray, cluster_ids: np.ndarray) -> None:
        if embeddings.shape[1] != self.dim:
            raise FitError(f"embeddings have {embeddings.shape[1]} columns where {self.dim} are expected")
        if cluster_ids.shape != embeddings.shape[:1]:
            raise FitError(f"{len(embeddings)} embeddings need as many cluster ids, not shape {cluster_ids.shape}")
        if not np.issubdtype(cluster_ids.dtype, np.integer) and len(cluster_ids):
            raise FitError(f"cluster ids must be integers, not {cluster_ids.dtype}")
        if len(cluster_ids) and (cluster_ids.min() < 0 or cluster_ids.max() >= self.n_clusters):
            n_wrong = int(((cluster_ids < 0) | (cluster_ids >= self.n_clusters)).sum())
            raise FitError(
                f"{n_wrong} of {len(cluster_ids)} images have no label among the {self.n_clusters} known: "
                "leave them out of the fit"
            )
        _check_finite(embeddings)

    # -- combining

    def grow(self, n_clusters: int) -> Moments:
        """Make room for more clusters, empty so far. Returns itself."""
        more = n_clusters - self.n_clusters
        if more > 0:
            self.counts = np.append(self.counts, np.zeros(more, dtype=np.int64))
            self.sums = np.vstack([self.sums, np.zeros((more, self.dim))])
        return self

    def copy(self) -> Moments:
        return Moments.from_arrays({name: array.copy() for name, array in self.to_arrays().items()})

    def moved_to(self, shift: np.ndarray) -> Moments:
        """The same moments around another shift.

        With a = old shift - new shift: sum (x + a) = sum x + n a, and
        sum (x + a)(x + a)' = sum x x' + (sum x) a' + a (sum x)' + n a a'.
        """
        moved = Moments(self.n_clusters, self.dim, shift=shift, norm_exponent=self.norm_exponent)
        if self.shift is not None:
            step = self.shift - shift  # (D,)
            cross = np.outer(self.sums.sum(axis=0), step)  # (D, D)
            moved.counts = self.counts.copy()
            moved.sums = self.sums + self.counts[:, None] * step
            moved.second = self.second + cross + cross.T + self.n_images * np.outer(step, step)
        return moved

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of images, around the shift of the first that has one."""
        if not isinstance(other, Moments):
            return NotImplemented
        if self.dim != other.dim:
            raise FitError(f"moments of {self.dim} and {other.dim} dimensions do not add up")
        if self.norm_exponent != other.norm_exponent:
            raise FitError(f"moments with norm_exponent {self.norm_exponent} and {other.norm_exponent} do not add up")
        n_clusters = max(self.n_clusters, other.n_clusters)
        total = self.copy().grow(n_clusters)
        if other.shift is None:
            return total
        if total.shift is None:
            return other.copy().grow(n_clusters)
        aligned = other.moved_to(total.shift).grow(n_clusters)
        total.counts += aligned.counts
        total.sums += aligned.sums
        total.second += aligned.second
        return total

    def merge(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> Moments:
        """The moments of all processes, given a function that sums an array over them (an all-reduce).

        Every process calls it and gets the same result; the shifts may differ, the number of clusters may not.

        >>> ranks = [Moments(1, 1).update([[1.0]], [0]), Moments(1, 1).update([[3.0]], [0])]
        >>> alone = ranks[0].merge(lambda array: array)  # one process: nothing to add
        >>> alone.means
        array([[1.]])
        """
        votes = np.zeros(self.dim + 1) if self.shift is None else np.append(self.shift, 1.0)
        votes = sum_over_ranks(votes)  # the common shift is the mean of those there are
        if votes[-1] == 0:
            return self.copy()
        moved = self.moved_to(votes[:-1] / votes[-1])
        moved.counts = sum_over_ranks(moved.counts)
        moved.sums = sum_over_ranks(moved.sums)
        moved.second = sum_over_ranks(moved.second)
        return moved

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All there is, by name; counts, sums and second add up over processes that have a common shift."""
        exponent = np.array([self.norm_exponent])
        arrays = {"counts": self.counts, "sums": self.sums, "second": self.second, "norm_exponent": exponent}
        return arrays if self.shift is None else arrays | {"shift": self.shift}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Moments:
        """The inverse of :meth:`to_arrays`."""
        n_clusters, dim = arrays["sums"].shape
        moments = cls(n_clusters, dim, shift=arrays.get("shift"), norm_exponent=arrays["norm_exponent"].item())
        moments.counts = np.asarray(arrays["counts"], dtype=np.int64)
        moments.sums = np.asarray(arrays["sums"], dtype=np.float64)
        moments.second = np.asarray(arrays["second"], dtype=np.float64)
        return moments

    # -- what follows from them; covariances are divided by N, as in the paper

    @property
    def n_clusters(self) -> int:
        return len(self.counts)

    @property
    def dim(self) -> int:
        return self.sums.shape[1]

    @property
    def n_images(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> np.ndarray:
        """Mean of all images (D,)."""
        return self._shift() + self.sums.sum(axis=0) / self.n_images

    @property
    def means(self) -> np.ndarray:
        """Mean of each cluster (M, D); NaN for an empty one."""
        counts = np.where(self.counts > 0, self.counts, np.nan)
        return self._shift() + self.sums / counts[:, None]

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviation of each feature (D,); exactly 0 for a constant one."""
        centre = self.sums.sum(axis=0) / self.n_images
        variance = np.maximum(np.diag(self.second) / self.n_images - centre**2, 0.0)
        deviation = np.sqrt(variance)
        return np.where(deviation > CONSTANT_FEATURE * np.abs(self._shift() + centre), deviation, 0.0)

    @property
    def total_covariance(self) -> np.ndarray:
        """Covariance of all images around their mean (D, D)."""
        centre = self.sums.sum(axis=0) / self.n_images
        return self.second / self.n_images - np.outer(centre, centre)

    @property
    def within_covariance(self) -> np.ndarray:
        """Covariance of the images around the means of their clusters (D, D): the paper's Sigma."""
        centres = self.sums / np.sqrt(np.maximum(self.counts, 1))[:, None]  # (M, D)
        return (self.second - centres.T @ centres) / self.n_images

    def _shift(self) -> np.ndarray:
        if self.shift is None or self.n_images == 0:
            raise FitError("there are no images to fit: add images")
        return self.shift


def _check_finite(embeddings: np.ndarray) -> None:
    """NaN, infinity and what overflows when squared are errors, found before anything is added."""
    for rows in row_blocks(*embeddings.shape):
        block = embeddings[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.vdot(block, block)):  # one quick pass, nearly always enough
                continue
            wide = block.astype(np.float64)
            fine = np.isfinite(np.vdot(wide, wide))
        if n_broken := count_broken(embeddings):
            raise FitError(
                f"{n_broken} of {len(embeddings)} embeddings hold NaN or infinity: "
                "the network has diverged or those images are broken; train again or leave them out"
            )
        if not fine:
            raise FitError("embeddings are too large to be squared: scale them down")


def count_broken(embeddings: np.ndarray) -> int:
    """How many rows hold NaN or infinity."""
    return int((~np.isfinite(embeddings)).any(axis=1).sum())


# --------------------------------------------------------------------------------------------- PCA and covariances


def count_components(eigenvalues: np.ndarray, explained_variance: float) -> int:
    """The least number of leading eigenvalues whose sum reaches the share ``explained_variance``; at least 1.

    >>> count_components(np.array([6.0, 3.0, 1.0]), 0.9)
    2
    >>> count_components(np.array([6.0, 3.0, 1.0]), 0.91)
    3
    """
    reached = np.cumsum(eigenvalues)
    needed = explained_variance * reached[-1] * (1 - 1e-12)  # 0.6 + 0.3 counts as 0.9
    return min(int(np.searchsorted(reached, needed)) + 1, len(eigenvalues))


def principal_axes(covariance: np.ndarray, explained_variance: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvalues (K,) and eigenvectors (D, K), largest first; null directions are never among them.

    With ``explained_variance=1`` this is the whole space less the null directions, so that K is its rank.
    """
    eigenvalues, axes = np.linalg.eigh(covariance)  # ascending
    eigenvalues, axes = eigenvalues[::-1], axes[:, ::-1]
    rank = int((eigenvalues > RELATIVE_FLOOR * eigenvalues[0]).sum())
    n_components = min(rank, count_components(np.maximum(eigenvalues, 0.0), explained_variance))
    return eigenvalues[:n_components], axes[:, :n_components]


def oas_covariance(covariance: np.ndarray, n_images: int) -> np.ndarray:
    """Oracle-approximating shrinkage (Chen et al. 2010): (1 - r) S + r (tr S / K) I.

    r = (a + m²) / ((n + 1)(a - m²/K)), at most 1, with a the mean of the squared entries of S and m = tr S / K.
    Unlike Ledoit-Wolf it needs second moments only.
    """
    n_components = len(covariance)
    scale = np.trace(covariance) / n_components
    spread = np.mean(covariance**2)
    excess = (n_images + 1) * (spread - scale**2 / n_components)
    shrinkage = min(1.0, (spread + scale**2) / excess) if excess > 0 else 1.0
    shrunk = (1 - shrinkage) * covariance
    shrunk.flat[:: n_components + 1] += shrinkage * scale
    return shrunk


def whitening(covariance: np.ndarray, floor: float) -> tuple[np.ndarray, float]:
    """W (K, K) with W' S W = I, and log det S; eigenvalues below ``floor`` count as ``floor``.

    S - floor I has a Cholesky factor just when no eigenvalue lies below ``floor``; then the factor of S whitens, at a
    tenth of the cost of eigenvectors.
    """
    identity = np.eye(len(covariance))
    try:
        cholesky(covariance - floor * identity)
        upper = cholesky(covariance)  # S = U' U
        return solve_triangular(upper, identity), float(2 * np.log(np.diag(upper)).sum())
    except LinAlgError:
        pass
    eigenvalues, axes = np.linalg.eigh(covariance)
    eigenvalues = np.maximum(eigenvalues, floor)
    return axes / np.sqrt(eigenvalues), float(np.log(eigenvalues).sum())


# ----------------------------------------------------------------------------------------------- fitted Gaussians


@dataclass(frozen=True, eq=False)
class Gaussians:
    """M Gaussians over embeddings, ready to score: all that a graph or another language needs to do the same.

    The projection of an embedding e is ``(e / ||e||^norm_exponent) @ matrix + offset``; there, a squared distance is
    plain Euclidean. With one covariance per cluster, ``whitenings[c]`` is applied to the projection first.
    """

    matrix: np.ndarray  # (D, K) standardise, rotate, whiten
    offset: np.ndarray  # (K,)
    centroids: np.ndarray  # (M, K) cluster means in the projection
    log_priors: np.ndarray  # (M,) log share of the images
    norm_exponent: float = 0.0
    float32: bool = True  # whether float32 products are exact enough
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
        """What the log density of each cluster adds to -d²/2, up to a common constant (M,)."""
        return self.log_priors if self.log_determinants is None else self.log_priors - self.log_determinants / 2

    @cached_property
    def map_axes(self) -> np.ndarray:
        """The plane of the projection in which the clusters lie furthest apart (K, 2): for people to look at.

        The principal axes of the centroids, each as heavy as its share of the images. Within a cluster the projection
        has unit covariance, so that these are Fisher's first two linear discriminants, and every cluster is a unit
        Gaussian in the plane too (not so where each has its own covariance).

        >>> x = np.repeat(6 * np.eye(3), 4, axis=0) + np.random.default_rng(0).normal(size=(12, 3))
        >>> gaussians = fit_gaussians(Moments(3, 3).update(x, np.repeat([0, 1, 2], 4)))
        >>> gaussians.on_map(gaussians.project(x)).shape
        (12, 2)
        """
        shares = np.exp(self.log_priors)  # (M,)
        centred = (self.centroids - self._map_centre) * np.sqrt(shares)[:, None]
        axes = np.linalg.svd(centred)[2][:2].T  # (K, 2), or (1, 1)
        axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])] < 0, -1.0, 1.0)  # one sign only
        return np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))

    @property
    def _map_centre(self) -> np.ndarray:
        shares = np.exp(self.log_priors)  # (M,)
        return shares @ self.centroids / shares.sum()

    def on_map(self, projection: np.ndarray) -> np.ndarray:
        """Where projections (N, K) lie in the plane of :attr:`map_axes` (N, 2)."""
        return (projection - self._map_centre) @ self.map_axes

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All there is, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: np.atleast_1d(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Gaussians:
        """The inverse of :meth:`to_arrays`."""
        scalars = {"norm_exponent": arrays["norm_exponent"].item(), "float32": bool(arrays["float32"].item())}
        return cls(**{**arrays, **scalars})

    def project(self, embeddings: Any) -> np.ndarray:
        """The projection (N, K), float64."""
        embeddings = _as_wide_as(embeddings, self.dim)
        projection = np.empty((len(embeddings), self.n_components))
        for rows, block in self._projected_blocks(embeddings):
            projection[rows] = block
        return projection

    def squared_distances(self, embeddings: Any) -> np.ndarray:
        """Squared distance of each embedding to each cluster (N, M), float64, never negative."""
        embeddings = _as_wide_as(embeddings, self.dim)
        distances = np.empty((len(embeddings), self.n_clusters))
        for rows, block in self._projected_blocks(embeddings):
            distances[rows] = self._block_distances(block)
        if not np.isfinite(distances).all():
            self._repair(embeddings, distances)
        return distances

    def _projected_blocks(self, embeddings: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        single = self.float32 and embeddings.dtype == np.float32
        matrix = self.matrix.astype(np.float32) if single else self.matrix
        for rows in row_blocks(*embeddings.shape, elements=2 * BLOCK_ELEMENTS):  # float32 takes half the space
            block = embeddings[rows]
            with np.errstate(over="ignore", invalid="ignore"):
                # Norms first: they bring the block into the cache. Scaling K columns is cheaper than scaling D.
                factors = _norm_factors(block, self.norm_exponent)[:, None] if self.norm_exponent else 1.0
                projection = np.multiply(block @ matrix, factors, dtype=np.float64)  # (B, K)
            yield rows, np.add(projection, self.offset, out=projection)

    def _block_distances(self, projection: np.ndarray) -> np.ndarray:
        if self.whitenings is None:
            return squared_distances(projection, self.centroids)
        return full_squared_distances(projection, self.centroids, self.whitenings)

    def _repair(self, embeddings: np.ndarray, distances: np.ndarray) -> None:
        """Rows that overflowed in float32 are done again in float64; NaN and infinite embeddings are an error."""
        if n_broken := count_broken(embeddings):
            raise DataError(f"{n_broken} of {len(embeddings)} embeddings hold NaN or infinity: leave those images out")
        overflowed = ~np.isfinite(distances).all(axis=1)
        exact = replace(self, float32=False)
        blocks = exact._projected_blocks(embeddings[overflowed].astype(np.float64))
        largest = np.finfo(np.float64).max
        repaired = np.concatenate([exact._block_distances(block) for _, block in blocks])
        distances[overflowed] = np.nan_to_num(repaired, nan=largest, posinf=largest)


def _as_wide_as(embeddings: Any, dim: int) -> np.ndarray:
    """Embeddings (N, ``dim``), or an error."""
    embeddings = as_embeddings(embeddings)
    if embeddings.shape[1] != dim:
        raise UsageError(
            f"embeddings have {embeddings.shape[1]} columns, but the detector was fitted on {dim}: "
            "use the same backbone"
        )
    return embeddings


def fit_gaussians(
    moments: Moments,
    *,
    explained_variance: float = 0.95,
    pca: bool = True,
    covariance: str = "tied",
    distance: str = "mahalanobis",
) -> Gaussians:
    """Standardise, PCA, covariance and whitening from ``moments``, folded into one affine map.

    Standardised, the covariance of all images is a correlation matrix; PCA keeps its leading axes that explain
    ``explained_variance`` of it, all axes but null directions without ``pca``. In that space the covariance is

    - ``tied``: around the cluster means, shared by all clusters (the paper's Eq. 1); shrunk by OAS where there are
      fewer than 10 images per component;
    - ``global``: around the common mean;
    - ``full``: one per cluster, which needs a second pass: see :func:`with_full_covariances`; this gives the tied one.

    ``distance="euclidean"`` leaves the standardised components unwhitened.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(2000) % 2
    >>> x = rng.normal(size=(2000, 3)) + 5 * labels[:, None]
    >>> gaussians = fit_gaussians(Moments(2, 3).update(x, labels), pca=False)
    >>> squared = gaussians.squared_distances(x)  # (N, M)
    >>> bool(abs(squared[np.arange(2000), labels].mean() - 3) < 1e-9)  # K = 3, exactly, by definition of Sigma
    True
    """
    _check_enough(moments, needs_within=covariance != "global" and distance == "mahalanobis")
    eigenvalues, matrix = _components(moments, explained_variance if pca else 1.0)
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


@dataclass(frozen=True, eq=False)
class Background:
    """All images as one Gaussian, whatever their cluster, and what of an embedding lies outside its components.

    With z the standardised embedding and p = z A its K principal components, of variances v:

    - squared distance to the background, sum_k p_k² / v_k: what relative distances subtract (Ren et al. 2021,
      https://arxiv.org/abs/2106.09022);
    - residual ||z||² - ||p||²: what PCA left out (as in ViM, Wang et al. 2022, https://arxiv.org/abs/2203.10807).
    """

    mean: np.ndarray  # (D,)
    scale: np.ndarray  # (D,) 1 / deviation; 0 for constant features
    matrix: np.ndarray  # (D, K) scale times principal axes
    variances: np.ndarray  # (K,)
    norm_exponent: float = 0.0

    def squared_distances(self, embeddings: Any) -> np.ndarray:
        """Squared distance to the background (N,)."""
        return self._over_blocks(embeddings, lambda centred: (centred @ self.matrix) ** 2 @ (1 / self.variances))

    def residuals(self, embeddings: Any) -> np.ndarray:
        """Squared length of what lies outside the components (N,), never negative."""

        def residual(centred: np.ndarray) -> np.ndarray:
            whole = (centred**2) @ self.scale**2
            return np.maximum(whole - ((centred @ self.matrix) ** 2).sum(axis=1), 0.0)

        return self._over_blocks(embeddings, residual)

    def _over_blocks(self, embeddings: Any, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """``measure`` of the centred embeddings, block by block, in float64."""
        embeddings = _as_wide_as(embeddings, len(self.mean))
        values = np.empty(len(embeddings))
        for rows in row_blocks(*embeddings.shape):
            wide = embeddings[rows].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                values[rows] = measure(normalise(wide, self.norm_exponent) - self.mean)
        return np.nan_to_num(values, nan=np.finfo(np.float64).max, posinf=np.finfo(np.float64).max)


def fit_background(moments: Moments, *, explained_variance: float = 0.95, pca: bool = True) -> Background:
    """The background in the components that :func:`fit_gaussians` keeps of the same moments.

    Of few images the variances are shrunk towards their mean, as the covariance within clusters is.

    >>> x = np.array([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [-3.0, 0.0]])
    >>> background = fit_background(Moments(1, 2).update(x, [0, 0, 0, 0]))
    >>> background.squared_distances(x).round(9)
    array([2., 2., 2., 2.])
    """
    _check_enough(moments, needs_within=False)
    variances, matrix = _components(moments, explained_variance if pca else 1.0)
    variances = _shrink_if_few(np.diag(variances), moments.n_images - 1).diagonal()
    return Background(moments.mean, _inverse_deviation(moments), matrix, variances, moments.norm_exponent)


def _components(moments: Moments, explained_variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Variances (K,) of the principal components of standardised embeddings, and the map (D, K) onto them."""
    scale = _inverse_deviation(moments)  # (D,)
    correlation = moments.total_covariance * np.outer(scale, scale)  # (D, D)
    variances, axes = principal_axes(correlation, explained_variance)
    return variances, scale[:, None] * axes


def with_full_covariances(gaussians: Gaussians, covariances: np.ndarray, counts: np.ndarray) -> Gaussians:
    """Gaussians with one covariance each, from ``covariances`` (M, K, K) of the projections around the centroids.

    Since the projection is whitened by the tied covariance, shrinking towards a multiple of the identity (OAS) means
    shrinking towards a multiple of the tied covariance.
    """
    for cluster, (covariance, count) in enumerate(zip(covariances, counts)):
        if count < MIN_IMAGES_FULL or np.trace(covariance) <= RELATIVE_FLOOR * len(covariance):
            raise FitError(
                f"cluster {cluster} has {count} images, too few or too alike for its own covariance: "
                "add images or use covariance='tied'"
            )
    shrunk = [oas_covariance(covariance, count) for covariance, count in zip(covariances, counts)]
    pairs = [whitening(covariance, RELATIVE_FLOOR * np.trace(covariance)) for covariance in shrunk]
    return replace(
        gaussians,
        whitenings=np.stack([matrix for matrix, _ in pairs]),
        log_determinants=np.array([log_determinant for _, log_determinant in pairs]),
    )


def add_scatter(
    scatter: np.ndarray, projection: np.ndarray, cluster_ids: np.ndarray, centroids: np.ndarray
) -> np.ndarray:
    """Add sum (z - centroid)(z - centroid)' of each cluster, in place, to ``scatter`` (M, K, K); returned as well."""
    for cluster in np.unique(cluster_ids):
        centred = projection[cluster_ids == cluster] - centroids[cluster]
        scatter[cluster] += centred.T @ centred
    return scatter


def _check_enough(moments: Moments, needs_within: bool) -> None:
    if moments.n_images == 0:
        raise FitError("there are no images to fit: add images")
    if (empty := np.flatnonzero(moments.counts == 0)).size:
        which = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise FitError(
            f"{len(empty)} of {moments.n_clusters} clusters have no images (cluster {which}): "
            "add images or leave the cluster out"
        )
    if needs_within and moments.n_images <= moments.n_clusters:
        raise FitError(
            f"{moments.n_images} images in {moments.n_clusters} clusters leave nothing to estimate a covariance from: "
            "add images, or use covariance='global'"
        )


def _inverse_deviation(moments: Moments) -> np.ndarray:
    """1 / deviation of each feature (D,); 0 for constant ones, which drop out."""
    deviation = moments.deviation
    if not deviation.any():
        raise FitError(
            f"all {moments.n_images} embeddings are equal, the network has collapsed: train again with a lower "
            "learning_rate or triplet_weight, or add different images"
        )
    return np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)


def _within_components(eigenvalues: np.ndarray, centroids: np.ndarray, moments: Moments) -> np.ndarray:
    """The covariance around the cluster means in the components (K, K), shrunk where images are few.

    Within is total less between: total is diagonal here, between follows from the ``centroids`` (M, K).
    """
    weighted = centroids * np.sqrt(moments.counts / moments.n_images)[:, None]
    within = np.diag(eigenvalues) - weighted.T @ weighted
    if np.trace(within) <= RELATIVE_FLOOR * eigenvalues[0] * len(within):
        raise FitError(
            "all embeddings of each cluster are equal, so that there is no covariance around the cluster means: "
            "add different images, or use covariance='global'"
        )
    n_free = moments.n_images - moments.n_clusters
    return _shrink_if_few(within, n_free)


def _shrink_if_few(covariance: np.ndarray, n_images: int) -> np.ndarray:
    """The covariance (K, K), shrunk where there are few images per component."""
    return oas_covariance(covariance, n_images) if n_images < IMAGES_PER_COMPONENT * len(covariance) else covariance


def float32_suffices(moments: Moments, matrix: np.ndarray) -> bool:
    """Whether rounding e @ matrix to float32 moves whitened coordinates by less than ``FLOAT32_ROUNDING``.

    The bound is eps sum_d |e_d| |matrix_dk| for a typical e: large when embeddings lie far from 0 next to their
    deviation, or when clusters are very tight.
    """
    typical = np.sqrt(moments.mean**2 + moments.deviation**2)  # (D,)
    rounding = np.finfo(np.float32).eps * (typical @ np.abs(matrix))  # (K,)
    return bool(rounding.max() < FLOAT32_ROUNDING)


# ---------------------------------------------------------------------------------------- distances, tail, posterior


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


def full_squared_distances(projection: np.ndarray, centroids: np.ndarray, whitenings: np.ndarray) -> np.ndarray:
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


def log_chi_square_tail(squared_distances: ArrayLike, degrees_of_freedom: int) -> np.ndarray:
    """log P(X >= d²) of a chi-square variable, finite and strictly decreasing however far out d² is.

    With a = k/2 and z = d²/2 the tail is Q(a, z). Up to its mean, Q = 1 - P with P from SciPy. Beyond, the finite sum
    exp(-z) sum_i z^i / Gamma(i + 1) over i = a-1, a-2, ... down to 0 (even k) or 1/2 (odd k, plus erfc(sqrt z)): its
    first term is the largest and is taken out, so that only its logarithm is ever needed.

    >>> log_chi_square_tail([0.0, 11.0, 1e5], 11).round(3)
    array([ 0.0000000e+00, -8.1400000e-01, -4.9955269e+04])
    """
    half = np.minimum(np.asarray(squared_distances, dtype=np.float64) / 2, 1e300)  # infinity stays finite
    if degrees_of_freedom < 1 or int(degrees_of_freedom) != degrees_of_freedom:
        raise UsageError(f"degrees of freedom must be a whole number of at least 1, not {degrees_of_freedom}")
    shape = degrees_of_freedom / 2
    far = half > shape
    log_tail = np.log1p(-gammainc(shape, np.where(far, 0.0, half))) + 0.0  # never -0
    if far.any():
        log_tail = np.asarray(log_tail)
        log_tail[far] = _log_far_tail(half[far], int(degrees_of_freedom))
    return log_tail


def _log_far_tail(half: np.ndarray, degrees_of_freedom: int) -> np.ndarray:
    """The finite sum for z > k/2, where each term is smaller than the one before (Horner from the last one)."""
    odd = degrees_of_freedom % 2
    log_erfc = np.log(2) + log_ndtr(-np.sqrt(2 * half)) if odd else -np.inf
    if degrees_of_freedom == 1:
        return np.asarray(log_erfc)
    first = degrees_of_freedom / 2 - 1
    total = np.ones_like(half)
    for i in np.arange(odd / 2 + 1, first + 1):  # the ratio of the terms i - 1 and i is i / z
        total *= i / half
        total += 1
    log_sum = first * np.log(half) - gammaln(first + 1) - half + np.log(total)
    return np.logaddexp(log_sum, log_erfc)


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
    log_class = class_logsumexp(log_joint, cluster_to_class)  # (N, C)
    return log_class - logsumexp(log_class, axis=1, keepdims=True)
