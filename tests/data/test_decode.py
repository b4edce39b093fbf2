"""One image: every mode, depth, orientation and kind of damage, against explicit expectations."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from image_files import encode, noise, png_of_size
from maple.data import decode
from maple.data.decode import auto_size, decode_bytes, read_file, to_rgb
from maple.data.decoders import decode_image
from maple.errors import DataError


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
        decoded = np.asarray(to_rgb(image))
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
    np.testing.assert_array_equal(np.asarray(to_rgb(big_endian))[0, :, 1], expected)
    np.testing.assert_array_equal(np.asarray(to_rgb(Image.fromarray(pixels.astype(np.int32))))[0, :, 2], expected)


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
    [(20_000, 1, "20000 x 1"), (1, 20_000, "1 x 20000"), (10_001, 10_000, "10001 x 10000"), (0, 5, "0 pixels")],
)
def test_sizes_beyond_the_limits_are_refused_from_the_header(width: int, height: int, words: str) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            decode_image(png_of_size(width, height), 8)


def test_the_limit_of_pillow_stays_on_in_this_process() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    assert limit == 89_478_485, "Pillow's own setting is left as it was"
    with pytest.raises(DataError, match="megapixels"):
        decode_bytes(png_of_size(2**14, 2**14), 8, "pad")
    assert limit == Image.MAX_IMAGE_PIXELS


def test_a_large_image_within_the_limits_is_decoded_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        large = encode(Image.new("1", (19_000, 5_000)), "PNG")  # 95 megapixels: Pillow alone would warn
        assert decode_image(large, 8, "crop").shape == (8, 8, 3)


def test_bad_images_say_why(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = encode(noise(rng, (64, 64)), "JPEG")
    cases = {
        "text": b"not an image",
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "truncated-png": encode(noise(rng, (64, 64)))[:2000],
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    for name, content in cases.items():
        with pytest.raises(DataError):
            decode_image(content, 8)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}'"):
            decode_image(tmp_path / name, 8)
    with pytest.raises(DataError, match=r"absent.png"):
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
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match="MiB"):
        read_file(path)


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
