"""``simulated-diatoms``: diatom-like microorganisms as bright-field light microscopy shows them, drawn by formula.

A diatom lives in a box of glass. Seen on its lid (*valve view*) it shows outline, striae and raphe; seen from the side
(*girdle view*) it is a rectangle with bands, whatever the taxon. Classes are therefore multi-modal, and some are hard
to tell apart in one of their views: what relabelling is made for. Three kinds of images:

    known   up to 12 taxa, the classes
    near    8 other taxa, each resembling a known one but for striae, proportions, raphe or a related outline
    far     bubbles, clumps, fibres, mineral grains, empty background

Every mark is a function of a distance (edge, line) or of a phase (wave), so that defocus needs no convolution: an edge
gets softer, a line wider and fainter, a wave weaker. Drawing costs a constant per pixel, at any size and any blur.

Lengths are in half-sides of the image: it spans [-1, 1] in x and y. Letters for shapes: n images of S x S pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from maple.errors import UsageError, suggest

VIEWS = ("valve", "opposite", "girdle", "colony", "tilted", "young", "broken")
VALVE, OPPOSITE, GIRDLE, COLONY, TILTED, YOUNG, BROKEN = range(len(VIEWS))

SMALLEST, LARGEST = 8, 512  # sides in pixels
_BLOCK = 256  # images whose traits come from one random stream: the unit of prefix stability
_PIXELS_AT_ONCE = 2**15  # drawn together: temporaries of 128 KiB stay in the cache
_SPECKS = 5  # debris specks per image, most of them invisible

Range = tuple[float, float]
Array = np.ndarray
Group = TypeVar("Group", "Body", "Marks", "Scene", "Speck")


class SimulatedImages(NamedTuple):
    """Images with what is known about them; ``views`` indexes ``VIEWS``."""

    images: Array  # (n, S, S, 3) uint8
    labels: Array  # (n,) int64, indexes ``names``
    names: tuple[str, ...]
    views: Array  # (n,) int64


# ---------------------------------------------------------------------------------------------------------- taxa


@dataclass(frozen=True)
class Family:
    """An outline: half-width ``(1 - |t|^pole)^(1/flank)`` times a profile, around a midline; t runs from pole to pole.

    ``pole`` = ``flank`` = 2 is an ellipse, ``flank`` = 1 has pointed poles, a large ``pole`` parallel sides.
    """

    pole: float = 2.0
    flank: float = 2.0
    taper: float = 0.0  # one pole broader than the other
    waist: float = 0.0  # > 0: constricted in the middle; < 0: drawn-out poles
    bow: float = 0.0  # midline bent to one side, in half-widths
    sigmoid: float = 0.0  # midline bent like an S, in half-lengths


FAMILIES: Mapping[str, Family] = {
    "elliptic": Family(),
    "ovate": Family(pole=2.3, flank=1.9, taper=0.28),
    "lanceolate": Family(pole=2.0, flank=1.1),
    "rostrate": Family(pole=5.0, flank=2.0, waist=-0.45),
    "linear": Family(pole=7.0, flank=2.0),
    "spindle": Family(pole=3.5, flank=1.2),
    "lunate": Family(pole=2.2, flank=1.5, bow=0.75),
    "banana": Family(pole=5.0, flank=2.0, bow=1.2),
    "clavate": Family(pole=2.6, flank=1.4, taper=0.42),
    "sigmoid": Family(pole=2.6, flank=1.3, sigmoid=0.42),
    "panduriform": Family(pole=3.0, flank=2.0, waist=0.28),
    "rectangle": Family(pole=9.0, flank=9.0),
    "rhombic": Family(pole=1.05, flank=1.05, taper=0.25),
}


@dataclass(frozen=True)
class Taxon:
    """What an organism, or another object on the slide, looks like. Pairs are ranges over individuals."""

    name: str
    family: str
    length: Range  # half-length
    aspect: Range  # width / length in valve view
    depth: Range = (0.3, 0.4)  # width / length in girdle view
    period: float = 0.15  # of the striae: a trait of the taxon, whatever the length of the cell
    striae: float = 0.5  # their strength
    radiate: float = 0.0  # fan-like towards the poles
    slant: float = 0.0  # tangent of their angle with the transapical axis
    puncta: float = 0.0  # 0: lines, 1: rows of dots
    axial: float = 0.1  # striae begin at this distance from the midline (centric: centre), in half-widths
    central: float = 0.0  # radius of the clear area in the middle
    centric: bool = False  # striae are rays
    raphe: float = 0.0  # strength of the central slit
    raphe_at: float = 0.0  # its place in half-widths: 0 midline, 1 margin
    fibulae: float = 0.0  # period of the dots that a keel shows instead; 0: none
    bend: float = 0.0  # bow of the girdle view
    views: Mapping[str, float] = field(default_factory=lambda: {"valve": 1.0})
    rim: float = 0.018  # thickness of the wall
    glass: float = 0.14  # darkness of the body
    plastids: float = 0.5  # share of living cells, with golden-brown content
    warp: float = 0.012  # irregularity: amplitude and wave number
    ripple: float = 6.0
    debris: float = 0.25  # share of specks that are visible


def _views(valve: float, girdle: float, **others: float) -> dict[str, float]:
    return {"valve": valve, "girdle": girdle, **others}


# fmt: off
KNOWN: tuple[Taxon, ...] = (
    Taxon("Navicula", "lanceolate", (0.62, 0.86), (0.26, 0.32), (0.21, 0.29), period=0.15, radiate=0.35, axial=0.12,
          central=0.07, raphe=0.7, views=_views(0.56, 0.28, tilted=0.08, young=0.08)),
    Taxon("Gomphonema", "clavate", (0.54, 0.8), (0.27, 0.34), (0.24, 0.32), period=0.17, radiate=0.2, axial=0.15,
          central=0.05, raphe=0.6, views=_views(0.5, 0.28, colony=0.12, young=0.1)),
    Taxon("Cymbella", "lunate", (0.58, 0.84), (0.25, 0.32), (0.25, 0.33), period=0.15, radiate=0.25, axial=0.12,
          raphe=0.7, raphe_at=-0.2, puncta=0.4, views=_views(0.56, 0.28, tilted=0.1, broken=0.06)),
    Taxon("Cyclotella", "elliptic", (0.38, 0.6), (0.96, 1.0), (0.42, 0.6), period=0.13, striae=0.7, axial=0.55,
          centric=True, views=_views(0.64, 0.28, tilted=0.08)),
    Taxon("Nitzschia", "spindle", (0.68, 0.95), (0.1, 0.14), (0.08, 0.12), period=0.07, striae=0.3, axial=0.0,
          raphe=0.9, raphe_at=0.75, fibulae=0.13, views=_views(0.58, 0.3, broken=0.12)),
    Taxon("Fragilaria", "linear", (0.62, 0.92), (0.13, 0.17), (0.1, 0.14), period=0.14, striae=0.7, axial=0.3,
          central=0.08, views=_views(0.36, 0.3, colony=0.34)),
    Taxon("Gyrosigma", "sigmoid", (0.68, 0.95), (0.17, 0.22), (0.17, 0.22), period=0.09, puncta=0.6, axial=0.08,
          central=0.04, raphe=0.8, views=_views(0.66, 0.18, tilted=0.16)),
    Taxon("Cocconeis", "elliptic", (0.42, 0.66), (0.56, 0.68), (0.2, 0.28), period=0.1, puncta=0.7, axial=0.06,
          raphe=0.8, bend=1.0, views=_views(0.42, 0.18, opposite=0.32, young=0.08)),
    Taxon("Pinnularia", "linear", (0.62, 0.9), (0.2, 0.26), (0.26, 0.34), period=0.2, striae=0.8, radiate=0.3,
          axial=0.3, central=0.12, raphe=0.8, views=_views(0.56, 0.3, young=0.14)),
    Taxon("Achnanthidium", "rostrate", (0.34, 0.52), (0.22, 0.3), (0.2, 0.28), period=0.08, striae=0.3, radiate=0.2,
          central=0.05, raphe=0.6, bend=0.9, views=_views(0.34, 0.32, opposite=0.22, colony=0.12)),
    Taxon("Epithemia", "banana", (0.5, 0.8), (0.24, 0.3), (0.34, 0.44), period=0.26, striae=0.8, axial=0.0,
          radiate=0.2, raphe=0.5, raphe_at=-0.7, views=_views(0.6, 0.28, broken=0.12)),
    Taxon("Surirella", "ovate", (0.5, 0.78), (0.42, 0.54), (0.34, 0.46), period=0.24, striae=0.8, radiate=0.5,
          axial=0.45, raphe=0.3, raphe_at=0.9, views=_views(0.62, 0.22, tilted=0.16)),
)

# Mostly seen on the valve: from the side nobody could tell them from their known relatives.
_NEAR_VIEWS = _views(0.7, 0.14, tilted=0.08, young=0.08)
NEAR: tuple[Taxon, ...] = tuple(replace(taxon, views=_NEAR_VIEWS) for taxon in (
    replace(KNOWN[0], name="Sellaphora", family="elliptic", period=0.2, radiate=0.0, axial=0.25, central=0.14),
    replace(KNOWN[1], name="Rhoicosphenia", period=0.24, striae=0.9, radiate=0.0, central=0.0, bend=0.8),
    replace(KNOWN[2], name="Encyonema", aspect=(0.36, 0.44), period=0.2, radiate=-0.2, raphe_at=-0.55),
    replace(KNOWN[3], name="Auliscus", aspect=(0.74, 0.84), period=0.2, striae=1.0, puncta=1.0, axial=0.0,
            centric=False),
    replace(KNOWN[4], name="Hantzschia", family="banana", aspect=(0.13, 0.17), fibulae=0.2, raphe_at=-0.75),
    replace(KNOWN[5], name="Tabellaria", family="rostrate", aspect=(0.15, 0.2), period=0.22, striae=0.9),
    replace(KNOWN[6], name="Pleurosigma", aspect=(0.25, 0.3), period=0.14, striae=0.8, slant=0.6),
    replace(KNOWN[7], name="Diploneis", family="panduriform", period=0.2, striae=0.9, axial=0.28),
))

_OBJECT = Taxon("object", "elliptic", (0.3, 0.6), (0.9, 1.0), striae=0.0, plastids=0.0)
FAR: tuple[Taxon, ...] = (
    replace(_OBJECT, name="bubble", length=(0.15, 0.85), rim=0.075, glass=-0.2, warp=0.0),
    replace(_OBJECT, name="clump", aspect=(0.5, 0.9), period=0.2, striae=0.5, puncta=1.0, plastids=0.6, axial=0.0,
            glass=0.5, warp=0.1, ripple=13.0, debris=0.9),
    replace(_OBJECT, name="fibre", family="linear", length=(1.2, 1.8), aspect=(0.02, 0.05), glass=0.3,
            warp=0.14, ripple=4.0),
    replace(_OBJECT, name="grain", family="rhombic", aspect=(0.5, 0.95), rim=0.03, glass=0.05,
            views={"valve": 0.5, "broken": 0.5}),
    replace(_OBJECT, name="empty", rim=0.0, glass=0.0, debris=0.7),
)
# fmt: on

KINDS: Mapping[str, tuple[Taxon, ...]] = {"known": KNOWN, "near": NEAR, "far": FAR}


# ------------------------------------------------------------------------------ traits: one value per image, (n, 1, 1)


class Body(NamedTuple):
    """The outline of each image's organism."""

    length: Array  # half-length
    width: Array  # half-width
    pole: Array
    flank: Array
    taper: Array
    waist: Array
    bow: Array
    sigmoid: Array
    warp: Array
    ripple: Array
    phase: Array  # of the irregularity
    cells: Array  # side by side
    cut: Array  # where a broken valve ends, from the centre
    cut_slope: Array


class Marks(NamedTuple):
    """What is seen on the body."""

    rim: Array
    glass: Array
    shade: Array  # one flank darker than the other
    period: Array
    striae: Array
    radiate: Array
    slant: Array
    puncta: Array
    axial: Array
    central: Array
    centric: Array  # 0 or 1
    raphe: Array
    raphe_at: Array
    fibulae: Array
    bands: Array
    band_at: Array
    plastids: Array
    plastid_at: Array


class Scene(NamedTuple):
    """Where the organism lies, how it is lit and how it is seen."""

    x: Array
    y: Array
    angle: Array
    zoom: Array
    contrast: Array
    focus: Array  # negative: beyond the focal plane, where dark lines turn bright
    blur: Array  # standard deviation of the defocus
    level: Array
    gradient_x: Array
    gradient_y: Array
    vignette: Array
    warmth: Array  # from blue (negative) to red light
    tint: Array  # from magenta (negative) to green light
    noise: Array


class Speck(NamedTuple):
    """A bit of debris in each image."""

    x: Array
    y: Array
    angle: Array
    radius: Array
    elongation: Array
    darkness: Array


class Sampler:
    """Random traits of n images whose taxa are given."""

    def __init__(self, taxa: tuple[Taxon, ...], labels: Array, rng: np.random.Generator) -> None:
        self.taxa, self.labels, self.rng = taxa, labels, rng

    def between(self, low: float | Array, high: float | Array) -> Array:
        """Uniform between two bounds, (n, 1, 1) float32."""
        return low + (high - low) * self.rng.random((len(self.labels), 1, 1), np.float32)

    def chance(self, probability: float | Array) -> Array:
        """True with the given probability, (n, 1, 1)."""
        return self.between(0.0, 1.0) < probability

    def trait(self, name: str) -> Array:
        """The trait of each image's taxon, or its family's, (n, 1, 1) float32; ranges become individual values."""
        owners = self.taxa if hasattr(self.taxa[0], name) else [FAMILIES[taxon.family] for taxon in self.taxa]
        table = np.array([getattr(owner, name) for owner in owners], np.float32)[self.labels]
        bounds = table.reshape(len(table), -1)[:, :, None, None]  # (n, 1 or 2, 1, 1)
        return bounds[:, 0] if table.ndim == 1 else self.between(bounds[:, 0], bounds[:, 1])

    def view(self) -> Array:
        """A view for each image in the shares of its taxon, (n,) int64."""
        shares = np.array([[taxon.views.get(view, 0.0) for view in VIEWS] for taxon in self.taxa])
        upper = np.cumsum(shares, axis=1)[self.labels] / shares.sum(axis=1)[self.labels, None]  # (n, V)
        return (self.rng.random((len(self.labels), 1)) >= upper[:, :-1]).sum(axis=1, dtype=np.int64)


def sample_body(sampler: Sampler, view: Array) -> Body:
    """The outline of each individual, as its view shows it. ``view``: (n, 1, 1)."""
    between, trait = sampler.between, sampler.trait
    side, young, tilted = (view == GIRDLE) | (view == COLONY), view == YOUNG, view == TILTED
    # A division makes a cell shorter, not narrower: small cells are stout.
    length = trait("length") * np.where(young, between(0.5, 0.65), 1.0)
    aspect = trait("aspect") * np.where(tilted, between(0.55, 0.75), 1.0)
    aspect = np.where(young, np.minimum(aspect * between(1.4, 1.8), 1.0), aspect)
    corner = between(6.0, 10.0)
    return Body(
        length=length,
        width=length * np.where(side, trait("depth"), aspect),
        pole=np.where(side, corner, trait("pole") * between(0.9, 1.1)),
        flank=np.where(side, corner, trait("flank") * between(0.95, 1.05)),
        taper=trait("taper") * between(0.7, 1.2),
        waist=np.where(side, 0.0, trait("waist") * between(0.8, 1.2)),
        bow=np.where(side, trait("bend"), trait("bow")) * between(0.75, 1.25),
        sigmoid=np.where(side, 0.0, trait("sigmoid") * between(0.7, 1.2)),
        warp=trait("warp") * between(0.3, 1.3),
        ripple=trait("ripple") * between(0.8, 1.2),
        phase=between(0.0, 2 * np.pi),
        cells=np.where(view == COLONY, np.floor(between(2.0, 4.6)), 1.0),
        cut=np.where(view == BROKEN, between(-0.15, 0.25), 9.0),
        cut_slope=between(-0.8, 0.8),
    )


def sample_marks(sampler: Sampler, view: Array) -> Marks:
    """What each individual shows in its view. ``view``: (n, 1, 1)."""
    between, trait = sampler.between, sampler.trait
    side, tilted, opposite = (view == GIRDLE) | (view == COLONY), view == TILTED, view == OPPOSITE
    return Marks(
        rim=trait("rim") * between(0.8, 1.25),
        glass=trait("glass") * between(0.6, 1.4),
        shade=np.where(tilted, between(0.6, 1.0), between(-0.2, 0.2)),
        period=trait("period") * between(0.92, 1.08),
        striae=trait("striae") * between(0.7, 1.2) * np.where(side, 0.6, 1.0),
        radiate=np.where(side, 0.0, trait("radiate")),
        slant=np.where(side, 0.0, trait("slant")),
        puncta=trait("puncta"),
        axial=np.where(side, 0.72, trait("axial") + np.where(opposite, 0.18, 0.0)),
        central=np.where(side, 0.0, trait("central")),
        centric=np.where(side, 0.0, trait("centric")),
        raphe=np.where(side | opposite, 0.0, trait("raphe")),
        raphe_at=trait("raphe_at") + np.where(tilted, 0.35, 0.0),
        fibulae=trait("fibulae"),
        bands=np.where(side, between(0.4, 1.0), np.where(tilted, 0.4, 0.0)),
        band_at=between(0.3, 0.6),
        plastids=np.where(sampler.chance(trait("plastids")), between(0.1, 0.45), 0.0),
        plastid_at=np.where(sampler.chance(0.5), between(0.3, 0.5), 0.0),
    )


def sample_scene(sampler: Sampler) -> Scene:
    """Position, light and optics: the same for all taxa, so that they say nothing about the class."""
    between, chance = sampler.between, sampler.chance
    inverted, defocused = chance(0.1), chance(0.08)
    return Scene(
        x=between(-0.1, 0.1),
        y=between(-0.1, 0.1),
        angle=between(0.0, 2 * np.pi),
        zoom=between(0.88, 1.12),
        contrast=np.exp(between(np.log(0.6), np.log(1.3))),
        focus=np.where(inverted, -between(0.4, 0.8), between(0.7, 1.1)),
        blur=np.where(defocused, between(0.04, 0.08), between(0.008, 0.035)),
        level=between(0.55, 0.85),
        gradient_x=between(-0.1, 0.1),
        gradient_y=between(-0.1, 0.1),
        vignette=between(0.0, 0.12),
        warmth=between(-0.04, 0.05),
        tint=between(-0.02, 0.02),
        noise=between(0.005, 0.02),
    )


def sample_speck(sampler: Sampler) -> Speck:
    """A speck or an elongated fragment anywhere; how often it is seen depends on the kind of object."""
    between, chance = sampler.between, sampler.chance
    return Speck(
        x=between(-1.0, 1.0),
        y=between(-1.0, 1.0),
        angle=between(0.0, np.pi),
        radius=between(0.015, 0.06),
        elongation=np.where(chance(0.2), between(2.0, 6.0), between(1.0, 1.5)),
        darkness=np.where(chance(sampler.trait("debris")), between(0.2, 0.8), 0.0),
    )


# ------------------------------------------------------------- marks under blur: what a Gaussian of width sigma leaves


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


# ------------------------------------------------------------------------------------------ drawing, (n, S, S) float32


class Place(NamedTuple):
    """Where each pixel lies on the body of its image, (n, S, S) each."""

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


def locate(x: Array, y: Array, scene: Scene) -> tuple[Array, Array]:
    """Pixels in the frame of the organism: shifted, turned, scaled."""
    cos, sin = np.cos(scene.angle) / scene.zoom, np.sin(scene.angle) / scene.zoom
    x, y = x - scene.x, y - scene.y
    return x * cos + y * sin, y * cos - x * sin


def outline(u: Array, v: Array, body: Body) -> Place:
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


def striae(place: Place, body: Body, marks: Marks, sigma: Array) -> Array:
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


def raphe(place: Place, body: Body, marks: Marks, sigma: Array) -> Array:
    """The slit along the valve with its gap at the central nodule, or a keel with its row of fibulae."""
    keel = marks.fibulae > 0
    period = np.where(keel, marks.fibulae, 1.0)
    u = np.abs(place.u)
    slit = line((place.s - marks.raphe_at) * body.width, np.where(keel, 0.022, 0.012), sigma)
    gap = edge(u - 0.045, sigma) * edge(0.88 * body.length - u, sigma)
    fibulae = 0.6 + 0.6 * wave((2.0 * np.pi / period) * u, period, sigma)
    return marks.raphe * slit * np.where(keel, fibulae, gap)


def bands(place: Place, body: Body, marks: Marks, sigma: Array) -> Array:
    """Girdle bands: lines along the side of the box, and the seam where its halves overlap."""
    s = np.abs(place.s)
    return marks.bands * (
        line((s - marks.band_at) * body.width, 0.016, sigma) + 0.5 * line(s * body.width, 0.012, sigma)
    )


def frustule(place: Place, body: Body, marks: Marks, focus: Array, sigma: Array) -> tuple[Array, Array]:
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


def spot(x: Array, y: Array, speck: Speck, sigma: Array) -> Array:
    """Darkness of a speck: the product of two lines at right angles, in one exponential."""
    cos, sin = np.cos(speck.angle), np.sin(speck.angle)
    length, width = np.square(speck.radius * speck.elongation), np.square(speck.radius)
    long, wide = length + sigma * sigma, width + sigma * sigma  # variances under blur
    x, y = x - speck.x, y - speck.y
    exponent = np.square(x * cos + y * sin) * (-0.5 / long) + np.square(y * cos - x * sin) * (-0.5 / wide)
    return speck.darkness * np.sqrt(length / long * width / wide) * np.exp(exponent)


def light(x: Array, y: Array, scene: Scene) -> Array:
    """Uneven illumination, a gradient and a darker margin, with a slight colour cast, (3, n, S, S)."""
    grey = scene.level * (1.0 + scene.gradient_x * x + scene.gradient_y * y - scene.vignette * (x * x + y * y))
    return grey * np.stack([1.0 + scene.warmth, 1.0 + scene.tint, 1.0 - scene.warmth])


# Absorption in red, green and blue: glass is grey, chloroplasts of diatoms are golden brown.
_PLASTID_COLOUR = np.array([0.5, 0.9, 1.9], np.float32)[:, None, None, None]


def draw(size: int, body: Body, marks: Marks, scene: Scene, specks: list[Speck], rng: np.random.Generator) -> Array:
    """The images of the given traits, (n, S, S, 3) uint8: transmitted light through everything on the slide."""
    x, y = pixel_grid(size)
    sigma = np.sqrt(np.square(scene.blur) + (0.8 / size) ** 2)  # defocus, and 0.4 of a pixel for its area
    place = outline(*locate(x, y, scene), body)
    glass, plastids = frustule(place, body, marks, scene.focus, sigma / scene.zoom)
    dark = scene.contrast * glass
    for speck in specks:  # each in all images that show it
        shown = speck.darkness.ravel() > 0
        dark[shown] += spot(x, y, _rows(speck, shown), sigma[shown])
    # Colours are the leading axis until the end: NumPy is slow along an axis of 3.
    seen = light(x, y, scene) * np.exp(-dark - _PLASTID_COLOUR * plastids)  # (3, n, S, S)
    seen += scene.noise * rng.standard_normal(dark.shape, np.float32)
    return np.moveaxis((np.clip(seen, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8), 0, -1)


# ----------------------------------------------------------------------------------------------------- the data set


def simulated_diatoms(
    n: int, *, size: int = 32, seed: int = 0, kind: Literal["known", "near", "far"] = "known", n_taxa: int = 8
) -> SimulatedImages:
    """n images of simulated diatoms (``known``, ``near``) or of other things on the slide (``far``).

    Labels take turns, so that classes are balanced within one image. The same seed gives the same images, and fewer
    images are the first of more. ``size`` changes the resolution, not the organisms. ``n_taxa`` is the number of known
    taxa; ``near`` and ``far`` always show all of theirs.

    >>> images, labels, names, views = simulated_diatoms(16, seed=1)
    >>> images.shape, images.dtype, names[:3]
    ((16, 32, 32, 3), dtype('uint8'), ('Navicula', 'Gomphonema', 'Cymbella'))
    >>> labels
    array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7])
    >>> simulated_diatoms(5, kind="far").names
    ('bubble', 'clump', 'fibre', 'grain', 'empty')
    """
    if kind not in KINDS:
        raise UsageError(f"there are no simulated diatoms of kind {kind!r}: {suggest(str(kind), KINDS)}")
    n = _integer("n", n, 1)
    size = _integer("size", size, SMALLEST, LARGEST)
    seed = _integer("seed", seed, 0)
    n_taxa = _integer("n_taxa", n_taxa, 2, len(KNOWN))
    taxa = KNOWN[:n_taxa] if kind == "known" else KINDS[kind]

    images = np.empty((n, size, size, 3), np.uint8)
    views = np.empty(n, np.int64)
    labels = np.arange(n, dtype=np.int64) % len(taxa)
    for start in range(0, n, _BLOCK):
        block = slice(start, min(start + _BLOCK, n))
        _fill_block(images[block], views[block], taxa, start, (list(KINDS).index(kind), start // _BLOCK, seed))
    return SimulatedImages(images, labels, tuple(taxon.name for taxon in taxa), views)


def _fill_block(images: Array, views: Array, taxa: tuple[Taxon, ...], start: int, stream: tuple[int, ...]) -> None:
    """Draw the images from number ``start`` on, at most a block, into ``images`` and ``views``.

    Traits are always sampled for a whole block, and pixels drawn in groups that depend on the size alone: what comes
    after an image never changes it.
    """
    rng = np.random.default_rng(stream)
    sampler = Sampler(taxa, np.arange(start, start + _BLOCK) % len(taxa), rng)
    view = sampler.view()
    views[:] = view[: len(views)]
    view = view[:, None, None]
    body, marks, scene = sample_body(sampler, view), sample_marks(sampler, view), sample_scene(sampler)
    specks = [sample_speck(sampler) for _ in range(_SPECKS)]
    size = images.shape[1]
    group = min(_BLOCK, max(1, _PIXELS_AT_ONCE // size**2))
    for first in range(0, len(images), group):
        rows = slice(first, first + group)
        some_specks = [_rows(speck, rows) for speck in specks]
        drawn = draw(size, _rows(body, rows), _rows(marks, rows), _rows(scene, rows), some_specks, rng)
        images[rows] = drawn[: len(images) - first]


def _rows(traits: Group, rows: slice | Array) -> Group:
    """The traits of some of the images."""
    return type(traits)(*(np.asarray(trait[rows], np.float32) for trait in traits))


def _integer(name: str, value: int, low: int, high: int | None = None) -> int:
    """``value`` as an int within bounds, or an error that names the argument."""
    try:
        number = index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{name} must be {bounds}, not {number}")
    return number
