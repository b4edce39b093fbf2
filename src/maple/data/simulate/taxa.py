"""Taxa and other objects of the simulation: outlines, marks and views, as tables.

    known   up to 12 taxa, the classes
    near    8 other taxa, each resembling a known one but for striae, proportions, raphe or a related outline
    far     bubbles, clumps, fibres, mineral grains, empty background

Lengths are in half-sides of the image: it spans [-1, 1] in x and y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

VIEWS = ("valve", "opposite", "girdle", "colony", "tilted", "young", "broken")
VALVE, OPPOSITE, GIRDLE, COLONY, TILTED, YOUNG, BROKEN = range(len(VIEWS))

Range = tuple[float, float]


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
    """Appearance of an organism, or of another object on the slide. Pairs are ranges over individuals."""

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

# Mostly in valve view: from the side they cannot be told from their known relatives.
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
