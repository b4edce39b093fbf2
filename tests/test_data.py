"""Sources, decoding and splits: every kind of image and of bad input, against explicit expectations."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from maple import data
from maple.config import DataOptions
from maple.data import (
    ImageSet,
    auto_size,
    decode_image,
    fold_shares,
    list_data_sets,
    load_splits,
    open_images,
    share_out,
    split_indices,
)
from maple.errors import DataError, UsageError

SHARES = (0.7, 0.1, 0.1, 0.1)


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(rng: np.random.Generator, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def write_folder(
    folder: Path, counts: dict[str, int], rng: np.random.Generator, size: tuple[int, int] = (8, 8)
) -> Path:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise(rng, size).save(folder / name / f"{i:03}.png")
    return folder


def png_of_size(width: int, height: int) -> bytes:
    """A tiny PNG file whose header claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def arrays(n: int, n_classes: int, seed: int = 0, name: str = "arrays") -> ImageSet:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return ImageSet.from_arrays(images, np.arange(n) % n_classes, name=name)


# --- decoding: every kind of image ------------------------------------------------------------------------------------


def test_an_image_of_the_right_size_keeps_every_pixel(rng: np.random.Generator) -> None:
    image = noise(rng)
    for fit in ("pad", "stretch", "crop"):
        decoded = decode_image(encode(image), 8, fit)
        assert decoded.dtype == np.uint8
        np.testing.assert_array_equal(decoded, np.asarray(image))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I;16", "I", "F"])
def test_every_mode_becomes_rgb(mode: str, rng: np.random.Generator) -> None:
    grey = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    else:
        image = grey.convert("RGB").convert(mode) if mode in ("LAB", "HSV", "YCbCr") else grey.convert(mode)
    if mode == "LAB":
        image = Image.merge("LAB", [grey, Image.new("L", (8, 8), 128), Image.new("L", (8, 8), 128)])
    if mode == "HSV":  # no file format stores it
        decoded = np.asarray(data._to_rgb(image))
    else:
        decoded = decode_image(encode(image, "TIFF"), 8)
    assert decoded.shape == (8, 8, 3) and decoded.dtype == np.uint8
    if mode not in ("1", "LAB"):
        np.testing.assert_allclose(decoded, np.repeat(np.asarray(grey)[..., None], 3, axis=2), atol=2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 100, 255], [0, 100, 255]),  # 8 bits in a 16-bit file
        ([0, 2048, 4095], [0, 128, 255]),  # 12 bits
        ([0, 4096, 65535], [0, 16, 255]),  # 16 bits
        ([0, 256, 256], [0, 16, 16]),  # just above 8 bits: 12
    ],
)
def test_16_bit_grey_is_scaled_by_the_bits_it_needs(values: list[int], expected: list[int]) -> None:
    pixels = np.resize(np.array(values, dtype=np.uint16), (3, 3))
    for format in ("PNG", "TIFF"):
        decoded = decode_image(encode(Image.fromarray(pixels), format), 3)
        np.testing.assert_array_equal(decoded[0, :, 0], expected)
    big_endian = Image.frombytes("I;16B", (3, 3), pixels.astype(">u2").tobytes())
    np.testing.assert_array_equal(np.asarray(data._to_rgb(big_endian))[0, :, 1], expected)
    np.testing.assert_array_equal(np.asarray(data._to_rgb(Image.fromarray(pixels.astype(np.int32))))[0, :, 2], expected)


def test_float_images_in_the_unit_interval_or_above() -> None:
    for scale in (1.0, 255.0):
        image = Image.fromarray(np.array([[0, 0.5], [1, 0]], dtype=np.float32) * scale)
        decoded = decode_image(encode(image, "TIFF"), 2)
        np.testing.assert_array_equal(decoded[..., 0], [[0, 128], [255, 0]])
    broken = Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32))
    with pytest.raises(DataError, match="NaN"):
        decode_image(encode(broken, "TIFF"), 2)


def test_transparency_is_laid_on_white() -> None:
    rgba = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    rgba.putpixel((0, 0), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    decoded = decode_image(encode(rgba), 4)
    assert decoded[0, 0].tolist() == [255, 0, 0]
    assert decoded[0, 1].tolist() == [127, 127, 127]
    assert decoded[3, 3].tolist() == [255, 255, 255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.putpixel((0, 0), 0)
    decoded = decode_image(encode(palette, transparency=1), 4)
    assert decoded[0, 0].tolist() == [10, 20, 30] and decoded[1, 1].tolist() == [255, 255, 255]
    assert decode_image(encode(Image.new("LA", (4, 4), (0, 0))), 4).min() == 255
    assert decode_image(encode(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3)), 4).min() == 255


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(format: str, orientation: int) -> None:
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:8, :8] = (255, 0, 0)
    pixels[:8, 8:] = (0, 255, 0)
    pixels[8:, :8] = (0, 0, 255)
    turned = {  # what the viewer must see, from the EXIF standard
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.swapaxes(0, 1),
        6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(pixels),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_image(encode(Image.fromarray(pixels), format, exif=exif, quality=95), 16)
    assert abs(decoded[4::8, 4::8].astype(int) - turned[4::8, 4::8]).max() < 30


def test_the_first_of_several_frames_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for format in ("GIF", "TIFF", "WEBP"):
        encoded = encode(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        assert decode_image(encoded, 4)[2, 2].tolist() == [255, 0, 0]


def test_pad_uses_the_median_colour_of_the_border() -> None:
    image = Image.new("RGB", (20, 10), (200, 180, 160))
    image.paste((0, 0, 0), (5, 2, 15, 8))  # the object, away from the border
    image.putpixel((0, 0), (255, 0, 255))  # an outlier on it
    decoded = decode_image(encode(image), 20)
    assert decoded[0].reshape(-1, 3).tolist() == [[200, 180, 160]] * 20
    np.testing.assert_array_equal(decoded[5:15], np.asarray(image))
    assert decode_image(encode(image.rotate(90, expand=True)), 20)[0, 0].tolist() == [200, 180, 160]


def test_crop_takes_the_centre_and_stretch_the_whole() -> None:
    image = Image.new("RGB", (30, 10), "red")
    image.paste("lime", (10, 0, 20, 10))
    assert (decode_image(encode(image), 10, "crop") == [0, 255, 0]).all()
    stretched = decode_image(encode(image), 10, "stretch")
    assert stretched[5, 0].tolist() == [255, 0, 0] and stretched[5, 5].tolist() == [0, 255, 0]
    assert stretched[5, 9].tolist() == [255, 0, 0]


def test_resizing_is_pillows_bilinear_filter(rng: np.random.Generator) -> None:
    image = noise(rng, (64, 64))
    expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode_image(encode(image), 32), expected)
    jpeg = encode(image, "JPEG")  # JPEG's own reduction must not replace the filter at a factor of two
    expected = np.asarray(Image.open(io.BytesIO(jpeg)).resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode_image(jpeg, 32), expected)


def test_a_long_strip_does_not_become_a_huge_canvas() -> None:
    decoded = decode_image(encode(Image.new("RGB", (19_999, 1), (9, 9, 9))), 16)
    assert (decoded == 9).all()


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [(20_000, 1, "20000 x 1"), (1, 20_000, "1 x 20000"), (10_001, 10_000, "megapixels"), (0, 5, "0 pixels")],
)
def test_sizes_beyond_the_limits_are_refused_from_the_header(width: int, height: int, words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's own warning must not leak
        with pytest.raises(DataError, match=words):
            decode_image(png_of_size(width, height), 8)
    limit = Image.MAX_IMAGE_PIXELS
    assert limit == 89_478_485, "Pillow's own setting is left as it was"


def test_a_large_image_within_the_limits_is_decoded_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        large = encode(Image.new("1", (19_000, 5_000)), "PNG")  # 95 megapixels: Pillow alone would warn
        assert decode_image(large, 8, "crop").shape == (8, 8, 3)


def test_bad_images_say_why(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = encode(noise(rng, (64, 64)), "JPEG")
    cases = {
        "text": (b"not an image", "not an image"),
        "empty": (b"", "not an image"),
        "truncated": (whole[: len(whole) // 2], "broken or truncated"),
        "truncated-png": (encode(noise(rng, (64, 64)))[:2000], "broken or truncated"),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    }
    for name, (content, reason) in cases.items():
        with pytest.raises(DataError, match=reason):
            decode_image(content, 8)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}'"):
            decode_image(tmp_path / name, 8)
    with pytest.raises(DataError, match="cannot be opened"):
        decode_image(tmp_path / "absent.png", 8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_never_escape_as_other_exceptions(draw: st.DataObject) -> None:
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**16)))
    format = draw.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
    content = bytearray(encode(noise(rng, (12, 9)), format))
    for position in rng.integers(0, len(content), 8):
        content[position] = rng.integers(256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pillow's remarks on odd metadata
        with contextlib.suppress(DataError):
            assert decode_image(bytes(content), 8).shape == (8, 8, 3)


def test_a_file_beyond_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    Image.new("RGB", (8, 8)).save(path)
    monkeypatch.setattr(data, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match="larger than"):
        decode_image(path, 8)


@pytest.mark.parametrize("size", [0, -1, 5000, "big", 2.5])
def test_sizes_that_cannot_be_asked_for(size: object) -> None:
    with pytest.raises(UsageError, match="size"):
        open_images("digits", size=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'pad'"):
        open_images("digits", fit="padd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dimensions", "expected"),
    [
        ([[32, 32], [32, 32]], 32),
        ([[96, 96]], 96),
        ([[8, 8]], 8),
        ([[97, 97]], 64),
        ([[32, 32], [32, 31]], 32),
        ([[40, 30], [44, 20]], 40),
        ([[5, 3]], 16),
        ([[400, 300]], 64),
    ],
)
def test_auto_size(dimensions: list[list[int]], expected: int) -> None:
    assert auto_size(np.array(dimensions)) == expected


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


def test_broken_files_are_skipped_and_counted(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 4, "b": 4}, rng)
    (folder / "a" / "001.png").write_bytes(b"broken")
    (folder / "b" / "003.png").write_bytes(png_of_size(20_000, 3))
    for memory_limit in (data.MEMORY_LIMIT, 0):
        images = open_images(folder, memory_limit=memory_limit)
        assert len(images) == 6 and images.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert [Path(entry.file).name for entry in images.skipped] == ["001.png", "003.png"]
        assert "not an image" in images.skipped[0].reason and "20000" in images.skipped[1].reason
        np.testing.assert_array_equal(images.read(1), decode_image(folder / "a" / "002.png", 8))
    for i in range(4):
        (folder / "b" / f"{i:03}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="class 'b' of 'set' has no image that can be used"):
        open_images(folder)
    for i in range(4):
        (folder / "a" / f"{i:03}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"none of the 8 images of 'set' can be used .*000\.png"):
        open_images(folder)


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
    with pytest.raises(DataError, match=r"cannot use '.*003\.png'"):
        stream.read(3)


def test_progress_counts_up_to_all_images(tmp_path: Path, rng: np.random.Generator) -> None:
    seen: list[tuple[int, int]] = []
    open_images(write_folder(tmp_path / "set", {"a": 150}, rng), progress=lambda *counts: seen.append(counts))
    assert seen == [(128, 150), (150, 150)]


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
    odd.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"cannot use '.*no-suffix': not an image"):
        open_images(odd, labelled=False)
    assert (open_images("digits", labelled=False).labels == -1).all()


def test_relative_globs(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "set", {"a": 2}, rng)
    monkeypatch.chdir(tmp_path)
    assert open_images("set/*/*.png", labelled=False).files == ("set/a/000.png", "set/a/001.png")


# --- Parquet ----------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, columns: dict[str, object], metadata: dict[bytes, bytes] | None = None) -> Path:
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


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


def test_array_values_are_scaled_alike_for_all_images() -> None:
    values = np.zeros((2, 8, 8), np.uint16)
    values[0], values[1] = 100, 4095
    images = ImageSet.from_arrays(values)
    assert images.read(0).max() == 6 and images.read(1).max() == 255


# --- image sets -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match="class 'a' of 'arrays' is not among"):
        images.with_class_names(["b", "c"])
    unused = images.subset([0, 2])
    assert unused.with_class_names(["b"]).labels.tolist() == [0, 0]
    unknown = ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8))
    assert unknown.with_class_names(["b"]).labels.tolist() == [-1, -1]


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


@pytest.fixture
def root(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with ``pets`` (train and test), ``birds`` (validation only) and a plain folder ``fish``."""
    monkeypatch.delenv("MAPLE_DATA", raising=False)
    folder = tmp_path / "root"
    for name, n in (("pets/train", 40), ("pets/test", 12), ("birds/val", 20)):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ["cat" if i % 2 else "dog" for i in range(n)]
        write_parquet(
            path,
            {"image": [encode(noise(rng)) for _ in range(n)], "label": [i % 2 for i in range(n)], "label_name": names},
        )
    write_folder(folder / "fish", {"cod": 6, "eel": 5}, rng)
    return folder


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


def test_an_open_set_is_taken_as_it_is() -> None:
    images = arrays(4, 2)
    assert open_images(images) is images and open_images(images, size=8) is images
    assert open_images(images, labelled=False).labels.tolist() == [-1] * 4
    with pytest.raises(UsageError, match="is open with 8 px, not 16"):
        open_images(images, size=16)


# --- splits -----------------------------------------------------------------------------------------------------------


def parts_of(images: ImageSet, seed: int = 0) -> list[set[bytes]]:
    return [set(images.keys[rows]) for rows in split_indices(images.labels, images.keys, SHARES, seed)]


def test_splits_are_stratified_and_complete() -> None:
    labels = np.repeat([0, 1, 2], [100, 37, 4])
    keys = np.array([f"{i:032x}" for i in range(141)], dtype="S32")
    parts = split_indices(labels, keys, SHARES, seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(141))
    counts = np.array([np.bincount(labels[rows], minlength=3) for rows in parts])
    assert counts.tolist() == [[70, 26, 1], [10, 4, 1], [10, 4, 1], [10, 3, 1]]


def test_splits_do_not_depend_on_the_order_of_rows(rng: np.random.Generator) -> None:
    images = arrays(200, 5)
    assert parts_of(images) == parts_of(images.subset(rng.permutation(200)))
    assert parts_of(images) != parts_of(images, seed=1)


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


def test_splits_are_the_same_in_every_process_and_release() -> None:
    code = (
        "import numpy as np; from maple.data import split_indices;"
        "k = np.array([b'%032x' % (i * i) for i in range(24)], dtype='S32');"
        "print([r.tolist() for r in split_indices(np.arange(24) % 2, k, (.5, .25, .25), 3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert outputs == {GOLDEN_SPLIT}


GOLDEN_SPLIT = "[[0, 2, 3, 4, 6, 7, 15, 19, 20, 21, 22, 23], [1, 12, 13, 16, 17, 18], [5, 8, 9, 10, 11, 14]]\n"


def test_splits_against_an_explicit_loop() -> None:
    images = arrays(90, 3)
    expected: list[list[int]] = [[], [], [], []]
    for label in range(3):
        rows = np.flatnonzero(images.labels == label).tolist()
        rows.sort(key=lambda i: hashlib.blake2b(images.keys[i], digest_size=16, key=b"7").digest())
        for part, start, stop in zip(expected, (0, 21, 24, 27), (21, 24, 27, 30)):  # 70, 10, 10, 10 % of 30
            part.extend(rows[start:stop])
    parts = split_indices(images.labels, images.keys, SHARES, seed=7)
    assert [part.tolist() for part in parts] == [sorted(part) for part in expected]


def test_copies_of_an_image_stay_in_one_split(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    source = rng.integers(0, 60, 300)  # every image several times, also under both labels
    images = ImageSet.from_arrays(pixels[source], rng.integers(0, 2, 300))
    for seed in range(5):
        parts = parts_of(images, seed)
        assert sum(len(part) for part in parts) == len(set().union(*parts))
        for rows in split_indices(images.labels, images.keys, SHARES, seed):
            assert set(images.labels[rows]) == {0, 1}


def test_a_class_made_of_copies_of_another_is_named(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(np.concatenate([pixels, pixels[:1]]), ["a"] * 8 + ["b"])
    with pytest.raises(DataError, match="class 'b' consists of copies"):
        load_splits(images)


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 500), st.lists(st.floats(0.01, 1), min_size=4, max_size=4), st.integers(0, 3))
def test_shares_are_met_to_one_image_and_never_empty(n: int, weights: list[float], zero: int) -> None:
    weights[zero] = 0.0
    shares = np.array(weights) / sum(weights)
    counts = share_out(n, shares)
    assert counts.sum() == n and (counts[shares > 0] >= 1).all() and counts[zero] == 0
    if (n * shares[shares > 0] >= 1).all():
        assert (np.abs(counts - n * shares) < 1).all()


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
    with pytest.raises(UsageError, match="data set 'pets' has no split 'validation'"):
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


def test_given_sources_fold_their_share_into_train() -> None:
    assert fold_shares(SHARES, ()) == SHARES
    assert fold_shares(SHARES, ("test", "validation")) == (0.9, 0.0, 0.1, 0.0)
    for shares in ((0.5, 0.1, 0.1, 0.1), (1.2, -0.1, -0.1, 0.0), (0.5, 0.5)):
        with pytest.raises(UsageError, match="sum to 1"):
            fold_shares(shares, ())
    with pytest.raises(UsageError, match="no training images"):
        fold_shares((0.0, 0.5, 0.5, 0.0), ())


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
    with pytest.raises(DataError, match="every train image of 'arrays' is also in another split"):
        load_splits(whole, test=whole)


def test_classes_of_given_sources_must_fit() -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    whole = ImageSet.from_arrays(pixels[:40], np.array(["a", "b"])[np.arange(40) % 2])
    other = ImageSet.from_arrays(pixels[40:], np.array(["b", "a"])[np.arange(20) % 2], name="other")
    splits = load_splits(whole, test=other)
    assert splits.test.labels.tolist() == other.labels.tolist()
    for role in ("validation", "calibration", "test"):
        one = other.subset(other.labels == 1)
        with pytest.raises(DataError, match=f"class 'a' is missing from the {role} images 'other'"):
            load_splits(whole, **{role: one})
        strange = ImageSet.from_arrays(pixels[40:], np.array(["a", "c"])[np.arange(20) % 2], name="strange")
        with pytest.raises(DataError, match=f"the {role} images do not fit .* class 'c' of 'strange'"):
            load_splits(whole, **{role: strange})


def test_too_few_classes_or_images() -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    one = ImageSet.from_arrays(pixels, ["a"] * 30)
    with pytest.raises(DataError, match=r"1 class \('a'\): at least two are needed"):
        load_splits(one)
    small = ImageSet.from_arrays(pixels, ["a"] * 14 + ["b"] * 15 + ["c"])
    with pytest.raises(DataError, match=r"class 'c' has 1 distinct image, too few for 4 splits.*--min-images 4"):
        load_splits(small)
    splits = load_splits(small, DataOptions(min_images=4))
    assert splits.left_out == ("c",) and splits.class_names == ("a", "b") and set(splits.train.labels) == {0, 1}
    test = ImageSet.from_arrays(pixels[:20][:, ::-1], (["a", "b", "c", "c"] * 5))
    assert len(load_splits(small, DataOptions(min_images=4), test=test).test) == 10  # left out there too
    with pytest.raises(DataError, match="lower --min-images"):
        load_splits(small, DataOptions(min_images=15))
    copies = ImageSet.from_arrays(pixels[[0] * 9 + list(range(10, 20))], ["a"] * 9 + ["b"] * 10)
    with pytest.raises(DataError, match="class 'a' has 1 distinct image"):
        load_splits(copies)
    assert load_splits(small.subset(small.labels < 2), DataOptions(min_images=14)).left_out == ("c",)
    with pytest.raises(DataError, match="images without a label"):
        load_splits(ImageSet.from_arrays(pixels))
    absent = ImageSet.from_arrays(pixels, np.arange(30) % 2, ["a", "b", "c"])
    with pytest.raises(DataError, match="class 'c' has 0 distinct images"):
        load_splits(absent)
    assert load_splits(absent, DataOptions(min_images=1)).left_out == ("c",)


def test_skipped_files_of_all_sources_are_reported(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder(tmp_path / "set", {"a": 10, "b": 10}, rng)
    other = write_folder(tmp_path / "other", {"a": 3, "b": 3}, rng)
    (folder / "a" / "004.png").write_bytes(b"x")
    (other / "b" / "001.png").write_bytes(b"x")
    splits = load_splits(folder, test=other)
    assert [Path(entry.file).name for entry in splits.skipped] == ["004.png", "001.png"]
    assert len(splits.test) == 5


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
