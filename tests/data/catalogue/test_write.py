"""Splits are written complete or not at all, one image at a time."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from image_files import encode, noise
from maple.data.catalogue import write
from maple.data.catalogue.describe import locate
from maple.data.catalogue.records import Row
from maple.errors import DataError
from published import Shop, tar


def test_what_a_killed_process_left_is_no_data_set(shop: Shop, rng: np.random.Generator) -> None:
    rest = shop.root / "imagenet_o" / ".test.parquet.part"
    rest.mkdir(parents=True)
    (rest / "test.parquet").write_bytes(b"half a file")
    assert locate("imagenet_o", shop.root) is None
    content = tar({"imagenet-o/n01/a.JPEG": encode(noise(rng), "JPEG")})
    shop.publish("imagenet_o", {"imagenet-o.tar": content}, {"test": 1})
    shop.get("imagenet_o")
    assert [path.name for path in (shop.root / "imagenet_o").iterdir()] == ["test.parquet"]
    assert locate("imagenet_o", shop.root) == shop.root / "imagenet_o"


def test_conversion_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as they come: a row group is full long before the last row was made."""
    monkeypatch.setattr(write, "_ROW_GROUP_BYTES", 1000)
    seen: list[int] = []
    writes: list[int] = []
    make_table = write._table
    monkeypatch.setattr(write, "_table", lambda group: writes.append(len(seen)) or make_table(group))

    def rows():
        for i in range(50):
            seen.append(i)
            yield Row(bytes(100), i, str(i))

    path = write.write_parquet(tmp_path / "set" / "train", rows())
    assert writes == [10, 20, 30, 40, 50] and pq.ParquetFile(path).num_row_groups == 5
    assert pq.read_table(path)["label"].to_pylist() == list(range(50))


def test_folders_take_plain_names_only(tmp_path: Path) -> None:
    for bad in ("..", "a/../../b", "../a.png", "", ".a", "a\\b"):
        for row in (Row(b"x", 0, bad, "a.png"), Row(b"x", 0, "a", bad)):
            with pytest.raises(DataError, match=re.escape(f"'{bad}'")):
                write.write_folder(tmp_path / "set" / "train", iter([row]))
    assert not list(tmp_path.iterdir())
