"""Weather: snow, fog, brightness.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

import numpy as np

from maple.data.corrupt._base import (
    Array,
    Rngs,
    draw_normal,
    draw_uniform,
    register_corruption,
    relative_side,
    to_pixels,
    to_unit,
)
from maple.data.corrupt.blur import streak, zoom_matrix

_GREY = np.array([0.299, 0.587, 0.114], np.float32)


@register_corruption(
    "snow",
    "weather",
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def _snow(
    images: Array,
    rngs: Rngs,
    mean: float,
    deviation: float,
    flake: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Array:
    """Flakes are the parts of enlarged noise above a threshold, drawn into streaks; the image is whitened a little."""
    s = relative_side(images)
    rows, columns = ((np.arange(side) / max(s, 1)).astype(np.int64) for side in images.shape[1:3])
    height, width = rows[-1] + 1, columns[-1] + 1  # as many grains of noise as an image of 32 pixels has
    layer = mean + deviation * draw_normal(rngs, (height, width))
    layer = zoom_matrix(height, flake) @ layer @ zoom_matrix(width, flake).T
    layer = np.where(layer < threshold, 0, np.clip(layer, 0, 1))[:, rows[:, None], columns, None].astype(np.float32)
    layer = streak(layer, draw_uniform(rngs, -135, -45), radius * s, sigma * s)
    x = to_unit(images)
    x = kept * x + (1 - kept) * np.maximum(x, (x @ _GREY)[..., None] * 1.5 + 0.5)
    return to_pixels(x + layer + layer[:, ::-1, ::-1])


def plasma(rngs: Rngs, side: int, decay: float) -> Array:
    """Clouds (N, side, side) in [0, 1] by the diamond-square algorithm; ``side`` is a power of two.

    Points halfway between those that are known get their mean and a random offset, whose range falls by ``decay``
    squared from each grid to the next finer one.
    """
    n = len(rngs)
    offsets = draw_uniform(rngs, -1, 1, (side * side - 1,))
    grid = np.zeros((n, side, side), np.float32)
    used, step, wibble = 0, side, 100.0

    def settle(total: Array) -> Array:
        nonlocal used
        count = total[0].size
        offset = offsets[:, used : used + count].reshape(total.shape)
        used += count
        return total / 4 + np.float32(wibble**2) * offset

    while step >= 2:
        half = step // 2
        known = grid[:, ::step, ::step]
        beside = known + np.roll(known, -1, 1)
        grid[:, half::step, half::step] = settle(beside + np.roll(beside, -1, 2))
        middle = grid[:, half::step, half::step]
        grid[:, ::step, half::step] = settle(middle + np.roll(middle, 1, 1) + known + np.roll(known, -1, 2))
        grid[:, half::step, ::step] = settle(middle + np.roll(middle, 1, 2) + known + np.roll(known, -1, 1))
        step, wibble = half, wibble / decay
    grid -= grid.min(axis=(1, 2), keepdims=True)
    return grid / grid.max(axis=(1, 2), keepdims=True)


@register_corruption("fog", "weather", (0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
def _fog(images: Array, rngs: Rngs, density: float, decay: float) -> Array:
    height, width = images.shape[1:3]
    clouds = plasma(rngs, 1 << (max(height, width) - 1).bit_length(), decay)[:, :height, :width, None]
    x = to_unit(images)
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    return to_pixels((x + density * clouds) * brightest / (brightest + density))


@register_corruption("brightness", "weather", (0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
def _brightness(images: Array, rngs: Rngs, more: float) -> Array:
    """More value in the sense of HSV: hue and saturation stay, so that all channels grow by one factor."""
    x = to_unit(images)
    value = x.max(axis=3, keepdims=True)
    brighter = np.minimum(value + np.float32(more), 1)
    return to_pixels(np.where(value > 0, x * (brighter / np.where(value > 0, value, 1)), brighter))
