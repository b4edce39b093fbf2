"""Shared fixtures: where the real data lie, random numbers, and a small data root."""

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


@pytest.fixture
def root(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small data root; the environment names none."""
    from image_files import write_data_root

    monkeypatch.delenv("MAPLE_DATA", raising=False)
    return write_data_root(tmp_path / "root", rng)
