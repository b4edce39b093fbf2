"""Random clusters for the tests of theory, from seeds that Hypothesis draws."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)


def draw_clusters(seed: int, n: int = 300, dim: int = 5, n_clusters: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Correlated clusters of uneven sizes, and their labels; the first images are one of each cluster."""
    rng = np.random.default_rng(seed)
    labels = np.r_[np.arange(n_clusters), rng.choice(n_clusters, n - n_clusters, p=rng.dirichlet(np.ones(n_clusters)))]
    embeddings = (
        rng.normal(size=(n, dim)) @ rng.normal(size=(dim, dim)) + 3 * rng.normal(size=(n_clusters, dim))[labels]
    )
    return embeddings, labels
