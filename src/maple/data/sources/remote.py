"""Images on file systems that are named by an address: ``s3://``, ``gs://``, ``hdfs://``, ``file://`` and others.

pyarrow opens the address; schemes that it does not know are opened by fsspec, if that and its part for the scheme are
installed. Paths that begin with ``/`` stay local.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyarrow import fs

from maple.data._decoder import Item
from maple.data.decode import IMAGE_SUFFIXES, check_file_size
from maple.data.sources.folders import Paths, why_no_image
from maple.data.stream import Source
from maple.errors import DataError, MapleError, RunError, UsageError
from maple.types import Skipped

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")
_READERS = 16  # files that are read at a time: most of the time goes by until the first byte comes
PARQUET = ".parquet"
GONE = "it is not there any more"


def is_remote(source: object) -> bool:
    """Whether a source is an address rather than a path.

    >>> [is_remote(source) for source in ("s3://bucket/slides", "file:///slides", "slides/train", "C:/slides")]
    [True, True, False, False]
    """
    return isinstance(source, str) and _ADDRESS.match(source) is not None


@dataclass(frozen=True)
class Place:
    """A file system, and the address of a folder or file on it; it travels to other processes as the address."""

    address: str
    given: Any = None  # a file system of pyarrow that the caller has opened, with paths instead of addresses

    def __str__(self) -> str:
        return self.address

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address, "given": self.given}  # connections stay here

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path on it."""
        if self.given is not None:
            return self.given, self.address
        try:
            return fs.FileSystem.from_uri(self.address)
        except (pa.ArrowException, OSError, ValueError):
            return _open_by_fsspec(self.address)

    @property
    def system(self) -> Any:
        return self._opened[0]

    @property
    def path(self) -> str:
        return self._opened[1].rstrip("/")

    def beside(self, path: str) -> Place:
        """Another file of this system."""
        bare, mark, query = self.address.partition("?")
        root = bare.rstrip("/").removesuffix(self.path)
        if root == bare.rstrip("/"):  # the address spells the path in another way
            root = bare.partition("://")[0] + "://"
        place = replace(self, address=path if self.given is not None else root + path + mark + query)
        place.__dict__["_opened"] = (self.system, path)
        return place

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # those of fsspec raise whatever they stumble over
            if isinstance(error, MapleError):
                raise
            raise DataError(f"cannot read '{self}': {_reason(error)}; check the address and the credentials") from None

    def find(self) -> list[Any]:
        """The files of a folder and below, or the one file, sorted by path; hidden ones are left out."""
        with self.naming_errors():
            info = self.system.get_file_info(self.path)
            if info.type == fs.FileType.File:
                return [info]
            if info.type == fs.FileType.NotFound:
                raise UsageError(f"no file or folder '{self}': check the address")
            below = self.system.get_file_info(fs.FileSelector(self.path, recursive=True))
        start = len(self.path) + 1 if self.path else 0
        files = [each for each in below if each.type == fs.FileType.File]
        return sorted((each for each in files if not _is_hidden(each.path[start:])), key=lambda each: each.path)

    def stamp(self) -> bytes:
        """Size and time of change of a file."""
        with self.naming_errors():
            return _stamp(self.system.get_file_info(self.path))

    def open(self) -> Any:
        """The file, for reading anywhere."""
        return self.system.open_input_file(self.path)


def _open_by_fsspec(address: str) -> tuple[Any, str]:
    schemes = [link.partition("://")[0] for link in address.split("::")]  # of a file system in another, and so on
    if "reference" in schemes:
        raise UsageError(f"'{address}' is not opened: files of references may hold templates, which run code")
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(address)
    except Exception as error:  # each scheme has its own requirements and errors
        remedy = f"install the package of fsspec for {schemes[0]}://, or give a path"
        raise UsageError(f"cannot open '{address}': {_reason(error)}; {remedy}") from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def _reason(error: Exception) -> str:
    """The first line of an error, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _stamp(info: Any) -> bytes:
    return b"\0%d %d\0" % (info.size or 0, info.mtime_ns or 0)


# --- image files ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RemoteFiles(Source):
    """Image files of a file system, of which only the paths are held; they are read several at a time."""

    place: Place
    paths: Paths
    name: str
    stamps: bytes = b""  # a digest of those of all files, when they were listed
    skipped: tuple[Skipped, ...] = ()

    labels = None
    class_names = ()

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for i in range(len(self)):
            found.update(self.paths.encoded(i) + b"\0")
        found.update(self.stamps)
        return found.hexdigest()

    def item(self, i: int) -> Item:
        place = self.place.beside(self.paths[i])
        try:
            with place.open() as file:
                check_file_size(file.size())
                return file.read()
        except DataError as error:
            return error
        except FileNotFoundError:
            return DataError(GONE)
        except (pa.ArrowException, OSError) as error:  # perhaps for a moment: the image is not to blame
            raise RunError(f"cannot read '{place}': {_reason(error)}; rerun the same command to resume") from None

    def is_gone(self, i: int) -> bool:
        place = self.place.beside(self.paths[i])
        with place.naming_errors():
            return place.system.get_file_info(place.path).type == fs.FileType.NotFound

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        with ThreadPoolExecutor(_READERS, "read") as readers:
            for first in range(start, len(self), _READERS):
                rows = range(first, min(first + _READERS, len(self)))
                for row, item in zip(rows, readers.map(self.item, rows), strict=True):
                    yield str(self.place.beside(self.paths[row])), item

    def only(self, rows: Sequence[int]) -> tuple[RemoteFiles, Sequence[int]]:
        """What reads these files in another process, and their positions there."""
        return RemoteFiles(self.place, Paths(self.paths[i] for i in rows), self.name), range(len(rows))


def list_remote(place: Place) -> RemoteFiles | list[Place]:
    """The image files of an address, or the Parquet files of a data set; a last name with ``*`` is a pattern."""
    pattern = None
    bare, mark, query = str(place).partition("?")
    folder, _, last = bare.rpartition("/")
    if "*" in last:
        place, pattern = replace(place, address=folder + mark + query), last
    files = place.find()
    if pattern is not None:
        files = [each for each in files if fnmatchcase(each.base_name, pattern)]
    images = [each for each in files if each.path.lower().endswith(IMAGE_SUFFIXES)]
    tables = [each for each in files if each.path.lower().endswith(PARQUET)]
    if tables and not images:
        return [place.beside(each.path) for each in tables]
    if not images:
        raise DataError(f"no images at '{place}': expected {'/'.join(IMAGE_SUFFIXES[:8])} or Parquet files")
    others = [each for each in files if not each.path.lower().endswith(IMAGE_SUFFIXES)]
    skipped = tuple(Skipped(str(place.beside(each.path)), why_no_image(each.base_name)) for each in others)
    stamps = hashlib.blake2b(b"".join(map(_stamp, images)), digest_size=16).digest()
    return RemoteFiles(place, Paths(each.path for each in images), str(place), stamps, skipped)
