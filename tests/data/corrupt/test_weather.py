"""Weather, by formula and explicit loops."""

from __future__ import annotations

import colorsys

import numpy as np

from maple.data.corrupt import (
    corrupt_images,
)
from maple.data.corrupt._base import image_generator
from maple.data.corrupt.weather import plasma


def test_weather_makes_brighter(images: np.ndarray) -> None:
    for family in ("snow", "brightness"):
        means = [corrupt_images(images, family, severity).mean() for severity in range(1, 6)]
        assert means == sorted(means) and means[0] > images.mean()
    assert corrupt_images(images, "fog", 5).std() < images.std()  # fog keeps the brightest value, and veils


def test_brightness_by_colorsys(images: np.ndarray) -> None:
    some = images[:2, ::4, ::4].copy()
    some[0, 0, 0] = 0  # black has no hue
    for severity, more in enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1):
        out = corrupt_images(some, "brightness", severity)
        for pixel, seen in zip(some.reshape(-1, 3), out.reshape(-1, 3)):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            exact = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1))) * 255
            assert np.abs(seen - exact).max() < 0.501


def test_plasma_by_explicit_loops() -> None:
    """Diamond-square, point by point, on a torus: squares get their four corners, then edges their four neighbours."""
    side, decay = 8, 2.0
    offsets = list(np.random.default_rng(7).uniform(-1, 1, (side * side - 1,)).astype(np.float32))
    grid = np.zeros((side, side))
    step, wibble = side, 100.0
    while step >= 2:
        half = step // 2
        for shift_r, shift_c, corners in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((0, -half), (0, half), (-half, 0), (half, 0))),
            (half, 0, ((0, -half), (0, half), (-half, 0), (half, 0))),
        ):
            for r in range(shift_r, side, step):
                for c in range(shift_c, side, step):
                    total = sum(grid[(r + dr) % side, (c + dc) % side] for dr, dc in corners)
                    grid[r, c] = total / 4 + wibble**2 * offsets.pop(0)
        step, wibble = half, wibble / decay
    grid -= grid.min()
    np.testing.assert_allclose(plasma([np.random.default_rng(7)], side, decay)[0], grid / grid.max(), atol=1e-5)


def test_fog_by_its_formula(images: np.ndarray) -> None:
    clouds = plasma([image_generator(b"k", "fog", 0)], 32, 3)[0, :, :, None]
    x = images[0] / 255
    exact = (x + 0.5 * clouds) * x.max() / (x.max() + 0.5) * 255
    assert np.abs(corrupt_images(images[:1], "fog", 2, keys=[b"k"])[0] - exact).max() < 0.51


def test_as_much_snow_at_any_size() -> None:
    for severity in (1, 5):
        means = [
            corrupt_images(np.full((20, side, side, 3), 60, np.uint8), "snow", severity, keys=np.arange(20)).mean()
            for side in (32, 64, 100)
        ]
        assert max(means) - 60 < 1.3 * (min(means) - 60)
