"""HTML for the ``_repr_html_`` of objects: cards with tables, as shown by Jupyter.

Styles are inline and there are no scripts, so a card looks the same in Jupyter, in an exported page and in a mail.
Text takes the colour of the page around it; lines and bars are translucent, for light and dark themes. Names of classes
and files are untrusted: every value that is not `Markup` is escaped.

>>> rows = [["diatom", bar(0.93)], ["<script>", bar(0.5)]]
>>> page = card("Prediction", summary(images=2), table(["class", "probability"], rows))
>>> "&lt;script&gt;" in page, "<script>" in page
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from markupsafe import escape as escape_text

from maple.text import shorten

MAX_ROWS = 10
MAX_CHARACTERS = 60  # of a name

_LINE = "rgba(128,128,128,.35)"
_ACCENT = "rgba(47,143,198,.75)"
_ALARM = "rgba(213,94,0,.3)"
_CELL_STYLE = f"padding:3px 10px;border:0;border-bottom:1px solid {_LINE};white-space:nowrap;vertical-align:middle"
_TABLE_STYLE = "border-collapse:collapse;margin:0;font:inherit;color:inherit"

# Templates: Markup.format escapes every argument that is not Markup.
_CARD = Markup(
    '<div style="line-height:1.4;font-variant-numeric:tabular-nums">'
    '<div style="margin-bottom:6px"><b>{}</b>&ensp;{}</div>{}</div>'
)
_CELL = Markup(f'<{{0}} style="{_CELL_STYLE};text-align:{{1}}">{{2}}</{{0}}>')
_ROW = Markup("<tr>{}</tr>")
_TABLE = Markup(
    f'<div style="overflow-x:auto"><table style="{_TABLE_STYLE}"><thead>{{}}</thead><tbody>{{}}</tbody></table></div>'
)
_MORE = Markup('<div style="margin-top:4px">{}</div>')
_FACT = Markup(
    f'<tr><th style="{_CELL_STYLE};text-align:left;font-weight:normal;opacity:.7">{{}}</th>'
    f'<td style="{_CELL_STYLE};text-align:left;white-space:normal">{{}}</td></tr>'
)
_FACTS = Markup(f'<table style="{_TABLE_STYLE}"><tbody>{{}}</tbody></table>')
_BAR = Markup(
    f'{{}}&ensp;<span style="display:inline-block;width:80px;background:{_LINE};border-radius:4px;overflow:hidden">'
    f'<span style="display:block;height:8px;width:{{:.0f}}%;background:{_ACCENT}"></span></span>'
)
_FLAG = Markup(f'<span style="background:{_ALARM};border-radius:4px;padding:1px 6px">{{}}</span>')
_BOLD = Markup("<b>{}</b>")
_MUTED = Markup('<span style="opacity:.7">{}</span>')


def escape(value: Any) -> Markup:
    """Any value as HTML: integers with thousands separators, floats with three decimals, invalid Unicode replaced.

    >>> escape(12345), escape(0.123456), escape(float("nan")), escape("a<b")
    (Markup('12,345'), Markup('0.123'), Markup('–'), Markup('a&lt;b'))
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Markup(f"{value:,}")
    if isinstance(value, float):
        return Markup("–" if math.isnan(value) else f"{value:,.3f}" if abs(value) < 1e6 else f"{value:.3g}")
    return escape_text(str(value).encode("utf-8", "replace").decode("utf-8"))


def card(title: str, about: str, *parts: Markup) -> str:
    """A title, a line about the object, and tables."""
    return str(_CARD.format(escape(title), muted(about), Markup("").join(parts)))


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, more: int = 0) -> Markup:
    """Rows of cells: text on the left, numbers and bars on the right; ``more`` is the number of rows not shown."""
    sides = [_side(value) for value in rows[0]] if rows else ["left"] * len(headings)
    head = _row([_cell(heading, side, "th") for heading, side in zip(headings, sides)])
    body = Markup("").join(_row([_cell(value, _side(value)) for value in row]) for row in rows)
    rest = _MORE.format(muted(f"… and {more:,} more")) if more else Markup("")
    return _TABLE.format(head, body) + rest


def facts(values: Mapping[str, Any]) -> Markup:
    """Names and values, one pair per line."""
    return _FACTS.format(Markup("").join(_FACT.format(escape(name), escape(value)) for name, value in values.items()))


def bar(share: float) -> Markup:
    """A number between 0 and 1, and a bar of that length."""
    length = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    return _BAR.format(escape(float(share)), 100 * length)


def flag(text: str) -> Markup:
    """Highlighted text."""
    return _FLAG.format(escape(text))


def bold(value: Any) -> Markup:
    return _BOLD.format(escape(value))


def muted(value: Any) -> Markup:
    return _MUTED.format(escape(value))


def summary(**numbers: int) -> str:
    """Counts by name in one line.

    >>> summary(images=12345, classes=3)
    'images 12,345 · classes 3'
    """
    return " · ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items())


def _row(cells: Sequence[Markup]) -> Markup:
    return _ROW.format(Markup("").join(cells))


def _cell(value: Any, side: str, tag: str = "td") -> Markup:
    content = escape(value) if _side(value) == "right" else escape(shorten(value, MAX_CHARACTERS))
    return _CELL.format(tag, side, content)


def _side(value: Any) -> str:
    return "left" if isinstance(value, str) and not isinstance(value, Markup) else "right"
