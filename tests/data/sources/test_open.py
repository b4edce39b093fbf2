"""Opening sources: sizes, sets that are open, real files."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from image_files import arrays
from maple.data.sources import open_images
from maple.errors import UsageError


@pytest.mark.parametrize("size", [0, -1, 5000, "big", 2.5])
def test_sizes_that_cannot_be_asked_for(size: object) -> None:
    with pytest.raises(UsageError, match="size"):
        open_images("digits", size=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'pad'"):
        open_images("digits", fit="padd")  # type: ignore[arg-type]


def test_an_open_set_is_taken_as_it_is() -> None:
    images = arrays(4, 2)
    assert open_images(images) is images and open_images(images, size=8) is images
    assert open_images(images, labelled=False).labels.tolist() == [-1] * 4
    with pytest.raises(UsageError, match=r"8 px.*16 px"):
        open_images(images, size=16)


@pytest.mark.shared
def test_cifar10_test_file(shared_dir: Path) -> None:
    images = open_images("cifar10", data_root=shared_dir / "data")
    assert len(images) == 10_000 and images.size == 32 and images.name == "cifar10/test" and not images.skipped
    assert images.class_names[:3] == ("airplane", "automobile", "bird")
    assert images.labels[:5].tolist() == [3, 8, 8, 0, 6] and np.bincount(images.labels).tolist() == [1000] * 10
    assert images.read(0)[0, :2].tolist() == [[158, 112, 49], [159, 111, 47]]
    assert len(set(images.keys)) == 10_000


def first_rows(path: Path, rows: int, folder: Path) -> Path:
    """The first rows of a real file, under the name of its data set."""
    small = folder / path.parent.name / path.name
    small.parent.mkdir(exist_ok=True)
    with pq.ParquetFile(path) as file:
        pq.write_table(pa.Table.from_batches([next(file.iter_batches(rows))]), small)
    return small


@pytest.mark.shared
def test_tiny_imagenet_holds_grey_images(shared_dir: Path, tmp_path: Path) -> None:
    path = first_rows(shared_dir / "data" / "tiny_imagenet" / "val.parquet", 300, tmp_path)
    images = open_images(path)
    assert images.size == 64 and len(images) == 300 and not images.skipped
    encoded = pq.read_table(path)["image"].to_pylist()
    grey = [i for i, content in enumerate(encoded) if Image.open(io.BytesIO(content)).mode == "L"]
    assert grey
    for i in grey:
        np.testing.assert_array_equal(images.read(i)[..., 0], images.read(i)[..., 2])
    half = open_images(path, size=32)
    colour = next(i for i in range(300) if i not in grey)
    expected = Image.open(io.BytesIO(encoded[colour])).resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(half.read(colour), np.asarray(expected))


@pytest.mark.shared
def test_plankton_is_padded_with_its_background(shared_dir: Path, tmp_path: Path) -> None:
    path = first_rows(shared_dir / "data" / "plankton_ndsb" / "train.parquet", 200, tmp_path)
    images = open_images(path)
    assert images.augment == "crop,flip-both" and images.size == 64 and not images.skipped
    encoded = pq.read_table(path)["image"].to_pylist()
    wide = [i for i, e in enumerate(encoded) if (s := Image.open(io.BytesIO(e)).size)[0] > 1.5 * s[1]]
    assert wide
    corners = np.array([images.read(i)[[0, 0, -1, -1], [0, -1, 0, -1]] for i in wide])
    assert np.median(corners) > 240  # white, as the background is


def test_digits_are_not_flipped() -> None:
    digits = open_images("digits")
    assert digits.class_names == tuple("0123456789") and digits.augment == "crop"
    assert digits.pixels is not None and digits.pixels.max() == 255
    assert open_images("digits", size=16).read(0).shape == (16, 16, 3)


def test_simulated_diatoms_and_their_parameters() -> None:
    images = open_images("simulated-diatoms?n=40&size=24&seed=3&taxa=4")
    assert len(images) == 40 and images.size == 24 and len(images.class_names) == 4
    assert images.augment == "crop,flip-both" and images.name == "simulated-diatoms"
    again = open_images("simulated-diatoms?n=40&size=24&seed=3&taxa=4")
    np.testing.assert_array_equal(images.pixels, again.pixels)
    assert (open_images("simulated-diatoms?n=40&size=24&seed=4&taxa=4").keys != images.keys).all()
    assert open_images("simulated-diatoms/near?n=5").name == "simulated-diatoms/near"
    assert open_images("simulated-diatoms/far?n=5", size=16).size == 16
    assert open_images("simulated-diatoms?n=5&size=24", size=16).size == 16


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("simulated-diatoms?m=4", "'m'"),
        ("simulated-diatoms?sed=4", "'seed'"),
        ("simulated-diatoms?n=0", "n=0"),
        ("simulated-diatoms?n=-5", "n=-5"),
        ("simulated-diatoms?n=1e3", "n=1e3"),
        ("simulated-diatoms?n=99999999999999999999999", "n=99999999999999999999999"),
        ("simulated-diatoms?size=4", "size=4"),
        ("simulated-diatoms?size=100000", "size=100000"),
        ("simulated-diatoms?n=10000000", re.escape("simulated-diatoms?n=10000000")),
        ("simulated-diatoms?n", "n="),
        ("simulated-diatoms/nearer", "'simulated-diatoms/near'"),
        ("digits?n=3", "digits"),
    ],
)
def test_parameters_that_cannot_be_used(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_images(source)
