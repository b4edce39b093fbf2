"""All images as one Gaussian; relative distances and residuals are in ``detectors/test_scores.py``."""

from __future__ import annotations

import numpy as np

from clusters import moments_of
from maple.stats.background import fit_background
from maple.stats.gaussians import FARTHEST
from maple.stats.moments import Moments


def test_background_of_few_images_does_not_overfit():
    """With hardly more images than components an unshrunk covariance calls every new image far away."""
    rng = np.random.default_rng(0)
    n_components = 60
    known, new = rng.normal(size=(80, n_components)), rng.normal(size=(500, n_components))
    background = fit_background(Moments(1, n_components).update(known, np.zeros(80, int)), explained_variance=1.0)
    unshrunk = np.einsum("nd,de,ne->n", new, np.linalg.inv(np.cov(known.T)), new).mean()
    assert unshrunk > 3 * n_components
    assert background.squared_distances(new).mean() < 1.3 * n_components


def test_distances_and_residuals_by_explicit_algebra():
    rng = np.random.default_rng(1)
    mixing = rng.normal(size=(5, 5))
    known, new = rng.normal(size=(4000, 5)) @ mixing + 3, rng.normal(size=(20, 5)) @ mixing
    moments = Moments(2, 5).update(known, np.arange(4000) % 2)  # clusters are ignored
    whole = fit_background(moments, explained_variance=1.0)
    centred = new - known.mean(axis=0)
    expected = np.einsum("nd,de,ne->n", centred, np.linalg.inv(np.cov(known.T, bias=True)), centred)
    np.testing.assert_allclose(whole.squared_distances(new), expected)
    np.testing.assert_allclose(whole.residuals(new), 0, atol=1e-9)
    part = fit_background(moments, explained_variance=0.6)
    standardised = centred / known.std(axis=0)
    _, _, axes = np.linalg.svd((known - known.mean(axis=0)) / known.std(axis=0), full_matrices=False)
    inside = standardised @ axes[: part.matrix.shape[1]].T
    np.testing.assert_allclose(part.residuals(new), (standardised**2).sum(1) - (inside**2).sum(1))


def test_an_embedding_that_is_not_finite_is_as_far_as_can_be():
    background = fit_background(Moments(1, 2).update([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]], [0, 0, 0]))
    assert background.squared_distances([[np.nan, 0.0], [np.inf, 0.0]]).tolist() == [FARTHEST, FARTHEST]


def test_the_background_does_not_depend_on_the_units(blobs):
    embeddings, labels = blobs
    units = 10.0 ** np.arange(-3, 3)
    plain, scaled = (fit_background(moments_of(embeddings * factor, labels)) for factor in (1.0, units))
    for measure in ("squared_distances", "residuals"):
        found, expected = getattr(scaled, measure)(embeddings * units), getattr(plain, measure)(embeddings)
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
