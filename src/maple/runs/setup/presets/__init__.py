"""Presets: settings by name, one TOML file each, with sections like those of ``config.toml``."""

from __future__ import annotations

from pathlib import Path

from maple.errors import ConfigError, suggest
from maple.options import Values, read_toml

_FOLDER = Path(__file__).parent


def list_presets() -> list[str]:
    """The names that ``--preset`` takes.

    >>> list_presets()
    ['finetune', 'openood', 'paper', 'paper-code', 'paper-diatoms', 'paper-imagenet']
    """
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_preset(name: str) -> dict[str, Values]:
    """The sections of a preset; those of recipes other than the chosen one have no effect."""
    if name not in list_presets():
        raise ConfigError(f"unknown preset '{name}': {suggest(name, list_presets())}")
    return read_toml(_FOLDER / f"{name}.toml")
