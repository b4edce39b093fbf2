"""Format, width and height of an encoded image from its first bytes, without a decoder.

The service reads them while a body arrives: an image in a format it does not accept, or with too many pixels, is
refused before the rest is sent. Decoding checks again what Pillow reads.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMAT_BYTES = 16  # from which the format is known
HEADER_BYTES = 2**16  # within which most files tell their dimensions


class Header(NamedTuple):
    """What the first bytes of an image say."""

    format: str | None  # as Pillow calls it; None: none of those that are read
    size: tuple[int, int] | None = None  # width and height; None where they come later, or cannot be read


def read_header(data: bytes) -> Header:
    """The header of an image that begins with ``data``.

    >>> read_header(b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR" + struct.pack(">II", 640, 480))
    Header(format='PNG', size=(640, 480))
    >>> read_header(b"%PDF-1.7")
    Header(format=None, size=None)
    """
    kind = _format(data)
    measure = {"PNG": _png, "JPEG": _jpeg, "WEBP": _webp, "GIF": _gif, "BMP": _bmp}.get(kind or "")
    try:
        return Header(kind, None if measure is None else measure(data))
    except (struct.error, IndexError):  # more bytes are needed
        return Header(kind)


def image_suffix(data: bytes) -> str:
    """The file name suffix of an encoded image, by its content.

    >>> image_suffix(b"\\xff\\xd8\\xff\\xe0")
    '.jpg'
    """
    kind = _format(data)
    return {"JPEG": ".jpg", "TIFF": ".tif", None: ""}.get(kind, f".{kind}".lower())


def _format(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:1] == b"P" and data[1:2] in b"14253607fFy" and len(data) > 1:
        return "PPM"
    begins = {
        b"\x89PNG\r\n\x1a\n": "PNG",
        b"\xff\xd8\xff": "JPEG",
        b"GIF87a": "GIF",
        b"GIF89a": "GIF",
        b"BM": "BMP",
        **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"MM*\0", b"II\0*"), "TIFF"),
    }
    return next((kind for start, kind in begins.items() if data.startswith(start)), None)


def _png(data: bytes) -> tuple[int, int] | None:
    return struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" else None


def _gif(data: bytes) -> tuple[int, int]:
    return struct.unpack_from("<HH", data, 6)


def _bmp(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:  # the header of OS/2
        return struct.unpack_from("<HH", data, 18)
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return (width, height) if len(data) >= 30 else None
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Those of the first frame header; segments before it are passed over."""
    at = 2
    while True:
        marker = data[at + 1]
        if data[at] != 0xFF or marker == 0xDA:  # no marker, or the scan, which comes after the frame
            return None
        if marker in (0x01, 0xFF, *range(0xD0, 0xD9)):  # of no length, or padding
            at += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
