"""Drawings read back: what every plot must be, and the text on it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from maple.reporting.plots import Plot


def check_plot(plot: Plot) -> ElementTree.Element:
    """One well-formed element that belongs on any page: described, without fixed colours or outside addresses."""
    drawing = ElementTree.fromstring(plot.svg)
    assert drawing.tag == "svg"
    assert drawing.attrib.keys() == {"viewBox", "role", "aria-label"}
    assert drawing.attrib["aria-label"] == plot.alt
    tags = re.sub(r' aria-label="[^"]*"', "", " ".join(re.findall(r"<[^>]*>", plot.svg)))
    assert not re.findall(r"#[0-9a-f]{6}\b", tags)  # all colours are the page's
    assert "http" not in tags and "<metadata" not in tags
    ids = set(re.findall(r' id="([^"]*)"', tags))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]*)', tags))
    assert used == ids  # each is there, none is left over
    return drawing


def words(drawing: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in drawing.iter("text")]
