"""Image files: those of a folder, of one subfolder per class, of a glob, or named one by one.

Their order does not depend on how a machine lists a directory.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from maple.data._decoder import Item
from maple.data.catalogue.table import is_built_in
from maple.data.decode import IMAGE_SUFFIXES, TABLE_SUFFIXES
from maple.data.image_set import Labels
from maple.data.stream import Source
from maple.errors import DataError, UsageError
from maple.files import expand_home, inert, suggest_path
from maple.types import Skipped

LOOSE = "not inside a class subfolder"  # why a labelled image is skipped
_KINDS = "/".join(IMAGE_SUFFIXES[:8])
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # as good as hidden
_SPLITS = ("train", "training")
_OTHER_IMAGES = (  # images of formats that are not read
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".eps", ".psd", ".ico", ".tga", ".exr", ".dcm", ".fits"),
    *(".czi", ".lif", ".nd2", ".oib", ".vsi", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
)


@dataclass(eq=False)
class Files(Source):
    """Image files, of which only the paths are held."""

    paths: Paths
    name: str
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(
        cls, paths: Iterable[str], name: str, labels: Labels | None = None, skipped: Iterable[Skipped] = ()
    ) -> Files:
        """Files whose names no spreadsheet takes for a formula; ``skipped`` may grow while ``paths`` are read."""
        own = Paths(map(inert, paths))
        others = sorted((replace(each, file=inert(each.file)) for each in skipped), key=lambda each: each.file)
        class_ids, class_names = labels or (None, ())
        return cls(own, name, class_ids, class_names, tuple(others))

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

    def is_gone(self, i: int) -> bool:
        return not os.path.exists(self.paths.encoded(i))  # noqa: PTH110 (no object per file)

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        for i in range(start, len(self)):
            # A name that is not UTF-8 cannot be written to a file.
            yield self.paths.encoded(i).decode("utf-8", "backslashreplace"), self.paths[i]

    def only(self, rows: Sequence[int]) -> tuple[Files, Sequence[int]]:
        """What reads these files in another process, which may have another working folder, and their positions."""
        return Files(Paths(str(Path(self.paths[i]).absolute()) for i in rows), self.name), range(len(rows))


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
    others = [
        Skipped(str(path), LOOSE if path in loose else why_no_image(path.name))
        for path in entries
        if path.is_file() and not _is_of_system(path)
    ]
    members = {path.name: list(_walk_images(path, others)) for path in classes}
    others.sort(key=lambda each: each.file)
    if not any(members.values()):
        found = f"no images in '{folder}'{_name_first(others)}"
        raise DataError(f"{found}: give one subfolder per class with {_KINDS} files")
    for path in classes:
        if not members[path.name]:
            inside = _name_first([each for each in others if path in Path(each.file).parents])
            found = f"class '{path.name}' of '{folder}' has no images{inside}"
            raise DataError(f"{found}: add images or remove the subfolder")
    _refuse_splits(members, folder)
    labels = np.repeat(np.arange(len(members)), [len(group) for group in members.values()])
    return Files.of(chain.from_iterable(members.values()), name, (labels, tuple(members)), others)


def _refuse_splits(members: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Refuse a folder whose subfolder ``train`` holds folders and no image beside them: those are the classes."""
    for name, paths in members.items():
        inside = {Path(path).relative_to(folder / name).parts[0] for path in paths} if name.lower() in _SPLITS else ()
        if len(inside) > 1 and all((folder / name / each).is_dir() for each in inside):
            raise DataError(
                f"'{folder / name}' holds a folder per class, so '{name}' is no class itself: give '{folder / name}' "
                "(and the folders beside it with --validation, --calibration, --test or --ood)"
            )


def _name_first(others: Sequence[Skipped]) -> str:
    return f" ('{others[0].file}': {others[0].reason})" if others else ""


def why_no_image(name: str) -> str:
    """Why a file in a folder of images is not read, by its name.

    >>> why_no_image("IMG_0042.HEIC"), why_no_image("notes.txt"), why_no_image("a.png")
    ('.heic is not read: save it as JPEG, PNG or TIFF', 'not an image, by its name', 'a broken link, or not a file')
    """
    suffix = Path(name).suffix.lower()
    if suffix in _OTHER_IMAGES:
        return f"{suffix} is not read: save it as JPEG, PNG or TIFF"
    return "a broken link, or not a file" if suffix in IMAGE_SUFFIXES else "not an image, by its name"


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


def _walk_images(folder: Path, others: list[Skipped]) -> Iterator[str]:
    """All images in a folder and below, sorted; every other file that is not hidden joins the ``others``.

    Links to folders are not followed, because they can form a ring. Only the names in one folder are held at a time, as
    strings.
    """
    files, folders = [], set()
    above = "" if folder == Path() else os.path.join(folder, "")  # noqa: PTH118 (no object per file)
    with _listing(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _SYSTEM_FILES:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.add(entry.name)
            elif entry.name.lower().endswith(IMAGE_SUFFIXES) and _leads_to(entry) == "file":
                files.append(entry.name)
            else:
                is_link = _leads_to(entry) == "folder"
                reason = "a link to a folder, which is not followed" if is_link else why_no_image(entry.name)
                others.append(Skipped(above + entry.name, reason))
    for name in sorted([*files, *folders]):
        if name in folders:
            yield from _walk_images(folder / name, others)
        else:
            yield above + name


def _leads_to(entry: os.DirEntry[str]) -> str:
    """``file`` or ``folder``, also by a link; empty for other things, and links in a ring or out of reach."""
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else ""
    except OSError:
        return ""


# --- without labels --------------------------------------------------------------------------------------------------


def list_files(sources: Sequence[str | Path], name: str) -> Files:
    """Images of files, folders and globs, without labels."""
    others: list[Skipped] = []
    found = Files.of(chain.from_iterable(_expand(source, others) for source in sources), name, skipped=others)
    if not len(found):
        raise UsageError("no images were given: name at least one file or folder")
    return found


def is_glob(source: str | Path) -> bool:
    """Whether a source is a pattern, and not a path that exists."""
    return any(character in str(source) for character in "*?[") and not Path(source).exists()


def _expand(source: str | Path, others: list[Skipped]) -> Iterator[str]:
    """The image files of one path, folder or glob; files that are no images join the ``others``."""
    path = expand_home(source)
    if path.is_dir():
        expected = f"expected {_KINDS} files there or below"
        yield from _some(_walk_images(path, others), f"no images in '{source}'", expected, others)
    elif not is_built_in(source) and is_glob(path):
        yield from _some(_match(path, others), f"no images match '{source}'", "check the pattern", others)
    elif is_built_in(source) or (path.is_file() and path.suffix.lower() in TABLE_SUFFIXES):
        raise UsageError(f"'{source}' cannot be opened together with other sources: give it alone")
    elif not path.is_file():
        hint = suggest_path(path) or "check the path; the name of a data set is given alone"
        raise UsageError(f"no file or folder '{source}': {hint}")
    else:
        yield str(path)


def _match(pattern: Path, others: list[Skipped]) -> Iterator[str]:
    """The images that match a glob, sorted, without hidden files and folders that it does not name."""
    top, found = Path(pattern.anchor), []
    try:
        for path in top.glob(str(pattern.relative_to(top))):
            hidden = (part for part in path.parts if part.startswith(".") and part not in pattern.parts)
            if path.is_dir() or _is_of_system(path) or any(hidden):
                continue
            if _is_image(path):
                found.append(str(path))
            else:
                others.append(Skipped(str(path), why_no_image(path.name)))
    except ValueError as error:
        raise UsageError(f"'{pattern}' is not a pattern for files ({error}): check the pattern") from None
    yield from sorted(found, key=lambda path: path.replace(os.sep, "\0"))  # folder by folder, as paths are sorted


def _is_of_system(path: str | Path) -> bool:
    return Path(path).name.lower() in _SYSTEM_FILES


def _some(files: Iterator[str], nothing: str, remedy: str, others: list[Skipped]) -> Iterator[str]:
    """The files; where there is none, a ``DataError`` that also names the first file that is no image."""
    first = next(files, None)
    if first is None:
        raise DataError(f"{nothing}{_name_first(others)}: {remedy}")
    yield first
    yield from files
