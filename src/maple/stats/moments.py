"""Counts, sums and second moments of embeddings by cluster: the sufficient statistics of the Gaussians.

Shapes: N images, D embedding, M clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from maple.errors import FitError
from maple.stats.arrays import as_array, as_embeddings, broken_rows, list_rows, normalise, row_blocks

# A feature whose standard deviation is below this share of its mean is constant up to rounding.
_CONSTANT_FEATURE = 1e-12
# Elements per panel of matrix products: BLAS blocks for the cache itself; large panels mean few thread barriers.
_PANEL_ELEMENTS = 1 << 22
_OUTER_ELEMENTS = 1 << 16  # of an outer product at a time
# Clusters in a block up to which a dense product sums faster than a sparse one.
_FEW_CLUSTERS = 24


class Moments:
    """Counts, sums and second moment of the embeddings of M clusters, accumulated batch by batch in float64.

    All sums are taken around ``shift`` (default: the mean of the first batch), because E[x²] - E[x]² cancels when the
    mean is large relative to the standard deviation. ``Moments`` with different shifts can be added. Embeddings are
    divided by their norm to the power ``norm_exponent`` before they are added (:func:`normalise`).

    >>> x = np.array([[0.0, 0.0], [2.0, 0.0], [10.0, 4.0], [12.0, 4.0]])
    >>> moments = Moments(2, 2).update(x, [0, 0, 1, 1])
    >>> moments.means
    array([[ 1.,  0.],
           [11.,  4.]])
    >>> moments.within_covariance.round(9)
    array([[1., 0.],
           [0., 0.]])
    """

    def __init__(self, n_clusters: int, dim: int, *, shift: Any = None, norm_exponent: float = 0.0) -> None:
        self.counts = np.zeros(n_clusters, dtype=np.int64)  # (M,)
        self.sums = np.zeros((n_clusters, dim))  # (M, D) sum of x - shift
        self.second = np.zeros((dim, dim))  # (D, D) sum of (x - shift)(x - shift)'
        self.shift = None if shift is None else np.array(shift, dtype=np.float64)  # (D,)
        self.norm_exponent = float(norm_exponent)
        self._room = _Room(), _Room()  # of counts and sums

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
        panels = list(row_blocks(*embeddings.shape, elements=_PANEL_ELEMENTS))
        centred = np.empty((panels[0].stop, self.dim))  # one panel at a time, float64
        for panel in panels:
            self._add_panel(embeddings[panel], cluster_ids[panel], self.shift, centred[: panel.stop - panel.start])
        self.counts += np.bincount(cluster_ids, minlength=self.n_clusters)
        return self

    def _add_panel(
        self, embeddings: np.ndarray, cluster_ids: np.ndarray, shift: np.ndarray, centred: np.ndarray
    ) -> None:
        for rows in row_blocks(*embeddings.shape):  # sum each block while it is in the cache
            np.copyto(centred[rows], normalise(embeddings[rows], self.norm_exponent))  # twice as fast as to mix types
            centred[rows] -= shift
            self._add_sums(centred[rows], cluster_ids[rows])
        self.second += centred.T @ centred  # NumPy calls SYRK for A' A: half the work

    def _add_sums(self, centred: np.ndarray, cluster_ids: np.ndarray) -> None:
        """Add the sums by cluster as one product: dense for few clusters, else a sparse one of N x D additions."""
        present, index = np.unique(cluster_ids, return_inverse=True)
        n = len(cluster_ids)
        if len(present) <= _FEW_CLUSTERS:
            members: Any = (index == np.arange(len(present))[:, None]).astype(np.float64)  # (M, N)
        else:
            members = csr_array((np.ones(n), (index, np.arange(n))), shape=(len(present), n))
        self.sums[present] += members @ centred

    def _check(self, embeddings: np.ndarray, cluster_ids: np.ndarray) -> None:
        if embeddings.shape[1] != self.dim:
            raise FitError(f"embeddings have {embeddings.shape[1]} columns, expected {self.dim}: use the same backbone")
        if cluster_ids.shape != embeddings.shape[:1]:
            raise FitError(f"cluster_ids has shape {cluster_ids.shape}: give one per embedding ({len(embeddings)})")
        if not np.issubdtype(cluster_ids.dtype, np.integer) and len(cluster_ids):
            raise FitError(f"cluster_ids has type {cluster_ids.dtype}: give integers")
        if len(cluster_ids) and (cluster_ids.min() < 0 or cluster_ids.max() >= self.n_clusters):
            n_wrong = int(((cluster_ids < 0) | (cluster_ids >= self.n_clusters)).sum())
            found = f"{n_wrong} of {len(cluster_ids)} images have no label among the {self.n_clusters} known"
            raise FitError(f"{found}: leave them out of the fit")
        _check_finite(embeddings)

    def _check_like(self, other: Moments) -> None:
        """Refuse moments of another kind of embeddings."""
        if self.dim != other.dim:
            raise FitError(f"cannot add moments of {self.dim} and {other.dim} dimensions: use one backbone")
        if self.norm_exponent != other.norm_exponent:
            exponents = f"{self.norm_exponent} and {other.norm_exponent}"
            raise FitError(f"cannot add moments of norm_exponent {exponents}: use one exponent")

    # -- combining

    def grow(self, n_clusters: int) -> Moments:
        """Append empty clusters up to ``n_clusters``, in constant time for each. Returns itself."""
        if n_clusters > self.n_clusters:
            self.counts = self._room[0].extend(self.counts, n_clusters)
            self.sums = self._room[1].extend(self.sums, n_clusters)
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
        """The moments of the union, around the shift of the first operand that has one."""
        if not isinstance(other, Moments):
            return NotImplemented
        self._check_like(other)
        n_clusters = max(self.n_clusters, other.n_clusters)
        total = self.copy().grow(n_clusters)
        if other.shift is None:
            return total
        if total.shift is None:
            return other.copy().grow(n_clusters)
        added = other.moved_to(total.shift).grow(n_clusters)
        total.counts += added.counts
        total.sums += added.sums
        total.second += added.second
        return total

    def centre(self) -> Moments:
        """Take the sums around the mean of all images, in place. Returns itself.

        With step = mean - shift: the sums lose n_c step each, and the second moment n step step'.
        """
        if self.shift is not None and self.n_images:
            step = self.sums.sum(axis=0) / self.n_images  # (D,)
            _add_outer(self.second, step, -float(self.n_images))
            self.sums -= self.counts[:, None] * step
            self.shift = self.shift + step
        return self

    def absorb(self, other: Moments) -> Moments:
        """Add the moments of other images, in place, without a third D x D matrix.

        Do not use ``other`` afterwards: it may share its arrays with the sum.

        Chan, Golub and LeVeque (1983): S = S1 + S2 + n1 n2 / (n1 + n2) (m1 - m2)(m1 - m2)'. Returns itself.

        >>> left, right = (Moments(1, 1).update(x, np.zeros(2, int)) for x in ([[1.0], [3.0]], [[5.0], [7.0]]))
        >>> left.absorb(right).total_covariance
        array([[5.]])
        """
        self._check_like(other)
        if other.shift is None or not other.n_images:
            return self
        if self.shift is None or not self.n_images:
            self.shift, before = other.shift, self.counts
            self.counts, self.sums, self.second = other.counts.copy(), other.sums.copy(), other.second
            return self.grow(len(before))
        self.grow(other.n_clusters).centre()
        other.grow(self.n_clusters).centre()
        n, more = self.n_images, other.n_images
        apart = other.shift - self.shift  # (D,)
        self.second += other.second
        _add_outer(self.second, apart, n * more / (n + more))
        step = apart * (more / (n + more))  # from the old to the new mean
        self.sums += other.sums
        self.sums += other.counts[:, None] * (apart - step) - self.counts[:, None] * step
        self.shift = self.shift + step
        self.counts += other.counts
        return self

    def merge(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray]) -> Moments:
        """The moments of all processes, given a function that sums an array over them (an all-reduce).

        Every process must call it, and all get the same result. Shifts may differ; the number of clusters must agree.

        >>> ranks = [Moments(1, 1).update([[1.0]], [0]), Moments(1, 1).update([[3.0]], [0])]
        >>> alone = ranks[0].merge(lambda array: array)  # a single process
        >>> alone.means
        array([[1.]])
        """
        votes = np.zeros(self.dim + 1) if self.shift is None else np.append(self.shift, 1.0)
        votes = sum_over_ranks(votes)  # common shift: mean over processes that have one
        if votes[-1] == 0:
            return self.copy()
        moved = self.moved_to(votes[:-1] / votes[-1])
        moved.counts = sum_over_ranks(moved.counts)
        moved.sums = sum_over_ranks(moved.sums)
        moved.second = sum_over_ranks(moved.second)
        return moved

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The moments as arrays, by name."""
        exponent = np.array([self.norm_exponent])
        arrays = {"counts": self.counts, "sums": self.sums, "second": self.second, "norm_exponent": exponent}
        return arrays if self.shift is None else arrays | {"shift": self.shift}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Moments:
        """The inverse of :meth:`to_arrays`."""
        moments = cls(0, 0, shift=arrays.get("shift"), norm_exponent=arrays["norm_exponent"].item())
        moments.counts = np.asarray(arrays["counts"], dtype=np.int64)
        moments.sums = np.asarray(arrays["sums"], dtype=np.float64)
        moments.second = np.asarray(arrays["second"], dtype=np.float64)
        return moments

    # -- derived statistics; covariances are divided by N, as in the paper

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
        """Standard deviation of each feature (D,); exactly 0 for constant features."""
        centre = self.sums.sum(axis=0) / self.n_images
        variance = np.maximum(np.diag(self.second) / self.n_images - centre**2, 0.0)
        deviation = np.sqrt(variance)
        return np.where(deviation > _CONSTANT_FEATURE * np.abs(self._shift() + centre), deviation, 0.0)

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


class _Room:
    """Memory for an array to which rows are appended, twice as large whenever it is full."""

    def __init__(self) -> None:
        self._memory = self._array = np.empty(0)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy, or what is read from a pickle, begins empty: its array would no longer be part of its memory."""
        return _Room, ()

    def extend(self, array: np.ndarray, n_rows: int) -> np.ndarray:
        """The array with zeros appended: in place if it is what was extended here last and there is room."""
        if array is not self._array or n_rows > len(self._memory):
            self._memory = np.zeros((max(n_rows, 2 * len(array)), *array.shape[1:]), array.dtype)
            self._memory[: len(array)] = array
        self._array = self._memory[:n_rows]
        return self._array


def _add_outer(matrix: np.ndarray, vector: np.ndarray, weight: float) -> None:
    """Add weight v v' to a matrix (D, D) in place, some rows at a time."""
    scaled = weight * vector
    for rows in row_blocks(*matrix.shape, elements=_OUTER_ELEMENTS, min_rows=1):
        matrix[rows] += np.outer(scaled[rows], vector)


def _check_finite(embeddings: np.ndarray) -> None:
    """Raise FitError for NaN, infinity, and values whose square overflows, before anything is added."""
    for rows in row_blocks(*embeddings.shape):
        block = embeddings[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.vdot(block, block)):  # fast path
                continue
            wide = block.astype(np.float64)
            fine = np.isfinite(np.vdot(wide, wide))
        if len(broken := broken_rows(embeddings)):
            where = f"{len(broken):,} of {len(embeddings):,} embeddings hold NaN or infinity ({list_rows(broken)})"
            remedy = "training diverged, or the images are corrupt; train again or leave them out"
            raise FitError(f"{where}: {remedy}")
        if not fine:
            raise FitError("squared embeddings overflow: scale the embeddings down")
