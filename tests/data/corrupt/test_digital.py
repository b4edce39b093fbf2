"""Digital corruptions, against Pillow and SciPy."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy import ndimage

from maple.data.corrupt import (
    corrupt_images,
)
from maple.data.corrupt.digital import bilinear


def test_displacements_grow_while_the_shear_falls() -> None:
    """An affine map leaves a ramp plane; what is left after fitting a plane is due to the displacements."""
    y, x = np.mgrid[:32, :32]
    ramps = np.stack([np.repeat((40 + a * x + b * y)[..., None], 3, 2) for a, b in ((4, 1), (1, 5), (3, 3))])
    ramps = ramps.astype(np.uint8)
    inner = (slice(9, -9), slice(9, -9))
    plane = np.stack([x[inner].ravel(), y[inner].ravel(), np.ones(x[inner].size)], axis=1)

    def roughness(severity: int) -> float:
        flat = corrupt_images(ramps, "elastic-transform", severity)[:, 9:-9, 9:-9, 0].reshape(3, -1).T.astype(float)
        return float(np.sqrt((np.linalg.lstsq(plane, flat, rcond=None)[1] / len(flat)).mean()))

    found = [roughness(severity) for severity in range(1, 6)]
    assert found[0] < 0.5  # rounding alone
    assert found[1] < found[2] < found[3] < found[4] and found[4] > 1


def test_contrast_by_its_formula(images: np.ndarray) -> None:
    for severity, kept in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        mean = images.astype(float).mean(axis=(1, 2), keepdims=True)
        exact = (images - mean) * kept + mean
        assert np.abs(corrupt_images(images, "contrast", severity) - exact).max() < 0.501


def test_jpeg_by_pillow(images: np.ndarray) -> None:
    for severity, quality in enumerate((80, 65, 58, 50, 40), 1):
        out = corrupt_images(images[:3], "jpeg-compression", severity)
        for image, seen in zip(images, out):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            np.testing.assert_array_equal(seen, np.asarray(Image.open(file)))


def test_pixelate_by_pillow_and_at_any_size(images: np.ndarray) -> None:
    for severity, share in enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1):
        out = corrupt_images(images[:3], "pixelate", severity)
        for image, seen in zip(images, out):
            small = Image.fromarray(image).resize((int(32 * share),) * 2, Image.Resampling.BOX)
            np.testing.assert_array_equal(seen, np.asarray(small.resize((32, 32), Image.Resampling.BOX)))
    large = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3), np.uint8)
    assert len(np.unique(corrupt_images(large, "pixelate", 5)[0].reshape(-1, 3), axis=0)) == 20 * 20


def test_bilinear_by_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((2, 9, 7, 3))
    rows, columns = rng.uniform(-5, 13, (2, 6, 5)), rng.uniform(-5, 11, (2, 6, 5))
    found = bilinear(x, rows, columns)
    for n in range(2):
        for channel in range(3):
            exact = ndimage.map_coordinates(x[n, ..., channel], [rows[n], columns[n]], order=1, mode="mirror")
            np.testing.assert_allclose(found[n, ..., channel], exact, atol=1e-12)
