"""Colours of plots: placeholders that the style sheet of the page defines, light and dark."""

from __future__ import annotations

import re
from importlib.resources import files

from maple.reporting.plots._style import BLUE, CLASS_COLOURS, LIGHT, PAGE_COLOURS, STYLE, Line


def test_every_placeholder_stands_for_one_variable_of_the_style_sheet() -> None:
    sheet = (files("maple.reporting") / "templates" / "style.css").read_text(encoding="utf-8")
    light, _, dark = sheet.partition("@media")
    names = [re.fullmatch(r"var\(--(\w+)\)", variable)[1] for variable in PAGE_COLOURS.values()]
    assert len(set(PAGE_COLOURS)) == len(set(names)) == 9 + len(CLASS_COLOURS)
    for name in names:
        assert name in LIGHT and f"--{name}: {LIGHT[name]}" in light
        assert re.search(rf"--{name}: #\w{{6}}", dark), name


def test_matplotlib_draws_only_with_placeholders() -> None:
    colours = [value for value in STYLE.values() if isinstance(value, str) and value.startswith("#")]
    assert colours and set(colours) <= set(PAGE_COLOURS)


def test_a_line_has_a_colour_and_dashes() -> None:
    assert Line("MAPLE", BLUE, "--").style() == {"color": BLUE, "linestyle": "--"}
