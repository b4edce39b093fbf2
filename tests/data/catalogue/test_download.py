"""Downloads: whole or not at all, resumed, verified."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from maple.data.catalogue.download import Download
from maple.data.catalogue.table import Checksum
from maple.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 5000  # 1.28 MB: more than one chunk


ANY = Checksum()
MD5, SHA256 = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()


class Server:
    """A file on a local server; its attributes say how the server behaves."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.etag: str | None = '"v1"'
        self.ranges = True  # whether it can send parts
        self.length = True  # whether it says how long the file is
        self.cuts: list[int] = []  # end the next answers after so many bytes
        self.failures: list[int] = []  # answer the next requests with these codes
        self.redirect: str | None = None
        self.asked: list[dict[str, str]] = []  # headers of all requests
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(dict(self.headers))
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/file.bin"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.failures:
            request.send_error(self.failures.pop(0))
            return
        if self.redirect and request.path == "/file.bin":
            request.send_response(302)
            request.send_header("Location", self.redirect)
            request.end_headers()
            return
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
        same = request.headers.get("If-Range") in (None, self.etag)
        if wanted and self.ranges and same:
            start = int(wanted[1])
            if start >= len(self.content):
                request.send_error(416)
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        else:
            request.send_response(200)
        body = self.content[start:]
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        if self.etag:
            request.send_header("ETag", self.etag)
        request.end_headers()
        request.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def fetch(server: Server, path: Path, expected: Checksum = ANY, **options: Any) -> Checksum:
    return Download(server.url, path, expected, **{"pause": 0.01, "attempts": 3, "timeout": 10, **options}).fetch()


def test_a_file_arrives_whole_and_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "new" / "file.bin"
    found = fetch(server, path, Checksum(len(CONTENT), MD5, SHA256), progress=lambda *counts: seen.append(counts))
    assert path.read_bytes() == CONTENT and found == Checksum(len(CONTENT), MD5, SHA256)
    assert list(path.parent.iterdir()) == [path]
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert fetch(server, path, Checksum(md5=MD5)) == found and len(server.asked) == 1  # what is there is only verified


def test_an_interrupted_transfer_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 500_000]
    fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [headers.get("Range") for headers in server.asked] == [None, "bytes=300000-", "bytes=800000-"]
    assert server.asked[1]["If-Range"] == '"v1"'


def test_a_later_call_goes_on_too(server: Server, tmp_path: Path) -> None:
    server.cuts = [400_000]
    with pytest.raises(DataError, match="400,000 of 1,280,000 bytes"):
        fetch(server, tmp_path / "file", attempts=1)
    assert (tmp_path / "file.part").stat().st_size == 400_000 and not (tmp_path / "file").exists()
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and server.asked[1]["Range"] == "bytes=400000-"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(server: Server, tmp_path: Path) -> None:
    server.cuts = [400_000]
    with pytest.raises(DataError):
        fetch(server, tmp_path / "file", attempts=1)
    server.content, server.etag = b"new" * 100_000, '"v2"'
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == server.content


def test_a_server_that_ignores_ranges_sends_everything_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cuts = False, [400_000]
    fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert (tmp_path / "file").read_bytes() == CONTENT and server.asked[1]["Range"] == "bytes=400000-"


@pytest.mark.parametrize("known", [True, False])
def test_without_a_version_only_a_checksum_allows_going_on(server: Server, tmp_path: Path, known: bool) -> None:
    server.etag, server.cuts = None, [400_000]
    fetch(server, tmp_path / "file", Checksum(md5=MD5) if known else ANY)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked[1].get("Range") == ("bytes=400000-" if known else None)


def test_parts_of_another_address_are_not_mixed_in(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    (tmp_path / "file.part.json").write_text('{"url": "http://elsewhere/", "version": "\\"v1\\""}')
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and "Range" not in server.asked[0]


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT + b"more")
    fetch(server, tmp_path / "file", Checksum(md5=MD5))  # the server has no such range
    assert (tmp_path / "file").read_bytes() == CONTENT
    (tmp_path / "again.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "again", Checksum(len(CONTENT), MD5))  # complete: only the name was missing
    assert (tmp_path / "again").read_bytes() == CONTENT and len(server.asked) == 2


def test_a_length_that_is_not_told_is_learnt(server: Server, tmp_path: Path) -> None:
    server.length = False
    assert fetch(server, tmp_path / "file").bytes == len(CONTENT)
    server.cuts = [1000]
    fetch(server, tmp_path / "known", Checksum(len(CONTENT), MD5))
    assert (tmp_path / "known").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "expected", [Checksum(md5="0" * 32), Checksum(sha256="0" * 64), Checksum(len(CONTENT) + 1, md5=MD5)]
)
def test_what_is_not_the_expected_file_never_gets_its_name(server: Server, tmp_path: Path, expected: Checksum) -> None:
    with pytest.raises(DataError, match="file"):
        fetch(server, tmp_path / "file", expected)
    assert not (tmp_path / "file").exists()


def test_a_wrong_checksum_starts_over_next_time(server: Server, tmp_path: Path) -> None:
    server.content = b"y" * len(CONTENT)
    with pytest.raises(DataError, match=r"md5 \w{32}.* \w{32}"):
        fetch(server, tmp_path / "file", Checksum(md5=MD5))
    server.content = CONTENT
    fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert "Range" not in server.asked[1]


def test_a_file_put_there_by_hand_is_verified(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a page that says no")
    with pytest.raises(DataError, match="file"):
        fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert (tmp_path / "file").exists() and not server.asked


def test_nothing_larger_than_expected_is_kept(server: Server, tmp_path: Path) -> None:
    for length in (True, False):
        server.length = length
        with pytest.raises(DataError, match="1,000 bytes"):
            fetch(server, tmp_path / "file", max_bytes=1000)
        with pytest.raises(DataError, match="999 bytes"):
            fetch(server, tmp_path / "file", Checksum(999))
    assert not (tmp_path / "file").exists()


def test_failures_that_pass_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 429]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and len(server.asked) == 3


def test_failures_that_stay_say_what_to_do(server: Server, tmp_path: Path) -> None:
    server.failures = [404]
    with pytest.raises(DataError, match=r"404.*http://\S+.*file'"):
        fetch(server, tmp_path / "file")
    assert len(server.asked) == 1
    server.failures = [503] * 3
    with pytest.raises(DataError, match="503"):
        fetch(server, tmp_path / "file")
    server.close()
    with pytest.raises(DataError, match=r"127.0.0.1.*file'"):
        fetch(server, tmp_path / "file")


def test_only_to_where_one_would_go_oneself(server: Server, tmp_path: Path) -> None:
    for url in ("ftp://host/x", "data:,x", "/etc/passwd", "javascript:1"):
        with pytest.raises(UsageError, match="https://"):
            Download(url, tmp_path / "file").fetch()
    (tmp_path / "secret").write_text("secret")
    for target in ((tmp_path / "secret").as_uri(), "ftp://host/x"):
        server.redirect = target
        with pytest.raises(DataError, match=r"file.bin"):
            fetch(server, tmp_path / "file")
    server.redirect = server.url.replace("file.bin", "other.bin")
    assert fetch(server, tmp_path / "file").md5 == MD5
    server.redirect = server.url  # round and round
    with pytest.raises(DataError):
        fetch(server, tmp_path / "ring")


def test_no_step_down_from_https() -> None:
    from urllib.request import Request

    from maple.data.catalogue.download import _SafeRedirects

    with pytest.raises(DataError, match="http://a/x"):
        _SafeRedirects().redirect_request(Request("https://a/x"), io.BytesIO(), 302, "", {}, "http://a/x")


def test_files_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(CONTENT)
    assert Download((tmp_path / "there").as_uri(), tmp_path / "here").fetch().sha256 == SHA256
    with pytest.raises(DataError, match="absent"):
        Download((tmp_path / "absent").as_uri(), tmp_path / "x").fetch()


def test_a_full_disk_is_noticed_beforehand(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-root"):
        fetch(server, tmp_path / "file", Checksum(10**18))
    assert not server.asked
