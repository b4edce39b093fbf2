"""Splits of sources: their own files first, never two copies apart, every class in every split."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from image_files import arrays, write_folder
from maple.data.image_set import ImageSet
from maple.data.options import DataOptions
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError


def test_splits_do_not_depend_on_names_or_listing_order(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "set", {"a": 20, "b": 20}, rng)
    before = [set(part.keys) for part in vars(load_splits(folder)).values() if isinstance(part, ImageSet)]
    listed = Path.iterdir

    def shuffled(path: Path) -> list[Path]:
        entries = list(listed(path))
        random.Random(1).shuffle(entries)
        return entries

    monkeypatch.setattr(Path, "iterdir", shuffled)
    files = open_images(folder).files
    assert list(files) == sorted(files)
    for name in "ab":
        for path in sorted((folder / name).glob("*.png")):
            path.rename(path.with_name(f"{rng.integers(2**40)}.png"))
    after = [set(part.keys) for part in vars(load_splits(folder)).values() if isinstance(part, ImageSet)]
    assert before == after and len(before) == 4


def test_a_class_made_of_copies_of_another_is_named(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(np.concatenate([pixels, pixels[:1]]), ["a"] * 8 + ["b"])
    with pytest.raises(DataError, match="class 'b'"):
        load_splits(images)


def test_load_splits_of_a_plain_source() -> None:
    splits = load_splits(arrays(200, 4), DataOptions(splits=(0.5, 0.2, 0.2, 0.1)))
    sizes = [len(part) for part in (splits.train, splits.validation, splits.calibration, splits.test)]
    assert sizes == [100, 40, 40, 20] and splits.class_names == ("0", "1", "2", "3")
    assert np.bincount(splits.test.labels).tolist() == [5] * 4
    without_test = load_splits(arrays(200, 4), DataOptions(splits=(0.8, 0.1, 0.1, 0.0)))
    assert len(without_test.test) == 0 and len(without_test.train) == 160


def test_a_named_data_set_keeps_its_test_file(root: Path) -> None:
    for source in ("pets", root / "pets"):
        splits = load_splits(source, data_root=root)
        assert splits.test.name == "pets/test" and len(splits.test) == 12
        assert [len(part) for part in (splits.train, splits.validation, splits.calibration)] == [32, 4, 4]
        assert set(splits.test.keys).isdisjoint(splits.train.keys)
    assert [len(load_splits("pets/train", data_root=root).test)] == [4]  # a file alone is cut four ways
    assert [len(load_splits("birds", data_root=root).train)] == [14]
    by_name = load_splits("birds", data_root=root, test="pets", calibration="pets/train")
    assert by_name.test.name == "pets/test" and by_name.calibration.name == "pets/train"
    with pytest.raises(UsageError, match=r"'pets'.*'validation'"):
        load_splits("birds", data_root=root, validation="pets")
    given_test = load_splits("pets", data_root=root, test=root / "birds" / "val.parquet")
    assert given_test.test.name == "birds/val"


def test_folders_called_train_and_test_are_splits_not_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    write_folder(tmp_path / "set" / "train", {"a": 10, "b": 10}, rng)
    write_folder(tmp_path / "set" / "val", {"a": 3, "b": 2}, rng)
    write_folder(tmp_path / "set" / "test", {"a": 4, "b": 3}, rng)
    splits = load_splits(tmp_path / "set", DataOptions(splits=(0.8, 0.0, 0.2, 0.0)))
    assert splits.class_names == ("a", "b")
    sizes = [len(part) for part in (splits.train, splits.validation, splits.calibration, splits.test)]
    assert sizes == [16, 5, 4, 7]
    assert open_images(tmp_path / "set").name == "set/test"


def test_an_image_in_several_sources_stays_in_the_most_precious() -> None:
    whole, later = arrays(80, 2), arrays(80, 2, seed=1)
    test = ImageSet.from_arrays(
        np.concatenate([whole.pixels[:6], later.pixels[:6]]),  # type: ignore[index]
        np.arange(12) % 2,
        name="late",
    )
    splits = load_splits(whole, test=test)
    assert len(splits.test) == 12 and len(splits.train) + len(splits.validation) + len(splits.calibration) == 74
    assert [entry.file for entry in splits.skipped] == [f"arrays#{i}" for i in range(6)]
    with pytest.raises(DataError, match=r"train.*'arrays'"):
        load_splits(whole, test=whole)


def test_classes_of_given_sources_must_fit() -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    whole = ImageSet.from_arrays(pixels[:40], np.array(["a", "b"])[np.arange(40) % 2])
    other = ImageSet.from_arrays(pixels[40:], np.array(["b", "a"])[np.arange(20) % 2], name="other")
    splits = load_splits(whole, test=other)
    assert splits.test.labels.tolist() == other.labels.tolist()
    for role in ("validation", "calibration", "test"):
        one = other.subset(other.labels == 1)
        with pytest.raises(DataError, match=f"'a'.*{role}.*'other'"):
            load_splits(whole, **{role: one})
        strange = ImageSet.from_arrays(pixels[40:], np.array(["a", "c"])[np.arange(20) % 2], name="strange")
        with pytest.raises(DataError, match=f"{role}.*'c'.*'strange'"):
            load_splits(whole, **{role: strange})


def test_too_few_classes_or_images() -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    one = ImageSet.from_arrays(pixels, ["a"] * 30)
    with pytest.raises(DataError, match="'a'"):
        load_splits(one)
    small = ImageSet.from_arrays(pixels, ["a"] * 14 + ["b"] * 15 + ["c"])
    with pytest.raises(DataError, match=r"class 'c'.*--min-images 4"):
        load_splits(small)
    splits = load_splits(small, DataOptions(min_images=4))
    assert splits.left_out == ("c",) and splits.class_names == ("a", "b") and set(splits.train.labels) == {0, 1}
    test = ImageSet.from_arrays(pixels[:20][:, ::-1], (["a", "b", "c", "c"] * 5))
    assert len(load_splits(small, DataOptions(min_images=4), test=test).test) == 10  # left out there too
    with pytest.raises(DataError, match="--min-images"):
        load_splits(small, DataOptions(min_images=15))
    copies = ImageSet.from_arrays(pixels[[0] * 9 + list(range(10, 20))], ["a"] * 9 + ["b"] * 10)
    with pytest.raises(DataError, match="class 'a'"):
        load_splits(copies)
    assert load_splits(small.subset(small.labels < 2), DataOptions(min_images=14)).left_out == ("c",)
    with pytest.raises(DataError, match="arrays"):
        load_splits(ImageSet.from_arrays(pixels))
    absent = ImageSet.from_arrays(pixels, np.arange(30) % 2, ["a", "b", "c"])
    with pytest.raises(DataError, match="class 'c'"):
        load_splits(absent)
    assert load_splits(absent, DataOptions(min_images=1)).left_out == ("c",)


def test_classes_are_left_out_by_name_and_kept_as_unknown() -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    names = ["a", "b", "c", "d"]
    images = ImageSet.from_arrays(pixels[:40], [names[i % 4] for i in range(40)])
    splits = load_splits(images, DataOptions(leave_out=("d", "b")))
    assert splits.class_names == ("a", "c") and splits.left_out == ("b", "d")
    unknown = splits.left_out_images
    assert unknown is not None and unknown.class_names == ("b", "d")
    np.testing.assert_array_equal(unknown.pixels, pixels[:40][np.arange(40) % 2 == 1])
    np.testing.assert_array_equal(unknown.labels, np.arange(20) % 2)
    kept = np.concatenate([splits.train.keys, splits.validation.keys, splits.calibration.keys, splits.test.keys])
    assert not np.isin(kept, unknown.keys).any() and len(kept) == 20
    test = ImageSet.from_arrays(pixels[40:], [names[i % 4] for i in range(20)])  # where there is a test file, of that
    unknown = load_splits(images, DataOptions(leave_out=("b",)), test=test).left_out_images
    assert unknown is not None and len(unknown) == 5 and np.isin(unknown.keys, test.keys).all()
    assert load_splits(images).left_out_images is None
    with pytest.raises(UsageError, match=r"'bb'.*'b'"):
        load_splits(images, DataOptions(leave_out=("bb",)))
    with pytest.raises(DataError, match="arrays"):
        load_splits(images, DataOptions(leave_out=("a", "b", "c")))


def test_skipped_files_of_all_sources_are_reported(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 10, "b": 10}, rng)
    other = write_folder(tmp_path / "other", {"a": 3, "b": 3}, rng)
    (folder / "a" / "004.png").write_bytes(b"x")
    (other / "b" / "001.png").write_bytes(b"x")
    splits = load_splits(folder, test=other)
    assert [Path(entry.file).name for entry in splits.skipped] == ["004.png", "001.png"]
    assert len(splits.test) == 5
