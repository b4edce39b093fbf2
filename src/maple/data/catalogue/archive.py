"""Archives, read in place: members are never unpacked into a folder, and their names, kinds and sizes are checked."""

from __future__ import annotations

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from maple.errors import DataError

MAX_MEMBERS = 2_000_000
MAX_UNPACKED = 8 * 2**30
_REFUSED = "fetch the archive that its authors publish"

BROKEN = (  # errors that reading a damaged archive raises
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, RuntimeError, ValueError, LookupError),
)


class Archive:
    """Files inside a tar (plain or compressed) or zip archive, by name, never unpacked to disk.

    Refused are absolute names, names with ``..``, links and devices, two members of one name, and more than
    ``max_members`` members or ``max_bytes`` bytes in all, as declared by the archive and as read.

    >>> import io
    >>> buffer = io.BytesIO()
    >>> with zipfile.ZipFile(buffer, "w") as file:
    ...     file.writestr("cats/1.txt", "purr")
    >>> with Archive(buffer, "pets.zip") as archive:
    ...     list(archive.names), archive.read("cats/1.txt")
    (['cats/1.txt'], b'purr')
    """

    def __init__(
        self,
        source: Path | BinaryIO,
        label: str | None = None,
        *,
        max_members: int = MAX_MEMBERS,
        max_bytes: int = MAX_UNPACKED,
    ) -> None:
        self._label = label or str(source)
        with ExitStack() as opened:  # closes the file where it is refused
            try:
                file = opened.enter_context(source.open("rb")) if isinstance(source, Path) else source
                file.seek(0)
                is_zip = file.read(4) in (b"PK\3\4", b"PK\5\6")
                file.seek(0)
                self._file = zipfile.ZipFile(file) if is_zip else tarfile.open(fileobj=file)  # noqa: SIM115
                self._members = self._list(max_members, max_bytes)
            except BROKEN as error:
                reason = str(error).partition("\n")[0]
                raise DataError(f"cannot read the archive '{self._label}': {reason}; fetch it again") from None
            self._opened = opened.pop_all()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    @property
    def names(self) -> list[str]:
        """Names of all files, in the order of the archive."""
        return list(self._members)

    def size(self, name: str) -> int:
        """Bytes of a member."""
        return self._member(name).size

    def open(self, name: str) -> BinaryIO:
        """Open a member as a file of its declared length."""
        info = self._member(name).info
        archive = self._file
        return cast(BinaryIO, archive.open(info) if isinstance(archive, zipfile.ZipFile) else archive.extractfile(info))

    def read(self, name: str) -> bytes:
        """Read a whole member."""
        try:
            with self.open(name) as file:
                data = file.read()
        except BROKEN as error:
            raise DataError(f"cannot read '{name}' in '{self._label}': {error}; fetch the archive again") from None
        if len(data) != self.size(name):
            raise DataError(f"'{name}' in '{self._label}' is truncated: fetch the archive again")
        return data

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            raise DataError(f"'{self._label}' holds no '{name}': {_REFUSED}")
        return self._members[name]

    def _list(self, max_members: int, max_bytes: int) -> dict[str, _Member]:
        """List the files by name, checked one by one, so that the list cannot outgrow the limits either."""
        members: dict[str, _Member] = {}
        total = 0
        infos: Iterable[Any] = self._file.infolist() if isinstance(self._file, zipfile.ZipFile) else self._file
        for number, member in enumerate(map(_member_of, infos)):
            name = self._check_name(member.name)
            total += member.size
            if number >= max_members or total > max_bytes:
                limits = f"{max_members:,} files or {max_bytes / 1e9:,.1f} GB"
                raise DataError(f"'{self._label}' holds more than {limits}: {_REFUSED}")
            if member.kind == "other":
                raise DataError(f"'{member.name}' in '{self._label}' is a link or a device: {_REFUSED}")
            if name in members:
                raise DataError(f"'{self._label}' holds '{name}' twice: {_REFUSED}")
            if member.kind == "file":
                members[name] = member
        return members

    def _check_name(self, raw: str) -> str:
        """Check that the name of a member is relative, and normalise it."""
        path = PurePosixPath(raw)
        absolute = path.is_absolute() or raw[1:2] == ":"
        if absolute or ".." in path.parts or "\\" in raw or any(ord(character) < 32 for character in raw):
            raise DataError(f"'{raw}' in '{self._label}' leads out of the archive: {_REFUSED}")
        return path.as_posix()


class _Member(NamedTuple):
    """A member as the archive declares it."""

    name: str
    size: int
    kind: Literal["file", "folder", "other"]
    info: Any  # what opens it


def _member_of(info: zipfile.ZipInfo | tarfile.TarInfo) -> _Member:
    if isinstance(info, tarfile.TarInfo):
        return _Member(info.name, info.size, "folder" if info.isdir() else "file" if info.isreg() else "other", info)
    is_plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)  # zip keeps Unix modes in the upper half
    return _Member(info.filename, info.file_size, "folder" if info.is_dir() else "file" if is_plain else "other", info)
