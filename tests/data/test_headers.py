"""Formats and dimensions from the first bytes, against Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from image_files import encode, noise, png_of_size
from maple.data.headers import HEADER_BYTES, Header, image_suffix, read_header

SIZES = ((1, 1), (300, 7), (16_000, 3))
MEASURED = {
    "PNG": [{}],
    "JPEG": [{}, {"progressive": True}, {"comment": b"x" * 60_000}, {"icc_profile": b"i" * 3000}],
    "WEBP": [{}, {"lossless": True}, {"exif": b"Exif\0\0", "lossless": True}],
    "GIF": [{}],
    "BMP": [{}],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind, many in MEASURED.items() for each in many])
def test_dimensions_are_those_that_pillow_finds(kind, options, size) -> None:
    data = encode(Image.new("RGB", size), kind, **options)
    header = read_header(data[:HEADER_BYTES])
    assert header == Header(kind, size)
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.size) == tuple(header)


@pytest.mark.parametrize("kind", ["TIFF", "PPM"])
def test_other_formats_are_only_recognised(kind, rng) -> None:
    assert read_header(encode(noise(rng), kind)) == Header(kind)


def test_suffixes_follow_the_content(rng) -> None:
    kinds = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    found = [image_suffix(encode(noise(rng), kind)) for kind in kinds]
    assert found == [".jpg", ".png", ".webp", ".gif", ".bmp", ".tif", ".ppm"]
    assert image_suffix(b"%PDF-1.7") == ""


@given(
    st.binary(max_size=64), st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]), st.integers(0, 80)
)
def test_any_bytes_have_a_header(tail, kind, kept) -> None:
    data = encode(noise(np.random.default_rng(0)), kind)[:kept] + tail
    header = read_header(data)
    assert header.size is None or all(side >= 0 for side in header.size)


def test_what_has_not_arrived_yet_is_unknown(rng) -> None:
    for kind, options in ((kind, each) for kind, many in MEASURED.items() for each in many):
        data = encode(noise(rng, (30, 20)), kind, **options)
        known = [read_header(data[:n]).size for n in range(min(len(data), 100))]
        assert set(known) <= {None, (30, 20)} and known[0] is None
    assert read_header(png_of_size(2**31 - 1, 5)).size == (2**31 - 1, 5)
