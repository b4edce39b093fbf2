"""Digital: contrast, elastic transform, pixelation, JPEG compression.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

from maple.data.corrupt._base import Array, Rngs, draw_uniform, register_corruption, relative_side, to_pixels, to_unit


@register_corruption("contrast", "digital", (0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
def _contrast(images: Array, rngs: Rngs, kept: float) -> Array:
    x = to_unit(images)
    mean = x.mean(axis=(1, 2), keepdims=True)
    return to_pixels((x - mean) * np.float32(kept) + mean)


def bilinear(x: Array, rows: Array, columns: Array) -> Array:
    """Images (N, H, W, C) read at real-valued ``rows`` and ``columns`` (N, H, W), mirrored at the border.

    >>> ramp = np.arange(4.0).reshape(1, 1, 4, 1).repeat(2, axis=1)
    >>> bilinear(ramp, np.zeros((1, 1, 3)), np.array([[[0.5, -1.0, 3.25]]])).ravel()
    array([0.5 , 1.  , 2.75])
    """
    every = np.arange(len(x))[:, None, None]
    r, c = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = (rows - r)[..., None], (columns - c)[..., None]

    def at(row: Array, column: Array) -> Array:
        return x[every, _mirror(row, x.shape[1]), _mirror(column, x.shape[2])]

    above = at(r, c) * (1 - right) + at(r, c + 1) * right
    below = at(r + 1, c) * (1 - right) + at(r + 1, c + 1) * right
    return above * (1 - down) + below * down


def _mirror(i: Array, length: int) -> Array:
    """Indices folded back into range, the border not repeated: -1 is 1."""
    return length - 1 - np.abs(np.abs(i) % (2 * length - 2) - (length - 1))


@register_corruption(
    "elastic-transform",
    "digital",
    (0, 0, 0.08),
    (0.05, 0.2, 0.07),
    (0.08, 0.06, 0.06),
    (0.1, 0.04, 0.05),
    (0.1, 0.03, 0.03),
)
def _elastic_transform(images: Array, rngs: Rngs, strength: float, smooth: float, shear: float) -> Array:
    """A random affine map, then random displacements that vary smoothly; all three lengths are shares of the side."""
    n, height, width, _ = images.shape
    side = min(height, width)
    corner, arm = np.array([width // 2, height // 2]), side // 3
    before = corner + arm * np.array([[1, 1], [1, -1], [-1, -1]])  # three points (x, y)
    after = before + draw_uniform(rngs, -shear * side, shear * side, (3, 2)).astype(np.float64)  # (N, 3, 2)
    ones = np.ones((n, 3, 1))
    back = np.linalg.solve(np.concatenate([after, ones], axis=2), np.broadcast_to(before, (n, 3, 2)).astype(float))
    y, x = np.mgrid[:height, :width]
    source = np.stack([x, y, np.ones_like(x)], axis=-1) @ back[:, None]  # (N, H, W, 2): x, y
    bent = bilinear(to_unit(images), *(source[..., axis].astype(np.float32) for axis in (1, 0)))
    moves = draw_uniform(rngs, -1, 1, (2, height, width))
    if strength:
        blur = (0, 0, smooth * side, smooth * side)
        dx, dy = np.moveaxis(gaussian_filter(moves, blur, mode="reflect", truncate=3) * (strength * side), 1, 0)
        bent = bilinear(bent, (y + dy).astype(np.float32), (x + dx).astype(np.float32))
    return to_pixels(bent)


@register_corruption("pixelate", "digital", (0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def _pixelate(images: Array, rngs: Rngs, share: float) -> Array:
    """Fewer pixels: a share of 32, or of the side where that is less, by Pillow's box filter, and back."""
    height, width = images.shape[1:3]
    scale = max(1.0, relative_side(images))
    small = (int(width / scale * share), int(height / scale * share))
    box = Image.Resampling.BOX
    return np.stack(
        [np.asarray(Image.fromarray(image).resize(small, box).resize((width, height), box)) for image in images]
    )


@register_corruption("jpeg-compression", "digital", (80,), (65,), (58,), (50,), (40,))
def _jpeg_compression(images: Array, rngs: Rngs, quality: int) -> Array:
    return np.stack([_through_jpeg(image, int(quality)) for image in images])


def _through_jpeg(image: Array, quality: int) -> Array:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))
