"""The main axes of embeddings, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from maple.reporting.gallery._selection import main_axes


def test_main_axes_agree_with_scikit_learn(rng: np.random.Generator) -> None:
    embeddings = rng.normal(size=(300, 12)) * np.arange(1, 13)
    points, explained = main_axes(embeddings)
    oracle = PCA(n_components=2).fit(embeddings)
    assert np.abs(points) == pytest.approx(np.abs(oracle.transform(embeddings)), abs=1e-8)
    assert explained == pytest.approx(tuple(oracle.explained_variance_ratio_))


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (2, 2), (3, 50)])
def test_main_axes_of_little_data(shape: tuple[int, int], rng: np.random.Generator) -> None:
    points, explained = main_axes(rng.normal(size=shape))
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all() and 0 <= sum(explained) <= 1 + 1e-9
