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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from maple.data.catalogue.records import Checksum
from maple.errors import DataError, UsageError
from maple.files import write_atomic

Progress = Callable[[int, int], None]  # bytes done, bytes in all

MAX_BYTES = 8 * 2**30  # of a download whose size is not known beforehand
_CHUNK = 2**20
_SCHEMES = ("https", "http", "file")
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60.0  # seconds


def download(
    url: str,
    path: Path,
    expected: Checksum | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    attempts: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
    progress: Progress | None = None,
) -> Checksum:
    """Fetch ``url`` to ``path`` unless it is there already, and return its size and checksums.

    A file that exists is verified like a fetched one. Temporary failures are retried after ``pause`` seconds, doubled
    each time; received bytes are kept, so that the next call resumes. ``progress`` is called with the bytes done and in
    all.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "there").write_bytes(b"maple")
    >>> download((folder / "there").as_uri(), folder / "here", Checksum(bytes=5)).md5
    'deb2fb335003a340d5b2beb970184456'
    """
    expected = expected or Checksum()
    if urlsplit(url).scheme not in _SCHEMES:
        raise UsageError(f"cannot fetch '{url}': give an address that begins with https://, http:// or file://")
    if not path.exists():
        transfer = _Transfer(url, path, expected, max_bytes, timeout, progress)
        _check_space(transfer.part, expected.bytes)
        _run_with_retries(transfer, attempts, pause)
        found = verify(transfer.part, expected, remove=True)
        transfer.part.replace(path)
        transfer.notes.unlink(missing_ok=True)
        return found
    return verify(path, expected)


def by_hand(url: str, path: Path) -> str:
    """Advice where the file cannot be fetched."""
    return f"fetch {url} by hand and put it at '{path}', then run the same command"


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
    for name in ("bytes", "md5", "sha256"):
        wanted, got = getattr(expected, name), getattr(found, name)
        if wanted is not None and wanted != got:
            if remove:
                path.unlink()
            remedy = "it was removed: run the same command again" if remove else "remove it and run the same command"
            raise DataError(f"'{path}' is not the file it should be ({name} {got}, should be {wanted}): {remedy}")
    return found


def _check_space(part: Path, needed: int | None) -> None:
    """Make the folder, and check that the disk has room for the missing bytes."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(part.parent).free
        missing = 0 if needed is None else needed - (part.stat().st_size if part.is_file() else 0)
    except OSError as error:
        raise DataError(f"cannot write to '{part.parent}': {error.strerror or error}; choose another folder") from None
    if missing > free:
        raise DataError(
            f"'{part.stem}' takes {missing / 1e9:.1f} GB and '{part.parent}' has {free / 1e9:.1f} GB left: free some "
            "space or choose another --data-root"
        )


class _Temporary(Exception):
    """A failure worth a retry; ``wait`` is the time in seconds that the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def _run_with_retries(transfer: _Transfer, attempts: int, pause: float) -> None:
    """Run a transfer, and retry temporary failures."""
    for attempt in range(attempts):
        try:
            transfer.run()
            return
        except _Temporary as failure:
            if attempt + 1 == attempts:
                raise DataError(
                    f"no network, or none that reaches {urlsplit(transfer.url).netloc} ({failure}): run the same "
                    f"command again later, or {by_hand(transfer.url, transfer.path)}"
                ) from None
            time.sleep(min(max(pause * 2**attempt, failure.wait), _LONGEST_WAIT))


class _Transfer:
    """Transfer of one file: the bytes received, and the version that the server gave them."""

    def __init__(
        self, url: str, path: Path, expected: Checksum, max_bytes: int, timeout: float, progress: Progress | None
    ) -> None:
        self.url, self.path, self.expected, self.timeout = url, path, expected, timeout
        self.part = path.with_name(path.name + ".part")
        self.notes = path.with_name(path.name + ".part.json")
        self._limit = expected.bytes if expected.bytes is not None else max_bytes
        self._progress = progress

    def run(self) -> None:
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
                hint = by_hand(self.url, self.path)
                raise DataError(f"cannot fetch {self.url} ({error.reason}): {hint}") from None
            raise _Temporary(str(error.reason)) from None
        except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
            raise _Temporary(str(error) or type(error).__name__) from None
        except OSError as error:
            raise DataError(f"cannot write '{self.part}': {error.strerror or error}; check the folder") from None

    def _request(self, have: int) -> urllib.request.Request:
        headers = {"User-Agent": "maple", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if version := self._note().get("version"):
                headers["If-Range"] = version
        return urllib.request.Request(self.url, headers=headers)

    def _note(self) -> dict[str, Any]:
        try:
            note = json.loads(self.notes.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) and note.get("url") == self.url else {}

    def _resumable(self) -> int:
        """Number of bytes received of a version that can be identified, by the server or by a known checksum."""
        if not self.part.is_file() or not (self._note().get("version") or self.expected.known):
            return 0
        have = self.part.stat().st_size
        return have if have <= self._limit else 0

    def _receive(self, response: Any, have: int) -> None:
        continued = response.status == 206 and _range_start(response.headers) == have
        if response.status == 206 and not continued:
            raise _Temporary("the server sent another part than the one requested")
        done = have if continued else 0
        total = _whole_number(response.headers.get("Content-Length"))
        total = None if total is None else total + done
        if total is not None:
            self._check_total(total)
        with self.part.open("ab" if continued else "wb") as file:
            if not continued:  # after truncating, so that bytes of another version never get this note
                _note(self.notes, self.url, response.headers)
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                if done > self._limit:
                    self._check_total(done)
                file.write(chunk)
                if self._progress is not None:
                    self._progress(done, total or self.expected.bytes or done)
            file.flush()
            os.fsync(file.fileno())
        wanted = total if total is not None else self.expected.bytes
        if wanted is not None and done < wanted:
            raise _Temporary(f"the connection ended after {done:,} of {wanted:,} bytes")

    def _check_total(self, total: int) -> None:
        if total > self._limit:
            raise DataError(
                f"{self.url} is larger than the {self._limit:,} bytes that were expected: the file was changed, or the "
                "server answers with a page"
            )

    def _refused(self, error: urllib.error.HTTPError, have: int) -> None:
        if error.code == 416 and have:  # the part is longer than the file, or of another file
            self.part.unlink()
            raise _Temporary("the server has no such part") from None
        reason = f"{error.code} {error.reason}"
        if error.code in _TRY_AGAIN:
            raise _Temporary(reason, _whole_number(error.headers.get("Retry-After")) or 0.0) from None
        raise DataError(f"the server refuses {self.url} ({reason}): {by_hand(self.url, self.path)}") from None


def _note(path: Path, url: str, headers: Mapping[str, str]) -> None:
    """Note the version of a file: a strong ETag, else its date."""
    tag = headers.get("ETag") or ""
    version = tag if tag.startswith('"') else headers.get("Last-Modified")
    write_atomic(path, json.dumps({"url": url, "version": version}))


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
            raise DataError(f"{req.full_url} leads to '{newurl}', which is not followed: fetch it by hand")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _make_opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()  # not build_opener, which brings ftp: and data:
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.FileHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        _SafeRedirects(),
    ):
        opener.add_handler(handler)
    return opener


_OPENER = _make_opener()
