"""Downloads from a server on this machine that interrupts, forgets, lies and refuses; archives made to do harm."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from maple.data.download import Archive, Checksum, download
from maple.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 5000  # 1.28 MB: more than one chunk
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


def fetch(server: Server, path: Path, expected: Checksum | None = None, **options: Any) -> Checksum:
    return download(server.url, path, expected, **{"pause": 0.01, "attempts": 3, "timeout": 10, **options})


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
    with pytest.raises(DataError, match="ended after 400,000 of 1,280,000 bytes"):
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
    fetch(server, tmp_path / "file", Checksum(md5=MD5) if known else None)
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
    with pytest.raises(DataError, match=r"is not the file it should be|the connection ended|no network"):
        fetch(server, tmp_path / "file", expected)
    assert not (tmp_path / "file").exists()


def test_a_wrong_checksum_starts_over_next_time(server: Server, tmp_path: Path) -> None:
    server.content = b"y" * len(CONTENT)
    with pytest.raises(DataError, match=r"md5 \w{32}, should be \w{32}\): it was removed"):
        fetch(server, tmp_path / "file", Checksum(md5=MD5))
    server.content = CONTENT
    fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert "Range" not in server.asked[1]


def test_a_file_put_there_by_hand_is_verified(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a page that says no")
    with pytest.raises(DataError, match="remove it and run the same command"):
        fetch(server, tmp_path / "file", Checksum(md5=MD5))
    assert (tmp_path / "file").exists() and not server.asked


def test_nothing_larger_than_expected_is_kept(server: Server, tmp_path: Path) -> None:
    for length in (True, False):
        server.length = length
        with pytest.raises(DataError, match="larger than the 1,000 bytes"):
            fetch(server, tmp_path / "file", max_bytes=1000)
        with pytest.raises(DataError, match="larger than the 999 bytes"):
            fetch(server, tmp_path / "file", Checksum(999))
    assert not (tmp_path / "file").exists()


def test_failures_that_pass_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 429]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT and len(server.asked) == 3


def test_failures_that_stay_say_what_to_do(server: Server, tmp_path: Path) -> None:
    server.failures = [404]
    with pytest.raises(DataError, match=r"404 .*: fetch http://\S+ by hand and put it at '.*file', then run the same"):
        fetch(server, tmp_path / "file")
    assert len(server.asked) == 1
    server.failures = [503] * 3
    with pytest.raises(DataError, match=r"no network.*503.*run the same command again later, or fetch"):
        fetch(server, tmp_path / "file")
    server.close()
    with pytest.raises(DataError, match=r"no network, or none that reaches 127.0.0.1.*by hand and put it at"):
        fetch(server, tmp_path / "file")


def test_only_to_where_one_would_go_oneself(server: Server, tmp_path: Path) -> None:
    for url in ("ftp://host/x", "data:,x", "/etc/passwd", "javascript:1"):
        with pytest.raises(UsageError, match="https://, http:// or file://"):
            download(url, tmp_path / "file")
    (tmp_path / "secret").write_text("secret")
    for target in ((tmp_path / "secret").as_uri(), "ftp://host/x"):
        server.redirect = target
        with pytest.raises(DataError, match=r"is not (followed|allowed)"):
            fetch(server, tmp_path / "file")
    server.redirect = server.url.replace("file.bin", "other.bin")
    assert fetch(server, tmp_path / "file").md5 == MD5
    server.redirect = server.url  # round and round
    with pytest.raises(DataError):
        fetch(server, tmp_path / "ring")


def test_no_step_down_from_https() -> None:
    from urllib.request import Request

    from maple.data.download import _SafeRedirects

    with pytest.raises(DataError, match="not followed"):
        _SafeRedirects().redirect_request(Request("https://a/x"), io.BytesIO(), 302, "", {}, "http://a/x")


def test_files_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(CONTENT)
    assert download((tmp_path / "there").as_uri(), tmp_path / "here").sha256 == SHA256
    with pytest.raises(DataError, match="by hand"):
        download((tmp_path / "absent").as_uri(), tmp_path / "x")


def test_a_full_disk_is_noticed_beforehand(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"takes 1000000000.0 GB .* free some space"):
        fetch(server, tmp_path / "file", Checksum(10**18))
    assert not server.asked


# --- archives ---------------------------------------------------------------------------------------------------------


def write_tar(path: Path, members: dict[str, bytes | tarfile.TarInfo], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = 0 if isinstance(content, tarfile.TarInfo) else len(content)
            archive.addfile(info, None if isinstance(content, tarfile.TarInfo) else io.BytesIO(content))
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:xz", "zip"])
def test_members_are_read_in_place(tmp_path: Path, kind: str) -> None:
    members = {"top/b.txt": b"second" * 1000, "./top/a.txt": b"first"}
    path = write_zip(tmp_path / "x", members) if kind == "zip" else write_tar(tmp_path / "x", members, kind)
    with Archive(path) as archive:
        assert archive.names == ["top/b.txt", "top/a.txt"] and archive.size("top/a.txt") == 5
        assert archive.read("top/a.txt") == b"first" and archive.read("top/b.txt") == b"second" * 1000
        with archive.open("top/b.txt") as file:
            assert file.read(6) == b"second"
        with pytest.raises(DataError, match=r"holds no 'top/c\.txt'"):
            archive.read("top/c.txt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "a\\..\\up", "c:/x", "a\nb"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="leads out of the archive"):
        Archive(write_tar(tmp_path / "x.tar", {name: b"x"}))
    with pytest.raises(DataError, match="leads out of the archive"):
        Archive(write_zip(tmp_path / "x.zip", {name: b"x"}))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "target"
    with pytest.raises(DataError, match="is a link or a device"):
        Archive(write_tar(tmp_path / "x.tar", {"link": info}))


def test_links_in_zip_archives_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="is a link or a device"):
        Archive(tmp_path / "x.zip")


def test_limits_on_members_and_bytes(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "x.tar.gz", {f"{i}": bytes(1000) for i in range(5)}, "w:gz")
    bomb = write_zip(tmp_path / "x.zip", {"zeros": bytes(10**7)})
    assert bomb.stat().st_size < 20_000
    Archive(tar, max_members=5, max_bytes=5000).close()
    for path, limits in ((tar, {"max_members": 4}), (tar, {"max_bytes": 4999}), (bomb, {"max_bytes": 10**6})):
        with pytest.raises(DataError, match="it is not the archive that was expected"):
            Archive(path, **limits)


def test_one_name_means_one_member(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for content in (b"good", b"evil"):
            info = tarfile.TarInfo("same")
            info.size = 4
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises(DataError, match="holds 'same' twice"):
        Archive(tmp_path / "x.tar")


def test_damage_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(DataError, match=r"cannot read the archive '.*text'.*fetch it again"):
        Archive(tmp_path / "text")
    with pytest.raises(DataError, match="cannot read the archive"):
        Archive(tmp_path / "absent")
    rng_bytes = hashlib.shake_128(b"seed").digest(50_000)
    for path in (
        write_tar(tmp_path / "x.tar.gz", {"a": rng_bytes}, "w:gz"),
        write_tar(tmp_path / "x.tar", {"a": rng_bytes}),
        write_zip(tmp_path / "x.zip", {"a": rng_bytes}),
    ):
        path.write_bytes(path.read_bytes()[:30_000])
        with pytest.raises(DataError), Archive(path) as archive:
            archive.read("a")
    broken = write_zip(tmp_path / "y.zip", {"a": b"some text that is long enough to be changed"})
    data = bytearray(broken.read_bytes())
    data[40] ^= 255
    broken.write_bytes(data)
    with pytest.raises(DataError, match="fetch the archive again"), Archive(broken) as archive:
        archive.read("a")


def test_an_archive_inside_an_archive(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", {"1.txt": b"one", "2.txt": b"two"}).read_bytes()
    with Archive(write_tar(tmp_path / "outer.tar", {"inner.tar": inner})) as outer:
        with outer.open("inner.tar") as file, Archive(file, "inner.tar") as archive:
            assert archive.read("2.txt") == b"two"
        assert outer.read("inner.tar") == inner
