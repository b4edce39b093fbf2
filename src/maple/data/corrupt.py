"""Common corruptions of images, as CIFAR-10-C and CIFAR-100-C have them, made here from clean images.

Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019
(https://arxiv.org/abs/1903.12261): 14 of their 15 families, five severities each; *frost* is left out since it needs
pictures of frost. Parameters are those published for 32 x 32 pixels; lengths grow with the side of the image.

What is random depends on the seed, the family and the content of an image (its key) alone, never on the images beside
it; all severities of an image share their random numbers, so that they differ in strength only.

Squared error grows with severity but for three families, whose published parameters trade one thing for another: glass
blur, motion blur (3 and 4 are alike) and the elastic transform (less shear, rougher displacements).

Three things differ from the published code: values are rounded, not cut, to whole grey levels; streaks are drawn by
:func:`streak` with ImageMagick's taps, unrounded; and displaced pixels are mirrored at every border.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from operator import index
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import correlate1d, gaussian_filter

from maple.data.image_set import MEMORY_LIMIT, ImageSet
from maple.errors import DataError, UsageError, suggest

Array = np.ndarray
Rngs = Sequence[np.random.Generator]  # one per image

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # side in pixels from which on all families are defined
_SIDE = 32  # pixels that the parameters were published for
_PIXELS_AT_ONCE = 2**17


class Corruption(NamedTuple):
    """One family: what it does to images, and its parameters at severities 1 to 5."""

    apply: Callable[..., Array]  # (images (N, H, W, 3) uint8, one generator each, parameters...) -> the same shape
    group: str
    levels: tuple[tuple[float, ...], ...]


CORRUPTIONS: dict[str, Corruption] = {}


def register_corruption(name: str, group: str, *levels: tuple[float, ...]) -> Callable[[Callable], Callable]:
    """Enter a family and the parameters of its five severities into ``CORRUPTIONS``."""

    def enter(apply: Callable) -> Callable:
        CORRUPTIONS[name] = Corruption(apply, group, levels)
        return apply

    return enter


# --- what users call --------------------------------------------------------------------------------------------------


def corrupt(images: Array, family: str, severity: int, seed: int = 0, keys: Any = None) -> Array:
    """Images (N, H, W, 3) uint8, corrupted.

    ``keys`` (N,) identify the images and decide, with ``seed``, what is random about each; without them it is their
    content. An image gets the same corruption in whatever company it comes.

    >>> grey = np.full((2, 32, 32, 3), 100, np.uint8)
    >>> corrupt(grey, "brightness", 4)[0, 0, 0]
    array([151, 151, 151], dtype=uint8)
    >>> noisy = corrupt(grey, "gaussian-noise", 1)
    >>> bool((noisy[0] == noisy[1]).all()), bool((noisy == corrupt(grey, "gaussian-noise", 1, seed=1)).all())
    (True, False)
    """
    images = _check_images(images)
    family, level = check_family(family), check_severity(severity) - 1
    keys = _content_keys(images) if keys is None else np.asarray(keys)
    if keys.shape != (len(images),):
        raise UsageError(f"{len(images)} images have keys of shape {keys.shape}: give one key per image")
    corruption = CORRUPTIONS[family]
    block = max(1, _PIXELS_AT_ONCE // (images.shape[1] * images.shape[2]))
    out = np.empty_like(images)
    for start in range(0, len(images), block):
        rows = slice(start, start + block)
        rngs = [_generator(key, family, seed) for key in keys[rows]]
        out[rows] = corruption.apply(images[rows], rngs, *corruption.levels[level])
    return out


def corrupt_set(
    images: ImageSet, family: str, severity: int | Literal["all"], seed: int = 0, memory_limit: int = MEMORY_LIMIT
) -> ImageSet:
    """The same images with the same labels, corrupted.

    With ``family="all"`` each image gets one of the 14 families, and with ``severity="all"`` one severity, drawn by
    seed and content: a corrupted set of the same size, whose accuracy is on average that over all families and
    severities. Keys and files of the images say what was done to them, so that they differ from the clean ones.

    >>> from maple.data.sources import open_images
    >>> foggy = corrupt_set(open_images("digits"), "fog", 3)
    >>> foggy
    ImageSet('corrupted:digits?family=fog&severity=3&seed=0', 1797 images, 10 classes, 8 px, in memory)
    >>> foggy.files[0]
    'digits#0?family=fog&severity=3&seed=0'
    """
    pixels = _pixels(images, memory_limit)
    drawn = draw_corruptions(images.keys, family, severity, seed)
    queries = np.array([f"?family={name}&severity={level}&seed={seed}" for name, level in drawn])
    corrupted = np.empty_like(pixels)
    for name, level in set(drawn):
        rows = np.flatnonzero(queries == f"?family={name}&severity={level}&seed={seed}")
        corrupted[rows] = corrupt(pixels[rows], name, level, seed, images.keys[rows])
    return replace(
        images,
        pixels=corrupted,
        keys=np.array([_digest(key + query.encode()) for key, query in zip(images.keys, queries)], dtype="S32"),
        files=tuple(file + str(query) for file, query in zip(images.files, queries)),
        name=f"corrupted:{images.name}?family={family}&severity={severity}&seed={seed}",
        store=None,
        rows=None,
    )


def corrupted_sets(
    images: ImageSet, families: Sequence[str] | None = None, severities: Sequence[int] = SEVERITIES, seed: int = 0
) -> Iterator[tuple[str, int, ImageSet]]:
    """All families at all severities, one set after the other: what the usual mean over corruptions is taken over.

    >>> from maple.data.sources import open_images
    >>> few = open_images("digits").subset(range(4))
    >>> sum(1 for family, severity, corrupted in corrupted_sets(few))
    70
    """
    for family in CORRUPTIONS if families is None else families:
        for severity in severities:
            yield family, severity, corrupt_set(images, family, severity, seed)


def draw_corruptions(keys: Array, family: str, severity: int | Literal["all"], seed: int = 0) -> list[tuple[str, int]]:
    """Family and severity of each image: the given ones, or drawn by seed and key where they are ``all``."""
    families = list(CORRUPTIONS) if family == "all" else [check_family(family)]
    severities = list(SEVERITIES) if severity == "all" else [check_severity(severity)]
    pairs = [(name, level) for name in families for level in severities]
    if len(pairs) == 1:
        return pairs * len(keys)
    return [pairs[_generator(key, "all", seed).integers(len(pairs))] for key in keys]


def check_family(family: str) -> str:
    """The name of a family as the registry has it.

    >>> check_family("gaussian_noise")
    'gaussian-noise'
    """
    name = str(family).replace("_", "-")
    if name not in CORRUPTIONS:
        raise UsageError(f"unknown corruption '{family}': {suggest(name, CORRUPTIONS)}")
    return name


def check_severity(severity: int) -> int:
    """A severity from 1 to 5."""
    try:
        level = index(severity)
    except TypeError:
        level = 0
    if level not in SEVERITIES:
        raise UsageError(f"severity {severity!r} cannot be used: give a whole number from 1 to 5")
    return level


def _check_images(images: Array) -> Array:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or min(images.shape[1:3]) < SMALLEST:
        raise UsageError(
            f"images of shape {images.shape} and type {images.dtype} cannot be corrupted: give uint8 of shape "
            f"(N, height, width, 3) with sides of at least {SMALLEST} pixels"
        )
    return images


def _pixels(images: ImageSet, memory_limit: int) -> Array:
    """The pixels of a set, (N, S, S, 3), read from disk where they are not in memory."""
    if images.pixels is not None:
        return images.pixels
    needed = len(images) * images.size**2 * 3
    if needed > memory_limit:
        raise DataError(
            f"'{images.name}' takes {needed / 2**30:.1f} GiB at {images.size} px, too much to be corrupted in memory: "
            "open it with a smaller size, or corrupt a part of it"
        )
    return np.stack([images.read(i) for i in range(len(images))])


# --- randomness -------------------------------------------------------------------------------------------------------


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _content_keys(images: Array) -> Array:
    return np.array([_digest(np.ascontiguousarray(image)) for image in images], dtype="S32")


def _generator(key: Any, purpose: str, seed: int) -> np.random.Generator:
    """Random numbers that belong to one image, one purpose and one seed."""
    name = key if isinstance(key, bytes) else str(key).encode()
    return np.random.default_rng(int.from_bytes(_digest(f"{index(seed)} {purpose} ".encode() + name)))


def _uniform(rngs: Rngs, low: float, high: float, shape: tuple[int, ...] = ()) -> Array:
    """(N, *shape), each row from its own generator."""
    return np.stack([rng.uniform(low, high, shape) for rng in rngs]).astype(np.float32)


def _normal(rngs: Rngs, shape: tuple[int, ...]) -> Array:
    return np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])


# --- numbers and lengths ----------------------------------------------------------------------------------------------


def _unit(images: Array) -> Array:
    """Pixels as float32 in [0, 1]."""
    return images.astype(np.float32) / 255


def _to_pixels(x: Array) -> Array:
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)


def _scale(images: Array) -> float:
    """By how much lengths are larger than in an image of 32 x 32 pixels."""
    return min(images.shape[1:3]) / _SIDE


# --- noise ------------------------------------------------------------------------------------------------------------


@register_corruption("gaussian-noise", "noise", (0.04,), (0.06,), (0.08,), (0.09,), (0.10,))
def _gaussian_noise(images: Array, rngs: Rngs, deviation: float) -> Array:
    return _to_pixels(_unit(images) + deviation * _normal(rngs, images.shape[1:]))


@register_corruption("shot-noise", "noise", (500,), (250,), (100,), (75,), (50,))
def _shot_noise(images: Array, rngs: Rngs, photons: float) -> Array:
    """Counts of photons, of which a white pixel receives ``photons`` on average."""
    expected = _unit(images) * photons
    return _to_pixels(np.stack([rng.poisson(image) for rng, image in zip(rngs, expected)]) / photons)


@register_corruption("impulse-noise", "noise", (0.01,), (0.02,), (0.03,), (0.05,), (0.07,))
def _impulse_noise(images: Array, rngs: Rngs, share: float) -> Array:
    """Salt and pepper: a share of all values becomes 0 or 255."""
    u = _uniform(rngs, 0, 1, images.shape[1:])
    salted = np.where(u < share / 2, np.uint8(255), images)
    return np.where(u >= 1 - share / 2, np.uint8(0), salted)


# --- blur -------------------------------------------------------------------------------------------------------------


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
    """What a lens that is out of focus does: the mean over a disc."""
    s = _scale(images)
    kernel = disk(radius * s, softness * s, max(1, round(s)))
    half = len(kernel) // 2
    x = np.pad(_unit(images), ((0, 0), (half, half), (half, half), (0, 0)), mode="reflect")
    out = np.zeros(images.shape, np.float32)
    for dy, dx in np.argwhere(kernel > 0):
        out += np.float32(kernel[dy, dx]) * x[:, dy : dy + images.shape[1], dx : dx + images.shape[2]]
    return _to_pixels(out)


@register_corruption("glass-blur", "blur", (0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
def _glass_blur(images: Array, rngs: Rngs, sigma: float, reach: float, rounds: int) -> Array:
    """Pixels seen through frosted glass: each is replaced by a near one, between two Gaussian blurs.

    The published code means to swap two pixels, but copies one over the other, since rows of an array are views. The
    published images are made so, and so are these.
    """
    s = _scale(images)
    far = max(1, round(reach * s))
    n, height, width, _ = images.shape
    smear = (0, sigma * s, sigma * s, 0)
    x = _to_pixels(gaussian_filter(_unit(images), smear, mode="nearest"))
    rows, columns = range(height - far, far, -1), range(width - far, far, -1)
    moves = np.stack([rng.integers(-far, far, (2, len(rows), len(columns), 2)) for rng in rngs])  # (N, 2, ., ., 2)
    every = np.arange(n)
    for turn in range(int(rounds)):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                dx, dy = moves[:, turn, i, j].T
                x[:, row, column] = x[every, row + dy, column + dx]
    return _to_pixels(gaussian_filter(_unit(x), smear, mode="nearest"))


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
    s = _scale(images)
    return _to_pixels(streak(_unit(images), _uniform(rngs, -45, 45), radius * s, sigma * s))


def zoom_matrix(length: int, factor: float) -> Array:
    """What enlarges the middle of a line of pixels by ``factor`` and cuts it to its length: (length, length) weights.

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
    x = np.moveaxis(_unit(images), 3, 1)  # (N, 3, H, W)
    tall = (down @ x).reshape(n, channels, int(zooms), height, width)
    wide = np.moveaxis(tall, 2, 3).reshape(n, channels, height, -1)  # (N, 3, H, Z W)
    return _to_pixels(np.moveaxis((x + wide @ across) / (len(factors) + 1), 1, 3))


# --- weather ----------------------------------------------------------------------------------------------------------


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
    """Flakes are what of an enlarged noise exceeds a threshold, drawn into streaks; the image is whitened a little."""
    s = _scale(images)
    rows, columns = ((np.arange(side) / max(s, 1)).astype(np.int64) for side in images.shape[1:3])
    height, width = rows[-1] + 1, columns[-1] + 1  # as many grains of noise as an image of 32 pixels has
    layer = mean + deviation * _normal(rngs, (height, width))
    layer = zoom_matrix(height, flake) @ layer @ zoom_matrix(width, flake).T
    layer = np.where(layer < threshold, 0, np.clip(layer, 0, 1))[:, rows[:, None], columns, None].astype(np.float32)
    layer = streak(layer, _uniform(rngs, -135, -45), radius * s, sigma * s)
    x = _unit(images)
    x = kept * x + (1 - kept) * np.maximum(x, (x @ _GREY)[..., None] * 1.5 + 0.5)
    return _to_pixels(x + layer + layer[:, ::-1, ::-1])


def plasma(rngs: Rngs, side: int, decay: float) -> Array:
    """Clouds (N, side, side) in [0, 1] by the diamond-square algorithm; ``side`` is a power of two.

    Points halfway between those that are known get their mean and a random offset, whose range falls by ``decay``
    squared from each grid to the next finer one.
    """
    n = len(rngs)
    offsets = _uniform(rngs, -1, 1, (side * side - 1,))
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
    x = _unit(images)
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    return _to_pixels((x + density * clouds) * brightest / (brightest + density))


@register_corruption("brightness", "weather", (0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
def _brightness(images: Array, rngs: Rngs, more: float) -> Array:
    """More value in the sense of HSV: hue and saturation stay, so that all channels grow by one factor."""
    x = _unit(images)
    value = x.max(axis=3, keepdims=True)
    brighter = np.minimum(value + np.float32(more), 1)
    return _to_pixels(np.where(value > 0, x * (brighter / np.where(value > 0, value, 1)), brighter))


# --- digital ----------------------------------------------------------------------------------------------------------


@register_corruption("contrast", "digital", (0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
def _contrast(images: Array, rngs: Rngs, kept: float) -> Array:
    x = _unit(images)
    mean = x.mean(axis=(1, 2), keepdims=True)
    return _to_pixels((x - mean) * np.float32(kept) + mean)


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
    after = before + _uniform(rngs, -shear * side, shear * side, (3, 2)).astype(np.float64)  # (N, 3, 2)
    ones = np.ones((n, 3, 1))
    back = np.linalg.solve(np.concatenate([after, ones], axis=2), np.broadcast_to(before, (n, 3, 2)).astype(float))
    y, x = np.mgrid[:height, :width]
    source = np.stack([x, y, np.ones_like(x)], axis=-1) @ back[:, None]  # (N, H, W, 2): x, y
    bent = bilinear(_unit(images), *(source[..., axis].astype(np.float32) for axis in (1, 0)))
    moves = _uniform(rngs, -1, 1, (2, height, width))
    if strength:
        blur = (0, 0, smooth * side, smooth * side)
        dx, dy = np.moveaxis(gaussian_filter(moves, blur, mode="reflect", truncate=3) * (strength * side), 1, 0)
        bent = bilinear(bent, (y + dy).astype(np.float32), (x + dx).astype(np.float32))
    return _to_pixels(bent)


@register_corruption("pixelate", "digital", (0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def _pixelate(images: Array, rngs: Rngs, share: float) -> Array:
    """Fewer pixels: a share of 32, or of the side where that is less, by Pillow's box filter, and back."""
    height, width = images.shape[1:3]
    scale = max(1.0, _scale(images))
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
