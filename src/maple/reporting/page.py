"""From a template to a page: names are escaped, and characters that may stand in no document are replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

# File names may hold anything; these characters may stand in no HTML or XML document, however escaped.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """A template of the package, filled in."""
    environment = Environment(
        loader=PackageLoader("maple.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", environment.get_template(template).render(context))
