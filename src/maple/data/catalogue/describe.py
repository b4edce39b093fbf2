"""Describe a data set: what it is, where it is looked for, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maple.data.catalogue.get import LOCK, original_path
from maple.data.catalogue.records import DataSet, Original
from maple.data.catalogue.table import is_built_in
from maple.data.sources.names import find_data_root, find_source
from maple.errors import UsageError


def locate(source: str, data_root: str | Path | None = None) -> Path | None:
    """File or folder of a source, or ``None`` where it is missing or empty."""
    try:
        path = None if is_built_in(source) else find_source(source, data_root)
    except UsageError:
        return None
    if path is not None and path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()):
        return None
    return path


def describe_data_set(data_set: DataSet, data_root: str | Path | None = None) -> dict[str, Any]:
    """Describe a data set: title, licence, where it was looked for, how to get it."""
    root = find_data_root(data_root)
    return {
        "title": data_set.title,
        "paper": data_set.paper,
        "licence": data_set.licence,
        "original": _original_size(data_set),
        "looked in": _looked_in(data_set, root),
        "how to get": _how_to_get(data_set, root),
    }


def _original_size(data_set: DataSet) -> str:
    """Numbers of images and classes: ``train 50,000, test 10,000; 10 classes``."""
    shown = [f"{split.name} {split.images:,}" for split in data_set.splits[:3]]
    more = [f"{len(data_set.splits) - 3} more"] if len(data_set.splits) > 3 else []
    return "; ".join(filter(None, [", ".join(shown + more), f"{data_set.classes:,} classes"]))


def _looked_in(data_set: DataSet, root: Path | None) -> list[str]:
    if is_built_in(data_set.name):
        return ["built in"]
    under = (
        "no data root: set MAPLE_DATA or give --data-root" if root is None else str((root / data_set.name).absolute())
    )
    return [str(Path(data_set.name).absolute()), under]


def _how_to_get(data_set: DataSet, root: Path | None) -> list[str]:
    """Instructions, one per line."""
    note = [data_set.note] if data_set.note else []
    if not data_set.originals:
        return note or ["nothing to get"]
    command = f"maple data {data_set.name} --get" + ("" if root is not None else " --data-root FOLDER")
    first = (
        f"{command} fetches and converts"
        if all(original.url for original in data_set.originals)
        else f"by hand from {data_set.page} to the places below; then {command} converts"
    )
    files = [
        f"{original.url or original.name} ({_facts(original)}) to "
        f"{original_path(data_set, original, root or Path('FOLDER'))}"
        for original in data_set.originals
    ]
    return [first, *files, *note]


def _facts(original: Original) -> str:
    size, md5 = original.expected.bytes, original.expected.md5
    shown = [] if size is None else [f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"]
    return ", ".join([*shown, f"md5 {md5}" if md5 else f"no published checksum: the first one is kept in {LOCK}"])
