"""Pages: values are escaped, a missing value is an error; small pictures are lossless, large ones small."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image

from maple.reporting.page import CRISP, data_uri, render_page

EMPTY = {
    "title": "a title",
    "subtitle": "",
    "sections": [],
    "pictures": [],
    "crisp": False,
    "has_ends": False,
    "has_parts": False,
    "part_meanings": {},
    "n_components": 1,
    "component_note": "",
}


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a & b", "{{ 7 * 7 }}", "nul\x00 \x1b \ufffe \ud800"])
def test_names_are_text(name: str) -> None:
    page = ElementTree.fromstring(render_page("explain.html.j2", EMPTY | {"title": name}).split("\n", 1)[1])
    shown = page.findtext("head/title")
    assert shown is not None and shown.replace("\ufffd", "?") == "".join(
        c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in name
    )
    assert not list(page.iter("script"))


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render_page("explain.html.j2", {name: value for name, value in EMPTY.items() if name != "subtitle"})


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
