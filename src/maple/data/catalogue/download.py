"""Download of files: resumed after an interruption, limited in size, verified, complete or not at all.

A transfer goes into ``<file>.part``, and ``<file>.part.json`` keeps the version that the server gave it (its ETag).
Started again, it asks for the rest *if the version is the same*; a server without that feature sends everything from
the start. Only a file of the right size and checksum gets its name.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from maple.data.catalogue.table import Checksum
from maple.data.image_set import Progress
from maple.errors import DataError, UsageError
from maple.files import write_atomic

_CHUNK = 2**20
_SCHEMES = ("https", "http", "file")
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60.0  # seconds


def measure(path: Path) -> Checksum:
    """Compute size and checksums of a file."""
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                md5.update(chunk)
                sha256.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}; check the file") from None
    return Checksum(size, md5.hexdigest(), sha256.hexdigest())


def verify(path: Path, expected: Checksum, remove: bool = False) -> Checksum:
    """Compute size and checksums of a file, and check them; ``remove`` a file that differs."""
    found = measure(path)
    for name, wanted in vars(expected).items():
        if wanted is not None and wanted != (got := getattr(found, name)):
            if remove:
                path.unlink()
            remedy = "it was removed: run the same command again" if remove else "remove it and run the same command"
            raise DataError(f"'{path}' has {name} {got}, expected {wanted}: {remedy}")
    return found


class _Temporary(Exception):
    """A failure worth a retry; ``wait`` is the time in seconds that the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Download:
    """Transfer of the file at ``url`` to ``path``.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "there").write_bytes(b"maple")
    >>> Download((folder / "there").as_uri(), folder / "here", Checksum(bytes=5)).fetch().md5
    'deb2fb335003a340d5b2beb970184456'
    """

    url: str
    path: Path
    expected: Checksum = Checksum()
    max_bytes: int = 8 * 2**30  # of a file whose size is not known beforehand
    attempts: int = 5
    timeout: float = 30.0  # seconds to wait for the server
    pause: float = 1.0  # seconds before the first retry, doubled for each further one
    progress: Progress | None = None  # called with the bytes done and in all

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def notes(self) -> Path:
        return self.path.with_name(self.path.name + ".part.json")

    @property
    def limit(self) -> int:
        return self.max_bytes if self.expected.bytes is None else self.expected.bytes

    def fetch(self) -> Checksum:
        """Fetch the file unless it is there already, and return its size and checksums.

        A file that exists is verified like a fetched one. Temporary failures are retried; received bytes are kept, so
        that the next call resumes.
        """
        if urlsplit(self.url).scheme not in _SCHEMES:
            raise UsageError(f"cannot fetch '{self.url}': give an address with https://, http:// or file://")
        if self.path.exists():
            return verify(self.path, self.expected)
        self._check_space()
        self._receive_with_retries()
        found = verify(self.part, self.expected, remove=True)
        self.part.replace(self.path)
        self.notes.unlink(missing_ok=True)
        return found

    def _check_space(self) -> None:
        """Make the folder, and check that the disk has room for the missing bytes."""
        folder = self.part.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            missing = (self.expected.bytes or 0) - (self.part.stat().st_size if self.part.is_file() else 0)
        except OSError as error:
            raise DataError(f"cannot write to '{folder}': {error.strerror or error}; choose another folder") from None
        if missing > free:
            found = f"'{self.path.name}' needs {missing / 1e9:.1f} GB, and '{folder}' has {free / 1e9:.1f} GB left"
            raise DataError(f"{found}: free some space or choose another --data-root")

    def _receive_with_retries(self) -> None:
        for attempt in range(self.attempts):
            try:
                self._receive_rest()
                return
            except _Temporary as failure:
                if attempt + 1 == self.attempts:
                    remedy = f"check the network and run the same command again, or {self._by_hand}"
                    raise DataError(f"cannot reach {urlsplit(self.url).netloc} ({failure}): {remedy}") from None
                time.sleep(min(max(self.pause * 2**attempt, failure.wait), _LONGEST_WAIT))

    @property
    def _by_hand(self) -> str:
        """Advice where the file cannot be fetched."""
        return f"fetch {self.url} by hand and put it at '{self.path}', then run the same command"

    def _receive_rest(self) -> None:
        """Fetch the missing bytes; ``_Temporary`` where a retry may help."""
        have = self._resumable()
        if have and have == self.expected.bytes:
            return
        try:
            with _OPENER.open(self._request(have), timeout=self.timeout) as response:
                self._receive(response, have)
        except urllib.error.HTTPError as error:
            self._refused(error, have)
        except urllib.error.URLError as error:
            if isinstance(error.reason, (FileNotFoundError, ssl.SSLCertVerificationError)):
                raise DataError(f"cannot fetch {self.url} ({error.reason}): {self._by_hand}") from None
            raise _Temporary(str(error.reason)) from None
        except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
            raise _Temporary(str(error) or type(error).__name__) from None
        except OSError as error:
            raise DataError(f"cannot write '{self.part}': {error.strerror or error}; check the folder") from None

    def _resumable(self) -> int:
        """Number of bytes received of a version that can be identified, by the server or by a known checksum."""
        if not self.part.is_file() or not (self._version() or self.expected.known):
            return 0
        have = self.part.stat().st_size
        return have if have <= self.limit else 0

    def _version(self) -> str | None:
        """The version that the server gave to the part, if it came from the same address."""
        with suppress(OSError, ValueError, AttributeError):
            note = json.loads(self.notes.read_text(encoding="utf-8"))
            if note.get("url") == self.url:
                return note.get("version")
        return None

    def _request(self, have: int) -> urllib.request.Request:
        headers = {"User-Agent": "maple", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if version := self._version():
                headers["If-Range"] = version
        return urllib.request.Request(self.url, headers=headers)

    def _receive(self, response: Any, have: int) -> None:
        continued = response.status == 206 and _range_start(response.headers) == have
        if response.status == 206 and not continued:
            raise _Temporary("the server sent another part than the one requested")
        done = have if continued else 0
        length = _whole_number(response.headers.get("Content-Length"))
        total = self.expected.bytes if length is None else length + done
        if length is not None:
            self._check_total(length + done)
        with self.part.open("ab" if continued else "wb") as file:
            if not continued:  # after truncating, so that bytes of another version never get this note
                self._note_version(response.headers)
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                self._check_total(done)
                file.write(chunk)
                if self.progress is not None:
                    self.progress(done, total or done)
            file.flush()
            os.fsync(file.fileno())
        if total is not None and done < total:
            raise _Temporary(f"the connection ended after {done:,} of {total:,} bytes")

    def _check_total(self, total: int) -> None:
        if total > self.limit:
            found = f"{self.url} is larger than the expected {self.limit:,} bytes"
            raise DataError(f"{found}, so it has changed or is an error page: {self._by_hand}")

    def _note_version(self, headers: Mapping[str, str]) -> None:
        """Note the version of the part: a strong ETag, else its date."""
        tag = headers.get("ETag") or ""
        version = tag if tag.startswith('"') else headers.get("Last-Modified")
        write_atomic(self.notes, json.dumps({"url": self.url, "version": version}))

    def _refused(self, error: urllib.error.HTTPError, have: int) -> None:
        if error.code == 416 and have:  # the part is longer than the file, or of another file
            self.part.unlink()
            raise _Temporary("the server has no such part") from None
        reason = f"{error.code} {error.reason}"
        if error.code in _TRY_AGAIN:
            raise _Temporary(reason, _whole_number(error.headers.get("Retry-After")) or 0.0) from None
        raise DataError(f"the server refuses {self.url} ({reason}): {self._by_hand}") from None


def _range_start(headers: Mapping[str, str]) -> int | None:
    """First byte of a part: 200 in ``bytes 200-999/1000``."""
    unit, _, rest = (headers.get("Content-Range") or "").partition(" ")
    return _whole_number(rest.partition("-")[0]) if unit == "bytes" else None


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else None


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https only, and never from https to http."""

    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in ("https", "http") or (req.type == "https" and scheme == "http"):
            raise DataError(f"{req.full_url} redirects to '{newurl}', which is not followed: fetch it by hand")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# Its handlers of other schemes are out of reach: addresses are checked in ``fetch``, redirects above.
_OPENER = urllib.request.build_opener(_SafeRedirects)
