"""Pictures inside pages: small ones are lossless, large ones small."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from maple.reporting.pictures import CRISP, data_uri


def decode(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


@pytest.mark.parametrize(("side", "lossless"), [(8, False), (CRISP, False), (96, True)])
def test_pixels_that_must_not_change(side: int, lossless: bool, rng: np.random.Generator) -> None:
    image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    uri = data_uri(image, lossless=lossless)
    assert uri.startswith("data:image/png;base64,") and (np.asarray(decode(uri)) == image).all()


def test_photographs_are_compressed() -> None:
    gradient = np.linspace(0, 255, 96 * 96 * 3).reshape(96, 96, 3).astype(np.uint8)
    found = np.asarray(decode(data_uri(gradient)).convert("RGB")).astype(int)
    assert np.abs(found - gradient).mean() < 6
