"""Request bodies to named images: limits first, then parsing as a stream; nothing is written to disk.

A body that cannot be used is an :class:`UploadError` with a status and one sentence: 413 too large, 415 unsupported
format, 422 broken or too many images. Names are labels that come back with the answer and never become paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from maple.errors import DataError
from maple.text import printable

FIELD = "files"  # of a form
MAX_NAME = 1_000  # characters

UploadStatus = Literal[413, 415, 422]


class UploadError(DataError):
    """An upload that cannot be used, with the status of the answer."""

    def __init__(self, status: UploadStatus, message: str) -> None:
        super().__init__(message)
        self.status: UploadStatus = status


@dataclass(frozen=True)
class Limits:
    """The limits of one request."""

    max_images: int
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True)
class Upload:
    """One image as sent: bytes of the file, or base64 text."""

    name: str
    data: bytes | str


class ImageRequest(BaseModel):
    """One image in a JSON body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=MAX_NAME, description="comes back with the answer")] = ""
    data: Annotated[str, Field(description="the image file in base64", json_schema_extra={"format": "byte"})]


class PredictRequest(BaseModel):
    """A JSON body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    images: Annotated[list[ImageRequest], FailFast()]


async def read_uploads(headers: Mapping[str, str], stream: AsyncIterator[bytes], limits: Limits) -> list[Upload]:
    """The images of a request; ``headers`` have lower-case names. At least one, each with a name."""
    kind, parameters = parse_options_header(headers.get("content-type"))
    if kind not in (b"multipart/form-data", b"application/json"):
        raise UploadError(415, f"send images as multipart/form-data (field '{FIELD}') or as application/json")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UploadError(415, "the body is compressed: send it as it is, without Content-Encoding")
    body = _limited(headers.get("content-length", ""), stream, limits.max_bytes)
    if kind == b"application/json":
        uploads = await asyncio.to_thread(parse_json, b"".join([chunk async for chunk in body]), limits)
    else:
        form = _Form(parameters.get(b"boundary", b""), limits)
        async for chunk in body:
            form.write(chunk)
        uploads = form.close()
    if not uploads:
        raise UploadError(422, "the request holds no image: send at least one")
    return [Upload(upload.name or f"image {i}", upload.data) for i, upload in enumerate(uploads, start=1)]


async def _limited(length: str, stream: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The chunks of a body up to the limit; the declared length is checked first, then the actual one."""
    too_long = UploadError(413, f"the body is longer than {max_bytes:,} bytes: send fewer or smaller images")
    if declared_length(length, 0) > max_bytes:
        raise too_long
    n_bytes = 0
    async for chunk in stream:
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            raise too_long
        yield chunk


def declared_length(length: str, default: int) -> int:
    """The Content-Length of a request, or ``default`` without a valid one.

    >>> declared_length("12", 0), declared_length("", 7), declared_length("-3", 7)
    (12, 7, 7)
    """
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else default


def _too_many(max_images: int) -> UploadError:
    return UploadError(422, f"more than {max_images:,} images: send them in several requests")


# --- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(body: bytes, limits: Limits) -> list[Upload]:
    """The images of a JSON body, still in base64.

    >>> parse_json(b'{"images": [{"name": "a.png", "data": "iVBORw=="}]}', Limits(1, 100, 100))
    [Upload(name='a.png', data='iVBORw==')]
    """
    # More commas than names and images could contain: refuse without parsing.
    if body.count(b",") > limits.max_images * (MAX_NAME + 2):
        raise _too_many(limits.max_images)
    try:
        images = PredictRequest.model_validate_json(body).images
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f" at {printable(place, 60)}" if place else ""
        raise UploadError(
            422,
            f"the JSON cannot be used{where} ({printable(first['msg'], 200)}): send {{'images': [{{'name', 'data'}}]}}",
        ) from None
    if len(images) > limits.max_images:
        raise _too_many(limits.max_images)
    return [Upload(image.name, image.data) for image in images]


# --- forms -----------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """The current part of a form."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_name: bytes = b""
    header_value: bytes = b""
    data: bytearray = field(default_factory=bytearray)
    name: str = ""


class _Form:
    """Streaming parser of a form with files in one field and nothing else."""

    def __init__(self, boundary: bytes, limits: Limits) -> None:
        self._limits = limits
        self._part = _Part()
        self._uploads: list[Upload] = []
        self._ended = False
        if not boundary:
            raise UploadError(422, "the form has no boundary: let your HTTP library write the Content-Type")
        with _refusing_broken_forms():
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_to_header_name,
                    "on_header_value": self._add_to_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end,
                    "on_end": self._end_form,
                },
            )

    def write(self, chunk: bytes) -> None:
        with _refusing_broken_forms():
            self._parser.write(chunk)

    def close(self) -> list[Upload]:
        """All images, once the form is complete."""
        with _refusing_broken_forms():
            self._parser.finalize()
        if not self._ended:
            raise UploadError(422, "the form ends too early: send it again")
        return self._uploads

    def _begin(self) -> None:
        if len(self._uploads) == self._limits.max_images:
            raise _too_many(self._limits.max_images)
        self._part = _Part()

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _end_header(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        part.header_name = part.header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition"))
        if options.get(b"name") != FIELD.encode() or b"filename" not in options:
            raise UploadError(422, f"the form holds something else than files in its field '{FIELD}': leave it out")
        self._part.name = options[b"filename"].decode("utf-8", "replace")[:MAX_NAME]

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._part.data += data[start:end]

    def _end(self) -> None:
        self._uploads.append(Upload(self._part.name, bytes(self._part.data)))

    def _end_form(self) -> None:
        self._ended = True


@contextmanager
def _refusing_broken_forms() -> Iterator[None]:
    """Turn errors of the form parser into :class:`UploadError`."""
    try:
        yield
    except FormParserError as error:
        raise UploadError(422, f"the form is broken ({printable(str(error), 200)}): send it again") from None
