"""Registry of corruptions, and what they share: random numbers per image, and pixels as numbers in [0, 1].

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np

from maple.data._decoder import content_key

Array = np.ndarray
Rngs = Sequence[np.random.Generator]  # one per image

_SIDE = 32  # pixels that the parameters were published for


class Corruption(NamedTuple):
    """One family: its function, and its parameters at severities 1 to 5."""

    apply: Callable[..., Array]  # (images (N, H, W, 3) uint8, one generator each, parameters...) -> the same shape
    group: str
    levels: tuple[tuple[float, ...], ...]


REGISTERED: dict[str, Corruption] = {}


def register_corruption(name: str, group: str, *levels: tuple[float, ...]) -> Callable[[Callable], Callable]:
    """Register a family with the parameters of its five severities."""

    def enter(apply: Callable) -> Callable:
        REGISTERED[name] = Corruption(apply, group, levels)
        return apply

    return enter


# --- randomness ------------------------------------------------------------------------------------------------------


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


# --- numbers and lengths ---------------------------------------------------------------------------------------------


def to_unit(images: Array) -> Array:
    """Convert pixels to float32 in [0, 1]."""
    return images.astype(np.float32) / 255


def to_pixels(x: Array) -> Array:
    """Round numbers in [0, 1] to uint8 pixels."""
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)


def relative_side(images: Array) -> float:
    """Shorter side in units of 32 pixels, the side that the parameters were published for."""
    return min(images.shape[1:3]) / _SIDE
