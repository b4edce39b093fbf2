"""Principal axes, shrinkage and whitening of a covariance matrix. Shapes: D embedding, K components."""

from __future__ import annotations

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from maple.stats._blas import reserve_buffers

reserve_buffers()

# Variances below this share of the largest one are rounding noise; they are never divided by.
RELATIVE_FLOOR = 1e-10
# With fewer images per component the covariance is shrunk (OAS).
IMAGES_PER_COMPONENT = 10


def count_components(eigenvalues: np.ndarray, explained_variance: float) -> int:
    """The smallest number of leading eigenvalues whose sum reaches the share ``explained_variance``; at least 1.

    >>> count_components(np.array([6.0, 3.0, 1.0]), 0.9)
    2
    >>> count_components(np.array([6.0, 3.0, 1.0]), 0.91)
    3
    """
    reached = np.cumsum(eigenvalues)
    needed = explained_variance * reached[-1] * (1 - 1e-12)  # 0.6 + 0.3 counts as 0.9
    return min(int(np.searchsorted(reached, needed)) + 1, len(eigenvalues))


def principal_axes(covariance: np.ndarray, explained_variance: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvalues (K,) and eigenvectors (D, K), largest first, without null directions.

    With ``explained_variance=1``, K is the rank of the covariance.
    """
    eigenvalues, axes = np.linalg.eigh(covariance)  # ascending
    eigenvalues, axes = eigenvalues[::-1], axes[:, ::-1]
    rank = int((eigenvalues > RELATIVE_FLOOR * eigenvalues[0]).sum())
    n_components = min(rank, count_components(np.maximum(eigenvalues, 0.0), explained_variance))
    return eigenvalues[:n_components], axes[:, :n_components]


def oas_covariance(covariance: np.ndarray, n_images: int) -> np.ndarray:
    """Oracle-approximating shrinkage (Chen et al. 2010): (1 - r) S + r (tr S / K) I.

    r = (a + m²) / ((n + 1)(a - m²/K)), at most 1, with a the mean of the squared entries of S and m = tr S / K.
    Unlike Ledoit-Wolf it requires second moments only.
    """
    n_components = len(covariance)
    scale = np.trace(covariance) / n_components
    spread = np.mean(covariance**2)
    excess = (n_images + 1) * (spread - scale**2 / n_components)
    shrinkage = min(1.0, (spread + scale**2) / excess) if excess > 0 else 1.0
    shrunk = (1 - shrinkage) * covariance
    shrunk.flat[:: n_components + 1] += shrinkage * scale
    return shrunk


def is_shrunk(n_images: int, n_components: int) -> bool:
    """Whether a covariance of K components is shrunk: there are few images per component.

    >>> is_shrunk(99, 10), is_shrunk(100, 10)
    (True, False)
    """
    return n_images < IMAGES_PER_COMPONENT * n_components


def shrink_if_few(covariance: np.ndarray, n_images: int) -> np.ndarray:
    """The covariance (K, K), shrunk if there are few images per component."""
    return oas_covariance(covariance, n_images) if is_shrunk(n_images, len(covariance)) else covariance


def whitening(covariance: np.ndarray, floor: float) -> tuple[np.ndarray, float]:
    """W (K, K) with W' S W = I, and log det S; eigenvalues are bounded below by ``floor``.

    S - floor I has a Cholesky factor if and only if no eigenvalue lies below ``floor``; then W follows from the factor
    of S, at a tenth of the cost of eigenvectors.
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
