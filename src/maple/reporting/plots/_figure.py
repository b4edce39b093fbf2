"""Matplotlib figures: axes, ticks and legends that plots share, and the figure as inline or standalone SVG."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from maple.reporting.plots._style import LIGHT, PAGE_COLOURS, STYLE
from maple.text import percent


@dataclass(frozen=True)
class Plot:
    """A drawing and its text alternative."""

    svg: Markup
    alt: str


Arguments = ParamSpec("Arguments")


def as_plot(draw: Callable[Arguments, tuple[Figure, str]]) -> Callable[Arguments, Plot]:
    """Turn a function that returns a figure and its description into one that returns a :class:`Plot`."""

    @wraps(draw)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Plot:
        with rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser chooses the font
            figure, alt = draw(*args, **kwargs)
            buffer = io.StringIO()
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # savefig draws twice
        return Plot(inline_svg(buffer.getvalue(), alt), alt)

    return wrapper


def inline_svg(text: str, alt: str) -> Markup:
    """Turn a Matplotlib SVG file into an element of a page: unique ids, CSS variables for colours, an aria-label."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    prefix = hashlib.sha256((alt + text).encode("utf-8", "replace")).hexdigest()[:8]
    used = set(re.findall(r"(?<=[(\"])#([^)\"]+)", text))  # in url(#..) and href="#.."

    def rename(match: re.Match[str]) -> str:
        if match[1].startswith("label"):
            return ' class="label"'
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    def restyle(match: re.Match[str]) -> str:
        """Rewrite one tag; text between tags (names of classes) is left alone."""
        tag = re.sub(r"font-family: [^;\"]*;? ?", "", match[0])
        tag = re.sub(r' id="([^"]*)"', rename, tag)
        tag = re.sub(r"(?<=url\(#)|(?<=href=\"#)", f"{prefix}-", tag)
        return re.sub(r"#[0-9a-f]{6}", lambda colour: PAGE_COLOURS.get(colour[0], colour[0]), tag)

    text = re.sub(r"<[^>]*>", restyle, text)
    view = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {view[0] if view else ""} role="img" aria-label="{Markup.escape(alt)}">'
    text = re.sub(r"<svg [^>]*>", lambda _: opening, text, count=1)
    return Markup(re.sub(r">\s+<", "><", text).strip())


def standalone_svg(plot: Plot) -> str:
    """The drawing as an SVG file: light colours on white, with XML namespaces."""

    def restyle(match: re.Match[str]) -> str:
        tag = match[0].replace(" href=", " xlink:href=")
        return re.sub(r"var\(--(\w+)\)", lambda name: LIGHT[name[1]], tag)

    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening, drawing = re.sub(r"<[^>]*>", restyle, str(plot.svg)).split(">", 1)
    opening = opening.replace("<svg", f'<svg {namespaces} font-family="sans-serif"')
    return f'{opening}><rect width="100%" height="100%" fill="{LIGHT["card"]}"/>{drawing}\n'


def make_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one plot; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def percent_tick(share: float, _: float) -> str:
    return percent(share, exact=True)


def percent_axes(*axes: Axes) -> None:
    for each in axes:
        each.xaxis.set_major_formatter(percent_tick)
        each.yaxis.set_major_formatter(percent_tick)


def legend_above(axes: Axes, n_columns: int = 3) -> None:
    """A legend between title and axes, so that no line crosses it."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=n_columns, columnspacing=1.2, handlelength=1.6)
