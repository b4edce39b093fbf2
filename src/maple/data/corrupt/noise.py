"""Noise: Gaussian, shot, impulse.

Letters for shapes: N images, H x W pixels.
"""

from __future__ import annotations

import numpy as np

from maple.data.corrupt._base import Array, Rngs, draw_normal, draw_uniform, register_corruption, to_pixels, to_unit


@register_corruption("gaussian-noise", "noise", (0.04,), (0.06,), (0.08,), (0.09,), (0.10,))
def _gaussian_noise(images: Array, rngs: Rngs, deviation: float) -> Array:
    return to_pixels(to_unit(images) + deviation * draw_normal(rngs, images.shape[1:]))


@register_corruption("shot-noise", "noise", (500,), (250,), (100,), (75,), (50,))
def _shot_noise(images: Array, rngs: Rngs, photons: float) -> Array:
    """Counts of photons, of which a white pixel receives ``photons`` on average."""
    expected = to_unit(images) * photons
    return to_pixels(np.stack([rng.poisson(image) for rng, image in zip(rngs, expected)]) / photons)


@register_corruption("impulse-noise", "noise", (0.01,), (0.02,), (0.03,), (0.05,), (0.07,))
def _impulse_noise(images: Array, rngs: Rngs, share: float) -> Array:
    """Salt and pepper: a share of all values becomes 0 or 255."""
    u = draw_uniform(rngs, 0, 1, images.shape[1:])
    salted = np.where(u < share / 2, np.uint8(255), images)
    return np.where(u >= 1 - share / 2, np.uint8(0), salted)
