"""Archives, read in place: members are never unpacked into a folder, and their names, kinds and sizes are checked."""

from __future__ import annotations

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from maple.errors import DataError

MAX_MEMBERS = 2_000_000
MAX_UNPACKED = 8 * 2**30

BROKEN = (  # errors that reading a damaged archive raises
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, RuntimeError, ValueError),
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
        self._owned: BinaryIO | None = None
        try:
            if isinstance(source, Path):
                source = self._owned = source.open("rb")
            source.seek(0)
            is_zip = source.read(4) in (b"PK\3\4", b"PK\5\6")
            source.seek(0)
            self._file = zipfile.ZipFile(source) if is_zip else tarfile.open(fileobj=source)  # noqa: SIM115
            self._members = self._list(max_members, max_bytes)
        except BROKEN as error:
            self.close()
            reason = str(error).partition("\n")[0]
            raise DataError(f"cannot read the archive '{self._label}': {reason}; fetch it again") from None
        except DataError:
            self.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    @property
    def names(self) -> list[str]:
        """Names of all files, in the order of the archive."""
        return list(self._members)

    def size(self, name: str) -> int:
        """Bytes of a member."""
        return _size(self._member(name))

    def open(self, name: str) -> BinaryIO:
        """Open a member as a file of its declared length."""
        member = self._member(name)
        if isinstance(self._file, zipfile.ZipFile):
            return cast(BinaryIO, self._file.open(member))
        return cast(BinaryIO, self._file.extractfile(member))

    def read(self, name: str) -> bytes:
        """Read a whole member."""
        try:
            with self.open(name) as file:
                data = file.read()
        except BROKEN as error:
            raise DataError(f"cannot read '{name}' in '{self._label}': {error}; fetch the archive again") from None
        if len(data) != self.size(name):
            raise DataError(f"'{name}' in '{self._label}' is cut short: fetch the archive again")
        return data

    def _member(self, name: str) -> Any:
        if name not in self._members:
            raise DataError(f"'{self._label}' holds no '{name}': it is not the archive that was expected")
        return self._members[name]

    def _list(self, max_members: int, max_bytes: int) -> dict[str, Any]:
        """List the files by name, checked one by one, so that the list cannot outgrow the limits either."""
        members: dict[str, Any] = {}
        total = 0
        for number, entry in enumerate(self._entries()):
            raw = entry.filename if isinstance(entry, zipfile.ZipInfo) else entry.name
            name = self._check_name(raw)
            total += _size(entry)
            if number >= max_members or total > max_bytes:
                raise DataError(
                    f"'{self._label}' holds more than {max_members:,} files or {max_bytes / 1e9:,.1f} GB: it is not "
                    "the archive that was expected"
                )
            kind = _kind(entry)
            if kind == "other":
                raise DataError(f"'{raw}' in '{self._label}' is a link or a device: such archives are not read")
            if name in members:
                raise DataError(f"'{self._label}' holds '{name}' twice: such archives are not read")
            if kind == "file":
                members[name] = entry
        return members

    def _entries(self) -> Iterable[zipfile.ZipInfo | tarfile.TarInfo]:
        if isinstance(self._file, zipfile.ZipFile):
            return self._file.infolist()
        return self._file

    def _check_name(self, raw: str) -> str:
        """Check that the name of a member is relative, and normalise it."""
        path = PurePosixPath(raw)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\\" in raw
            or raw[1:2] == ":"
            or any(ord(character) < 32 for character in raw)
        ):
            raise DataError(f"'{raw}' in '{self._label}' leads out of the archive: such archives are not read")
        return path.as_posix()


def _size(entry: zipfile.ZipInfo | tarfile.TarInfo) -> int:
    return entry.file_size if isinstance(entry, zipfile.ZipInfo) else entry.size


def _kind(entry: zipfile.ZipInfo | tarfile.TarInfo) -> str:
    """Kind of a member: ``file``, ``folder`` or ``other``; zip keeps Unix modes in the upper half of attributes."""
    if isinstance(entry, tarfile.TarInfo):
        return "folder" if entry.isdir() else "file" if entry.isreg() else "other"
    if entry.is_dir():
        return "folder"
    return "file" if stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG) else "other"
