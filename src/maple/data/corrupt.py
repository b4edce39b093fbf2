"""Common corruptions of images, as CIFAR-10-C and CIFAR-100-C have them, made here from clean images.

Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019
(https://arxiv.org/abs/1903.12261): 14 of their 15 families, five severities each; *frost* is left out since it needs
pictures of frost. Parameters are those published for 32 x 32 pixels; lengths grow with the side of the image.

Randomness depends on the seed, the family and the content of an image (its key) alone, never on the images beside it;
all severities of an image share their random numbers, so that they differ in strength only.

Squared error grows with severity but for three families, whose published parameters trade one thing for another: glass
blur, motion blur (3 and 4 are alike) and the elastic transform (less shear, rougher displacements).

Three things differ from the published code: values are rounded, not cut, to whole grey levels; streaks are drawn by
:func:`~maple.data._corruptions.streak` with ImageMagick's taps, unrounded; and displaced pixels are mirrored at every
border.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from maple.data._corruptions import CORRUPTIONS, Array, image_generator
from maple.data._decoder import content_key
from maple.data.image_set import MEMORY_LIMIT, ImageSet, content_keys, read_pixels
from maple.errors import DataError, UsageError, check_integer, suggest

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # side in pixels from which on all families are defined
_PIXELS_AT_ONCE = 2**17


def corrupt_images(images: Array, family: str, severity: int, seed: int = 0, keys: Any = None) -> Array:
    """Corrupt images (N, H, W, 3) uint8.

    ``keys`` (N,) and ``seed`` decide the random numbers of each image; the default keys are digests of the content. The
    corruption of an image does not depend on the other images.

    >>> grey = np.full((2, 32, 32, 3), 100, np.uint8)
    >>> corrupt_images(grey, "brightness", 4)[0, 0, 0]
    array([151, 151, 151], dtype=uint8)
    >>> noisy = corrupt_images(grey, "gaussian-noise", 1)
    >>> bool((noisy[0] == noisy[1]).all()), bool((noisy == corrupt_images(grey, "gaussian-noise", 1, seed=1)).all())
    (True, False)
    """
    images = _check_images(images)
    family, level = check_family(family), check_integer("severity", severity, 1, 5) - 1
    keys = content_keys(images) if keys is None else np.asarray(keys)
    if keys.shape != (len(images),):
        raise UsageError(f"{len(images)} images have keys of shape {keys.shape}: give one key per image")
    corruption = CORRUPTIONS[family]
    block = max(1, _PIXELS_AT_ONCE // (images.shape[1] * images.shape[2]))
    out = np.empty_like(images)
    for start in range(0, len(images), block):
        rows = slice(start, start + block)
        rngs = [image_generator(key, family, seed) for key in keys[rows]]
        out[rows] = corruption.apply(images[rows], rngs, *corruption.levels[level])
    return out


def corrupt_set(
    images: ImageSet, family: str, severity: int | Literal["all"], seed: int = 0, memory_limit: int = MEMORY_LIMIT
) -> ImageSet:
    """Corrupt an image set; labels stay.

    With ``family="all"`` each image gets one of the 14 families, and with ``severity="all"`` one severity, drawn by
    seed and content: a corrupted set of the same size, whose accuracy is on average that over all families and
    severities. Keys and file names record the corruption, so that they differ from those of the clean images.

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
        corrupted[rows] = corrupt_images(pixels[rows], name, level, seed, images.keys[rows])
    return replace(
        images,
        pixels=corrupted,
        keys=np.array([content_key(key + query.encode()) for key, query in zip(images.keys, queries)], dtype="S32"),
        files=tuple(file + str(query) for file, query in zip(images.files, queries)),
        name=f"corrupted:{images.name}?family={family}&severity={severity}&seed={seed}",
        store=None,
        rows=None,
    )


def corrupted_sets(
    images: ImageSet, families: Sequence[str] | None = None, severities: Sequence[int] = SEVERITIES, seed: int = 0
) -> Iterator[tuple[str, int, ImageSet]]:
    """Iterate over all families at all severities, the sets of the usual mean over corruptions.

    >>> from maple.data.sources import open_images
    >>> few = open_images("digits").subset(range(4))
    >>> sum(1 for family, severity, corrupted in corrupted_sets(few))
    70
    """
    for family in CORRUPTIONS if families is None else families:
        for severity in severities:
            yield family, severity, corrupt_set(images, family, severity, seed)


def draw_corruptions(keys: Array, family: str, severity: int | Literal["all"], seed: int = 0) -> list[tuple[str, int]]:
    """Family and severity of each image: those given, or drawn by seed and key where they are ``all``."""
    families = list(CORRUPTIONS) if family == "all" else [check_family(family)]
    severities = list(SEVERITIES) if severity == "all" else [check_integer("severity", severity, 1, 5)]
    pairs = [(name, level) for name in families for level in severities]
    if len(pairs) == 1:
        return pairs * len(keys)
    return [pairs[image_generator(key, "all", seed).integers(len(pairs))] for key in keys]


def check_family(family: str) -> str:
    """Check the name of a family, and spell it as the registry does.

    >>> check_family("gaussian_noise")
    'gaussian-noise'
    """
    name = str(family).replace("_", "-")
    if name not in CORRUPTIONS:
        raise UsageError(f"unknown corruption '{family}': {suggest(name, CORRUPTIONS)}")
    return name


def _check_images(images: Array) -> Array:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or min(images.shape[1:3]) < SMALLEST:
        remedy = f"give uint8 of shape (N, height, width, 3) with sides of at least {SMALLEST} pixels"
        raise UsageError(f"images of shape {images.shape} and type {images.dtype} cannot be corrupted: {remedy}")
    return images


def _pixels(images: ImageSet, memory_limit: int) -> Array:
    """Pixels of a set, (N, S, S, 3), decoded where they are not in memory."""
    if images.pixels is not None:
        return images.pixels
    if (needed := len(images) * images.size**2 * 3) > memory_limit:
        found = f"corrupting '{images.name}' needs {needed / 2**30:.1f} GiB of memory at {images.size} px"
        raise DataError(f"{found}: open it with a smaller size, or corrupt a part of it")
    return next(read_pixels(images, [np.arange(len(images))]))
