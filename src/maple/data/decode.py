"""Decode one image: encoded bytes in, a square RGB array out.

Every image has exactly one decoded form, for any mode, bit depth, orientation or transparency. Sizes are checked in the
header, before a pixel is decoded, and every failure of a decoder becomes a ``DataError`` that says why the image cannot
be used.

Nothing here limits time or memory: commands decode in the processes of :mod:`maple.data.decoders`, which do.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from maple.errors import DataError, UsageError, suggest

Fit = Literal["pad", "stretch", "crop"]
Size = Literal["auto"] | int

MAX_PIXELS = 100_000_000
MAX_SIDE = 20_000  # refused from this side on
MAX_FILE_BYTES = 512 * 2**20
MAX_SIZE = 4096  # side of the decoded square
IMAGE_SECONDS = 60.0  # processor time of one image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm", ".pnm")
TABLE_SUFFIXES = (".parquet", ".npz")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none that runs a program or nests another format
_LIMITS = f"sides of 1 to {MAX_SIDE - 1:,} pixels, and at most {MAX_PIXELS // 10**6} megapixels, can be used"


@dataclass(frozen=True)
class Decoding:
    """Side and fit of the decoded images, and the limits of one image."""

    size: int
    fit: Fit = "pad"
    max_pixels: int = MAX_PIXELS
    seconds: float = IMAGE_SECONDS
    keys: bool = False  # whether to return a digest of each encoded image
    formats: tuple[str, ...] = FORMATS  # of Pillow, that are accepted
    only_headers: bool = False  # whether to return widths and heights instead of pixels


def check_size_and_fit(size: Size, fit: str) -> Size:
    """Check ``size`` and ``fit``, and return ``size`` as a plain number, or 'auto'."""
    if size != "auto" and (not isinstance(size, (int, np.integer)) or not 1 <= size <= MAX_SIZE):
        raise UsageError(f"size {size!r} cannot be used: give 'auto' or a number of pixels from 1 to {MAX_SIZE}")
    if fit not in get_args(Fit):
        raise UsageError(f"unknown fit '{fit}': {suggest(fit, get_args(Fit))}")
    return size if size == "auto" else int(size)


def auto_size(dimensions: np.ndarray) -> int:
    """Side to decode to, from widths and heights (N, 2).

    Equal squares of at most 96 pixels keep their size; anything else gets the median long side, rounded to a multiple
    of 8, from 16 to 64.

    >>> auto_size(np.array([[32, 32], [32, 32]])), auto_size(np.array([[40, 30], [44, 20]]))
    (32, 40)
    """
    if (dimensions == dimensions[0, 0]).all() and dimensions[0, 0] <= 96:
        return int(dimensions[0, 0])
    median = float(np.median(dimensions.max(axis=1)))
    return int(np.clip(8 * round(median / 8), 16, 64))


# --- files and headers ------------------------------------------------------------------------------------------------


def check_file_size(n_bytes: int) -> None:
    """Refuse an encoded image of more than ``MAX_FILE_BYTES``."""
    if n_bytes > MAX_FILE_BYTES:
        raise DataError(f"larger than {MAX_FILE_BYTES // 2**20} MiB: make it smaller")


@contextmanager
def open_file(path: Path | str) -> Iterator[BinaryIO]:
    """Open an image file of an accepted length."""
    if "\0" in str(path):
        raise DataError("cannot be read: its name contains a null character")
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (no object per file)
            check_file_size(os.fstat(file.fileno()).st_size)
            yield file
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from None


def read_file(path: Path | str) -> bytes:
    """Read the encoded bytes of an image file."""
    with open_file(path) as file:
        return file.read()


def _open_header(file: BinaryIO, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """Read the header and check the dimensions; no pixel is decoded yet."""
    try:
        image = Image.open(file, formats=formats)
    except Image.DecompressionBombError as error:  # Pillow's own limit, which is higher than ours
        raise DataError(f"{_LIMITS} ({error})") from None
    except UnidentifiedImageError:
        file.seek(0)
        if file.read(12)[4:8] == b"ftyp":  # the container of HEIC and AVIF
            raise DataError("HEIC or AVIF, which is not read: save it as JPEG, PNG or TIFF") from None
        raise DataError("not an image that can be read, or one of 0 pixels") from None
    width, height = image.size
    if min(width, height) < 1 or max(width, height) >= MAX_SIDE or width * height > MAX_PIXELS:
        raise DataError(f"{width} x {height} pixels: {_LIMITS}")
    return image


@contextmanager
def _refusing() -> Iterator[None]:
    """Within it any failure of a decoder is a ``DataError``."""
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise DataError("takes more memory to decode than there is: make it smaller") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...
        raise DataError(f"broken or truncated: {error}") from None


def read_dimensions(file: BinaryIO, formats: tuple[str, ...] = FORMATS) -> tuple[int, int]:
    """Read width and height of an image from its header."""
    with _refusing():
        return _open_header(file, formats).size


# --- pixels -----------------------------------------------------------------------------------------------------------


def decode_bytes(data: bytes, size: int, fit: Fit, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
    """Decode one image to a square RGB array, (S, S, 3) uint8; the error is the bare reason.

    Transparency is laid on white, EXIF orientation applied, 16-bit grey scaled by the smallest of 8, 12 and 16 bits
    that holds its maximum; of several frames the first is taken. An image that already has the right size keeps its
    pixels exactly; any other is made square (``pad`` with the median colour of its border, ``stretch``, or ``crop``
    to the centre) and resized with Pillow's bilinear filter.

    >>> file = io.BytesIO()
    >>> Image.new("LA", (4, 2), (0, 255)).save(file, "PNG")
    >>> decode_bytes(file.getvalue(), 8, "pad").shape
    (8, 8, 3)
    """
    with _refusing(), _open_header(io.BytesIO(data), formats) as image:
        image.draft(None, (4 * size, 4 * size))  # lets JPEG decode a much larger image at a fraction of its size
        image.load()
        square = fit_square(to_rgb(_upright(image)), size, fit)
        return np.frombuffer(square.tobytes(), np.uint8).reshape(size, size, 3).copy()


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; ignore one that cannot be read."""
    if image.format != "TIFF" and not image.info.keys() & {"exif", "xmp", "Raw profile type exif", "XML:com.adobe.xmp"}:
        return image  # most images: asking Pillow costs a third of decoding a small one
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to RGB; transparency is laid on white."""
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(scale_to_8_bit(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def full_scale(values: np.ndarray) -> float:
    """Value that becomes 255: 1 for floats in [0, 1], else the largest of 8, 12 or 16 bits that is needed."""
    top = values.max(initial=0)
    if not (np.isfinite(top) and np.isfinite(values.min(initial=0))):
        raise DataError("pixels that are NaN or infinite")
    if values.dtype == bool or (values.dtype.kind == "f" and top <= 1):
        return 1.0
    return float(next((limit for limit in (255, 4095, 65535) if top <= limit), top))


def scale_to_8_bit(values: np.ndarray, full: float | None = None) -> np.ndarray:
    """Scale pixel values of any type to uint8.

    >>> scale_to_8_bit(np.array([0, 2048, 4095], dtype=np.uint16))
    array([  0, 128, 255], dtype=uint8)
    """
    if values.dtype == np.uint8:
        return values
    full = full_scale(values) if full is None else full
    return np.rint(np.clip(values, 0, full) * (255 / full)).astype(np.uint8)


def fit_square(image: Image.Image, size: int, fit: Fit) -> Image.Image:
    """Make an RGB image ``size`` x ``size`` pixels."""
    width, height = image.size
    if (width, height) == (size, size):
        return image
    if fit == "crop":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    elif fit == "pad" and width != height:
        image = _pad_square(image)
    return image.resize((size, size), Image.Resampling.BILINEAR)


def _pad_square(image: Image.Image) -> Image.Image:
    """Pad an image to a square with the median colour of its border."""
    if max(image.size) > MAX_SIZE:  # a strip of 19,999 x 1 pixels must not become a canvas of 400 megapixels
        scale = MAX_SIZE / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)  # (H, W, 3)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    colour = np.sort(border, axis=0)[len(border) // 2]
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), tuple(colour.tolist()))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas
