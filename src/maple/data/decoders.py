"""Decoding of outside images in processes with limits.

Every command and the service decode in such processes, and read no header anywhere else. Small files can be made that
keep a decoder busy for hours, such as a JPEG of thousands of scans, and some crash it. Neither a thread nor the
interpreter's lock can be taken back from such an image, so each image has limits on time, processor time and memory.
Processes are also faster than threads: small images spend most of their time in Python.

Each process is a Python interpreter of its own with a pipe in and a pipe out (:mod:`maple.data._decoder`). The death of
either side is an end of file for the other, so that a killed parent leaves no process behind. Unlike a process of
``multiprocessing`` (and the pools built on it) it does not import the user's script, and with it torch, and the parent
unpickles nothing that a process with untrusted images has sent.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import cast

import numpy as np

from maple.data._decoder import Batch, Failure, Item, decode_items, receive_batch, send_items
from maple.data.decode import Decoding, Fit, check_size_and_fit
from maple.errors import DataError, RunError

TIME_ENDS = ("SIGALRM", "SIGPROF")  # signals by which an image over its time ends a process,
IMAGE_ENDS = (*TIME_ENDS, "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")  # and other images
ATTEMPTS = 2  # at images whose process is killed from outside
_PIPE_BYTES = 2**20


class DecoderKilled(RunError):
    """A decoding process that was ended from outside, for example because memory ran out; no image is to blame."""


class DecoderPool:
    """``n`` decoding processes for at most ``n`` threads.

    An image that ends its process, by its time limit or by a crash, fails alone: the other images of its request are
    decoded one at a time in another process. A process that has ended is replaced when it is next needed.

    >>> with DecoderPool(Decoding(8), n=1) as pool:
    ...     [failure.reason for failure in pool.decode([b"GIF89a"]).failures]
    ['not an image that can be read, or one of 0 pixels']
    """

    def __init__(self, how: Decoding, n: int) -> None:
        self.n, self._how = n, how
        self._slots = [_Slot() for _ in range(n)]
        self._idle = deque(self._slots)
        with ExitStack() as stack:  # ends the first processes where the next cannot be started
            stack.callback(self.close)
            for slot in self._slots:
                slot.start()
            stack.pop_all()

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for slot in self._slots:
            slot.close()

    def decode(self, items: Sequence[Item], attempts: int = 1) -> Batch:
        """Decode images in one process, in their order.

        ``DecoderKilled`` where something else than an image has ended as many processes as there are ``attempts``,
        ``OSError`` where no process can be started.
        """
        with self._borrow() as slot:
            return slot.decode(items, self._how, attempts)

    def kill(self) -> None:
        """End all processes while threads may be waiting for their answers."""
        for slot in self._slots:
            slot.kill()

    @contextmanager
    def _borrow(self) -> Iterator[_Slot]:
        slot = self._idle.pop()
        try:
            yield slot
        finally:
            if slot.is_running:
                self._idle.append(slot)
            else:
                self._idle.appendleft(slot)  # running processes are taken first


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Answers to requests of one image each, as one."""
    pixels = np.concatenate([part.pixels for part in parts])
    failures = [failure._replace(row=row) for row, part in enumerate(parts) for failure in part.failures]
    dimensions = [each for part in parts for each in part.dimensions]
    return Batch(pixels, [key for part in parts for key in part.keys], failures, dimensions)


class _Slot:
    """The place of one process, which is started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise DecoderKilled("the pool of decoding processes is closed")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from maple.data._decoder import run; run()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=_PIPE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C, which the terminal sends to all, is for the parent alone
        )
        return self._process

    def decode(self, items: Sequence[Item], how: Decoding, attempts: int) -> Batch:
        """The answer of the process; of another one if the first is killed from outside, ``attempts`` in all."""
        for _ in range(attempts - 1):
            with suppress(DecoderKilled):
                return self._decode(items, how)
        return self._decode(items, how)

    def _decode(self, items: Sequence[Item], how: Decoding) -> Batch:
        """The answer of the process. Where an image has ended it, each image is decoded alone to find out which."""
        answer = self._ask(items, how)
        if isinstance(answer, Batch):
            return answer
        if answer not in IMAGE_ENDS:
            raise DecoderKilled(f"a decoding process ended with {answer}")
        if len(items) > 1:
            return join_batches([self._decode([item], how) for item in items])
        reason = f"its decoder ended with {answer}: save it again"
        if answer in TIME_ENDS:
            reason = f"takes longer than {how.seconds:g} s to decode: make it smaller, or save it again"
        return Batch(np.empty((0, how.size, how.size, 3), dtype=np.uint8), [], [Failure(0, reason)])

    def _ask(self, items: Sequence[Item], how: Decoding) -> Batch | str:
        """The answer of the process, or how it ended instead: the name of a signal, or an exit code."""
        process = self._process or self.start()
        with suppress(OSError):  # the process has ended, which shows in its answer
            send_items(cast(BufferedWriter, process.stdin), items, how)
        batch = receive_batch(cast(BufferedReader, process.stdout), len(items), how.size)
        if batch is not None:
            return batch
        code = process.wait()
        self._end(process)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def abandon(self) -> None:
        """End the process, which may be in the middle of an answer; the next request starts another."""
        if self._process is not None:
            self._end(self._process)

    def kill(self) -> None:
        """End the process while a thread may be waiting for its answer."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, which is idle."""
        self._closed = True
        self.abandon()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        with suppress(OSError):  # of a pipe that nobody reads any more
            process.communicate()


# --- the kept process ------------------------------------------------------------------------------------------------


class _Kept:
    """One decoding process that this process keeps until it ends: starting one costs more than most images."""

    def __init__(self) -> None:
        self._slot, self._lock = _Slot(), threading.Lock()

    def decode(self, items: Sequence[Item], how: Decoding) -> Batch:
        with self._lock:
            try:
                return self._slot.decode(items, how, ATTEMPTS)
            except DecoderKilled:
                raise
            except BaseException:  # Ctrl-C in the middle of an answer
                self._slot.abandon()
                raise

    def forget(self) -> None:
        """In a child that was forked: the process belongs to the parent."""
        self._slot, self._lock = _Slot(), threading.Lock()

    def close(self) -> None:
        self._slot.close()


_kept = _Kept()
atexit.register(_kept.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kept.forget)


def decode_kept(items: Sequence[Item], how: Decoding) -> Batch:
    """Decode images in the kept process, with its limits; images that are pixels already need none.

    >>> decode_kept([b"GIF89a"], Decoding(8)).failures[0].reason
    'not an image that can be read, or one of 0 pixels'
    """
    if any(isinstance(item, str | bytes) for item in items):
        return _kept.decode(items, how)
    return decode_items(items, how)


def decode_image(source: bytes | str | Path, size: int, fit: Fit = "pad") -> np.ndarray:
    """Decode one image (bytes or a file) to a square RGB array, (S, S, 3) uint8, within the limits of an image.

    >>> decode_image(b"GIF89a", 8)
    Traceback (most recent call last):
    ...
    maple.errors.DataError: cannot use the image: not an image that can be read, or one of 0 pixels
    """
    check_size_and_fit(size, fit)
    batch = decode_kept([source if isinstance(source, bytes) else str(source)], Decoding(size, fit))
    for failure in batch.failures:
        name = "the image" if isinstance(source, bytes) else f"'{source}'"
        raise DataError(f"cannot use {name}: {failure.reason}")
    return batch.pixels[0]
