"""What the sources of networks share: preprocessing, imports of extras, unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from maple.data.decode import Fit
from maple.errors import UsageError, naming_extras
from maple.networks._torchvision import import_torchvision


class Preprocessing(NamedTuple):
    """Preprocessing of images, from the configuration of a network or asked for; ``None`` where it is not given."""

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: int | None = None  # side of the square, in pixels
    fit: Fit | None = None  # how images are made square


def import_extra(package: str) -> ModuleType:
    """Import a package that belongs to an extra; the error names the extra."""
    if package in ("timm", "transformers") and find_spec("torchvision") is not None:
        import_torchvision()
    with naming_extras():
        return import_module(package)


def check_name(name: str, known: Sequence[str], package: str) -> None:
    """Raise ``UsageError`` with the nearest name if ``package`` has no network ``name``."""
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{package}/{nearest[0]}'?" if nearest else f"{package} lists its own by list_models()"
        raise UsageError(f"unknown network '{package}/{name}': {hint}")
