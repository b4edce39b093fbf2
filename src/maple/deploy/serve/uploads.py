"""Request bodies to images: limits first, then parsing as a stream, then decoding; nothing is written to disk.

Formats and dimensions are checked while a body arrives (:mod:`maple.deploy.serve.watch`), and again before decoding.

A body that cannot be used is an :class:`UploadError` with a status and one sentence: 413 too large, 415 unsupported
format, 422 broken or too many images. Names are labels that come back with the answer and never become paths.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File, FormParser, parse_options_header

from maple.data.decoders import DecoderKilled, DecoderPool
from maple.data.headers import HEADER_BYTES
from maple.deploy.serve.batching import Busy
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.watch import (
    MAX_NAME,
    FormWatch,
    ImageWatch,
    JsonWatch,
    UploadError,
    check_header,
    refusal,
    too_many,
)
from maple.text import printable

FIELDS = ("files", "file")  # of a form, either
BINARY = "application/octet-stream"
# What the body of a single image is called: its own type, nothing, or what curl --data-binary says without being asked.
RAW = (b"", BINARY.encode(), b"application/x-www-form-urlencoded")
DECODER_WAIT = 5  # seconds until a decoding process may be available again


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


async def read_uploads(headers: Mapping[str, str], stream: AsyncIterator[bytes], limits: ServeOptions) -> list[Upload]:
    """The images of a request; ``headers`` have lower-case names. At least one, each with a name."""
    kind, parameters = parse_options_header(headers.get("content-type"))
    is_raw = kind in RAW or kind.startswith(b"image/")
    if not is_raw and kind not in (b"multipart/form-data", b"application/json"):
        raise UploadError(
            415, f"send images as multipart/form-data (field '{FIELDS[0]}'), as application/json, or one as the body"
        )
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UploadError(415, "the body is compressed: send it as it is, without Content-Encoding")
    body = _limited(headers.get("content-length", ""), stream, limits.max_bytes)
    if is_raw:
        content = await _collect(body, ImageWatch(limits, "image 1"))
        uploads = [Upload("", content)] if content else []
    elif kind == b"application/json":
        uploads = await asyncio.to_thread(parse_json, await _collect(body, JsonWatch(limits)), limits.max_images)
    else:
        uploads = await _read_form(parameters.get(b"boundary", b""), body, limits)
    if not uploads:
        raise UploadError(422, "the request holds no image: send at least one")
    return [Upload(upload.name or f"image {i}", upload.data) for i, upload in enumerate(uploads, start=1)]


async def _limited(length: str, stream: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The chunks of a body up to the limit; the declared length is checked first, then the actual one."""
    too_long = UploadError(413, f"the body is longer than {max_bytes:,} bytes: send fewer or smaller images")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > max_bytes:
        raise too_long
    n_bytes = 0
    async for chunk in stream:
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            raise too_long
        yield chunk


async def _collect(body: AsyncIterator[bytes], watch: ImageWatch | JsonWatch) -> bytes:
    """The whole body, seen by ``watch`` while it arrives."""
    content = bytearray()
    async for chunk in body:
        watch.feed(chunk)
        content += chunk
    return bytes(content)


def parse_json(body: bytes, max_images: int) -> list[Upload]:
    """The images of a JSON body, still in base64.

    >>> parse_json(b'{"images": [{"name": "a.png", "data": "iVBORw=="}]}', 1)
    [Upload(name='a.png', data='iVBORw==')]
    """
    # More commas than names and images could contain: refuse without parsing.
    if body.count(b",") > max_images * (MAX_NAME + 2):
        raise too_many(max_images)
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
    if len(images) > max_images:
        raise too_many(max_images)
    return [Upload(image.name, image.data) for image in images]


async def _read_form(boundary: bytes, body: AsyncIterator[bytes], limits: ServeOptions) -> list[Upload]:
    """The images of a form with files in ``FIELDS`` and nothing else, parsed in memory while it arrives."""
    uploads: list[Upload] = []
    ends: list[bool] = []

    def refuse_part(_: object) -> None:
        raise UploadError(422, f"the form holds something else than files in its field '{FIELDS[0]}': leave it out")

    def add(file: File) -> None:
        if (file.field_name or b"").decode("utf-8", "replace") not in FIELDS:
            refuse_part(file)
        if len(uploads) == limits.max_images:
            raise too_many(limits.max_images)
        assert isinstance(file.file_object, io.BytesIO)  # never on disk
        name = (file.file_name or b"").decode("utf-8", "replace")[:MAX_NAME]
        uploads.append(Upload(name, file.file_object.getvalue()))

    if not boundary:
        raise UploadError(422, "the form has no boundary: let your HTTP library write the Content-Type")
    in_memory = {"MAX_MEMORY_FILE_SIZE": math.inf}
    try:
        parser = FormParser(
            "multipart/form-data", refuse_part, add, lambda: ends.append(True), boundary, config=in_memory
        )
        FormWatch(limits).attach(parser)
        async for chunk in body:
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise UploadError(422, f"the form is broken ({printable(str(error), 200)}): send it again") from None
    if not ends:
        raise UploadError(422, "the form ends too early: send it again")
    return uploads


def decode_upload(upload: Upload, pool: DecoderPool, limits: ServeOptions) -> np.ndarray:
    """The pixels (S, S, 3) uint8 of an image; :class:`Busy` if no process could decode it, though it may be fine.

    Dimensions are checked before a pixel is decoded; an image that takes too long is refused.
    """
    try:
        data = upload.data if isinstance(upload.data, bytes) else base64.b64decode(upload.data, validate=True)
    except ValueError:
        reason = "its data are not base64: encode the bytes of the file, without line breaks"
        raise refusal(upload.name, reason) from None
    check_header(data[:HEADER_BYTES], upload.name, limits)
    try:
        batch = pool.decode([data], attempts=2)  # the second in another process, if the first is killed from outside
    except DecoderKilled:
        reason = "two decoding processes were killed, perhaps out of memory: try again later"
        raise Busy("decoder", reason, DECODER_WAIT) from None
    except OSError as error:
        reason = f"cannot start a decoding process ({error.strerror or error}): try again later"
        raise Busy("decoder", reason, DECODER_WAIT) from None
    for failure in batch.failures:
        raise refusal(upload.name, failure.reason, 413 if failure.too_large else 422)
    return batch.pixels[0]
