"""Image files: those of a folder, of one subfolder per class, of a glob, or named one by one.

Their order does not depend on how a machine lists a directory.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from maple.data.catalogue.table import is_built_in
from maple.data.decode import IMAGE_SUFFIXES, TABLE_SUFFIXES
from maple.data.stream import Item, Source
from maple.errors import DataError, UsageError
from maple.files import suggest_path
from maple.types import Skipped

LOOSE = "not inside a class subfolder"  # why a labelled image is skipped
_KINDS = "/".join(IMAGE_SUFFIXES[:8])


@dataclass(eq=False)
class Files(Source):
    """Image files, of which only the paths are held."""

    paths: Paths
    name: str
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for i in range(len(self)):
            path = self.paths.encoded(i)
            found.update(path + stamp_file(path))
        return found.hexdigest()

    def item(self, i: int) -> Item:
        return self.paths[i]

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        for i in range(start, len(self)):
            # A name that is not UTF-8 cannot be written to a file.
            yield self.paths.encoded(i).decode("utf-8", "backslashreplace"), self.paths[i]


class Paths:
    """Paths in one block of bytes: as strings they take twice as much memory, as ``Path`` ten times.

    >>> paths = Paths(["a/1.png", "b/2.png"])
    >>> len(paths), paths[1]
    (2, 'b/2.png')
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._block, self._ends = bytearray(), array("q", [0])
        for path in paths:
            self._block += os.fsencode(path)
            self._ends.append(len(self._block))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self.encoded(i))

    def encoded(self, i: int) -> bytes:
        """The path as the file system has it."""
        return bytes(self._block[self._ends[i] : self._ends[i + 1]])


def stamp_file(path: bytes) -> bytes:
    """Size and time of change of a file, after a mark that no path contains; only marks where there is no file."""
    try:
        found = os.stat(path)  # noqa: PTH116 (no object per file)
    except OSError:
        return b"\0\0"
    return b"\0%d %d\0" % (found.st_size, found.st_mtime_ns)


# --- labelled --------------------------------------------------------------------------------------------------------


def list_class_folders(folder: Path, name: str) -> Files:
    """Images of a folder with one subfolder per class; classes in the order of their names."""
    entries = list_visible(folder)
    classes = [path for path in entries if path.is_dir()]
    loose = [path for path in entries if _is_image(path)]
    if loose and not classes:
        raise DataError(f"'{folder}' holds images but no class subfolders: put each class in its own subfolder")
    members = {path.name: list(_walk_images(path)) for path in classes}
    if not any(members.values()):
        raise DataError(f"no images in '{folder}': give one subfolder per class with {_KINDS} files")
    for class_name, group in members.items():
        if not group:
            raise DataError(f"class '{class_name}' of '{folder}' has no images: add images or remove the subfolder")
    paths = Paths(chain.from_iterable(members.values()))
    labels = np.repeat(np.arange(len(members)), [len(group) for group in members.values()])
    return Files(paths, name, labels, tuple(members), tuple(Skipped(str(path), LOOSE) for path in loose))


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot list the folder '{folder}': {error.strerror or error}; check the path") from None


def list_visible(folder: Path) -> list[Path]:
    """Entries of a folder that are not hidden, sorted."""
    with _listing(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


def _walk_images(folder: Path) -> Iterator[str]:
    """All images in a folder and below, sorted; links to folders are not followed, because they can form a ring.

    Only the names in one folder are held at a time, as strings.
    """
    files, folders = [], set()
    with _listing(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.add(entry.name)
            elif entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file():
                files.append(entry.name)
    above = "" if folder == Path() else os.path.join(folder, "")  # noqa: PTH118 (no object per file)
    for name in sorted([*files, *folders]):
        if name in folders:
            yield from _walk_images(folder / name)
        else:
            yield above + name


# --- without labels --------------------------------------------------------------------------------------------------


def list_files(sources: Sequence[str | Path], name: str) -> Files:
    """Images of files, folders and globs, without labels."""
    files = Files(Paths(chain.from_iterable(map(_expand, sources))), name)
    if not len(files):
        raise UsageError("no images were given: name at least one file or folder")
    return files


def is_glob(source: str | Path) -> bool:
    """Whether a source is a pattern, and not a path that exists."""
    return any(character in str(source) for character in "*?[") and not Path(source).exists()


def _expand(source: str | Path) -> Iterator[str]:
    """The image files of one path, folder or glob."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _some(_walk_images(path), f"no images in '{source}': expected {_KINDS} files there or below")
    elif not is_built_in(source) and is_glob(path):
        yield from _some(_match(path), f"no images match '{source}': check the pattern")
    elif is_built_in(source) or (path.is_file() and path.suffix.lower() in TABLE_SUFFIXES):
        raise UsageError(f"'{source}' cannot be opened together with other sources: give it alone")
    elif not path.is_file():
        hint = suggest_path(path) or "check the path; the name of a data set is given alone"
        raise UsageError(f"no file or folder '{source}': {hint}")
    else:
        yield str(path)


def _match(pattern: Path) -> Iterator[str]:
    """The images that match a glob, sorted, without hidden ones and those in hidden folders."""
    top = Path(pattern.anchor)
    try:
        found = [
            str(path)
            for path in top.glob(str(pattern.relative_to(top)))
            if _is_image(path) and not any(part.startswith(".") for part in path.parts[1:])
        ]
    except ValueError as error:
        raise UsageError(f"'{pattern}' is not a pattern for files ({error}): check the pattern") from None
    yield from sorted(found, key=lambda path: path.replace(os.sep, "\0"))  # folder by folder, as paths are sorted


def _some(files: Iterator[str], message: str) -> Iterator[str]:
    """The files; a ``DataError`` with this message where there is none."""
    first = next(files, None)
    if first is None:
        raise DataError(message)
    yield first
    yield from files
