"""Decoding process: encoded images in at standard input, pixels out at standard output.

A request is one line of JSON that lists the images (a path, a number of bytes, or a reason why there is none), then the
bytes. An answer is one line of JSON with failures and keys, then the pixels. Neither side unpickles anything, because
the process has read untrusted images. The module loads NumPy and Pillow, never torch or pyarrow.
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
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from maple.data.decode import MAX_PIXELS, Decoding, decode_bytes, read_dimensions, read_file
from maple.errors import DataError

_BASE_BYTES = 2**30  # memory limit of a process: so much,
_BYTES_PER_PIXEL = 32  # and so much per pixel of the largest image: 16-bit grey takes 23, most others less

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

    pixels: np.ndarray  # (n, S, S, 3) uint8
    keys: list[str]  # n digests, or none
    failures: list[Failure]


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
    pixels = np.empty((len(items), how.size, how.size, 3), dtype=np.uint8)
    keys: list[str] = []
    failures: list[Failure] = []
    for row, item in enumerate(items):
        try:
            data = _read(item)
            set_alarm(how.seconds)
            pixels[row - len(failures)] = data if isinstance(data, np.ndarray) else _decode_within(data, how)
            if how.keys:
                keys.append(content_key(data))
        except DataError as error:
            failures.append(Failure(row, str(error), isinstance(error, TooManyPixels)))
        finally:
            set_alarm(0)
    return Batch(pixels[: len(items) - len(failures)], keys, failures)


def _read(item: Item) -> bytes | np.ndarray:
    if isinstance(item, DataError):
        raise item
    return read_file(Path(item)) if isinstance(item, str) else item


def _decode_within(data: bytes, how: Decoding) -> np.ndarray:
    """Decode one image after checking its number of pixels."""
    if how.max_pixels < MAX_PIXELS:
        width, height = read_dimensions(io.BytesIO(data))
        if width * height > how.max_pixels:
            raise TooManyPixels(f"{width} x {height} pixels, and {how.max_pixels:,} are the most: make it smaller")
    return decode_bytes(data, how.size, how.fit)


# --- wire format -----------------------------------------------------------------------------------------------------


def send_items(file: BinaryIO, items: Sequence[Item]) -> None:
    """Write a request.

    >>> pipe = io.BytesIO()
    >>> send_items(pipe, ["a.png", b"GIF89a", DataError("no image")])
    >>> pipe.getvalue()
    b'["a.png", 6, ["no image"]]\\nGIF89a'
    >>> receive_items(io.BytesIO(pipe.getvalue()))
    ['a.png', b'GIF89a', DataError('no image')]
    """
    file.write(json.dumps(list(items), default=_announce).encode() + b"\n")
    for item in items:
        if isinstance(item, bytes):
            file.write(item)
    file.flush()


def _announce(item: bytes | DataError) -> int | list[str]:
    return len(item) if isinstance(item, bytes) else [str(item)]


def receive_items(file: BinaryIO) -> list[Item] | None:
    """Read a request; None at the end of the file."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    items: list[Item] = []
    for item in json.loads(line):
        if isinstance(item, str):
            items.append(item)
        else:
            items.append(file.read(item) if isinstance(item, int) else DataError(*item))
    return items


def send_batch(file: BinaryIO, batch: Batch) -> None:
    """Write an answer."""
    file.write(json.dumps([batch.failures, batch.keys]).encode() + b"\n")
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
    failures, keys = json.loads(line)
    pixels = np.empty((n_items - len(failures), size, size, 3), dtype=np.uint8)
    if file.readinto(pixels.reshape(-1).data) < pixels.nbytes:
        return None
    return Batch(pixels, keys, [Failure(*failure) for failure in failures])


# --- the process -----------------------------------------------------------------------------------------------------


def run(how: Decoding) -> None:
    """Answer requests until standard input is closed. The process ends itself at an image over its time limit."""
    _obey_limits(_BASE_BYTES + _BYTES_PER_PIXEL * how.max_pixels)
    answers = _take_output()
    warnings.simplefilter("ignore")  # remarks of Pillow about broken images
    with suppress(BrokenPipeError):
        while (items := receive_items(sys.stdin.buffer)) is not None:
            send_batch(answers, decode_items(items, how, _end_after))


def _take_output() -> BinaryIO:
    """Reserve standard output for answers; what a decoder prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _end_after(seconds: float) -> None:
    """End this process after so many seconds, whatever it is doing; 0 cancels that."""
    if sys.platform != "win32":  # which has no such signal
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _obey_limits(n_bytes: int) -> None:
    """Let SIGALRM end this process, also where the parent ignores or blocks that signal, and limit its memory.

    Allocations beyond ``n_bytes`` of address space are a MemoryError of the image that asks for them.
    """
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
