"""Built-in sets: ``digits``, ``simulated-diatoms``, and any source corrupted (``corrupted:SOURCE?family=fog``)."""

from __future__ import annotations

from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlencode

import numpy as np

from maple.data.catalogue.table import BUILT_IN, CORRUPTED, is_corrupted
from maple.data.decode import Fit, Size
from maple.data.image_set import ImageSet
from maple.errors import UsageError, suggest


def open_built_in(source: str, size: Size, fit: Fit, memory_limit: int) -> ImageSet:
    """The images of a built-in set that is not a corrupted one."""
    name, _, query = source.partition("?")
    if name not in BUILT_IN:
        raise UsageError(f"unknown data set '{source}': {suggest(name, BUILT_IN)}")
    if name != "digits":
        return _open_simulated(source, name, query, size, fit, memory_limit)
    if query:
        raise UsageError(f"'{source}' cannot be opened: 'digits' takes no parameters")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    return ImageSet.from_arrays(images, digits.target, name=name, size=size, fit=fit)


def _open_simulated(source: str, name: str, query: str, size: Size, fit: Fit, memory_limit: int) -> ImageSet:
    from maple.data.simulate.diatoms import LARGEST, SMALLEST, simulated_diatoms

    limits = {"n": (1, 10_000_000), "size": (SMALLEST, LARGEST), "seed": (0, 2**32 - 1), "taxa": (1, 1_000)}
    given = _parse_query(source, query, limits)
    kind = cast(Literal["known", "near", "far"], name.partition("/")[2] or "known")
    side = given.get("size", size if isinstance(size, int) and SMALLEST <= size <= LARGEST else 32)
    n = given.get("n", 4000 if kind == "known" else 1000)
    if n * side * side * 3 > memory_limit:
        raise UsageError(
            f"'{source}' would take {n * side * side * 3 / 2**30:.1f} GiB: ask for fewer or smaller images"
        )
    taxa = {"n_taxa": given["taxa"]} if "taxa" in given else {}
    images, labels, names, _ = simulated_diatoms(n, size=side, seed=given.get("seed", 0), kind=kind, **taxa)
    return ImageSet.from_arrays(
        images, labels, names, name=name, size=side if size == "auto" else size, fit=fit, memory_limit=memory_limit
    )


def clean_source(source: str) -> str:
    """The source that a corrupted one is made of; any other source itself.

    >>> clean_source("corrupted:slides/test?family=fog"), clean_source("digits")
    ('slides/test', 'digits')
    """
    return parse_corrupted(source)[0] if is_corrupted(source) else source


def parse_corrupted(source: str) -> tuple[str, dict[str, Any]]:
    """The clean source, and how to corrupt it: the query behind the last ``?``, as the clean source may have its own.

    >>> parse_corrupted("corrupted:simulated-diatoms?n=9?family=fog&severity=3")
    ('simulated-diatoms?n=9', {'family': 'fog', 'severity': 3, 'seed': 0})
    """
    from maple.data.corrupt import check_family

    rest = source.removeprefix(CORRUPTED)
    clean, mark, query = rest.rpartition("?")
    clean = clean if mark else rest
    given = dict(parse_qsl(query if mark else "", keep_blank_values=True))
    for name in given.keys() - {"family", "severity", "seed"}:
        raise UsageError(f"unknown parameter '{name}' in '{source}': {suggest(name, ('family', 'severity', 'seed'))}")
    if not clean or is_corrupted(clean):
        raise UsageError(f"'{source}' names no clean images: write corrupted:SOURCE?family=fog&severity=3")
    family = given.pop("family", "all")
    if given.get("severity") == "all":
        del given["severity"]
    numbers = _parse_query(source, urlencode(given), {"severity": (1, 5), "seed": (0, 2**32 - 1)})
    family = family if family == "all" else check_family(family)
    return clean, {"family": family, "severity": "all", "seed": 0} | numbers


def _parse_query(source: str, query: str, limits: dict[str, tuple[int, int]]) -> dict[str, int]:
    """``n=5000&seed=3`` as numbers, each within its limits."""
    values = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in limits:
            raise UsageError(f"unknown parameter '{key}' in '{source}': {suggest(key, limits)}")
        low, high = limits[key]
        if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
            raise UsageError(f"'{key}={text}' in '{source}' cannot be used: give a number from {low} to {high:,}")
        values[key] = int(text)
    return values
