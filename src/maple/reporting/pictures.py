"""Pictures as data URIs, to stand inside a page."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image, features

CRISP = 16  # images of so few pixels a side are shown as pixels, not blurred


def data_uri(image: np.ndarray, lossless: bool = False) -> str:
    """A picture (H, W, 3 or 4) as a data URI: PNG if it is small or must be ``lossless``, WebP otherwise."""
    as_png = lossless or is_crisp(image) or not features.check("webp")
    buffer = io.BytesIO()
    if as_png:
        Image.fromarray(image).save(buffer, "PNG", optimize=True)
    else:
        Image.fromarray(image).save(buffer, "WEBP", quality=88, use_sharp_yuv=True)
    kind = "png" if as_png else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def is_crisp(image: np.ndarray) -> bool:
    """Whether a thumbnail (S, S, 3) is so small that its pixels are shown as squares."""
    return image.shape[0] <= CRISP
