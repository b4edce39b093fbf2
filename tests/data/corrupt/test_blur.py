"""Blurs, against SciPy and explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from maple.data.corrupt import (
    CORRUPTIONS,
    corrupt_images,
)
from maple.data.corrupt._base import image_generator
from maple.data.corrupt.blur import disk, streak, zoom_matrix


def test_defocus_by_scipy(images: np.ndarray) -> None:
    for severity in (1, 3, 5):
        radius, softness = CORRUPTIONS["defocus-blur"].levels[severity - 1]
        kernel = disk(radius, softness, 1)
        assert kernel.sum() == pytest.approx(1) and (kernel == kernel[::-1, ::-1]).all()
        exact = ndimage.correlate(images[0].astype(float), kernel[..., None], mode="mirror")
        assert np.abs(corrupt_images(images[:1], "defocus-blur", severity)[0] - exact).max() < 0.51
    assert (disk(1.5, 0.1, 1) > 1e-6).sum() == 9  # a disc of radius 1.5 is the 3 x 3 neighbourhood
    large = disk(6, 0.4, 4)
    assert np.sqrt((large > large.max() / 2).sum() / np.pi) == pytest.approx(6, abs=0.3)


def test_glass_blur_by_explicit_loops(images: np.ndarray) -> None:
    """Severity 4, image by image as the published code goes, with its copies instead of swaps."""
    sigma, _, rounds = CORRUPTIONS["glass-blur"].levels[3]
    image = images[7]
    moves = image_generator(b"key", "glass-blur", 0).integers(-1, 1, (2, 30, 30, 2))
    x = np.rint(ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), mode="nearest")).astype(np.uint8)
    for turn in range(rounds):
        for i, h in enumerate(range(31, 1, -1)):
            for j, w in enumerate(range(31, 1, -1)):
                dx, dy = moves[turn, i, j]
                x[h, w] = x[h + dy, w + dx]
    exact = ndimage.gaussian_filter(x.astype(float), (sigma, sigma, 0), mode="nearest")
    found = corrupt_images(image[None], "glass-blur", 4, keys=[b"key"])[0]
    assert np.abs(found - exact).max() < 1.01  # rounding before the shuffle may go either way


def test_streaks_by_explicit_loops() -> None:
    rng = np.random.default_rng(0)
    x, angles = rng.random((3, 9, 11, 2)), np.array([0.0, 37.0, -120.0])
    radius, sigma = 2.5, 1.4
    taps = np.exp(-0.5 * (np.arange(7) / sigma) ** 2)
    taps /= taps.sum()
    exact = np.zeros_like(x)
    for n, angle in enumerate(np.deg2rad(angles)):
        for row in range(9):
            for column in range(11):
                for step, weight in enumerate(taps):
                    r = min(max(row + int(np.ceil(step * np.sin(angle) - 0.5)), 0), 8)
                    c = min(max(column + int(np.ceil(step * np.cos(angle) - 0.5)), 0), 10)
                    exact[n, row, column] += weight * x[n, r, c]
    np.testing.assert_allclose(streak(x, angles, radius, sigma), exact, atol=1e-12)


@pytest.mark.parametrize(("length", "factor"), [(32, 1.0), (32, 1.07), (32, 1.25), (32, 2.25), (33, 1.31), (8, 1.25)])
def test_zooms_by_scipy(length: int, factor: float) -> None:
    line = np.random.default_rng(0).random(length)
    crop = int(np.ceil(length / factor))
    first = (length - crop) // 2
    zoomed = ndimage.zoom(line[first : first + crop], factor, order=1)
    trim = (len(zoomed) - length) // 2
    np.testing.assert_allclose(zoom_matrix(length, factor) @ line, zoomed[trim : trim + length], atol=1e-6)


def test_zoom_blur_is_a_mean_over_zooms(images: np.ndarray) -> None:
    total = images[0].astype(float).copy()
    for factor in np.arange(1, 1.11, 0.01):  # 12 of them, since 0.11 / 0.01 is a little more than 11
        matrix = zoom_matrix(32, factor)
        total += np.einsum("ij,jkc,lk->ilc", matrix, images[0].astype(float), matrix)
    assert np.abs(corrupt_images(images[:1], "zoom-blur", 2)[0] - total / 13).max() < 0.51
