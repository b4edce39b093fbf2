"""All images as one Gaussian; relative distances and residuals are in ``detectors/test_scores.py``."""

from __future__ import annotations

import numpy as np

from maple.stats.background import fit_background
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
