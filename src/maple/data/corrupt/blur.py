"""Blur: defocus, glass, motion, zoom.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from scipy.ndimage import correlate1d, gaussian_filter

from maple.data.corrupt._base import Array, Rngs, draw_uniform, register_corruption, relative_side, to_pixels, to_unit


def _taps(sigma: float, reach: int) -> Array:
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    return taps / taps.sum()


def disk(radius: float, softness: float, reach: int) -> Array:
    """A disc of total weight 1, its edge softened by a Gaussian of 2 ``reach`` + 1 taps.

    >>> disk(1, 0.2, 1).round(2)[3:-3, 3:-3].shape, round(float(disk(1.5, 0.1, 1).sum()), 6)
    ((1, 1), 1.0)
    """
    half = ceil(radius) + reach + 1
    away = np.arange(-half, half + 1) ** 2
    inside = (away[:, None] + away[None, :] <= radius**2).astype(np.float64)
    taps = _taps(softness, reach)
    return correlate1d(correlate1d(inside / inside.sum(), taps, axis=0), taps, axis=1)


@register_corruption("defocus-blur", "blur", (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
def _defocus_blur(images: Array, rngs: Rngs, radius: float, softness: float) -> Array:
    """Blur of a lens out of focus: the mean over a disc."""
    s = relative_side(images)
    kernel = disk(radius * s, softness * s, max(1, round(s)))
    half = len(kernel) // 2
    x = np.pad(to_unit(images), ((0, 0), (half, half), (half, half), (0, 0)), mode="reflect")
    out = np.zeros(images.shape, np.float32)
    for dy, dx in np.argwhere(kernel > 0):
        out += np.float32(kernel[dy, dx]) * x[:, dy : dy + images.shape[1], dx : dx + images.shape[2]]
    return to_pixels(out)


@register_corruption("glass-blur", "blur", (0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
def _glass_blur(images: Array, rngs: Rngs, sigma: float, reach: float, rounds: int) -> Array:
    """Pixels seen through frosted glass: each is replaced by a near one, between two Gaussian blurs.

    The published code means to swap two pixels, but copies one over the other, since rows of an array are views. The
    published images are made so, and so are these.
    """
    s = relative_side(images)
    far = max(1, round(reach * s))
    n, height, width, _ = images.shape
    smear = (0, sigma * s, sigma * s, 0)
    x = to_pixels(gaussian_filter(to_unit(images), smear, mode="nearest"))
    rows, columns = range(height - far, far, -1), range(width - far, far, -1)
    moves = np.stack([rng.integers(-far, far, (2, len(rows), len(columns), 2)) for rng in rngs])  # (N, 2, ., ., 2)
    every = np.arange(n)
    for turn in range(int(rounds)):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                dx, dy = moves[:, turn, i, j].T
                x[:, row, column] = x[every, row + dy, column + dx]
    return to_pixels(gaussian_filter(to_unit(x), smear, mode="nearest"))


def streak(x: Array, angle: Array, radius: float, sigma: float) -> Array:
    """Smear (N, H, W, C) along a line at ``angle`` (N,) in degrees: half a Gaussian of 2 radius + 1 taps.

    Taps lie at whole pixels, as in ImageMagick's motion blur; pixels beyond the border repeat it.

    >>> line = np.zeros((1, 1, 5, 1)); line[0, 0, 4] = 1
    >>> streak(line, np.zeros(1), radius=1, sigma=1).ravel().round(2)
    array([0.  , 0.  , 0.08, 0.43, 1.  ])
    """
    n, height, width, _ = x.shape
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights /= weights.sum()
    turn = np.deg2rad(angle)[:, None]  # (N, 1)
    dy, dx = (np.ceil(steps * part - 0.5).astype(np.int64) for part in (np.sin(turn), np.cos(turn)))  # (N, taps)
    every = np.arange(n)[:, None, None]
    out = np.zeros_like(x)
    for tap, weight in enumerate(weights):
        rows = np.clip(np.arange(height) + dy[:, tap, None], 0, height - 1)  # (N, H)
        columns = np.clip(np.arange(width) + dx[:, tap, None], 0, width - 1)  # (N, W)
        out += x.dtype.type(weight) * x[every, rows[:, :, None], columns[:, None, :]]
    return out


@register_corruption("motion-blur", "blur", (6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
def _motion_blur(images: Array, rngs: Rngs, radius: float, sigma: float) -> Array:
    s = relative_side(images)
    return to_pixels(streak(to_unit(images), draw_uniform(rngs, -45, 45), radius * s, sigma * s))


def zoom_matrix(length: int, factor: float) -> Array:
    """Weights (length, length) that enlarge the middle of a line of pixels by ``factor`` and cut it to its length.

    The same linear interpolation as ``scipy.ndimage.zoom(order=1)``, so that an image is enlarged by two products.
    """
    crop = ceil(length / factor)
    enlarged = round(crop * factor)
    first, trim = (length - crop) // 2, (enlarged - length) // 2
    at = first + (np.arange(length) + trim) * (crop - 1) / (enlarged - 1)
    low = np.minimum(at.astype(np.int64), length - 2)
    matrix = np.zeros((length, length), np.float32)
    matrix[np.arange(length), low] = 1 - (at - low)
    matrix[np.arange(length), low + 1] = at - low
    return matrix


@register_corruption("zoom-blur", "blur", (7,), (12,), (16,), (21,), (26,))
def _zoom_blur(images: Array, rngs: Rngs, zooms: int) -> Array:
    """The mean over zooms by 1.00, 1.01, 1.02, ... and the image itself."""
    n, height, width, channels = images.shape
    factors = [1 + step / 100 for step in range(int(zooms))]
    down = np.concatenate([zoom_matrix(height, factor) for factor in factors])  # (Z H, H)
    across = np.concatenate([zoom_matrix(width, factor).T for factor in factors])  # (Z W, W)
    x = np.moveaxis(to_unit(images), 3, 1)  # (N, 3, H, W)
    tall = (down @ x).reshape(n, channels, int(zooms), height, width)
    wide = np.moveaxis(tall, 2, 3).reshape(n, channels, height, -1)  # (N, 3, H, Z W)
    return to_pixels(np.moveaxis((x + wide @ across) / (len(factors) + 1), 1, 3))
