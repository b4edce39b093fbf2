"""Images that several tests share."""

from __future__ import annotations

import numpy as np
import pytest

from maple.data.simulate.diatoms import simulated_diatoms


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Coloured images with shapes and fine texture: (48, 32, 32, 3)."""
    rng = np.random.default_rng(0)
    pixels = simulated_diatoms(48, size=32, seed=5).images.astype(float)
    tint = rng.uniform(0.4, 1.2, (48, 1, 1, 3))
    return np.clip(pixels * tint + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8)
