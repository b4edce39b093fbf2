"""Colours, fonts and lines shared by all plots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

# Placeholders: Matplotlib writes these colours, and the page's CSS variables replace them.
_NAMES = ("ink", "muted", "line", "card", "rest", "blue", "orange", "green", "pink")
_COLOURS = tuple(f"#0{i}0{i}0{i}" for i in range(1, 10))
INK, MUTED, GRID, CARD, REST, BLUE, ORANGE, GREEN, PINK = _COLOURS
CLASS_COLOURS = tuple(f"#0{i}1{i}2{i}" for i in range(10))
PAGE_COLOURS = {
    **{colour: f"var(--{name})" for colour, name in zip(_COLOURS, _NAMES)},
    **{colour: f"var(--c{i})" for i, colour in enumerate(CLASS_COLOURS)},
}
_CSS = (files("maple.reporting") / "templates" / "style.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6})", _CSS.partition("@media")[0]))  # for standalone drawings
DOTTED = (0, (2, 3))
DASHED = (0, (5, 3))
LEGEND_ROW = 0.2  # inches, of a legend above the axes
MAX_VERTICES = 600  # of a line
STYLE: Any = {  # Matplotlib parameters
    "svg.fonttype": "none",  # text stays text: searchable, accessible, in the page's font
    "svg.hashsalt": "maple",
    "text.parse_math": False,  # a class may be called $x$
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # by which texts are measured: it comes with Matplotlib, others are searched
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@dataclass(frozen=True)
class Line:
    """How a method is drawn; methods differ in colour and in dashes, for colour-blind readers."""

    label: str
    colour: str
    dashes: str

    def style(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes}
