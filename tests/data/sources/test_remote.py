"""Images by address: pyarrow's mock file system, the local one as ``file://``, and one of fsspec."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from PIL import Image

from maple.data.decode import Decoding
from maple.data.sources import open_images, open_source
from maple.data.sources.remote import GONE, Place, RemoteFiles, is_remote, list_remote
from maple.data.sources.tables import Tables
from maple.data.stream import decode_stream
from maple.errors import DataError, RunError, UsageError
from maple.types import Skipped


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(n: int, labels: list[str] | None = None) -> pa.Table:
    columns: dict = {"image": pa.array([png(10 * i) for i in range(n)], pa.binary())}
    return pa.table(columns | ({"label_name": labels} if labels else {}))


def fill(folder: Path) -> Path:
    for name in ("b/2.png", "a/1.png", "a/.hidden.png", "_temporary/3.png", "notes.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(len(name)))
    (folder / "b" / "broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("scheme", ["reference", "nowhere", "zip", "dir", "filecache", "data", "github"])
def test_addresses_that_cannot_be_opened_are_a_sentence(scheme: str, tmp_path: Path) -> None:
    """Files of references may hold templates, which run code; other schemes need more than an address."""
    (tmp_path / "x").write_text('{"version": 1, "templates": {"a": "{{ 1 }}"}, "refs": {"0.png": "a"}}')
    with pytest.raises((UsageError, DataError), match=scheme):
        open_images(f"{scheme}://{tmp_path}/x", labelled=False)


@pytest.mark.parametrize("chain", ["dir://::reference::{}", "zip://0.png::reference://::file://{}"])
def test_files_of_references_are_refused_inside_other_systems_too(chain: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "x").write_text('{"version": 1, "refs": {"0.png": ["/etc/hostname"]}}')
    with pytest.raises(UsageError, match="templates"):
        open_images(chain.format(tmp_path / "x"), labelled=False)


@pytest.fixture
def mock():
    """pyarrow's file system in memory, with images and a Parquet data set."""
    found = pyarrow.fs._MockFileSystem()
    found.create_dir("bucket/slides", recursive=True)
    found.create_dir("bucket/tables", recursive=True)
    for i in range(40):
        with found.open_output_stream(f"bucket/slides/{i:02}.png") as file:
            file.write(png(5 * i))
    for i, n in enumerate((3, 0, 2)):
        with found.open_output_stream(f"bucket/tables/part-{i}.parquet") as file:
            pq.write_table(table(n), file)
    return found


def test_addresses_are_told_from_paths():
    assert is_remote("s3://bucket") and is_remote("hdfs://namenode:8020/x")
    assert not is_remote("slides") and not is_remote(Path("s3:/x")) and not is_remote("corrupted:digits")


def test_images_of_a_mock_file_system_are_read_in_order(mock):
    files = list_remote(Place("bucket/slides", mock))
    assert isinstance(files, RemoteFiles) and len(files) == 40
    (found,) = decode_stream(files, Decoding(8), chunk_size=100)
    assert found.files == [f"bucket/slides/{i:02}.png" for i in range(40)]
    assert found.pixels[:, 0, 0, 0].tolist() == [5 * i for i in range(40)]
    assert [name for name, _ in files.only([7, 3])[0].items(0)] == ["bucket/slides/07.png", "bucket/slides/03.png"]
    before = files.digest()
    with mock.open_output_stream("bucket/slides/03.png") as file:
        file.write(png(1) + b"more")
    assert list_remote(Place("bucket/slides", mock)).digest() != before
    mock.delete_file("bucket/slides/04.png")  # a source that vanishes
    (left,) = decode_stream(files, Decoding(8), chunk_size=100)
    assert left.skipped == [Skipped("bucket/slides/04.png", GONE)]
    assert [files.is_gone(i) for i in (3, 4)] == [False, True]


def test_parquet_files_of_a_mock_file_system_are_one_table(mock):
    found = list_remote(Place("bucket/tables", mock))
    rows = Tables(found, "tables")
    assert len(rows) == 5 and len([*rows.items(3)]) == 2
    assert rows.item(4) == png(10) and [item for _, item in rows.items(0)][4] == png(10)
    assert len([*rows.items(5)]) == 0
    for wanted in ([3, 4], [1], [4, 0, 2]):  # as they travel: without the files that hold none of them
        some, positions = rows.only(wanted)
        assert [some.item(i) for i in positions] == [rows.item(i) for i in wanted]
        assert next(some.items(positions[0])) == next(rows.items(wanted[0]))
    assert len(rows.only([3, 4])[0].parts) < len(rows.parts)


def test_addresses_are_opened_wherever_they_travel(tmp_path):
    source = open_source([f"file://{fill(tmp_path / 'in put')}"], size=8)
    again = pickle.loads(pickle.dumps(source))  # noqa: S301
    for files in (source, again):
        assert [Path(name).name for name, _ in files.items(0)] == ["1.png", "2.png", "broken.png"]
        assert all(is_remote(name) for name, _ in files.items(0))
    assert [Path(each.file).name for each in source.skipped] == ["notes.txt"]
    pattern = open_source([f"file://{tmp_path}/in put/b/[0-9]*.png"], size=8)
    assert [Path(name).name for name, _ in pattern.items(0)] == ["2.png"]


def test_other_schemes_are_opened_by_fsspec():
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/archive/1.png", png(3))
    files = open_source(["memory://archive"], size=8)
    assert len(files) == 1 and files.item(0) == png(3)


def test_files_at_the_root_of_an_archive_keep_their_names(tmp_path: Path) -> None:
    """Whatever they begin with, and however short they are."""
    pytest.importorskip("fsspec")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for value, name in enumerate(("-rf.png", "1.png", "=cmd.png", ".hidden.png")):
            archive.writestr(name, png(value))
    (found,) = decode_stream(open_source([f"zip://::{tmp_path}/a.zip"], size=8), Decoding(8), chunk_size=9)
    assert found.files == ["zip://-rf.png", "zip://1.png", "zip://=cmd.png"]
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("address", "kind", "named"), [
    ("file:///no/such/place", UsageError, "/no/such/place"),
    ("nothing://x/y", UsageError, "nothing://x/y"),
    ("file:///proc/self/fdinfo", DataError, "no images"),
])  # fmt: skip
def test_addresses_without_images_are_named(address, kind, named):
    with pytest.raises(kind, match=named):
        open_source([address], size=8)


def test_a_parquet_data_set_has_the_labels_of_its_files(tmp_path):
    for i, labels in enumerate((["cat", "dog", "cat"], ["eel", "cat"])):
        pq.write_table(table(len(labels), labels), tmp_path / f"part-{i:06}.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    for source in (tmp_path, f"file://{tmp_path}"):
        images = open_images(source, size=8)
        assert images.class_names == ("cat", "dog", "eel") and images.labels.tolist() == [0, 1, 0, 2, 0]
        assert len(open_source([source], size=8)) == 5
    pq.write_table(table(2, ["cat", "dog"]), tmp_path / "test.parquet")  # now they are splits
    assert len(open_images(tmp_path, size=8)) == 2


def test_image_files_by_address_have_no_labels(tmp_path):
    with pytest.raises(UsageError, match="no labels"):
        open_images(f"file://{fill(tmp_path)}", size=8)


def test_a_file_that_cannot_be_read_now_stops_the_command(tmp_path):
    """Its image is not to blame: it is not skipped."""
    files = open_source([f"file://{fill(tmp_path)}"], size=8)
    (tmp_path / "a" / "1.png").unlink()
    (tmp_path / "a" / "1.png").mkdir()
    with pytest.raises(RunError, match=r"1\.png"):
        list(files.items(0))
