"""How objects look in a notebook: small pieces of HTML for their ``_repr_html_``.

Styles are inline and scripts there are none, so that a piece is the same in Jupyter, in an exported page and in a mail.
Colours are those of the page around it: text inherits, lines and bars are translucent, in light and in dark. Names of
classes and files come from outside; whatever is not `Markup` is escaped.

>>> rows = [["diatom", bar(0.93)], ["<script>", bar(0.5)]]
>>> page = card("Prediction", summary(images=2), table(["class", "probability"], rows))
>>> "&lt;script&gt;" in page, "<script>" in page
(True, False)
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maple.text import shorten

MAX_ROWS = 10
MAX_CHARACTERS = 60  # of a name

_LINE = "rgba(128,128,128,.35)"
_ACCENT = "rgba(47,143,198,.75)"
_ALARM = "rgba(213,94,0,.3)"
_CELL = f"padding:3px 10px;border:0;border-bottom:1px solid {_LINE};white-space:nowrap;vertical-align:middle"
_TABLE = "border-collapse:collapse;margin:0;font:inherit;color:inherit"
_NUMBERS = "font-variant-numeric:tabular-nums"


class Markup(str):
    """Text that is HTML already."""


def escape(value: Any) -> Markup:
    """Any value as HTML: numbers with thousands and few digits, and what is no Unicode replaced.

    >>> escape(12345), escape(0.123456), escape(float("nan")), escape("a<b")
    ('12,345', '0.123', '–', 'a&lt;b')
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Markup(f"{value:,}")
    if isinstance(value, float):
        return Markup("–" if math.isnan(value) else f"{value:,.3f}" if abs(value) < 1e6 else f"{value:.3g}")
    return Markup(html.escape(str(value).encode("utf-8", "replace").decode("utf-8")))


def card(title: str, about: str, *parts: Markup) -> str:
    """A piece: a title, a line about it, and tables."""
    head = f'<div style="margin-bottom:6px"><b>{escape(title)}</b>&ensp;{muted(about)}</div>'
    return f'<div style="line-height:1.4;{_NUMBERS}">{head}{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, more: int = 0) -> Markup:
    """Rows of cells; text is on the left, numbers and bars on the right; ``more`` rows are told of and not shown."""
    sides = [_side(value) for value in rows[0]] if rows else ["left"] * len(headings)
    head = "".join(_cell(heading, side, "th") for heading, side in zip(headings, sides))
    body = "".join(f"<tr>{''.join(_cell(value, _side(value)) for value in row)}</tr>" for row in rows)
    rest = f'<div style="margin-top:4px">{muted(f"… and {more:,} more")}</div>' if more else ""
    return Markup(
        f'<div style="overflow-x:auto"><table style="{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{rest}"
    )


def facts(values: Mapping[str, Any]) -> Markup:
    """Names and values, one under the other."""
    rows = "".join(
        f'<tr><th style="{_CELL};text-align:left;font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{_CELL};text-align:left;white-space:normal">{escape(value)}</td></tr>'
        for name, value in values.items()
    )
    return Markup(f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>')


def _cell(value: Any, side: str, tag: str = "td") -> str:
    content = escape(value) if _side(value) == "right" else escape(shorten(value, MAX_CHARACTERS))
    return f'<{tag} style="{_CELL};text-align:{side}">{content}</{tag}>'


def _side(value: Any) -> str:
    return "left" if isinstance(value, str) and not isinstance(value, Markup) else "right"


def bar(share: float) -> Markup:
    """A number between 0 and 1, and a bar of that length."""
    length = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    inner = f'<span style="display:block;height:8px;width:{100 * length:.0f}%;background:{_ACCENT}"></span>'
    return Markup(
        f'{escape(float(share))}&ensp;<span style="display:inline-block;width:80px;background:{_LINE};'
        f'border-radius:4px;overflow:hidden">{inner}</span>'
    )


def flag(text: str) -> Markup:
    """A word that should be seen."""
    return Markup(f'<span style="background:{_ALARM};border-radius:4px;padding:1px 6px">{escape(text)}</span>')


def bold(value: Any) -> Markup:
    return Markup(f"<b>{escape(value)}</b>")


def muted(value: Any) -> Markup:
    return Markup(f'<span style="opacity:.7">{escape(value)}</span>')


def summary(**numbers: int) -> str:
    """Numbers by name in a line.

    >>> summary(images=12345, classes=3)
    'images 12,345 · classes 3'
    """
    return " · ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items())
