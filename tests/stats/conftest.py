"""Fixtures of clusters."""

from __future__ import annotations

import numpy as np
import pytest

from clusters import correlated_blobs, spherical_blobs


@pytest.fixture
def blobs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return correlated_blobs(rng)


@pytest.fixture
def three(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three well separated clusters in six dimensions."""
    return spherical_blobs(20 * np.eye(6)[:3], [60, 90, 120], rng)
