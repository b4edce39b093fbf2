"""Archives are read in place, and refused where names, kinds or sizes are not safe."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from maple.data.catalogue.archive import Archive
from maple.errors import DataError


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
        with pytest.raises(DataError, match=r"top/c\.txt"):
            archive.read("top/c.txt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "a\\..\\up", "c:/x", "a\nb"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"x\.(tar|zip)"):
        Archive(write_tar(tmp_path / "x.tar", {name: b"x"}))
    with pytest.raises(DataError, match=r"x\.(tar|zip)"):
        Archive(write_zip(tmp_path / "x.zip", {name: b"x"}))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "target"
    with pytest.raises(DataError, match="link"):
        Archive(write_tar(tmp_path / "x.tar", {"link": info}))


def test_links_in_zip_archives_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="link"):
        Archive(tmp_path / "x.zip")


def test_limits_on_members_and_bytes(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "x.tar.gz", {f"{i}": bytes(1000) for i in range(5)}, "w:gz")
    bomb = write_zip(tmp_path / "x.zip", {"zeros": bytes(10**7)})
    assert bomb.stat().st_size < 20_000
    Archive(tar, max_members=5, max_bytes=5000).close()
    for path, limits in ((tar, {"max_members": 4}), (tar, {"max_bytes": 4999}), (bomb, {"max_bytes": 10**6})):
        with pytest.raises(DataError, match=path.name):
            Archive(path, **limits)


def test_one_name_means_one_member(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for content in (b"good", b"evil"):
            info = tarfile.TarInfo("same")
            info.size = 4
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises(DataError, match="same"):
        Archive(tmp_path / "x.tar")


def test_damage_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(DataError, match="text"):
        Archive(tmp_path / "text")
    with pytest.raises(DataError, match="absent"):
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
    with pytest.raises(DataError, match=r"y.zip"), Archive(broken) as archive:
        archive.read("a")


def test_an_archive_inside_an_archive(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", {"1.txt": b"one", "2.txt": b"two"}).read_bytes()
    with Archive(write_tar(tmp_path / "outer.tar", {"inner.tar": inner})) as outer:
        with outer.open("inner.tar") as file, Archive(file, "inner.tar") as archive:
            assert archive.read("2.txt") == b"two"
        assert outer.read("inner.tar") == inner
