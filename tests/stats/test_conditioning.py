"""Conditioning against the eigenvalues of the covariance, computed the long way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from clusters import moments_of, within_covariance
from maple.stats.conditioning import ILL_CONDITIONED, Conditioning, measure_conditioning
from maple.stats.covariance import oas_covariance
from maple.stats.gaussians import fit_gaussians


@pytest.mark.parametrize("n", [800, 45])  # enough, and so few that the covariance is shrunk
def test_condition_is_the_ratio_of_variances_within_clusters(blobs, n):
    embeddings, labels = blobs[0][:n], blobs[1][:n]
    moments = moments_of(embeddings, labels)
    found = measure_conditioning(moments, fit_gaussians(moments, pca=False))
    projection = PCA().fit_transform(StandardScaler().fit_transform(embeddings))
    within = within_covariance(projection, labels)
    variances = np.linalg.eigvalsh(oas_covariance(within, n - 4) if n == 45 else within)
    assert found.condition == pytest.approx(variances[-1] / variances[0])
    assert found.shrunk == (n == 45) and ("shrunk" in found.sentence()) == found.shrunk
    assert (found.n_images, found.n_clusters, found.n_components) == (n, 4, 6)
    assert found.smallest_cluster == np.bincount(labels).min()


def test_constant_features_are_counted_and_a_thin_direction_is_told(blobs, rng):
    embeddings, labels = blobs
    thin = embeddings[:, :1] + 1e-4 * embeddings[:, 1:2].std() * rng.normal(size=(800, 1))
    padded = np.column_stack([embeddings, np.full(800, 3.0)])
    moments = moments_of(padded, labels)
    well = measure_conditioning(moments, fit_gaussians(moments, pca=False))
    assert well.n_constant == 1 and well.n_features == 7 and not well.is_ill and "1 constant" in well.sentence()
    moments = moments_of(np.column_stack([padded, thin]), labels)
    ill = measure_conditioning(moments, fit_gaussians(moments, pca=False))
    assert ill.condition > 1e4 * well.condition


@pytest.mark.parametrize("standardise", [True, False])
def test_scales_of_features_count_only_without_standardising(blobs, standardise):
    embeddings, labels = blobs
    moments = moments_of(embeddings * np.array([1, 1e3, 1, 1e-3, 1, 1]), labels)
    gaussians = fit_gaussians(moments, pca=False, standardise=standardise)
    found = measure_conditioning(moments, gaussians, standardise)
    assert (found.condition > 1e6) == (not standardise)


@pytest.mark.parametrize("n", [63, 64])
def test_ten_images_per_component_beyond_the_clusters_are_enough(blobs, n):
    moments = moments_of(blobs[0][:n], blobs[1][:n])
    assert measure_conditioning(moments, fit_gaussians(moments, pca=False)).shrunk == (n - 4 < 60)


def test_the_limit_and_the_sentence():
    found = Conditioning(40, 1, 4, 200, 0, 39, ILL_CONDITIONED, False, True)
    assert ILL_CONDITIONED == 1e7 and found.is_ill is False and replace(found, condition=1.01e7).is_ill is True
    assert "float64" not in found.sentence() and "constant" not in found.sentence()
    assert "float64" in replace(found, float32=False).sentence()
