"""Sets of images: in memory or from disk, in part, under other class names, and with files that are broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_files import arrays, png_of_size, write_folder
from maple.data.decoders import decode_image
from maple.data.image_set import (
    MEMORY_LIMIT,
    ImageSet,
    channel_statistics,
    default_augment,
    index_labels,
    no_labels,
    read_pixels,
)
from maple.data.sources import open_images
from maple.errors import DataError


def test_subset_takes_integers_or_a_mask() -> None:
    images = arrays(6, 3)
    for chosen in ([4, 1], np.array([4, 1])):
        part = images.subset(chosen)
        assert part.labels.tolist() == [1, 1] and part.files == ("arrays#4", "arrays#1")
        np.testing.assert_array_equal(part.pixels, images.pixels[[4, 1]])  # type: ignore[index]
    assert images.subset(images.labels == 2).labels.tolist() == [2, 2]
    assert len(images.subset([])) == 0


def test_classes_are_matched_by_name() -> None:
    images = ImageSet.from_arrays(np.zeros((3, 8, 8), np.uint8), ["b", "a", "b"])
    assert images.with_class_names(["c", "b", "a"]).labels.tolist() == [1, 2, 1]
    with pytest.raises(DataError, match=r"'a'.*'arrays'"):
        images.with_class_names(["b", "c"])
    unused = images.subset([0, 2])
    assert unused.with_class_names(["b"]).labels.tolist() == [0, 0]
    unknown = ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8))
    assert unknown.with_class_names(["b"]).labels.tolist() == [-1, -1]


def test_array_values_are_scaled_alike_for_all_images() -> None:
    values = np.zeros((2, 8, 8), np.uint16)
    values[0], values[1] = 100, 4095
    images = ImageSet.from_arrays(values)
    assert images.read(0).max() == 6 and images.read(1).max() == 255


def test_broken_files_are_skipped_and_counted(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 4, "b": 4}, rng)
    (folder / "a" / "001.png").write_bytes(b"broken")
    (folder / "b" / "003.png").write_bytes(png_of_size(20_000, 3))
    for memory_limit in (MEMORY_LIMIT, 0):
        images = open_images(folder, memory_limit=memory_limit)
        assert len(images) == 6 and images.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert [Path(entry.file).name for entry in images.skipped] == ["001.png", "003.png"]
        assert "not an image" in images.skipped[0].reason and "20000" in images.skipped[1].reason
        np.testing.assert_array_equal(images.read(1), decode_image(folder / "a" / "002.png", 8))
    for i in range(4):
        (folder / "b" / f"{i:03}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="class 'b' of 'set'"):
        open_images(folder)
    for i in range(4):
        (folder / "a" / f"{i:03}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"'set'.*000\.png"):
        open_images(folder)


def test_streaming_equals_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 5, "b": 4}, rng, size=(40, 30))
    memory = open_images(folder)
    stream = open_images(folder, memory_limit=9 * 40 * 40 * 3 - 1)
    assert memory.pixels is not None and stream.pixels is None and "from disk" in repr(stream)
    assert open_images(folder, memory_limit=9 * 40 * 40 * 3).pixels is not None
    assert stream.keys.tolist() == memory.keys.tolist() and stream.size == memory.size == 40
    part = stream.subset([7, 2])
    for i, j in enumerate([7, 2]):
        np.testing.assert_array_equal(part.read(i), memory.read(j))
        assert part.files[i] == memory.files[j]
    Path(stream.files[3]).unlink()
    with pytest.raises(DataError, match=r"003\.png"):
        stream.read(3)


def test_progress_counts_up_to_all_images(tmp_path: Path, rng: np.random.Generator) -> None:
    seen: list[tuple[int, int]] = []
    open_images(write_folder(tmp_path / "set", {"a": 150}, rng), progress=lambda *counts: seen.append(counts))
    assert seen == [(128, 150), (150, 150)]


@pytest.mark.parametrize(
    ("name", "augment"),
    [
        ("digits", "crop"),
        ("svhn/train", "crop"),
        ("cifar10/train", "crop,flip"),
        ("simulated-diatoms", "crop,flip-both"),
        ("UDE_Diatoms_2024/train", "crop,flip-both"),
        ("zooplankton", "crop,flip-both"),
        ("green-algae", "crop,flip-both"),
        ("microorganisms", "crop,flip-both"),
    ],
)
def test_augmentation_follows_from_the_name(name: str, augment: str) -> None:
    assert default_augment(name) == augment


def test_channel_statistics() -> None:
    images = arrays(20, 2)
    assert images.pixels is not None
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, (images.pixels / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(std, (images.pixels / 255).std((0, 1, 2)))
    with pytest.raises(DataError, match="plain"):
        channel_statistics(ImageSet.from_arrays(np.full((3, 8, 8), 7, np.uint8), name="plain"))


def test_batches_of_rows_in_memory_and_from_disk(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 5, "b": 4}, rng)
    memory, stream = open_images(folder), open_images(folder, memory_limit=0)
    plan = [np.array([8, 2, 2]), np.array([0])]
    for images, workers in ((memory, 0), (stream, 0), (stream, 1)):
        for rows, pixels in zip(plan, read_pixels(images, plan, workers), strict=True):
            np.testing.assert_array_equal(pixels, memory.pixels[rows])  # type: ignore[index]


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_numbers_become_positions_in_their_numeric_order(values: list[int]) -> None:
    labels, names = index_labels(np.array(values), None, "x")
    assert names == tuple(str(value) for value in sorted(set(values)))
    assert [names[label] for label in labels] == [str(value) for value in values]


@given(st.lists(st.sampled_from("abcd"), min_size=1))
def test_names_become_positions_among_those_declared(values: list[str]) -> None:
    labels, names = index_labels(np.array(values), ["d", "c", "b", "a"], "x")
    assert names == ("d", "c", "b", "a") and [names[label] for label in labels] == values


def test_labels_that_cannot_be_used_name_their_source() -> None:
    for values, declared in (
        (np.array([0, 3]), ["a", "b"]),
        (np.array([0, -1]), None),
        (np.array(["a", "e"]), ["a", "b"]),
        (np.array([0, 1]), ["a", "a"]),
        (np.array([0.5]), None),
        (np.zeros((2, 2), int), None),
    ):
        with pytest.raises(DataError, match="pets"):
            index_labels(values, declared, "pets")


def test_images_without_labels() -> None:
    labels, names = no_labels(3)
    assert labels.tolist() == [-1] * 3 and names == ()
