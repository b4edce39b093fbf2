"""Numbers and names as people read them: the same on pages, on plots and in a terminal."""

from __future__ import annotations

import math


def percent(share: float, exact: bool = False) -> str:
    """A share that was measured, with one decimal where it matters; ``exact``, one that was chosen, as it is.

    >>> [percent(share) for share in (0.5, 0.973, 0.0004, 0.9999, 1.0, float("nan"))]
    ['50 %', '97.3 %', '< 0.1 %', '> 99.9 %', '100 %', '–']
    >>> [percent(share, exact=True) for share in (0.05, 0.0004, 0.9999)]
    ['5 %', '0.04 %', '99.99 %']
    """
    if math.isnan(share):
        return "–"
    if exact:
        return f"{100 * share:.6g} %"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def number(value: float, digits: int = 3) -> str:
    """A number of fixed digits, shorter where it is large, a dash where it is missing.

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


def shorten(text: str, length: int) -> str:
    """Text of at most ``length`` characters.

    >>> shorten("Navicula", 5)
    'Navi…'
    """
    return text if len(text) <= length else text[: length - 1] + "…"
