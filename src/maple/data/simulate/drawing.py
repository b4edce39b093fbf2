"""Drawing: traits in, images out.

Every mark is a function of a distance (edge, line) or of a phase (wave), so that defocus needs no convolution: an edge
gets softer, a line wider and fainter, a wave weaker. Drawing costs a constant per pixel, at any size and any blur.

Letters for shapes: n images of S x S pixels. Lengths are in half-sides of the image.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maple.data.simulate.traits import Array, Traits

# --- marks under a Gaussian blur of width sigma ---------------------------------------------------------


def edge(distance: Array, sigma: Array) -> Array:
    """A step from 0 (negative distance) to 1, softened; the logistic function is within 0.01 of the Gaussian one.

    >>> edge(np.array([-9.0, 0.0, 9.0]), np.array(1.0)).round(3)
    array([0. , 0.5, 1. ])
    """
    return 1.0 / (1.0 + np.exp(np.clip(distance * (-1.702 / sigma), -30.0, 30.0)))


def line(distance: Array, width: Array | float, sigma: Array) -> Array:
    """A line of Gaussian profile: blur widens it and keeps its integral.

    >>> line(np.array([0.0]), 1.0, np.array(0.0)), line(np.array([0.0]), 3.0, np.array(4.0))
    (array([1.]), array([0.6]))
    """
    variance = width * width + sigma * sigma
    return (width / np.sqrt(variance)) * np.exp(np.square(distance) * (-0.5 / variance))


def wave(phase: Array, period: Array, sigma: Array) -> Array:
    """A cosine: blur only weakens it, by exp(-2 (pi sigma / period)^2).

    >>> wave(np.array([0.0]), np.array(1.0), np.array([0.0, 0.5])).round(3)
    array([1.   , 0.007])
    """
    return np.exp(-2.0 * np.square(np.pi * sigma / period)) * np.cos(phase)


# --- drawing, (n, S, S) float32 --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Position of each pixel on the body of its image, (n, S, S) each."""

    u: Array  # along the apical axis, from the centre of the cell
    v: Array  # across
    t: Array  # u in half-lengths: poles at -1 and 1
    s: Array  # distance from the midline in half-widths: margins at -1 and 1
    distance: Array  # to the outline, positive inside; exact to first order


def pixel_grid(size: int) -> tuple[Array, Array]:
    """Centres of the pixels: x (1, 1, S) and y (1, S, 1) in [-1, 1].

    >>> pixel_grid(4)[0].ravel()
    array([-0.75, -0.25,  0.25,  0.75], dtype=float32)
    """
    centres = (np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0
    return centres[None, None, :], centres[None, :, None]


def locate(x: Array, y: Array, scene: Traits) -> tuple[Array, Array]:
    """Shift, turn and scale pixels into the frame of the organism."""
    cos, sin = np.cos(scene.angle) / scene.zoom, np.sin(scene.angle) / scene.zoom
    x, y = x - scene.x, y - scene.y
    return x * cos + y * sin, y * cos - x * sin


def outline(u: Array, v: Array, body: Traits) -> Place:
    """Coordinates and distance of every pixel for the outline ``F(t, s) = |t|^pole + |s|^flank = 1``.

    The distance is (1 - G) / |grad G| with G = F^(1/flank), which grows evenly from axis to margin: one formula for
    every family, view and number of cells.
    """
    u, v = u + body.warp * np.sin(body.ripple * v + body.phase), v + body.warp * np.cos(body.ripple * u - body.phase)
    last, spacing = body.cells - 1.0, 2.06 * body.width
    v = v - spacing * (np.clip(np.rint(v / spacing + last / 2), 0.0, last) - last / 2)  # from the nearest cell's axis

    t = u / body.length
    c = np.clip(t, -1.1, 1.1)  # profile and midline end a little beyond the poles
    profile = 1.0 + body.taper * c + body.waist * (2.0 * c * c - 1.0)
    slope = body.taper + 4.0 * body.waist * c
    bow, swing = body.bow * body.width, body.sigmoid * body.length
    midline = bow * (0.6 - c * c) + swing * c * (c * c - 0.5)
    midslope = -2.0 * bow * c + swing * (3.0 * c * c - 0.5)
    half_width = body.width * profile
    s = (v - midline) / half_width

    along, across = np.maximum(np.abs(t), 0.01), np.maximum(np.abs(s), 0.01)
    f_t, f_s = np.exp(body.pole * np.log(along)), np.exp(body.flank * np.log(across))
    f = f_t + f_s
    d_t = np.copysign(body.pole * f_t / (f * along), t)  # derivatives of log F
    d_s = np.copysign(body.flank * f_s / (f * across), s)
    d_u = (d_t - d_s * (midslope / half_width + s * slope / profile)) / body.length
    d_v = d_s / half_width
    g = np.exp(np.log(f) / body.flank)
    distance = body.flank * (1.0 / g - 1.0) / np.sqrt(d_u * d_u + d_v * d_v)
    # Never more than to the ends of the box around the body, where first order is not enough, or to the break.
    to_pole, to_flank = body.length - np.abs(u), half_width - np.abs(v - midline)
    to_break = body.cut * body.length - u - body.cut_slope * v
    return Place(u, v, t, s, np.minimum(np.minimum(distance, to_pole), np.minimum(to_flank, to_break)))


def striae(place: Place, body: Traits, marks: Traits, sigma: Array) -> Array:
    """Rows of pores: parallel, fanning out, slanted, or rays of a disc; clear along the axis and in the middle."""
    u, v, s = place.u, place.v, np.abs(place.s)
    phase = (2.0 * np.pi / marks.period) * (u * (1.0 - marks.radiate * s) + marks.slant * v)
    across, from_axis = v.copy(), s
    rays = marks.centric.ravel() > 0
    if rays.any():
        radius = np.hypot(u[rays], v[rays])
        count = np.rint(5.5 * body.length[rays] / marks.period[rays])
        phase[rays] = count * np.arctan2(v[rays], u[rays])
        across[rays], from_axis[rays] = radius, radius / body.length[rays]
    dots = wave((2.0 * np.pi / marks.period) * across, marks.period, sigma)
    rows = wave(phase, marks.period, sigma) * (1.0 - marks.puncta * (0.5 - 0.5 * dots))
    clear = edge((from_axis - marks.axial) * body.width, sigma) * edge(np.sqrt(u * u + v * v) - marks.central, sigma)
    return marks.striae * rows * clear


def raphe(place: Place, body: Traits, marks: Traits, sigma: Array) -> Array:
    """The slit along the valve with its gap at the central nodule, or a keel with its row of fibulae."""
    keel = marks.fibulae > 0
    period = np.where(keel, marks.fibulae, 1.0)
    u = np.abs(place.u)
    slit = line((place.s - marks.raphe_at) * body.width, np.where(keel, 0.022, 0.012), sigma)
    gap = edge(u - 0.045, sigma) * edge(0.88 * body.length - u, sigma)
    fibulae = 0.6 + 0.6 * wave((2.0 * np.pi / period) * u, period, sigma)
    return marks.raphe * slit * np.where(keel, fibulae, gap)


def bands(place: Place, body: Traits, marks: Traits, sigma: Array) -> Array:
    """Girdle bands: lines along the side of the box, and the seam where its halves overlap."""
    s = np.abs(place.s)
    return marks.bands * (
        line((s - marks.band_at) * body.width, 0.016, sigma) + 0.5 * line(s * body.width, 0.012, sigma)
    )


def frustule(place: Place, body: Traits, marks: Traits, focus: Array, sigma: Array) -> tuple[Array, Array]:
    """Darkness of the glass box and of the living content."""
    inside = edge(place.distance, sigma)
    wall = np.minimum(marks.rim, 0.2 * body.width)
    rim = 1.4 * line(place.distance - wall, wall, sigma)
    halo = 0.35 * line(place.distance + 2.2 * wall, 1.4 * wall, sigma)
    relief = striae(place, body, marks, sigma) + raphe(place, body, marks, sigma) + bands(place, body, marks, sigma)
    shading = marks.glass * (1.0 + marks.shade * np.clip(place.s, -1.0, 1.0))
    glass = inside * (shading + 0.5 * focus * relief) + focus * (rim - halo)
    middle = np.square((np.abs(place.t) - marks.plastid_at) / 0.3) + np.square(place.s / 0.75)
    return glass, marks.plastids * inside * np.exp(-np.minimum(middle, 30.0))


def spot(x: Array, y: Array, speck: Traits, sigma: Array) -> Array:
    """Darkness of a speck: the product of two lines at right angles, in one exponential."""
    cos, sin = np.cos(speck.angle), np.sin(speck.angle)
    length, width = np.square(speck.radius * speck.elongation), np.square(speck.radius)
    long, wide = length + sigma * sigma, width + sigma * sigma  # variances under blur
    x, y = x - speck.x, y - speck.y
    exponent = np.square(x * cos + y * sin) * (-0.5 / long) + np.square(y * cos - x * sin) * (-0.5 / wide)
    return speck.darkness * np.sqrt(length / long * width / wide) * np.exp(exponent)


def light(x: Array, y: Array, scene: Traits) -> Array:
    """Uneven illumination, a gradient and a darker margin, with a slight colour cast, (3, n, S, S)."""
    grey = scene.level * (1.0 + scene.gradient_x * x + scene.gradient_y * y - scene.vignette * (x * x + y * y))
    return grey * np.stack([1.0 + scene.warmth, 1.0 + scene.tint, 1.0 - scene.warmth])


# Absorption in red, green and blue: glass is grey, chloroplasts of diatoms are golden brown.
_PLASTID_COLOUR = np.array([0.5, 0.9, 1.9], np.float32)[:, None, None, None]


def draw(
    size: int, body: Traits, marks: Traits, scene: Traits, specks: list[Traits], rng: np.random.Generator
) -> Array:
    """Draw the images of the given traits, (n, S, S, 3) uint8: light transmitted through everything on the slide."""
    x, y = pixel_grid(size)
    sigma = np.sqrt(np.square(scene.blur) + (0.8 / size) ** 2)  # defocus, and 0.4 of a pixel for its area
    place = outline(*locate(x, y, scene), body)
    glass, plastids = frustule(place, body, marks, scene.focus, sigma / scene.zoom)
    dark = scene.contrast * glass
    for speck in specks:  # each in all images that show it
        shown = speck.darkness.ravel() > 0
        dark[shown] += spot(x, y, speck.select(shown), sigma[shown])
    # Colours are the leading axis until the end: NumPy is slow along an axis of 3.
    seen = light(x, y, scene) * np.exp(-dark - _PLASTID_COLOUR * plastids)  # (3, n, S, S)
    seen += scene.noise * rng.standard_normal(dark.shape, np.float32)
    return np.moveaxis((np.clip(seen, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8), 0, -1)
