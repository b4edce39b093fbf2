"""Thumbnails and the sheets that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maple.errors import RunError
from maple.reporting.gallery._sheet import from_sheet, load_sheet, save_sheet, thumbnail, to_sheet


def random_thumbnails(n: int, side: int, grey: bool = False) -> np.ndarray:
    pixels = np.random.default_rng(n).integers(0, 256, size=(n, side, side, 1 if grey else 3), dtype=np.uint8)
    return np.broadcast_to(pixels, (n, side, side, 3))


@given(st.integers(1, 40), st.integers(1, 6))
def test_sheet_round_trip(n: int, side: int) -> None:
    thumbnails = random_thumbnails(n, side)
    assert (from_sheet(to_sheet(thumbnails), n, side) == thumbnails).all()


def test_large_images_become_thumbnails() -> None:
    gradient = np.repeat(np.linspace(0, 255, 300).astype(np.uint8)[:, None], 300, axis=1)
    small = thumbnail(np.stack([gradient] * 3, axis=-1), 96)
    assert small.shape == (96, 96, 3)
    assert small[:, 0, 0].tolist() == sorted(small[:, 0, 0].tolist())


@pytest.mark.parametrize(("grey", "mode"), [(True, "L"), (False, "RGB")])
def test_pixels_survive_the_disk_and_grey_takes_one_channel(tmp_path: Path, grey: bool, mode: str) -> None:
    thumbnails = random_thumbnails(5, 8, grey)
    save_sheet(tmp_path, "shown", {"names": ["a"]}, thumbnails)
    value, loaded = load_sheet(tmp_path / "shown.json")
    assert value["names"] == ["a"] and (loaded == thumbnails).all()
    (sheet,) = tmp_path.glob("shown.*.png")
    assert Image.open(sheet).mode == mode


def test_a_new_sheet_replaces_the_old_one(tmp_path: Path) -> None:
    for n in (3, 4):
        save_sheet(tmp_path, "shown", {}, random_thumbnails(n, 8))
    (sheet,) = tmp_path.glob("*.png")
    assert json.loads((tmp_path / "shown.json").read_text())["sheet"] == sheet.name
    save_sheet(tmp_path, "shown", {}, [])
    assert not list(tmp_path.glob("*.png")) and len(load_sheet(tmp_path / "shown.json")[1]) == 0


def test_a_missing_or_damaged_sheet_is_named(tmp_path: Path) -> None:
    save_sheet(tmp_path, "shown", {}, random_thumbnails(3, 8))
    (sheet,) = tmp_path.glob("shown.*.png")
    sheet.write_bytes(sheet.read_bytes()[:40])
    with pytest.raises(RunError, match=sheet.name):
        load_sheet(tmp_path / "shown.json")
    sheet.unlink()
    with pytest.raises(RunError, match=sheet.name):
        load_sheet(tmp_path / "shown.json")
