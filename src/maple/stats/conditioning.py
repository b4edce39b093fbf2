"""Conditioning: how well the images determine the covariance that distances are measured with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maple.stats.covariance import is_shrunk
from maple.stats.gaussians import Gaussians, feature_scale
from maple.stats.moments import Moments
from maple.text import plural

# Above this, the variances of the widest and the narrowest direction differ so much that float32 cannot hold both.
ILL_CONDITIONED = 1e7


@dataclass(frozen=True)
class Conditioning:
    """Numbers that say how far the covariance within clusters can be trusted.

    ``condition`` is the ratio of the largest to the smallest variance within clusters, of standardised embeddings in
    the principal components, after shrinkage: 1 for a sphere, large where a direction hardly varies. With one
    covariance per cluster it is that of the common one.
    """

    n_images: int
    smallest_cluster: int  # images
    n_clusters: int
    n_features: int
    n_constant: int  # features that are equal in all images and drop out
    n_components: int
    condition: float
    shrunk: bool  # towards a sphere (OAS), since there are fewer than 10 images per component
    float32: bool  # whether float32 products are accurate enough

    @property
    def is_ill(self) -> bool:
        """Whether some direction varies so little that its distances are mostly rounding or chance."""
        return self.condition > ILL_CONDITIONED

    def sentence(self) -> str:
        """The numbers in one line, without a full stop.

        >>> Conditioning(40, 1, 4, 200, 3, 39, 12.0, True, True).sentence()
        '39 components of 200 features (3 constant), condition 12, shrunk: 40 images are few; smallest cluster 1 image'
        """
        constant = f" ({self.n_constant} constant)" if self.n_constant else ""
        parts = [
            f"{self.n_components} components of {self.n_features} features{constant}, condition {self.condition:.2g}",
            *([f"shrunk: {self.n_images:,} images are few"] if self.shrunk else []),
            *([] if self.float32 else ["products in float64"]),
        ]
        return f"{', '.join(parts)}; smallest cluster {plural(self.smallest_cluster, 'image')}"


def measure_conditioning(moments: Moments, gaussians: Gaussians, standardise: bool = True) -> Conditioning:
    """The conditioning of ``gaussians`` fitted to ``moments``.

    The map is scale, rotation, then whitening W with W' S W = I: the singular values of the last two are one over the
    root of the variances of S.

    >>> from maple.stats.gaussians import fit_gaussians
    >>> x = np.random.default_rng(0).normal(size=(5000, 3)) * [1, 1, 100]
    >>> moments = Moments(2, 3).update(x, np.arange(5000) % 2)
    >>> found = measure_conditioning(moments, fit_gaussians(moments, pca=False))
    >>> 1 <= found.condition < 1.2, found.shrunk
    (True, False)
    """
    scale = feature_scale(moments, standardise)  # (D,)
    used = scale > 0
    rotated = gaussians.matrix[used] / scale[used, None]
    precision = np.linalg.eigvalsh(rotated.T @ rotated)  # (K,) one over the variances, ascending
    return Conditioning(
        n_images=moments.n_images,
        smallest_cluster=int(moments.counts.min()),
        n_clusters=moments.n_clusters,
        n_features=moments.dim,
        n_constant=int((~used).sum()),
        n_components=gaussians.n_components,
        condition=float(precision[-1] / precision[0]),
        shrunk=is_shrunk(moments.n_images - moments.n_clusters, gaussians.n_components),
        float32=gaussians.float32,
    )
