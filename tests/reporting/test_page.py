"""Pages: values are escaped, forbidden characters are replaced, and a missing value is an error."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from jinja2 import UndefinedError

from maple.reporting.page import render_page

EMPTY = {
    "title": "a title",
    "subtitle": "",
    "sections": [],
    "pictures": [],
    "crisp": False,
    "has_ends": False,
    "has_parts": False,
    "part_meanings": {},
    "n_components": 1,
    "component_note": "",
}


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a & b", "{{ 7 * 7 }}", "nul\x00 \x1b \ufffe \ud800"])
def test_names_are_text(name: str) -> None:
    page = ElementTree.fromstring(render_page("explain.html.j2", EMPTY | {"title": name}).split("\n", 1)[1])
    shown = page.findtext("head/title")
    assert shown is not None and shown.replace("\ufffd", "?") == "".join(
        c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in name
    )
    assert not list(page.iter("script"))


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render_page("explain.html.j2", {name: value for name, value in EMPTY.items() if name != "subtitle"})
