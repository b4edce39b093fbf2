"""Decoding process: encoded images in at standard input, pixels out at standard output.

A request is one line of JSON that says how to decode and lists the images (a path, a number of bytes, or a reason why
there is none), then the bytes. An answer is one line of JSON with failures, keys and dimensions, then the pixels.
Neither side unpickles anything, because the process has read untrusted images. The module loads NumPy and Pillow, never
torch or pyarrow.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from maple.data.decode import MAX_PIXELS, Decoding, decode_bytes, open_file, read_dimensions, read_file
from maple.errors import DataError

_BASE_BYTES = 2**30  # memory limit of a process: so much,
_BYTES_PER_PIXEL = 32  # and so much per pixel of the largest image: 16-bit grey takes 23, most others less
_PATIENCE = 4  # seconds by the clock for each of processor time: on a busy machine no good image is to be lost
_OPEN_FILES = 64  # at a time

Item = str | bytes | np.ndarray | DataError  # path, encoded image, decoded image, or why there is none


class TooManyPixels(DataError):
    """An image with more pixels than allowed."""


class Failure(NamedTuple):
    """An image that cannot be decoded: its row in the request, and why."""

    row: int
    reason: str
    too_large: bool = False


class Batch(NamedTuple):
    """Decoded images in the order of the request, without those that failed."""

    pixels: np.ndarray  # (n, S, S, 3) uint8, or none
    keys: list[str]  # n digests, or none
    failures: list[Failure]
    dimensions: list[tuple[int, int]] = []  # n widths and heights, where nothing else was asked for


def content_key(data: Any) -> str:
    """Digest of encoded bytes or of pixels; splits are made from these keys.

    >>> content_key(b"maple")
    '7e75cdbb64f9083f68ee741b290217a2'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode_items(
    items: Sequence[Item], how: Decoding, set_alarm: Callable[[float], None] = lambda seconds: None
) -> Batch:
    """Decode images in this process. ``set_alarm`` gets the time limit before each image and 0 after it.

    >>> batch = decode_items([b"not an image", DataError("no bytes")], Decoding(8))
    >>> batch.pixels.shape, [failure.row for failure in batch.failures]
    ((0, 8, 8, 3), [0, 1])
    """
    pixels = np.empty((0 if how.only_headers else len(items), how.size, how.size, 3), dtype=np.uint8)
    batch = Batch(pixels, [], [], [])
    for row, item in enumerate(items):
        try:
            if how.only_headers:
                set_alarm(how.seconds)
                batch.dimensions.append(_measure(item, how))
                continue
            data = _read(item)
            set_alarm(how.seconds)
            pixels[row - len(batch.failures)] = data if isinstance(data, np.ndarray) else _decode_within(data, how)
            if how.keys:
                batch.keys.append(content_key(data))
        except DataError as error:
            batch.failures.append(Failure(row, str(error), isinstance(error, TooManyPixels)))
        finally:
            set_alarm(0)
    return batch._replace(pixels=pixels[: len(items) - len(batch.failures)])


def _read(item: Item) -> bytes | np.ndarray:
    if isinstance(item, DataError):
        raise item
    return read_file(item) if isinstance(item, str) else item


def _measure(item: Item, how: Decoding) -> tuple[int, int]:
    """Width and height of an image, from its header."""
    if isinstance(item, str):
        with open_file(item) as file:
            return read_dimensions(file, how.formats)
    data = _read(item)
    return data.shape[1::-1] if isinstance(data, np.ndarray) else read_dimensions(io.BytesIO(data), how.formats)


def _decode_within(data: bytes, how: Decoding) -> np.ndarray:
    """Decode one image after checking its number of pixels."""
    if how.max_pixels < MAX_PIXELS:
        width, height = read_dimensions(io.BytesIO(data), how.formats)
        if width * height > how.max_pixels:
            raise TooManyPixels(f"{width} x {height} pixels, and {how.max_pixels:,} are the most: make it smaller")
    return decode_bytes(data, how.size, how.fit, how.formats)


# --- wire format -----------------------------------------------------------------------------------------------------


def send_items(file: BinaryIO, items: Sequence[Item], how: Decoding) -> None:
    """Write a request, with absolute paths: the working folder may have changed since the process was started.

    >>> pipe = io.BytesIO()
    >>> send_items(pipe, ["/a.png", b"GIF89a", DataError("no image")], Decoding(8))
    >>> pipe.getvalue()[:31], pipe.getvalue()[-7:]
    (b'[["/a.png", 6, ["no image"]], {', b'\\nGIF89a')
    >>> receive_items(io.BytesIO(pipe.getvalue()))[1]
    ['/a.png', b'GIF89a', DataError('no image')]
    """
    listed = [os.path.abspath(item) if isinstance(item, str) else item for item in items]  # noqa: PTH100 (no object each)
    file.write(json.dumps([listed, asdict(how)], default=_announce).encode() + b"\n")
    for item in items:
        if isinstance(item, bytes):
            file.write(item)
    file.flush()


def _announce(item: bytes | DataError) -> int | list[str]:
    return len(item) if isinstance(item, bytes) else [str(item)]


def receive_items(file: BinaryIO) -> tuple[Decoding, list[Item]] | None:
    """Read a request; None at the end of the file."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    items: list[Item] = []
    listed, how = json.loads(line)
    for item in listed:
        if isinstance(item, str):
            items.append(item)
        else:
            items.append(file.read(item) if isinstance(item, int) else DataError(*item))
    return Decoding(**{**how, "formats": tuple(how["formats"])}), items


def send_batch(file: BinaryIO, batch: Batch) -> None:
    """Write an answer."""
    file.write(json.dumps([batch.failures, batch.keys, batch.dimensions]).encode() + b"\n")
    file.write(batch.pixels.data)
    file.flush()


def receive_batch(file: io.BufferedReader, n_items: int, size: int) -> Batch | None:
    """Read the answer to a request of ``n_items`` images; None where it is cut short.

    >>> pipe = io.BytesIO()
    >>> send_batch(pipe, Batch(np.zeros((1, 8, 8, 3), np.uint8), [], [Failure(1, "broken")]))
    >>> receive_batch(io.BytesIO(pipe.getvalue()), 2, 8).failures
    [Failure(row=1, reason='broken', too_large=False)]
    """
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    failures, keys, dimensions = json.loads(line)
    pixels = np.empty((n_items - len(failures) - len(dimensions), size, size, 3), dtype=np.uint8)
    if file.readinto(pixels.reshape(-1).data) < pixels.nbytes:
        return None
    return Batch(pixels, keys, [Failure(*failure) for failure in failures], [(w, h) for w, h in dimensions])


# --- the process -----------------------------------------------------------------------------------------------------


def run() -> None:
    """Answer requests until standard input is closed. The process ends itself at an image over its time limit."""
    _obey_limits()
    answers = _take_output()
    warnings.simplefilter("ignore")  # remarks of Pillow about broken images
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    with suppress(BrokenPipeError):
        while (request := receive_items(sys.stdin.buffer)) is not None:
            how, items = request
            _limit_memory(_BASE_BYTES + _BYTES_PER_PIXEL * how.max_pixels)
            send_batch(answers, decode_items(items, how, _end_after))


def _take_output() -> BinaryIO:
    """Reserve standard output for answers; what a decoder prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _end_after(seconds: float) -> None:
    """End this process after so many seconds of processor time, whatever it is doing; 0: never."""
    if sys.platform != "win32":  # which has no such signals
        signal.setitimer(signal.ITIMER_PROF, seconds)  # over all threads
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds)


def _obey_limits() -> None:
    """Let the timers end this process, also where the parent ignores or blocks their signals.

    It cannot write files, leave a core or open many files, whatever an image makes it do.
    """
    if sys.platform != "win32":
        import resource

        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
        most = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _OPEN_FILES}
        for kind, value in most.items():
            resource.setrlimit(kind, (value, value))


def _limit_memory(n_bytes: int) -> None:
    """Allocations beyond ``n_bytes`` of address space are a MemoryError of the image that asks for them."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
