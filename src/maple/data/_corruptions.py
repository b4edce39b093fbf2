"""Families of corruptions, with the parameters of their five severities: noise, blur, weather, digital.

A family is a function of images (N, H, W, 3) uint8, one random generator per image, and its parameters. The order of
the families decides which one is drawn for an image where all are asked for.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from math import ceil
from operator import index
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import correlate1d, gaussian_filter

from maple.data._decoder import content_key

Array = np.ndarray
Rngs = Sequence[np.random.Generator]  # one per image

_SIDE = 32  # pixels that the parameters were published for
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


class Corruption(NamedTuple):
    """One family: its function, and its parameters at severities 1 to 5."""

    apply: Callable[..., Array]  # (images (N, H, W, 3) uint8, one generator each, parameters...) -> the same shape
    levels: tuple[tuple[float, ...], ...]


CORRUPTIONS: dict[str, Corruption] = {}


def corruption(name: str, *levels: tuple[float, ...]) -> Callable[[Callable], Callable]:
    """Register a family with the parameters of its five severities."""

    def enter(apply: Callable) -> Callable:
        CORRUPTIONS[name] = Corruption(apply, levels)
        return apply

    return enter


def image_generator(key: Any, purpose: str, seed: int) -> np.random.Generator:
    """Random generator of one image, for one purpose and seed."""
    name = key if isinstance(key, bytes) else str(key).encode()
    return np.random.default_rng(int.from_bytes(content_key(f"{index(seed)} {purpose} ".encode() + name).encode()))


def draw_uniform(rngs: Rngs, low: float, high: float, shape: tuple[int, ...] = ()) -> Array:
    """Uniform numbers (N, *shape), each row from its own generator."""
    return np.stack([rng.uniform(low, high, shape) for rng in rngs]).astype(np.float32)


def draw_normal(rngs: Rngs, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers (N, *shape), each row from its own generator."""
    return np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])


def to_unit(images: Array) -> Array:
    """Convert pixels to float32 in [0, 1]."""
    return images.astype(np.float32) / 255


def to_pixels(x: Array) -> Array:
    """Round numbers in [0, 1] to uint8 pixels."""
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)


def relative_side(images: Array) -> float:
    """Shorter side in units of 32 pixels, the side that the parameters were published for."""
    return min(images.shape[1:3]) / _SIDE


# --- noise -----------------------------------------------------------------------------------------------------------


@corruption("gaussian-noise", (0.04,), (0.06,), (0.08,), (0.09,), (0.10,))
def _gaussian_noise(images: Array, rngs: Rngs, deviation: float) -> Array:
    return to_pixels(to_unit(images) + deviation * draw_normal(rngs, images.shape[1:]))


@corruption("shot-noise", (500,), (250,), (100,), (75,), (50,))
def _shot_noise(images: Array, rngs: Rngs, photons: float) -> Array:
    """Counts of photons, of which a white pixel receives ``photons`` on average."""
    expected = to_unit(images) * photons
    return to_pixels(np.stack([rng.poisson(image) for rng, image in zip(rngs, expected)]) / photons)


@corruption("impulse-noise", (0.01,), (0.02,), (0.03,), (0.05,), (0.07,))
def _impulse_noise(images: Array, rngs: Rngs, share: float) -> Array:
    """Salt and pepper: a share of all values becomes 0 or 255."""
    u = draw_uniform(rngs, 0, 1, images.shape[1:])
    salted = np.where(u < share / 2, np.uint8(255), images)
    return np.where(u >= 1 - share / 2, np.uint8(0), salted)


# --- blur ------------------------------------------------------------------------------------------------------------


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


@corruption("defocus-blur", (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
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


@corruption("glass-blur", (0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
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


@corruption("motion-blur", (6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
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


@corruption("zoom-blur", (7,), (12,), (16,), (21,), (26,))
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


# --- weather ---------------------------------------------------------------------------------------------------------


@corruption(
    "snow",
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def _snow(images: Array, rngs: Rngs, *level: float) -> Array:
    """Flakes are the parts of enlarged noise above a threshold, drawn into streaks; the image is whitened a little."""
    mean, deviation, flake, threshold, radius, sigma, kept = level
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


@corruption("fog", (0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
def _fog(images: Array, rngs: Rngs, density: float, decay: float) -> Array:
    height, width = images.shape[1:3]
    clouds = plasma(rngs, 1 << (max(height, width) - 1).bit_length(), decay)[:, :height, :width, None]
    x = to_unit(images)
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    return to_pixels((x + density * clouds) * brightest / (brightest + density))


@corruption("brightness", (0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
def _brightness(images: Array, rngs: Rngs, more: float) -> Array:
    """More value in the sense of HSV: hue and saturation stay, so that all channels grow by one factor."""
    x = to_unit(images)
    value = x.max(axis=3, keepdims=True)
    brighter = np.minimum(value + np.float32(more), 1)
    return to_pixels(np.where(value > 0, x * (brighter / np.where(value > 0, value, 1)), brighter))


# --- digital ---------------------------------------------------------------------------------------------------------


@corruption("contrast", (0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
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


@corruption(
    "elastic-transform", (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
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


@corruption("pixelate", (0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def _pixelate(images: Array, rngs: Rngs, share: float) -> Array:
    """Fewer pixels: a share of 32, or of the side where that is less, by Pillow's box filter, and back."""
    height, width = images.shape[1:3]
    scale = max(1.0, relative_side(images))
    small = (int(width / scale * share), int(height / scale * share))
    box = Image.Resampling.BOX
    return np.stack(
        [np.asarray(Image.fromarray(image).resize(small, box).resize((width, height), box)) for image in images]
    )


@corruption("jpeg-compression", (80,), (65,), (58,), (50,), (40,))
def _jpeg_compression(images: Array, rngs: Rngs, quality: int) -> Array:
    return np.stack([_through_jpeg(image, int(quality)) for image in images])


def _through_jpeg(image: Array, quality: int) -> Array:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))
