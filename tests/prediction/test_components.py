"""Components: orthogonal axes that separate clusters, and those that all clusters share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import sqrtm

from maple.detectors.maple import MapleDetector
from maple.prediction.components import deviations, find_components
from maple.types import Outputs


def fit(outputs: Outputs, **options) -> MapleDetector:
    return MapleDetector(norm_exponent=0.0, **options).fit(outputs)


def test_own_covariances_are_whitened_symmetrically(outputs: Outputs) -> None:
    """Oracle: the symmetric root of each cluster's precision, in the basis of the components."""
    detector = fit(outputs, covariance="full")
    gaussians = detector.gaussians_
    components = find_components(gaussians)
    z = gaussians.project(outputs.embeddings)
    clusters = outputs.cluster_ids
    found = deviations(gaussians, components, z, clusters)
    for i in range(0, len(outputs), 7):
        whitening = gaussians.whitenings[clusters[i]]
        precision = components.axes.T @ whitening @ whitening.T @ components.axes
        expected = sqrtm(precision) @ components.axes.T @ (z[i] - gaussians.centroids[clusters[i]])
        np.testing.assert_allclose(found[i], expected.real, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [{}, {"pca": False}, {"covariance": "global"}, {"covariance": "full"}, {"distance": "euclidean"}],
    ids=str,
)
def test_axes_are_orthogonal_and_the_same_every_time(outputs: Outputs, options: dict) -> None:
    gaussians = fit(outputs, **options).gaussians_
    first, again = find_components(gaussians), find_components(replace(gaussians))
    np.testing.assert_allclose(first.axes.T @ first.axes, np.eye(len(first.axes)), atol=1e-12)
    np.testing.assert_array_equal(first.axes, again.axes)
    assert (first.axes[np.abs(first.axes).argmax(axis=0), np.arange(len(first.axes))] > 0).all()
    reach = np.ptp(first.centroids, axis=0)
    assert (reach[: first.n_separating] > 2).all()


def test_shared_components_are_ordered_by_what_they_do_to_the_embedding(outputs: Outputs) -> None:
    gaussians = fit(outputs, pca=False).gaussians_
    components = find_components(gaussians)
    r, k = components.n_separating, len(components.axes)
    assert 0 < r < k - 1
    steps = np.linalg.pinv(gaussians.matrix @ components.axes)  # (K, D) of the embedding, along each component
    lengths = np.linalg.norm(steps[r:], axis=1)
    assert (np.diff(lengths) <= 1e-12).all()
    cosines = (steps[r:] @ steps[r:].T) / np.outer(lengths, lengths)
    np.testing.assert_allclose(cosines, np.eye(k - r), atol=1e-8)
