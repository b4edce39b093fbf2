"""Sources: folders, Parquet, arrays, built-in sets and names, each also with every kind of bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from image_files import arrays, encode, noise, write_folder, write_parquet
from maple.data.decode import decode_image
from maple.data.sources import list_data_sets, open_images
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError


@pytest.mark.parametrize("size", [0, -1, 5000, "big", 2.5])
def test_sizes_that_cannot_be_asked_for(size: object) -> None:
    with pytest.raises(UsageError, match="size"):
        open_images("digits", size=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'pad'"):
        open_images("digits", fit="padd")  # type: ignore[arg-type]


def test_an_open_set_is_taken_as_it_is() -> None:
    images = arrays(4, 2)
    assert open_images(images) is images and open_images(images, size=8) is images
    assert open_images(images, labelled=False).labels.tolist() == [-1] * 4
    with pytest.raises(UsageError, match="is open with 8 px, not 16"):
        open_images(images, size=16)


# --- folders ----------------------------------------------------------------------------------------------------------


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
    assert [Path(entry.file).name for entry in images.skipped] == ["overview.png"]
    for i, file in enumerate(images.files):
        np.testing.assert_array_equal(images.read(i), decode_image(file, 8))


def test_links_to_folders_cannot_form_a_ring(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 2}, rng)
    (folder / "a" / "again").symlink_to(folder, target_is_directory=True)
    (folder / "b").symlink_to(folder / "a", target_is_directory=True)  # a class may itself be a link
    assert open_images(folder).labels.tolist() == [0, 0, 1, 1]


def test_folders_without_usable_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no images in '.*empty': expected one subfolder per class with \.jpg"):
        open_images(empty)
    with pytest.raises(DataError, match="no images in"):
        open_images(empty, labelled=False)
    (empty / "a").mkdir()
    with pytest.raises(DataError, match="no images in"):
        open_images(empty)
    flat = tmp_path / "flat"
    flat.mkdir()
    noise(rng).save(flat / "x.png")
    with pytest.raises(DataError, match="put each class in its own subfolder"):
        open_images(flat)
    half = write_folder(tmp_path / "half", {"a": 2, "b": 0}, rng)
    with pytest.raises(DataError, match=r"class 'b' of .* has no images"):
        open_images(half)
    with pytest.raises(DataError, match="single file"):
        open_images(flat / "x.png")


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
    with pytest.raises(DataError, match="no images match"):
        open_images(str(folder / "*.tiff"), labelled=False)
    with pytest.raises(UsageError, match="no data set, file or folder"):
        open_images(str(folder / "*.png"))
    with pytest.raises(UsageError, match="one source"):
        open_images([folder, folder])
    with pytest.raises(UsageError, match="no images were given"):
        open_images([], labelled=False)
    with pytest.raises(UsageError, match="no file or folder"):
        open_images([folder, tmp_path / "absent"], labelled=False)
    for made in ("digits", "simulated-diatoms/far?n=6", "corrupted:digits?family=fog"):
        with pytest.raises(UsageError, match="cannot be opened together with other sources: give it alone"):
            open_images([folder, made], labelled=False)
    odd.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"cannot use '.*no-suffix': not an image"):
        open_images(odd, labelled=False)
    assert (open_images("digits", labelled=False).labels == -1).all()


def test_relative_globs(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "set", {"a": 2}, rng)
    monkeypatch.chdir(tmp_path)
    assert open_images("set/*/*.png", labelled=False).files == ("set/a/000.png", "set/a/001.png")


# --- Parquet ----------------------------------------------------------------------------------------------------------


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
    only_names = write_parquet(tmp_path / "n.parquet", {"image": encoded, "label_name": ["z", "b", "z", "b"]})
    assert open_images(only_names).labels.tolist() == [1, 0, 1, 0]
    strings = write_parquet(tmp_path / "s.parquet", {"img": encoded, "labels": ["z", "b", "z", "b"]})
    assert open_images(strings).class_names == ("b", "z")


def test_parquet_as_hugging_face_writes_it(tmp_path: Path, rng: np.random.Generator) -> None:
    image = [{"bytes": encode(noise(rng)), "path": name} for name in ("a.png", None, "c.png")]
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    path = write_parquet(tmp_path / "test-0.parquet", {"image": image, "label": [1, 0, 1]}, metadata)
    images = open_images(path)
    assert images.class_names == ("cat", "dog", "cow") and images.labels.tolist() == [1, 0, 1]
    assert images.files == ("a.png", "test-0#1", "c.png")
    path = write_parquet(tmp_path / "bad.parquet", {"image": image, "label": [1, 0, 3]}, metadata)
    with pytest.raises(DataError, match=r"label 3 in row 2 of '.*bad\.parquet' is out of range: there are 3"):
        open_images(path)


def test_numbers_without_names_keep_their_numeric_order(tmp_path: Path, rng: np.random.Generator) -> None:
    encoded = [encode(noise(rng)) for _ in range(3)]
    images = open_images(write_parquet(tmp_path / "x.parquet", {"image": encoded, "fine_label": [10, 9, 2]}))
    assert images.class_names == ("2", "9", "10") and images.labels.tolist() == [2, 1, 0]


def test_bad_parquet_files(tmp_path: Path, rng: np.random.Generator) -> None:
    image = [encode(noise(rng)), encode(noise(rng))]
    cases: list[tuple[dict[str, object], str]] = [
        ({"picture": image, "label": [0, 1]}, "no image column.*found columns: picture, label"),
        ({"image": image, "class": [0, 1]}, "no label column.*found columns: image, class"),
        ({"image": ["a.png", "b.png"], "label": [0, 1]}, "image column of .* holds string"),
        ({"image": image, "label": [0, None]}, "row 1 of .* has no label"),
        ({"image": image, "label": [0, -1]}, "label -1 in row 1 .* out of range"),
        ({"image": image, "label": [0.5, 1.0]}, "type float64"),
        ({"image": image, "label": [[0], [1, 2]]}, "holds list"),
        ({"image": image, "label": [0, 0], "label_name": ["a", "b"]}, "label 0 .* both 'a' and 'b'"),
        ({"image": image, "label": [0, 1], "label_name": ["a", "a"]}, "several labels .* 'a'"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, "no rows"),
    ]
    for columns, words in cases:
        with pytest.raises(DataError, match=words):
            open_images(write_parquet(tmp_path / "x.parquet", columns))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"cannot read .* as Parquet"):
        open_images(tmp_path / "x.parquet")
    path = write_parquet(tmp_path / "y.parquet", {"image": [image[0], None, b"junk"], "label": [0, 0, 0]})
    assert [entry.file for entry in open_images(path).skipped] == ["y#1", "y#2"]
    assert open_images(write_parquet(path, {"image": image}), labelled=False).labels.tolist() == [-1, -1]


# --- arrays -----------------------------------------------------------------------------------------------------------


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
        ({"pictures": zeros, "y": [0, 1]}, "no array 'images' or 'x': found: pictures, y"),
        ({"x": zeros}, "no array 'labels' or 'y'"),
        ({"x": np.zeros((2, 3, 8, 8), np.uint8), "y": [0, 1]}, "put the channels last"),
        ({"x": np.zeros((2, 8), np.uint8), "y": [0, 1]}, r"shape \(2, 8\)"),
        ({"x": np.zeros((2, 8, 8, 5), np.uint8), "y": [0, 1]}, "1, 3 or 4 channels"),
        ({"x": np.zeros((0, 8, 8), np.uint8), "y": []}, "no images"),
        ({"x": zeros, "y": [0, 1, 1]}, "2 images but 3 labels"),
        ({"x": zeros, "y": [0, 2], "class_names": ["a", "b"]}, "label 2 in row 1 .* out of range"),
        ({"x": zeros, "y": [0, 1], "class_names": ["a", "a"]}, "two classes named 'a'"),
        ({"x": zeros, "y": [0, 1], "class_names": [1, 2]}, "class_names"),
        ({"x": zeros - 1.0, "y": [0, 1]}, "negative"),
        ({"x": zeros + np.nan, "y": [0, 1]}, "NaN"),
        ({"x": zeros, "y": [0.5, 1]}, "type float64"),
        ({"x": np.array([None, None]), "y": [0, 1]}, "not Python objects"),
        ({"x": zeros, "y": np.array([{}, {}])}, "not Python objects"),
    ]
    for content, words in cases:
        np.savez(path, **content)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=words):
            open_images(path)
    path.write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match=r"cannot read .* as \.npz"):
        open_images(path)
    np.savez(path, x=zeros, y=[0, 1])
    with pytest.raises(DataError, match="unpacks to"):
        open_images(path, memory_limit=10)
    with pytest.raises(DataError, match="choose a smaller size"):
        open_images(path, memory_limit=1000, size=64)


# --- built-in sets and names ------------------------------------------------------------------------------------------


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
        ("simulated-diatoms?m=4", "unknown parameter 'm'"),
        ("simulated-diatoms?sed=4", "did you mean 'seed'"),
        ("simulated-diatoms?n=0", "from 1 to"),
        ("simulated-diatoms?n=-5", "from 1 to"),
        ("simulated-diatoms?n=1e3", "from 1 to"),
        ("simulated-diatoms?n=99999999999999999999999", "from 1 to"),
        ("simulated-diatoms?size=4", "from 8 to 512"),
        ("simulated-diatoms?size=100000", "from 8 to 512"),
        ("simulated-diatoms?n=10000000", "GiB"),
        ("simulated-diatoms?n", "from 1 to"),
        ("simulated-diatoms/nearer", "did you mean 'simulated-diatoms/near'"),
        ("digits?n=3", "no parameters"),
    ],
)
def test_parameters_that_cannot_be_used(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_images(source)


def test_names_under_the_data_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_images("pets/train", data_root=root).name == "pets/train"
    assert open_images("pets", data_root=root).name == "pets/test"
    assert open_images("pets", data_root=root, split="train").name == "pets/train"
    assert open_images("birds", data_root=root).name == "birds/val"
    assert open_images("birds", data_root=root, split="validation").name == "birds/val"
    assert open_images("fish", data_root=root).class_names == ("cod", "eel")
    assert open_images(root / "pets" / "test.parquet").name == "pets/test"
    assert open_images(root / "pets").name == "pets/test"
    monkeypatch.setenv("MAPLE_DATA", str(root))
    assert len(open_images("pets")) == 12
    assert list_data_sets() == (
        *("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far"),
        *("birds", "birds/val", "fish", "pets", "pets/test", "pets/train"),
    )


def test_unknown_names_get_a_suggestion(root: Path) -> None:
    with pytest.raises(UsageError, match=r"'pet': did you mean 'pets'.*data root '.*root'"):
        open_images("pet", data_root=root)
    with pytest.raises(UsageError, match="did you mean 'pets/train'"):
        open_images("pets/trian", data_root=root)
    with pytest.raises(UsageError, match="has no split 'trian': did you mean 'train'"):
        open_images("pets", data_root=root, split="trian")
    with pytest.raises(UsageError, match=r"did you mean 'digits'.*no data root: set MAPLE_DATA"):
        open_images("digit")
    with pytest.raises(UsageError, match="did you mean 'simulated-diatoms'"):
        load_splits("simulated-diatom", data_root=root)
    with pytest.raises(UsageError, match="cannot open 3"):
        open_images(3)  # type: ignore[arg-type]


def test_a_folder_may_begin_like_a_built_in_set(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "digits" / "mine", {"a": 1, "b": 1}, rng)
    monkeypatch.chdir(tmp_path)
    assert open_images("digits/mine").class_names == ("a", "b")
    assert len(open_images("digits")) == 1797
    with pytest.raises(UsageError, match="did you mean 'simulated-diatoms'"):
        open_images("simulated-diatom?n=5")


# --- real files -------------------------------------------------------------------------------------------------------


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
