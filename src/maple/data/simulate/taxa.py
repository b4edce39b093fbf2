"""Taxa and other objects of the simulation: outlines, marks and views, from ``taxa.json``.

    known   up to 12 taxa, the classes
    near    8 other taxa, each resembling a known one but for striae, proportions, raphe or a related outline
    far     bubbles, clumps, fibres, mineral grains, empty background

Lengths are in half-sides of the image: it spans [-1, 1] in x and y.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VIEWS = ("valve", "opposite", "girdle", "colony", "tilted", "young", "broken")
VALVE, OPPOSITE, GIRDLE, COLONY, TILTED, YOUNG, BROKEN = range(len(VIEWS))

Range = Sequence[float]  # lowest and highest


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


# Mostly in valve view: from the side they cannot be told from their known relatives.
_NEAR_VIEWS = {"valve": 0.7, "girdle": 0.14, "tilted": 0.08, "young": 0.08}


def _load() -> tuple[dict[str, Family], dict[str, tuple[Taxon, ...]]]:
    """Families of outlines by name, and taxa by kind; a near taxon gives its differences from a known one."""
    tables = json.loads(Path(__file__).with_name("taxa.json").read_text(encoding="utf-8"))
    families = {name: Family(**traits) for name, traits in tables.pop("families").items()}
    for traits in tables["near"].values():
        traits |= tables["known"][traits.pop("like")] | traits | {"views": _NEAR_VIEWS}
    return families, {kind: tuple(Taxon(name, **traits) for name, traits in t.items()) for kind, t in tables.items()}


FAMILIES, KINDS = _load()
KNOWN = KINDS["known"]
