"""Text helpers: numbers, counts and names, formatted the same in pages, plots, messages and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def percent(share: float, exact: bool = False, fixed: bool = False) -> str:
    """A measured share with one decimal; with ``exact``, a chosen share (an option) with all its digits.

    With ``fixed`` the decimal stays where it is zero, so that the numbers of a column line up.

    >>> [percent(share) for share in (0.5, 0.973, 0.0004, 0.9999, 1.0, float("nan"))]
    ['50 %', '97.3 %', '< 0.1 %', '> 99.9 %', '100 %', '–']
    >>> [percent(share, exact=True) for share in (0.05, 0.0004, 0.9999)]
    ['5 %', '0.04 %', '99.99 %']
    >>> [percent(share, fixed=True) for share in (0.0, 0.5, 1.0)]
    ['0 %', '50.0 %', '100 %']
    """
    if math.isnan(share):
        return "–"
    if exact:
        return f"{100 * share:.6g} %"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    text = f"{100 * share:.1f} %"
    return text if fixed and 0 < share < 1 else text.replace(".0 %", " %")


def number(value: float, digits: int = 3) -> str:
    """A number with fixed decimals, fewer if it is large; a dash for NaN.

    >>> [number(value) for value in (0.97345, 12.5, 1234.5, float("inf"), float("nan"))]
    ['0.973', '12.50', '1,234', '∞', '–']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits if abs(value) < 10 else max(digits - 1, 0)}f}"


def compact(value: Any) -> str:
    """The value of an option: floats with four significant digits, everything else unchanged.

    >>> compact(0.000123456), compact(12), compact("tied")
    ('0.0001235', '12', 'tied')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """A time in words, in the two largest units at most; seconds only below ten minutes.

    >>> [duration(seconds) for seconds in (0.2, 59.6, 95, 1234, 3600, 7384)]
    ['0 s', '1 min', '1 min 35 s', '21 min', '1 h', '2 h 3 min']
    """
    if (whole := round(seconds)) < 600:
        parts = {"min": whole // 60, "s": whole % 60}
    else:
        hours, minutes = divmod(round(seconds / 60), 60)
        parts = {"h": hours, "min": minutes}
    return " ".join(f"{n} {unit}" for unit, n in parts.items() if n) or "0 s"


def plural(n: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "class"), plural(2, "class"), plural(1200, "image")
    ('1 class', '2 classes', '1,200 images')
    """
    ending = "" if n == 1 else "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{ending}"


def join_names(names: Sequence[str]) -> str:
    """Names as a list in a sentence.

    >>> join_names(["a"]), join_names(["a", "b"]), join_names(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def shorten_list(names: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` names and the number of the others.

    >>> shorten_list(["a", "b", "c"]), shorten_list(["a", "b", "c", "d"])
    ('a, b, c', 'a, b, c and 1 more')
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def shorten(text: str, length: int) -> str:
    """Text of at most ``length`` characters.

    >>> shorten("Navicula", 5)
    'Navi…'
    """
    return text if len(text) <= length else text[: length - 1] + "…"


def shorten_middle(text: str, length: int) -> str:
    """Text of at most ``length`` characters without its middle: names often differ in their ends.

    >>> shorten_middle("copepod_calanoid_eggs", 13)
    'copepo…d_eggs'
    """
    tail = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def shorten_names(names: Sequence[str], length: int) -> list[str]:
    """Names without their middle, of at most ``length`` characters; names that would look the same stay whole.

    >>> shorten_names(["copepod_calanoid_eggs", "copepod_cyclopoid_eggs", "copepod_calanoid_large"], 13)
    ['copepod_calanoid_eggs', 'copepod_cyclopoid_eggs', 'copepo…_large']
    """
    short = [shorten_middle(name, length) for name in names]
    return [name if short.count(own) > 1 else own for name, own in zip(names, short)]


def printable(text: str, length: int) -> str:
    r"""Untrusted text for a message: unprintable characters replaced by ``?``, at most ``length`` characters.

    >>> printable("a\x00b" + "c" * 99, 10)
    'a?bcccccc…'
    """
    return "".join(c if c.isprintable() else "?" for c in shorten(text, length))
