"""Check formats and dimensions of images while a body arrives, so that the rest of a refused one is never kept.

A watch sees the bytes on their way to the parser and reads the header of each image as soon as it is complete. What it
cannot tell from the first 64 kB, such as the dimensions of a TIFF file, the decoding process checks before a pixel is
decoded.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Literal

from python_multipart.multipart import FormParser, parse_options_header

from maple.data.headers import FORMAT_BYTES, HEADER_BYTES, read_header
from maple.deploy.serve.options import ServeOptions
from maple.errors import DataError
from maple.text import printable

MAX_NAME = 1_000  # characters
UploadStatus = Literal[413, 415, 422]
_DATA = re.compile(rb'"data"\s*:\s*"')  # no string of JSON holds this: its own quotes are escaped
_NAME = re.compile(rb'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_KEPT = 8 * MAX_NAME  # bytes of text in which a name or the beginning of an image may be


class UploadError(DataError):
    """An upload that cannot be used, with the status of the answer."""

    def __init__(self, status: UploadStatus, message: str) -> None:
        super().__init__(message)
        self.status: UploadStatus = status


def refusal(name: str, reason: str, status: UploadStatus = 422) -> UploadError:
    """The error for one image."""
    return UploadError(status, f"cannot use '{printable(name, 60)}': {printable(reason, 200)}")


def too_many(max_images: int) -> UploadError:
    """The error for a request of more images than are accepted."""
    return UploadError(422, f"more than {max_images:,} images: send them in several requests")


def check_header(head: bytes, name: str, options: ServeOptions) -> bool:
    """Refuse an image by its first bytes; returns whether more bytes would add nothing."""
    header = read_header(head)
    if header.format is not None and header.format.lower() not in options.formats:
        accepted = ", ".join(options.formats)
        raise refusal(name, f"{header.format} is not accepted: convert it to one of {accepted}", 415)
    if header.size is None:
        return header.format is None and len(head) >= FORMAT_BYTES
    width, height = header.size
    if width * height > options.max_pixels:
        reason = f"{width} x {height} pixels, and {options.max_pixels:,} are the most: make it smaller"
        raise refusal(name, reason, 413)
    return True


class ImageWatch:
    """Watches the bytes of one image. They are looked at again whenever there are twice as many."""

    def __init__(self, options: ServeOptions, name: str) -> None:
        self._options, self._name = options, name
        self._head, self._next = bytearray(), FORMAT_BYTES

    @property
    def is_done(self) -> bool:
        """Whether further bytes tell nothing more."""
        return self._next > HEADER_BYTES

    def feed(self, data: bytes) -> None:
        """The next bytes; :class:`UploadError` if they show that the image cannot be used."""
        if self.is_done:
            return
        self._head += data[: HEADER_BYTES - len(self._head)]
        if len(self._head) >= self._next:
            known = check_header(bytes(self._head), self._name, self._options)
            self._next = HEADER_BYTES + 1 if known else 2 * len(self._head)


class FormWatch:
    """Watches the parts of a form, by the callbacks of its parser."""

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._n = options, 0
        self._value = b""  # of the header being read
        self._name = ""
        self._image = ImageWatch(options, "")

    def attach(self, form: FormParser) -> None:
        """See what the callbacks of the form see, before them."""
        parser: Any = form.parser
        for event, note in (
            ("part_begin", self._begin),
            ("headers_finished", self._start),
            ("header_end", self._end_header),
        ):
            then = parser.callbacks[f"on_{event}"]
            parser.set_callback(event, lambda note=note, then=then: (note(), then()))
        for event, see in (("header_value", self._add_value), ("part_data", self._see)):
            use = parser.callbacks[f"on_{event}"]
            parser.set_callback(event, lambda data, a, b, see=see, use=use: (see(data[a:b]), use(data, a, b)))

    def _begin(self) -> None:
        self._n += 1
        self._value, self._name = b"", f"image {self._n}"

    def _add_value(self, value: bytes) -> None:
        self._value += value

    def _end_header(self) -> None:
        given = parse_options_header(self._value)[1].get(b"filename")
        self._name = (given or b"").decode("utf-8", "replace")[:MAX_NAME] or self._name
        self._value = b""

    def _start(self) -> None:
        self._image = ImageWatch(self._options, self._name)

    def _see(self, data: bytes) -> None:
        self._image.feed(data)


class JsonWatch:
    """Watches the images of a JSON body, in base64."""

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._n = options, 0
        self._image: ImageWatch | None = None
        self._rest = b""  # of the text, not looked at yet

    def feed(self, chunk: bytes) -> None:
        """The next bytes; :class:`UploadError` if they show that an image cannot be used."""
        self._rest += chunk
        while self._image is not None or self._find():
            assert self._image is not None
            text, quote, after = self._rest.partition(b'"')
            whole = len(text) // 4 * 4  # characters that make bytes
            if not self._image.is_done:
                self._image.feed(_decode(text[:whole]))
            if not quote:
                self._rest = text[whole:]
                return
            self._image, self._rest = None, after

    def _find(self) -> bool:
        """Whether the next image begins in the text; what is before it is dropped."""
        found = _DATA.search(self._rest)
        if found is None:
            self._rest = self._rest[-_KEPT:]
            return False
        self._n += 1
        if self._n > self._options.max_images:
            raise too_many(self._options.max_images)
        names = _NAME.findall(self._rest[: found.start()])
        self._image = ImageWatch(self._options, (_text(names[-1]) if names else "") or f"image {self._n}")
        self._rest = self._rest[found.end() :]
        return True


def _text(quoted: bytes) -> str:
    """A string of JSON; empty where it is broken, which the parser will say."""
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def _decode(text: bytes) -> bytes:
    """The bytes of a piece of base64; none where it is something else, which the parser will say."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
