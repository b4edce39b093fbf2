"""Tiny originals of data sets of the catalogue, published in a folder."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from maple.data.catalogue.get import get_data_set
from maple.data.catalogue.table import CATALOGUE, Checksum


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


class Shop:
    """Data sets of the catalogue with tiny originals, published in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root = folder / "published", folder / "data"
        self.folder.mkdir()
        self._monkeypatch = monkeypatch

    def publish(self, name: str, files: dict[str, bytes], images: dict[str, int], checksums: bool = True) -> None:
        """Replace the originals of a data set, and say how many images each split then has; others are left out."""
        data_set = CATALOGUE[name]
        for file, content in files.items():
            (self.folder / file).write_bytes(content)
        originals = tuple(
            replace(
                original,
                url=original.url and (self.folder / original.name).as_uri(),
                expected=Checksum(md5=hashlib.md5(files[original.name]).hexdigest()) if checksums else Checksum(),
            )
            for original in data_set.originals
        )
        splits = tuple(replace(s, images=images[s.name]) for s in data_set.splits if s.name in images)
        self._monkeypatch.setitem(CATALOGUE, name, replace(data_set, originals=originals, splits=splits))

    def put_by_hand(self, name: str, *files: str) -> None:
        for file in files:
            path = self.root / ".originals" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((self.folder / file).read_bytes())

    def get(self, name: str) -> list[Path]:
        return get_data_set(name, self.root)

    def read(self, source: str) -> tuple[list[np.ndarray], list[int], list[str]]:
        """Pixels, labels and names of a converted split, from the Parquet file itself."""
        table = pq.read_table(self.root / f"{source}.parquet")
        assert [str(column.type) for column in table.columns] == ["binary", "int64", "string"]
        pixels = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in table["image"].to_pylist()]
        return pixels, table["label"].to_pylist(), table["label_name"].to_pylist()


def cifar_records(rng: np.random.Generator, n: int, coarse: bool) -> tuple[bytes, np.ndarray, list[int]]:
    """Records as Toronto writes them, with the images (n, 32, 32, 3) and labels inside."""
    pixels = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    labels = [int(label) for label in rng.integers(0, 100 if coarse else 10, n)]
    records = b""
    for image, label in zip(pixels, labels):
        planes = b"".join(image[:, :, channel].tobytes() for channel in range(3))
        records += (bytes([7]) if coarse else b"") + bytes([label]) + planes
    return records, pixels, labels
