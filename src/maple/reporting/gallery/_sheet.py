"""Thumbnails, stored side by side in one PNG sheet beside the JSON file that describes them.

The sheet is written first, under a name with its digest; the JSON, written last, names the sheet. Captions and
thumbnails therefore always belong together, also after a crash.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maple.errors import RunError, check_integer
from maple.files import load_json, save_json, write_atomic

MAX_THUMBNAILS = 100_000  # of a sheet
MAX_SIDE = 512  # pixels of a thumbnail


def thumbnail(image: np.ndarray, side: int) -> np.ndarray:
    """A square image, scaled down to ``side`` pixels if it is larger.

    >>> thumbnail(np.zeros((200, 200, 3), np.uint8), 64).shape
    (64, 64, 3)
    >>> thumbnail(np.zeros((32, 32, 3), np.uint8), 64).shape
    (32, 32, 3)
    """
    if image.shape[0] <= side:
        return image
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def to_sheet(thumbnails: np.ndarray) -> np.ndarray:
    """Thumbnails (n, S, S, 3) side by side in an almost square picture.

    >>> to_sheet(np.zeros((5, 8, 8, 3), np.uint8)).shape
    (16, 24, 3)
    """
    n, side = thumbnails.shape[:2]
    columns = math.isqrt(n - 1) + 1
    rows = -(-n // columns)
    cells = np.zeros((rows * columns, side, side, 3), dtype=np.uint8)
    cells[:n] = thumbnails
    return cells.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)


def from_sheet(sheet: np.ndarray, n: int, side: int) -> np.ndarray:
    """The first ``n`` thumbnails of a sheet: the inverse of :func:`to_sheet`.

    >>> thumbnails = np.arange(5 * 2 * 2 * 3, dtype=np.uint8).reshape(5, 2, 2, 3)
    >>> bool((from_sheet(to_sheet(thumbnails), 5, 2) == thumbnails).all())
    True
    """
    rows, columns = sheet.shape[0] // side, sheet.shape[1] // side
    cells = sheet.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return cells.reshape(rows * columns, side, side, 3)[:n]


def save_sheet(folder: Path, stem: str, value: Mapping[str, Any], thumbnails: Sequence[np.ndarray]) -> None:
    """Write ``<stem>.json`` with ``value`` and the sheet of its ``thumbnails``; remove the sheet it replaces."""
    sheet, side = None, 0
    if len(thumbnails):
        side = thumbnails[0].shape[0]
        png = _png(to_sheet(np.stack(thumbnails)))
        sheet = f"{stem}.{hashlib.sha256(png).hexdigest()[:8]}.png"
        write_atomic(folder / sheet, png)
    save_json(folder / f"{stem}.json", {"sheet": sheet, "side": side, "thumbnails": len(thumbnails), **value})
    for old in folder.glob(f"{stem}.*.png"):
        if old.name != sheet:
            old.unlink()


def load_sheet(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The JSON and the thumbnails (n, S, S, 3) that :func:`save_sheet` wrote."""
    value = load_json(path)
    if value["sheet"] is None:
        return value, np.zeros((0, 0, 0, 3), dtype=np.uint8)
    n = check_integer("thumbnails", value["thumbnails"], 1, MAX_THUMBNAILS)
    side = check_integer("side", value["side"], 1, MAX_SIDE)
    sheet = path.parent / Path(value["sheet"]).name
    columns = math.isqrt(n - 1) + 1
    try:
        with Image.open(sheet, formats=("PNG",)) as image:
            if image.size != (columns * side, -(-n // columns) * side):  # before a pixel is decoded
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels")
            return value, from_sheet(np.asarray(image.convert("RGB")), n, side)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RunError(f"'{sheet}' is damaged ({error}): delete '{path}' or evaluate the run again") from None


def _png(image: np.ndarray) -> bytes:
    """A PNG file; grey images take one channel."""
    grey = bool((image == image[..., :1]).all())
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if grey else image).save(buffer, "PNG")
    return buffer.getvalue()
