"""Templates to pages: values are escaped, and characters that no document may contain are replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from maple import __version__
from maple.reporting.pictures import data_uri, is_crisp
from maple.text import join_names, number, percent, plural, shorten, shorten_list

# File names may hold anything; these characters are forbidden in HTML and XML, however escaped.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_BAR_WIDTH = 120  # pixels of a share of 1


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """A template of the package, filled in; a value missing from ``context`` is an error."""
    text = _environment().get_template(template).render({"version": __version__, **context})
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("maple.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bar_width": lambda share: round(_BAR_WIDTH * share),
        "basename": lambda file: PurePath(file).name,
        "data_uri": data_uri,
        "join_names": join_names,
        "number": number,
        "percent": percent,
        "plural": plural,
        "shorten": shorten,
        "shorten_list": shorten_list,
    }
    environment.tests["crisp"] = is_crisp
    return environment
