"""Components: axes of the whitened space along which squared distances are split.

A squared distance is a sum of K squares, one per whitened coordinate. The coordinates of ``Gaussians.project`` come
from a triangular factor and have no meaning of their own, but any rotation of them keeps every distance.
:func:`find_components` chooses an interpretable rotation:

- *Separating* components come first: the principal axes of the centroids. Clusters are spheres in the whitened space,
  so these are the canonical variates of discriminant analysis. The first separates clusters best, and at most M - 1
  are needed; axes along which no two clusters lie more than two standard deviations apart do not count.
- *Shared* components are the rest: differences between images of one cluster, whichever the cluster. They are ordered
  by how far one standard deviation moves the embedding.

Separating components decide between two clusters; the part of a squared distance along shared components measures how
unusual an image is irrespective of its class. Each component adds 1 on average to the squared distance of images of
the cluster itself.

If each cluster has its own covariance, its whitening W is followed by the rotation Q that makes W Q symmetric: of all
whitened coordinates these agree best with the axes (Kessy, Lewin and Strimmer 2018), so a component keeps its meaning
from cluster to cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maple.stats.gaussians import Gaussians

FAR_APART = 2.0  # standard deviations; a component does not separate clusters that are closer along it


@dataclass(frozen=True, eq=False)
class Components:
    """K orthogonal axes of the whitened space: separating ones first, then shared ones."""

    axes: np.ndarray  # (K, K) one component per column
    n_separating: int
    centroids: np.ndarray  # (M, K) coordinates of the centroids on the components

    @property
    def spreads(self) -> np.ndarray:
        """The standard deviation of the centroids along each component (K,)."""
        return self.centroids.std(axis=0)

    def ends(self, component: int) -> tuple[int, int]:
        """The clusters at the negative and the positive end of a component."""
        along = self.centroids[:, component]
        return int(along.argmin()), int(along.argmax())


def find_components(gaussians: Gaussians) -> Components:
    """The components of the clusters of ``gaussians``.

    >>> plane = Gaussians(np.eye(2), np.zeros(2), np.array([[3.0, 4.0], [-3.0, -4.0]]), np.log([0.5, 0.5]))
    >>> found = find_components(plane)
    >>> found.axes.round(3)  # the first from one centroid to the other
    array([[ 0.6,  0.8],
           [ 0.8, -0.6]])
    >>> found.n_separating, found.ends(0)
    (1, (1, 0))
    """
    centroids = gaussians.centroids - gaussians.centroids.mean(axis=0)
    axes = _principal_axes(centroids.T @ centroids)
    is_far = np.ptp(centroids @ axes, axis=0) > FAR_APART
    separating, shared = axes[:, is_far], axes[:, ~is_far]
    steps = shared.T @ np.linalg.pinv(gaussians.matrix)  # (K - r, D) change of the embedding by one standard deviation
    axes = np.hstack([separating, shared @ _principal_axes(steps @ steps.T)])
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(len(axes))]
    axes = axes * np.sign(largest)  # signs are arbitrary: equal Gaussians should give equal ones
    return Components(axes, int(is_far.sum()), gaussians.centroids @ axes)


def _principal_axes(covariance: np.ndarray) -> np.ndarray:
    """All eigenvectors as columns, by decreasing eigenvalue; null directions included."""
    return np.linalg.eigh(covariance)[1][:, ::-1]


def component_coordinates(gaussians: Gaussians, embeddings: Any) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates of images on the components (N, K), and the spreads of the components (K,)."""
    components = find_components(gaussians)
    return gaussians.project(embeddings) @ components.axes, components.spreads


def deviations(
    gaussians: Gaussians, components: Components, projection: np.ndarray, clusters: np.ndarray
) -> np.ndarray:
    """The deviations of images from one cluster each, along the components, in standard deviations (N, K).

    ``projection`` (N, K) is that of the embeddings, ``clusters`` (N,) holds the cluster of each image. The squares sum
    to the squared distance.
    """
    centred = projection - gaussians.centroids[clusters]
    if gaussians.whitenings is not None:
        for cluster in np.unique(clusters):
            whitening = gaussians.whitenings[cluster]
            left, _, right = np.linalg.svd(whitening)
            own = clusters == cluster
            centred[own] = centred[own] @ whitening @ (left @ right).T  # the last factor makes the product symmetric
    return centred @ components.axes
