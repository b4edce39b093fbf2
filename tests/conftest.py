"""Shared fixtures: where the real data lie, and Gaussian blobs with known answers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with real data and weights: ``MAPLE_SHARED`` or ``../shared``; tests skip where it is absent."""
    folder = Path(os.environ.get("MAPLE_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data here (set MAPLE_SHARED)")
    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
