"""Templates to pages (values escaped, forbidden characters replaced), and pictures to data URIs inside them."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image, features

from maple import __version__
from maple.text import duration, join_names, number, percent, plural, shorten_list, shorten_middle

_PIECES = re.compile(r"[^\s_\-/.+]{1,18}[\s_\-/.+]*|[\s_\-/.+]+")  # of names, each on one line
LONG = 20  # letters; longer words of a sentence are names that may be broken
CRISP = 16  # images of so few pixels a side are shown as pixels, not blurred
# File names may hold anything; these characters are forbidden in HTML and XML, however escaped.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


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
        "basename": lambda file: PurePath(file).name,
        "breakable": breakable,
        "data_uri": data_uri,
        "duration": duration,
        "join_names": join_names,
        "number": number,
        "percent": _percent,
        "plural": plural,
        "prose": prose,
        "shorten_list": shorten_list,
        "shorten_middle": shorten_middle,
    }
    environment.tests["crisp"] = is_crisp
    return environment


def breakable(name: str) -> Markup:
    """A name that breaks after ``_``, ``-``, ``/``, ``.`` and ``+``, and elsewhere only within very long words.

    >>> breakable("copepod_calanoid")
    Markup('copepod_<wbr/>calanoid')
    """
    return Markup("<wbr/>").join(_PIECES.findall(name))


def prose(sentence: str) -> Markup:
    """A sentence in which a share stays on one line, and names break as :func:`breakable` says.

    >>> prose("53.3 % are copepod_calanoid_antennae")
    Markup('53.3\\xa0% are copepod_<wbr/>calanoid_<wbr/>antennae')
    """
    words = sentence.replace(" %", "\N{NO-BREAK SPACE}%").split(" ")
    return Markup(" ").join(breakable(word) if len(word) > LONG else word for word in words)


def _percent(share: float, exact: bool = False) -> str:
    """A share that stays on one line, with one decimal in all rows of a table."""
    return percent(share, exact, fixed=True).replace(" ", "\N{NO-BREAK SPACE}")


def data_uri(image: np.ndarray, lossless: bool = False) -> str:
    """A picture (H, W, 3 or 4) as a data URI: PNG if it is small or must be ``lossless``, WebP otherwise."""
    as_png = lossless or is_crisp(image) or not features.check("webp")
    buffer = io.BytesIO()
    if as_png:
        Image.fromarray(image).save(buffer, "PNG", optimize=True)
    else:
        Image.fromarray(image).save(buffer, "WEBP", quality=88, use_sharp_yuv=True)
    kind = "png" if as_png else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def is_crisp(image: np.ndarray) -> bool:
    """Whether a thumbnail (S, S, 3) is so small that its pixels are shown as squares."""
    return image.shape[0] <= CRISP


def any_crisp(sheets: Iterable[np.ndarray]) -> bool:
    """Whether the thumbnails (n, S, S, 3) of any sheet are shown as pixels."""
    return any(len(sheet) > 0 and is_crisp(sheet[0]) for sheet in sheets)
