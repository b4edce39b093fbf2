"""Image files: class folders, folders, globs, lists of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from image_files import encode, noise, write_folder, write_parquet
from maple.data.decoders import decode_image
from maple.data.sources import open_images
from maple.errors import DataError, UsageError


def test_names_that_a_spreadsheet_would_compute_stay_paths(
    tmp_path: Path, rng: np.random.Generator, monkeypatch
) -> None:
    """In CSV, too, a cell that begins with one of these characters is a formula, and an argument an option."""
    names = ("=cmd.png", "+1.png", "-rf.png", "@sum.png", "plain.png")
    for name in names:
        noise(rng).save(tmp_path / name)
    (tmp_path / "=note.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    for source in (".", "*", list(names)):
        images = open_images(source, labelled=False)
        assert sorted(images.files) == sorted([*(f"./{name}" for name in names[:4]), "plain.png"])
    for source in (".", "*"):
        assert [each.file for each in open_images(source, labelled=False).skipped] == ["./=note.txt"]
    np.testing.assert_array_equal(open_images(["=cmd.png"], labelled=False).read(0), decode_image("=cmd.png", 8))
    write_parquet(tmp_path / "=x.parquet", {"image": [encode(noise(rng))]})
    assert open_images("=x.parquet", labelled=False).files[0].startswith("./=x")


def test_folder_with_class_subfolders(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"b": 2, "a": 3}, rng)
    (folder / "a" / "deeper").mkdir()
    noise(rng).save(folder / "a" / "deeper" / "x.JPG")
    noise(rng).save(folder / "a" / ".hidden.png")
    (folder / ".cache").mkdir()
    noise(rng).save(folder / ".cache" / "x.png")
    (folder / "b" / "notes.txt").write_text("not an image")
    noise(rng).save(folder / "overview.png")
    images = open_images(folder)
    assert images.class_names == ("a", "b")
    assert images.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert [Path(file).name for file in images.files] == [
        "000.png",
        "001.png",
        "002.png",
        "x.JPG",
        "000.png",
        "001.png",
    ]
    assert images.name == "set" and images.size == 8 and images.augment == "crop,flip"
    assert [Path(entry.file).name for entry in images.skipped] == ["notes.txt", "overview.png"]
    for i, file in enumerate(images.files):
        np.testing.assert_array_equal(images.read(i), decode_image(file, 8))


@pytest.mark.parametrize("labelled", [True, False])
def test_nothing_in_a_folder_disappears(tmp_path: Path, rng: np.random.Generator, labelled: bool) -> None:
    """Read + skipped = found, with a reason; only hidden files and those of the system do not count."""
    folder = write_folder(tmp_path / "set", {"a": 2, "b": 2}, rng)
    for name in ("a/photo.HEIC", "a/x.avif", "b/notes.txt", "a/deeper/y.cr2", "README"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    for name in ("a/.DS_Store", "b/Thumbs.db", "desktop.ini"):
        (folder / name).write_bytes(b"x")
    (folder / "a" / "link").symlink_to(folder / "b", target_is_directory=True)
    (folder / "b" / "broken.png").write_bytes(b"x")
    images = open_images(folder, labelled=labelled)
    reasons = {Path(each.file).relative_to(folder).as_posix(): each.reason for each in images.skipped}
    assert len(images) == 4 and sorted(reasons) == [
        "README", "a/deeper/y.cr2", "a/link", "a/photo.HEIC", "a/x.avif", "b/broken.png", "b/notes.txt",
    ]  # fmt: skip
    assert "JPEG" in reasons["a/photo.HEIC"] and "JPEG" in reasons["a/x.avif"] and "link" in reasons["a/link"]


def test_other_files_of_a_glob_and_heic_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 2}, rng)
    (folder / "a" / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    images = open_images(str(folder / "a" / "*"), labelled=False)
    assert len(images) == 2 and [Path(each.file).name for each in images.skipped] == ["photo.heic"]
    with pytest.raises(DataError, match=r"photo\.heic.*HEIC.*JPEG"):
        open_images(folder / "a" / "photo.heic", labelled=False)
    (folder / "b").mkdir()
    (folder / "b" / "photo.heic").write_bytes(b"x")
    for source, labelled in ((folder, True), (folder / "b", False), (str(folder / "b" / "*"), False)):
        with pytest.raises(DataError, match=r"photo\.heic.*JPEG"):
            open_images(source, labelled=labelled)


def test_links_to_folders_cannot_form_a_ring(tmp_path: Path, rng: np.random.Generator) -> None:
    """Those to nowhere, or to themselves, are listed."""
    folder = write_folder(tmp_path / "set", {"a": 2}, rng)
    (folder / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "a" / "ring.png").symlink_to("ring.png")
    (folder / "a" / "again").symlink_to(folder, target_is_directory=True)
    (folder / "b").symlink_to(folder / "a", target_is_directory=True)  # a class may itself be a link
    images = open_images(folder)
    assert images.labels.tolist() == [0, 0, 1, 1]
    broken = {Path(each.file).name for each in images.skipped if "link" in each.reason}
    assert broken == {"gone.png", "ring.png", "again"}


def test_folders_without_usable_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="empty"):
        open_images(empty)
    with pytest.raises(DataError, match="empty"):
        open_images(empty, labelled=False)
    (empty / "a").mkdir()
    with pytest.raises(DataError, match="empty"):
        open_images(empty)
    flat = tmp_path / "flat"
    flat.mkdir()
    noise(rng).save(flat / "x.png")
    with pytest.raises(DataError, match="flat"):
        open_images(flat)
    half = write_folder(tmp_path / "half", {"a": 2, "b": 0}, rng)
    with pytest.raises(DataError, match="class 'b'"):
        open_images(half)
    with pytest.raises(DataError, match=r"x\.png"):
        open_images(flat / "x.png")


def test_a_folder_of_splits_is_no_folder_of_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    for split in ("train", "new"):
        write_folder(tmp_path / "set" / split, {"a": 2, "b": 2}, rng)
    with pytest.raises(DataError, match=r"train.*--test"):
        open_images(tmp_path / "set")
    assert open_images(tmp_path / "set" / "train").class_names == ("a", "b")
    noise(rng).save(tmp_path / "set" / "train" / "locomotive.png")  # a class of that name
    assert open_images(tmp_path / "set").class_names == ("new", "train")


def test_unlabelled_sources(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 2, "b": 1}, rng)
    noise(rng).save(folder / "loose.png")
    noise(rng).save(folder / "a" / ".hidden.png")
    images = open_images(folder, labelled=False)
    assert images.labels.tolist() == [-1] * 4 and images.class_names == ()
    assert [Path(file).name for file in images.files] == ["000.png", "001.png", "000.png", "loose.png"]
    assert len(open_images(folder / "loose.png", labelled=False)) == 1
    assert len(open_images(str(folder / "a" / "*.png"), labelled=False)) == 2
    assert len(open_images(str(folder / "**" / "*.png"), labelled=False)) == 4
    assert len(open_images([folder / "a", folder / "loose.png"], labelled=False)) == 3
    assert len(open_images([folder], labelled=False)) == 4
    odd = folder / "no-suffix"
    noise(rng).save(odd, "PNG")
    assert len(open_images(odd, labelled=False)) == 1
    with pytest.raises(DataError, match=r"\*\.tiff"):
        open_images(str(folder / "*.tiff"), labelled=False)
    with pytest.raises(UsageError, match=r"\*\.png"):
        open_images(str(folder / "*.png"))
    with pytest.raises(UsageError, match="subfolder"):
        open_images([folder, folder])
    with pytest.raises(UsageError, match="no images"):
        open_images([], labelled=False)
    with pytest.raises(UsageError, match="absent"):
        open_images([folder, tmp_path / "absent"], labelled=False)
    for made in ("digits", "simulated-diatoms/far?n=6", "corrupted:digits?family=fog"):
        with pytest.raises(UsageError, match=made.partition("?")[0]):
            open_images([folder, made], labelled=False)
    odd.write_bytes(b"broken")
    with pytest.raises(DataError, match="no-suffix"):
        open_images(odd, labelled=False)
    assert (open_images("digits", labelled=False).labels == -1).all()


def test_relative_globs(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "set", {"a": 2}, rng)
    monkeypatch.chdir(tmp_path)
    assert open_images("set/*/*.png", labelled=False).files == ("set/a/000.png", "set/a/001.png")
    write_folder(tmp_path / ".own", {"b": 1}, rng)
    noise(rng).save(tmp_path / ".hidden.png")
    noise(rng).save(tmp_path / "1.png")
    assert open_images("*.png", labelled=False).files == ("1.png",)
    assert open_images(".own/*/*.png", labelled=False).files == (".own/b/000.png",)
    monkeypatch.chdir(tmp_path / "set" / "a")
    assert open_images("../../*.png", labelled=False).files == ("../../1.png",)
