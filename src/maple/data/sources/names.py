"""Names of sources: built-in sets, corrupted ones, and files and folders under the data root with their splits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

from maple.data.catalogue.table import BUILT_IN, CORRUPTED, find_data_set, is_corrupted
from maple.data.decode import TABLE_SUFFIXES
from maple.data.sources.folders import list_visible
from maple.data.sources.remote import is_remote
from maple.errors import UsageError, suggest
from maple.files import expand_home, suggest_path

SPLIT_NAMES = {  # names that a file or folder of each split may have
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid"),
    "calibration": ("calibration", "cal"),
    "test": ("test", "testing"),
}
_ALL_SPLIT_NAMES = {name for names in SPLIT_NAMES.values() for name in names}


def list_data_sets(data_root: str | Path | None = None) -> tuple[str, ...]:
    """Names that :func:`~maple.data.sources.open.open_images` knows, those under the data root with their splits."""
    root = find_data_root(data_root)
    names = list(BUILT_IN)
    if root is not None and root.is_dir():
        for entry in list_visible(root):
            if entry.is_dir():
                names += [entry.name, *(f"{entry.name}/{split}" for split in split_files(entry))]
            elif entry.suffix in TABLE_SUFFIXES:
                names.append(entry.stem)
    return tuple(names)


def find_data_root(data_root: str | Path | None) -> Path | None:
    """Folder of named data sets: the given one, else that of the environment variable MAPLE_DATA, else none."""
    root = data_root or os.environ.get("MAPLE_DATA")
    return expand_home(root) if root else None


def find_source(source: str | Path, data_root: str | Path | None) -> Path:
    """The existing file or folder that ``source`` means: a path, or a name under the data root."""
    if is_remote(source):
        raise UsageError(f"'{source}' is an address: give a file or folder of this machine")
    path = expand_home(source)
    if path.exists():
        return path
    if (placed := find_placed(str(source))) is not None:
        return placed
    root = find_data_root(data_root)
    if root is not None and not path.is_absolute():
        for candidate in (root / path, *(root / f"{path}{suffix}" for suffix in TABLE_SUFFIXES)):
            if candidate.exists():
                return candidate
    known = find_data_set(str(source))
    hint = f"'maple data {known.name}' says how to get it" if known else suggest_path(path)
    hint = hint or suggest(str(source), list_data_sets(data_root))
    here = "looked among the built-in sets"
    if root is None:
        looked = f"{here} and in the current folder; there is no data root: set MAPLE_DATA or give --data-root"
    else:
        looked = f"{here}, in the current folder and in the data root '{root}'"
    raise UsageError(f"no data set, file or folder '{source}': {hint} ({looked})")


def find_placed(source: str) -> Path | None:
    """The existing file or folder of a data set of a plug-in, or of its split; None for other sources."""
    known = find_data_set(source)
    if known is None or not known.path:
        return None
    inside = source.partition("/")[2]
    path = Path(known.path) / inside
    candidates = (path, *(Path(f"{path}{suffix}") for suffix in TABLE_SUFFIXES))
    return next((each for each in candidates if each.exists()), None)


def locate_split(source: str | Path, data_root: str | Path | None, split: str | None) -> tuple[Path, str]:
    """The file or folder to open, down to the split where a data set folder is meant, and its name."""
    path = find_source(source, data_root)
    if path.is_dir() and not parquet_files(path) and split_files(path):
        path = _choose_split(str(source), path, split)
    return path, _name_of(path, data_root)


def _name_of(path: Path, data_root: str | Path | None) -> str:
    """``cifar10/test`` for a split of a data set and for paths under the data root, else the file or folder's name."""
    path = expand_home(path).resolve()
    bare = path.with_suffix("") if path.suffix.lower() in TABLE_SUFFIXES else path
    root = find_data_root(data_root)
    if root is not None and root.resolve() in bare.parents:
        return bare.relative_to(root.resolve()).as_posix()
    return f"{bare.parent.name}/{bare.name}" if bare.name in _ALL_SPLIT_NAMES else bare.name


# --- splits ----------------------------------------------------------------------------------------------------------


def parquet_files(folder: Path) -> list[Path]:
    """The files of a Parquet data set: a folder of several such files, none of them named like a split, and no others.

    Names that begin with ``_``, such as ``_SUCCESS`` and ``_manifest.json``, do not count.
    """
    if not folder.is_dir():
        return []
    entries = [path for path in list_visible(folder) if not path.name.startswith("_")]
    is_table = [path.suffix.lower() == ".parquet" and path.stem not in _ALL_SPLIT_NAMES for path in entries]
    return entries if len(entries) > 1 and all(is_table) else []


def split_files(folder: Path) -> dict[str, Path]:
    """The splits of a data set folder: Parquet or .npz files, or folders named train, test, ... and no others."""
    entries = list_visible(folder)
    folders = [path for path in entries if path.is_dir()]
    files = {path.stem: path for path in entries if path.suffix.lower() in TABLE_SUFFIXES and path.is_file()}
    if files and (not folders or _ALL_SPLIT_NAMES & files.keys()):
        return files
    are_splits = bool(folders) and all(path.name in _ALL_SPLIT_NAMES for path in folders)
    if are_splits and any(inner.is_dir() for path in folders for inner in list_visible(path)):
        return {path.name: path for path in folders}
    return {}


def find_split(splits: dict[str, Path], role: str) -> Path | None:
    """The file of one of the four splits, under any of its names."""
    return next((splits[name] for name in SPLIT_NAMES.get(role, (role,)) if name in splits), None)


def _choose_split(name: str, folder: Path, split: str | None) -> Path:
    """The file to open where only the data set is named: ``split``, else test, validation, train, or the only one."""
    splits = split_files(folder)
    if split is not None:
        found = splits.get(split) or find_split(splits, split)
        if found is None:
            raise UsageError(f"data set '{name}' has no split '{split}': {suggest(split, splits)}")
        return found
    for role in ("test", "validation", "train"):
        if (found := find_split(splits, role)) is not None:
            return found
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise UsageError(f"data set '{name}' has several splits: name one of {', '.join(f'{name}/{s}' for s in splits)}")


# --- parameters ------------------------------------------------------------------------------------------------------


class Corrupted(NamedTuple):
    """A source made of another one: ``corrupted:SOURCE?family=fog&severity=3``."""

    clean: str
    family: str = "all"
    severity: int | Literal["all"] = "all"
    seed: int = 0


def clean_source(source: str) -> str:
    """The source that a corrupted one is made of; any other source itself.

    >>> clean_source("corrupted:slides/test?family=fog"), clean_source("digits")
    ('slides/test', 'digits')
    """
    return parse_corrupted(source).clean if is_corrupted(source) else source


def parse_corrupted(source: str) -> Corrupted:
    """Parse a corrupted source: the query follows the last ``?``, as the clean source may have its own.

    >>> parse_corrupted("corrupted:simulated-diatoms?n=9?family=fog&severity=3")
    Corrupted(clean='simulated-diatoms?n=9', family='fog', severity=3, seed=0)
    """
    from maple.data.corrupt import check_family

    rest = source.removeprefix(CORRUPTED)
    clean, query = rest.rsplit("?", 1) if "?" in rest else (rest, "")
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name in given.keys() - {"family", "severity", "seed"}:
        raise UsageError(f"unknown parameter '{name}' in '{source}': {suggest(name, ('family', 'severity', 'seed'))}")
    if not clean or is_corrupted(clean):
        raise UsageError(f"'{source}' names no clean images: write corrupted:SOURCE?family=fog&severity=3")
    family = given.pop("family", "all")
    if given.get("severity") == "all":
        del given["severity"]
    numbers = parse_numbers(source, urlencode(given), {"severity": (1, 5), "seed": (0, 2**32 - 1)})
    return Corrupted(clean, family if family == "all" else check_family(family), **numbers)


def parse_numbers(source: str, query: str, limits: dict[str, tuple[int, int]]) -> dict[str, int]:
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
