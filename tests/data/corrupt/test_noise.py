"""Noise has the published strength."""

from __future__ import annotations

import numpy as np
import pytest

from maple.data.corrupt import (
    corrupt_images,
)


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)])
def test_gaussian_noise_has_its_deviation(severity: int, deviation: float) -> None:
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    noise = (corrupt_images(grey, "gaussian-noise", severity, keys=np.arange(40)).astype(float) - 128) / 255
    assert noise.std() == pytest.approx(deviation, rel=0.01) and abs(noise.mean()) < 4 * deviation / 350
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (2, 250), (3, 100), (4, 75), (5, 50)])
def test_shot_noise_varies_as_photons_do(severity: int, photons: int) -> None:
    grey = np.full((40, 32, 32, 3), 64, np.uint8)
    seen = corrupt_images(grey, "shot-noise", severity, keys=np.arange(40)).astype(float) / 255
    assert seen.mean() == pytest.approx(64 / 255, rel=0.01)
    assert seen.var() == pytest.approx(64 / 255 / photons, rel=0.03)


def test_impulse_noise_changes_its_share_to_the_extremes(images: np.ndarray) -> None:
    for severity, share in enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1):
        grey = np.full((40, 32, 32, 3), 100, np.uint8)
        out = corrupt_images(grey, "impulse-noise", severity, keys=np.arange(40))
        assert set(np.unique(out)) == {0, 100, 255}
        for extreme in (0, 255):
            assert (out == extreme).mean() == pytest.approx(share / 2, rel=0.1)
