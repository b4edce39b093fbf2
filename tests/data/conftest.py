"""Images that several tests share."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from maple.data.decode import Decoding
from maple.data.decoders import decode_kept
from maple.data.simulate.diatoms import simulated_diatoms


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Coloured images with shapes and fine texture: (48, 32, 32, 3)."""
    rng = np.random.default_rng(0)
    pixels = simulated_diatoms(48, size=32, seed=5).images.astype(float)
    tint = rng.uniform(0.4, 1.2, (48, 1, 1, 3))
    return np.clip(pixels * tint + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes that were started, without the one that this process keeps."""
    decode_kept([b""], Decoding(8))
    processes = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr("maple.data.decoders.subprocess.Popen", Noted)
    return processes
