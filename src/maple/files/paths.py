"""Paths from a user: the home folder, and the existing path that a misspelt one is most like."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from maple.errors import RunError, UsageError


def expand_home(path: str | Path) -> Path:
    """The path with ``~`` replaced; other names that begin so stay, for which ``Path.expanduser`` raises an error.

    >>> expand_home("~$table.png").name
    '~$table.png'
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def inert(path: str) -> str:
    """The path, so that a spreadsheet takes it for no formula and a command for no option.

    >>> inert("=HYPERLINK(1).png"), inert("-x.png"), inert("a=b.png")
    ('./=HYPERLINK(1).png', './-x.png', 'a=b.png')
    """
    return f"./{path}" if path.startswith(("=", "+", "-", "@", "\t", "\r")) else path


def check_links(folder: Path) -> None:
    """Refuse links that lead out of a folder, before it is copied or published: they would add any file to it.

    In the cache of huggingface_hub a run consists of links to files beside it.
    """
    own = folder.resolve()
    homes = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
                raise RunError(f"'{path}' is a link that leads out of the run: remove it, or replace it by the file")


def check_weights_file(path: Path) -> None:
    """Raise :class:`UsageError` if there is no such file; nothing is loaded."""
    if not path.is_file():
        raise UsageError(f"weights file '{path}' does not exist: {suggest_path(path) or 'check the path'}")


def nearest_path(path: Path) -> Path | None:
    """The existing path that is spelt most like one that does not exist; None if nothing beside it is.

    Only the first missing part is corrected: ``slide/train`` becomes ``slides/train``, if there is such a folder.

    >>> folder = getfixture("tmp_path")
    >>> (folder / "slides" / "train").mkdir(parents=True)
    >>> nearest_path(folder / "slide" / "train").relative_to(folder).as_posix()
    'slides/train'
    """
    missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
    if missing is None:
        return None
    try:
        names = [entry.name for entry in missing.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return None
    nearest = difflib.get_close_matches(missing.name, sorted(names), n=1, cutoff=0.6)
    found = [missing.parent / name / path.relative_to(missing) for name in nearest]
    return next((each for each in found if each.exists()), None)


def suggest_path(path: Path) -> str:
    """A hint for a path that does not exist: the one next to it, or nothing."""
    nearest = nearest_path(path)
    return "" if nearest is None else f"did you mean '{nearest}'?"


def skipped_path(path: Path) -> Path:
    """The list of images that have no row in the predictions ``path``: beside a file, in a folder."""
    return path.with_suffix(".skipped.csv") if path.suffix else path / "_skipped.csv"
