"""Parquet and .npz tables, each also with every kind of bad input."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from image_files import encode, noise, write_parquet
from maple.data.decoders import decode_image
from maple.data.sources import open_images, tables
from maple.data.sources.tables import Table
from maple.errors import DataError


def test_parquet_with_plain_bytes_and_names(tmp_path: Path, rng: np.random.Generator) -> None:
    encoded = [encode(noise(rng)) for _ in range(4)]
    path = write_parquet(
        tmp_path / "x.parquet", {"image": encoded, "label": [7, 2, 7, 2], "label_name": ["z", "b", "z", "b"]}
    )
    images = open_images(path)
    assert images.class_names == ("b", "z") and images.labels.tolist() == [1, 0, 1, 0]  # in the order of the labels
    assert images.files == ("x#0", "x#1", "x#2", "x#3")
    for i, content in enumerate(encoded):
        np.testing.assert_array_equal(images.read(i), decode_image(content, 8))
    stream = open_images(path, memory_limit=0)
    np.testing.assert_array_equal(stream.subset([3]).read(0), images.read(3))
    names_first = {"label_name": ["z", "b", "z", "b"], "image": encoded, "label": [7, 2, 7, 2]}
    assert open_images(write_parquet(tmp_path / "f.parquet", names_first)).labels.tolist() == [1, 0, 1, 0]
    only_names = write_parquet(tmp_path / "n.parquet", {"image": encoded, "label_name": ["z", "b", "z", "b"]})
    assert open_images(only_names).labels.tolist() == [1, 0, 1, 0]
    strings = write_parquet(tmp_path / "s.parquet", {"img": encoded, "labels": ["z", "b", "z", "b"]})
    assert open_images(strings).class_names == ("b", "z")


@pytest.mark.parametrize("shared", [2**26, 0])
def test_images_in_structs_are_read_in_any_order(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """From row groups with equal images, whose rows share values, and from row groups that are too large for it."""
    monkeypatch.setattr(tables, "_SHARED_VALUES", shared)
    encoded = [encode(noise(rng)) for _ in range(3)] * 4
    named = [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(encoded)]
    pq.write_table(pa.table({"image": named}), tmp_path / "x.parquet", row_group_size=5)
    table = Table(tmp_path / "x.parquet", "x")
    assert [table.item(i) for i in (11, 0, 6)] == [encoded[i] for i in (11, 0, 6)]
    assert list(table.items(7)) == [(f"{i}.png", encoded[i]) for i in range(7, 12)]


def test_parquet_as_hugging_face_writes_it(tmp_path: Path, rng: np.random.Generator) -> None:
    image = [{"bytes": encode(noise(rng)), "path": name} for name in ("a.png", None, "c.png")]
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    path = write_parquet(tmp_path / "test-0.parquet", {"image": image, "label": [1, 0, 1]}, metadata)
    images = open_images(path)
    assert images.class_names == ("cat", "dog", "cow") and images.labels.tolist() == [1, 0, 1]
    assert images.files == ("a.png", "test-0#1", "c.png")
    path = write_parquet(tmp_path / "bad.parquet", {"image": image, "label": [1, 0, 3]}, metadata)
    with pytest.raises(DataError, match=r"label 3 in row 2 of '.*bad\.parquet'"):
        open_images(path)


def test_numbers_without_names_keep_their_numeric_order(tmp_path: Path, rng: np.random.Generator) -> None:
    encoded = [encode(noise(rng)) for _ in range(3)]
    images = open_images(write_parquet(tmp_path / "x.parquet", {"image": encoded, "fine_label": [10, 9, 2]}))
    assert images.class_names == ("2", "9", "10") and images.labels.tolist() == [2, 1, 0]


def test_bad_parquet_files(tmp_path: Path, rng: np.random.Generator) -> None:
    image = [encode(noise(rng)), encode(noise(rng))]
    cases: list[tuple[dict[str, object], str]] = [
        ({"picture": image, "label": [0, 1]}, "picture, label"),
        ({"image": image, "class": [0, 1]}, "image, class"),
        ({"image": ["a.png", "b.png"], "label": [0, 1]}, "string"),
        ({"image": image, "label": [0, None]}, "row 1 .*label"),
        ({"image": image, "label": [0, -1]}, "label -1 in row 1"),
        ({"image": image, "label": [0.5, 1.0]}, "float64"),
        ({"image": image, "label": [[0], [1, 2]]}, "list"),
        ({"image": image, "label": [0, 0], "label_name": ["a", "b"]}, "label 0 .*'a'.*'b'"),
        ({"image": image, "label": [0, 1], "label_name": ["a", "a"]}, "'a'"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, r"x\.parquet"),
    ]
    for columns, words in cases:
        with pytest.raises(DataError, match=words):
            open_images(write_parquet(tmp_path / "x.parquet", columns))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"x\.parquet"):
        open_images(tmp_path / "x.parquet")
    path = write_parquet(tmp_path / "y.parquet", {"image": [image[0], None, b"junk"], "label": [0, 0, 0]})
    assert [entry.file for entry in open_images(path).skipped] == ["y#1", "y#2"]
    assert open_images(write_parquet(path, {"image": image}), labelled=False).labels.tolist() == [-1, -1]


@pytest.mark.parametrize("shared", [2**26, 2**18])
def test_a_small_file_cannot_repeat_a_large_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """A kilobyte of Parquet that unpacks to 200 MB: every row is the one value of its dictionary.

    Batches of large row groups, whose rows do not share values, have fewer rows.
    """
    monkeypatch.setattr(tables, "_SHARED_VALUES", shared)
    monkeypatch.setattr(tables, "_PLAIN_BYTES", 2**23)
    large = pa.array([bytes(2**20)], pa.binary())
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), large)
    for name, column in {
        "flat": rows,
        "nested": pa.StructArray.from_arrays([rows.cast(pa.binary()), pa.nulls(200, pa.string())], ["bytes", "path"]),
    }.items():
        path = tmp_path / f"{name}.parquet"
        how = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 2**30}
        pq.write_table(pa.table({"image": column}), path, **how)
        assert path.stat().st_size < 5000
        before, table = pa.total_allocated_bytes(), Table(path, name)
        for _, (_, item) in zip(range(3), table.items(0), strict=False):
            assert len(item) == 2**20 and pa.total_allocated_bytes() - before < 2**25
        assert len(table.item(190)) == 2**20 and pa.total_allocated_bytes() - before < 2**25


def test_more_rows_than_bytes_are_no_images(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": pa.nulls(1_000_000, pa.binary())}), path)
    with pytest.raises(DataError, match="rows in"):
        Table(path, "x")


@pytest.mark.parametrize("shared", [2**26, 0])
def test_names_of_any_length_are_refused(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    monkeypatch.setattr(tables, "_SHARED_VALUES", shared)
    encoded = [encode(noise(rng)) for _ in range(2)]
    names = pa.array(["a" * 20_000, "b"], pa.large_string())  # as other libraries write all texts
    long = write_parquet(tmp_path / "x.parquet", {"image": encoded, "label_name": names})
    paths = write_parquet(
        tmp_path / "y.parquet", {"image": [{"bytes": each, "path": "a" * 20_000} for each in encoded]}
    )
    for path, labelled in ((long, True), (paths, False)):
        with pytest.raises(DataError, match=path.name):
            open_images(path, labelled=labelled)


def test_names_may_be_of_any_bytes_or_numbers(tmp_path: Path, rng: np.random.Generator) -> None:
    encoded = pa.array([encode(noise(rng)) for _ in range(2)], pa.binary())
    broken = pa.StringArray.from_buffers(2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe"))
    for column in ("label", "label_name"):
        images = open_images(write_parquet(tmp_path / "x.parquet", {"image": encoded, column: broken}))
        assert images.class_names == ("\\xfe", "\\xff") and images.labels.tolist() == [1, 0]
    for paths, files in ((broken, ("\\xff", "\\xfe")), (pa.array([7, None]), ("7", "x#1"))):
        nested = pa.StructArray.from_arrays([encoded, paths], ["bytes", "path"])
        path = write_parquet(tmp_path / "x.parquet", {"image": nested})
        assert open_images(path, labelled=False).files == files


def test_names_of_columns_that_are_no_text_are_a_sentence(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"image": [encode(noise(rng))]})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"image", b"\xecmage"))
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_images(str(path), size=8)


def test_long_names_take_the_memory_of_each_once(tmp_path: Path) -> None:
    """Not that of each row: two names for 20,000 rows would take 800 MB as an array."""
    n = 20_000
    names = pa.DictionaryArray.from_arrays(pa.array(np.arange(n) % 2, pa.int32()), pa.array(["b" * 9_999, "a" * 9_999]))
    content = pa.array([bytes(str(i), "ascii") for i in range(n)], pa.binary())
    path = write_parquet(tmp_path / "x.parquet", {"image": content, "label_name": names, "label": np.arange(n) % 2})
    tracemalloc.start()
    try:
        table = Table(path, "x", labelled=True)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert table.labels.tolist() == [0, 1] * (n // 2) and table.class_names == ("b" * 9_999, "a" * 9_999)


def test_npz(tmp_path: Path, rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=[[1], [0], [1], [0]], class_names=["cat", "dog"])
    images = open_images(tmp_path / "a.npz")
    np.testing.assert_array_equal(images.pixels, pixels)
    assert images.labels.tolist() == [1, 0, 1, 0] and images.class_names == ("cat", "dog")
    np.savez(tmp_path / "b.npz", x=pixels[..., 0] / 255, y=np.array(["q", "p", "q", "p"]))
    images = open_images(tmp_path / "b.npz")
    np.testing.assert_array_equal(images.pixels, np.repeat(pixels[..., :1], 3, axis=3))
    assert images.class_names == ("p", "q")
    np.savez(tmp_path / "c.npz", x=pixels[:, :, :5].astype(np.uint16) * 257)
    images = open_images(tmp_path / "c.npz", labelled=False, size=8)
    assert images.pixels is not None and images.pixels.shape == (4, 8, 8, 3)
    np.testing.assert_array_equal(images.pixels[:, :, 1:6], pixels[:, :, :5])  # padded from 5 to 8 columns


def test_bad_npz_files(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    zeros = np.zeros((2, 8, 8, 3), np.uint8)
    cases: list[tuple[dict[str, object], str]] = [
        ({"pictures": zeros, "y": [0, 1]}, "'images'.*pictures, y"),
        ({"x": zeros}, "'labels'"),
        ({"x": np.zeros((2, 3, 8, 8), np.uint8), "y": [0, 1]}, r"\(2, 3, 8, 8\)"),
        ({"x": np.zeros((2, 8), np.uint8), "y": [0, 1]}, r"\(2, 8\)"),
        ({"x": np.zeros((2, 8, 8, 5), np.uint8), "y": [0, 1]}, r"\(2, 8, 8, 5\)"),
        ({"x": np.zeros((0, 8, 8), np.uint8), "y": []}, r"\(0, 8, 8, 1\)|\(0, 8, 8\)"),
        ({"x": zeros, "y": [0, 1, 1]}, "2 images.*3 labels"),
        ({"x": zeros, "y": [0, 2], "class_names": ["a", "b"]}, "label 2 in row 1"),
        ({"x": zeros, "y": [0, 1], "class_names": ["a", "a"]}, "'a'"),
        ({"x": zeros, "y": [0, 1], "class_names": [1, 2]}, "class_names"),
        ({"x": zeros - 1.0, "y": [0, 1]}, "x"),
        ({"x": zeros + np.nan, "y": [0, 1]}, "NaN"),
        ({"x": zeros, "y": [0.5, 1]}, "float64"),
        ({"x": np.array([None, None]), "y": [0, 1]}, r"x\.npz"),
        ({"x": zeros, "y": np.array([{}, {}])}, r"x\.npz"),
    ]
    for content, words in cases:
        np.savez(path, **content)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=words):
            open_images(path)
    path.write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match=r"x\.npz"):
        open_images(path)
    np.savez(path, x=zeros, y=[0, 1])
    with pytest.raises(DataError, match=r"x\.npz"):
        open_images(path, memory_limit=10)
    with pytest.raises(DataError, match="64 px"):
        open_images(path, memory_limit=1000, size=64)
