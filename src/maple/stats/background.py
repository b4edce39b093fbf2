"""Background: one Gaussian over all images, for relative distances, and the residual outside its components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maple.stats.arrays import ArrayRecord, as_embeddings, normalise, row_blocks
from maple.stats.covariance import shrink_if_few
from maple.stats.gaussians import FARTHEST, check_enough, feature_scale, principal_components
from maple.stats.moments import Moments


@dataclass(frozen=True, eq=False)
class Background(ArrayRecord):
    """One Gaussian over all images, ignoring clusters, and the residual outside its principal components.

    With z the standardised embedding and p = z A its K principal components, of variances v:

    - squared distance to the background, sum_k p_k² / v_k, subtracted in relative distances (Ren et al. 2021,
      https://arxiv.org/abs/2106.09022);
    - residual ||z||² - ||p||², the part outside the components (as in ViM, Wang et al. 2022,
      https://arxiv.org/abs/2203.10807).
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
        """Squared length of the part outside the components (N,), never negative."""

        def residual(centred: np.ndarray) -> np.ndarray:
            whole = (centred**2) @ self.scale**2
            return np.maximum(whole - ((centred @ self.matrix) ** 2).sum(axis=1), 0.0)

        return self._over_blocks(embeddings, residual)

    def _over_blocks(self, embeddings: Any, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """``measure`` of the centred embeddings, block by block, in float64."""
        embeddings = as_embeddings(embeddings, len(self.mean))
        values = np.empty(len(embeddings))
        for rows in row_blocks(*embeddings.shape):
            wide = embeddings[rows].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                values[rows] = measure(normalise(wide, self.norm_exponent) - self.mean)
        return np.minimum(np.nan_to_num(values, nan=FARTHEST, posinf=FARTHEST), FARTHEST)


def fit_background(
    moments: Moments, *, explained_variance: float = 0.95, pca: bool = True, standardise: bool = True
) -> Background:
    """The background in the principal components that :func:`fit_gaussians` keeps for the same moments.

    With few images the variances are shrunk towards their mean, like the covariance within clusters.

    >>> x = np.array([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [-3.0, 0.0]])
    >>> background = fit_background(Moments(1, 2).update(x, [0, 0, 0, 0]))
    >>> background.squared_distances(x).round(9)
    array([2., 2., 2., 2.])
    """
    check_enough(moments, needs_within=False)
    variances, matrix = principal_components(moments, explained_variance if pca else 1.0, standardise)
    variances = shrink_if_few(np.diag(variances), moments.n_images - 1).diagonal()
    return Background(moments.mean, feature_scale(moments, standardise), matrix, variances, moments.norm_exponent)
