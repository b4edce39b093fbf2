"""Images of any number, decoded ahead of whoever reads them: memory does not grow with their number.

A :class:`Source` knows where images are and hands them out *encoded*, chunk by chunk; :func:`decode_stream` turns
chunks into pixels, in order, in other processes if asked. Only the paths of files are held, as one block of bytes; a
Parquet file is read along with the images. Nothing here imports torch, and neither do the processes.

Processes and not threads: small images spend most of their time in Python, and threads were seen to be slower than one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import numpy as np

from maple.data.decode import Fit, decode_bytes, read_dimensions, read_file
from maple.errors import DataError, RunError
from maple.types import Skipped

if TYPE_CHECKING:  # loaded where a source is opened: processes that decode need neither this nor pyarrow
    from maple.data.image_set import ColumnStore, ImageSet

READ_ROWS = 64  # of a Parquet file at a time
READ_BYTES = 2**20  # of its columns at a time: else whole row groups, which may be the whole file
IMAGE_SECONDS = 60.0  # that a process may take to decode one image
IMAGE_ENDS = ("SIGALRM", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")  # how an image ends its process

Item = str | bytes | np.ndarray | DataError  # path, encoded image, decoded image, or why there is none


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive images of a source, not decoded yet."""

    first: int  # position of the first of them in the source
    files: list[str]  # what each is called
    items: list[Item]


class Decoded(NamedTuple):
    """Consecutive images of a source: those that could be decoded, and the others."""

    first: int  # position of the first of them in the source
    files: list[str]  # of the n that could be decoded
    pixels: np.ndarray  # (n, S, S, 3) uint8
    skipped: list[Skipped]

    @property
    def stop(self) -> int:
        """The position behind the last of them."""
        return self.first + len(self.files) + len(self.skipped)


# --- sources ---------------------------------------------------------------------------------------------------------


class Source(ABC):
    """Images that can be counted and read in order, from any position on, without holding them."""

    path: Path | None = None  # where all are rows of one file
    skipped: tuple[Skipped, ...] = ()  # what was found to be of no use when the source was opened
    is_decoded = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def __len__(self) -> int:
        """How many images there are, whether or not they can be decoded."""

    @abstractmethod
    def digest(self) -> str:
        """What is another when images were added, removed or changed."""

    @abstractmethod
    def read(self, start: int) -> Iterator[tuple[str, Item]]:
        """What each image is called, and the image, from position ``start`` on."""

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        """Chunks of ``size`` images, the last of which may have fewer."""
        rows = self.read(start)
        while rows_of_chunk := list(islice(rows, size)):
            files, items = zip(*rows_of_chunk)
            yield Chunk(start, list(files), list(items))
            start += len(files)


def open_source(
    sources: Sequence[str | Path], *, size: int, fit: Fit = "pad", data_root: str | Path | None = None
) -> Source:
    """The images that :func:`maple.data.sources.open_images` would open without labels; here they are only listed."""
    from maple.data.sources import find_images, open_images

    places, name = find_images(sources, data_root)
    if places is None:
        return Arrays(open_images(sources, size=size, fit=fit, data_root=data_root, labelled=False))
    return Table(places, name) if isinstance(places, Path) else Files(places, name)


class Paths:
    """Paths in one block of bytes: as strings they take twice as much memory, as ``Path`` ten times.

    >>> paths = Paths(["a/1.png", "b/2.png"])
    >>> len(paths), paths[1]
    (2, 'b/2.png')
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._block, self._ends = bytearray(), array("q", [0])
        for path in paths:
            self._block += os.fsencode(path)
            self._ends.append(len(self._block))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self.encoded(i))

    def encoded(self, i: int) -> bytes:
        """The path as the system has it."""
        return bytes(self._block[self._ends[i] : self._ends[i + 1]])


class Files(Source):
    """Image files."""

    def __init__(self, paths: Iterable[str], name: str) -> None:
        super().__init__(name)
        self.paths = Paths(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for i in range(len(self)):
            path = self.paths.encoded(i)
            found.update(path + _stamp(path))
        return found.hexdigest()

    def read(self, start: int) -> Iterator[tuple[str, Item]]:
        for i in range(start, len(self)):
            # A name that is not UTF-8 could be written to no file.
            yield self.paths.encoded(i).decode("utf-8", "backslashreplace"), self.paths[i]


class Table(Source):
    """Encoded images in a column of a Parquet file, which is read along with them."""

    def __init__(self, path: Path, name: str) -> None:
        from maple.data.sources import find_image_column, read_image_column

        super().__init__(name)
        self.path = path
        with self._open() as file:
            self._column = find_image_column(file.schema_arrow, path)
            read_image_column(file.schema_arrow.empty_table()[self._column], name, path)  # raises where it holds none
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])  # the first row of each row group, and the number of rows
        if len(self) == 0:
            raise DataError(f"no images in '{path}': the file has no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digest(self) -> str:
        path = os.fsencode(self.path or "")
        return hashlib.blake2b(path + _stamp(path), digest_size=16).hexdigest()

    def read(self, start: int) -> Iterator[tuple[str, Item]]:
        import pyarrow as pa

        from maple.data.image_set import ColumnStore
        from maple.data.sources import read_image_column

        assert self.path is not None
        group = int(np.searchsorted(self._starts, start, side="right")) - 1
        row = int(self._starts[group])
        with self._open() as file:
            groups = list(range(group, file.num_row_groups))
            for batch in file.iter_batches(READ_ROWS, groups, [self._column], use_threads=False):
                column = pa.chunked_array([batch.column(0)])
                column, files = read_image_column(column, self.name, self.path, row)
                store = ColumnStore(column)
                for i in range(max(start - row, 0), len(store)):
                    yield files[i], _read(store, i)
                row += len(store)

    @contextmanager
    def _open(self) -> Iterator:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, buffer_size=READ_BYTES, pre_buffer=False) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read '{self.path}' as Parquet: {str(error).splitlines()[0]}") from None


class Arrays(Source):
    """Images that are in memory already: arrays, built-in sets and corrupted ones."""

    is_decoded = True

    def __init__(self, images: ImageSet) -> None:
        super().__init__(images.name)
        assert images.pixels is not None
        self._pixels, self._files, self._keys = images.pixels, images.files, images.keys
        self.skipped = images.skipped

    def __len__(self) -> int:
        return len(self._files)

    def digest(self) -> str:
        return hashlib.blake2b("\0".join(self._files).encode() + self._keys.tobytes(), digest_size=16).hexdigest()

    def read(self, start: int) -> Iterator[tuple[str, Item]]:
        yield from zip(self._files[start:], self._pixels[start:])


def _stamp(path: bytes) -> bytes:
    """Size and time of change of a file, after a mark that no path contains; nothing where there is no such file."""
    try:
        found = os.stat(path)  # noqa: PTH116 (no object per file)
    except OSError:
        return b"\0\0"
    return b"\0%d %d\0" % (found.st_size, found.st_mtime_ns)


def _read(store: ColumnStore, i: int) -> bytes | DataError:
    try:
        return store.read(i)
    except DataError as error:
        return error


# --- decoding --------------------------------------------------------------------------------------------------------


def decode_stream(
    source: Source,
    *,
    size: int,
    fit: Fit = "pad",
    chunk_size: int = 256,
    start: int = 0,
    workers: int = 0,
    seconds: float = IMAGE_SECONDS,
) -> Generator[Decoded]:
    """The images of a source from position ``start`` on, decoded, chunk by chunk and in order.

    ``workers`` processes decode ahead, one chunk each, so that ``workers`` + 1 chunks are in memory at most; there are
    fewer where there are few chunks. An image that takes a process longer than ``seconds``, or that brings it down, is
    skipped. 0 workers decode in this process, which nothing guards against such images.

    >>> from maple.data.image_set import ImageSet
    >>> source = Arrays(ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8), name="dark"))
    >>> [(chunk.files, chunk.pixels.shape) for chunk in decode_stream(source, size=8, chunk_size=3)]
    [(['dark#0', 'dark#1', 'dark#2'], (3, 8, 8, 3)), (['dark#3', 'dark#4'], (2, 8, 8, 3))]
    """
    chunks = source.chunks(start, chunk_size)
    n_chunks = -(-(len(source) - start) // chunk_size)
    workers = 0 if source.is_decoded else min(workers, -(-n_chunks // 2))
    if workers:
        yield from _decode_ahead(chunks, size, fit, workers, seconds)
        return
    for chunk in chunks:
        yield _join(chunk, *decode_items(chunk.items, size, partial(decode_bytes, size=size, fit=fit)))


def decode_items(
    items: Sequence[Item], size: int, decode: Callable[[bytes], np.ndarray]
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Pixels (n, S, S, 3) of the images that can be decoded; positions of the others, and why they cannot.

    ``decode`` makes an array (S, S, 3) of one encoded image.
    """
    pixels = np.empty((len(items), size, size, 3), dtype=np.uint8)
    reasons: list[tuple[int, str]] = []
    for i, item in enumerate(items):
        try:
            pixels[i - len(reasons)] = _decode(item, decode)
        except DataError as error:
            reasons.append((i, str(error)))
    return pixels[: len(items) - len(reasons)], reasons


def _decode(item: Item, decode: Callable[[bytes], np.ndarray]) -> np.ndarray:
    if isinstance(item, DataError):
        raise item
    if isinstance(item, np.ndarray):
        return item
    return decode(item if isinstance(item, bytes) else read_file(Path(item)))


def _join(chunk: Chunk, pixels: np.ndarray, reasons: Sequence[tuple[int, str]]) -> Decoded:
    why = dict(reasons)
    used = [file for i, file in enumerate(chunk.files) if i not in why]
    return Decoded(chunk.first, used, pixels, [Skipped(chunk.files[i], reason) for i, reason in why.items()])


def _decode_ahead(chunks: Iterator[Chunk], size: int, fit: Fit, workers: int, seconds: float) -> Iterator[Decoded]:
    """As many chunks at once as there are processes; the next in order is awaited, and its process given another."""
    with ExitStack() as stack:
        idle = [stack.enter_context(_Decoder(size, fit, seconds)) for _ in range(workers)]
        at_work: deque[tuple[_Decoder, Chunk]] = deque()
        for chunk in chunks:
            decoded = None
            if not idle:
                decoder, earlier = at_work.popleft()
                decoded = decoder.take(earlier)
                idle.append(decoder)
            decoder = idle.pop()
            decoder.give(chunk)
            at_work.append((decoder, chunk))
            if decoded is not None:  # while it is worked with, all processes are busy
                yield decoded
        for decoder, chunk in at_work:
            yield decoder.take(chunk)


class _Decoder:
    """A process that decodes one chunk at a time: what it is given it must be asked for before it is given more.

    It is a Python of its own with a pipe in and a pipe out, so that the death of either side is an end of file for the
    other: no process is left behind by a kill, as those of a pool would be, and none is waited for in vain. Unlike a
    process of ``multiprocessing`` it does not import the user's script, and torch with it. Both sides speak JSON and
    bare bytes: what has read images of others is not trusted with pickles.

    Where an image has ended the process, another takes its place, and the images of the chunk are decoded one at a time
    to find out which it was. What ended in any other way, as where memory ran out, says nothing about an image.
    """

    def __init__(self, size: int, fit: Fit, seconds: float) -> None:
        self._size = size
        self._start = partial(_start, "serve", size, fit, seconds)
        self._start_guarded = partial(GuardedDecoder, size, fit, None, seconds)
        self._process = self._start()

    def __enter__(self) -> _Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)

    def give(self, chunk: Chunk) -> None:
        with suppress(OSError):  # of a process that has ended, which is found out when it is asked
            send_items(cast(io.BufferedWriter, self._process.stdin), chunk.items)

    def take(self, chunk: Chunk) -> Decoded:
        answers = cast(io.BufferedReader, self._process.stdout)
        line = answers.readline()
        reasons = json.loads(line) if line.endswith(b"\n") else []
        pixels = np.empty((len(chunk.items) - len(reasons), self._size, self._size, 3), dtype=np.uint8)
        if not line or answers.readinto(pixels.reshape(-1).data) < pixels.nbytes:
            pixels, reasons = self._take_one_at_a_time(chunk)
        return _join(chunk, pixels, reasons)

    def _take_one_at_a_time(self, chunk: Chunk) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """As :func:`decode_items`, after the process has ended: what ends another one alone is skipped."""
        how = _how(self._process.wait())
        if how not in IMAGE_ENDS:
            raise self._say_ended(chunk, how)
        _end(self._process)
        self._process = self._start()
        decoder = self._start_guarded()

        def decode(data: bytes) -> np.ndarray:
            nonlocal decoder
            try:
                return decoder.decode(data)
            except DecoderEnded as error:
                if error.how not in IMAGE_ENDS:
                    raise self._say_ended(chunk, error.how) from None
                decoder = self._start_guarded()
                raise

        try:
            return decode_items(chunk.items, self._size, decode)
        finally:
            decoder.close()

    def _say_ended(self, chunk: Chunk, how: str) -> RunError:
        return RunError(
            f"a process that decodes images ended {_by(how)}, at one of '{chunk.files[0]}' to '{chunk.files[-1]}', "
            "perhaps since memory ran out: give the same command again, with --workers 0 or a smaller --batch-size"
        )


def _start(function: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A Python of its own that calls a function of this module."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from maple.data.stream import {function}; {function}{arguments!r}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,  # it does not hear Ctrl-C, which the terminal sends to all
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):  # of a pipe that nobody reads any more
        process.communicate()


def _how(code: int) -> str:
    """How a process ended: the name of a signal, or its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _by(how: str) -> str:
    return f"by {how}" if how.startswith("SIG") else f"with {how}"


def _take_output() -> BinaryIO:
    """Standard output, for answers alone: a decoder that has something to say says it elsewhere."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(size: int, fit: Fit, seconds: float) -> None:
    """Decode what comes in at standard input, until that is closed: what a process of ``decode_stream`` does.

    It ends itself where one image takes longer than ``seconds`` to decode; reading a file may take any time.
    """
    _obey_alarm()
    answers = _take_output()

    def decode(data: bytes) -> np.ndarray:
        _end_after(seconds)
        try:
            return decode_bytes(data, size, fit)
        finally:
            _end_after(0)

    with suppress(BrokenPipeError):
        while (items := receive_items(sys.stdin.buffer)) is not None:
            pixels, reasons = decode_items(items, size, decode)
            answers.write(json.dumps(reasons).encode() + b"\n")
            answers.write(pixels.data)
            answers.flush()


def send_items(file: BinaryIO, items: Sequence[Item]) -> None:
    """Paths, encoded images and reasons: a line of JSON, in which an image is its number of bytes, then the bytes.

    >>> pipe = io.BytesIO()
    >>> send_items(pipe, ["a.png", b"GIF89a", DataError("no image")])
    >>> pipe.getvalue()
    b'["a.png", 6, ["no image"]]\\nGIF89a'
    >>> receive_items(io.BytesIO(pipe.getvalue()))
    ['a.png', b'GIF89a', DataError('no image')]
    """
    file.write(json.dumps([_announce(item) for item in items]).encode() + b"\n")
    for item in items:
        if isinstance(item, bytes):
            file.write(item)
    file.flush()


def _announce(item: Item) -> str | int | list[str]:
    if isinstance(item, bytes):
        return len(item)
    return [str(item)] if isinstance(item, DataError) else cast(str, item)  # arrays need no decoding


def receive_items(file: BinaryIO) -> list[Item] | None:
    """What :func:`send_items` wrote; None where nothing comes any more."""
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


# --- images of strangers ---------------------------------------------------------------------------------------------


class TooManyPixels(DataError):
    """An image of more pixels than are allowed."""


class DecoderEnded(DataError):
    """An image that took too long to decode, or brought its decoder down; ``how`` that ended."""

    def __init__(self, message: str, how: str) -> None:
        super().__init__(message)
        self.how = how


class GuardedDecoder:
    """A process that decodes one image at a time, and ends itself where that takes longer than ``seconds``.

    ``max_pixels`` may be less than :func:`maple.data.decode.decode_bytes` takes; None leaves it at that.

    Small files can be made that keep a decoder busy for hours, such as a JPEG of thousands of scans, and some bring it
    down. Neither a thread nor the lock of the interpreter could be taken back from it.
    """

    def __init__(self, size: int, fit: Fit, max_pixels: int | None, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self._process = _start("serve_guarded", size, fit, max_pixels, seconds)
        self._requests = cast(io.BufferedWriter, self._process.stdin)
        self._answers = cast(io.BufferedReader, self._process.stdout)

    def decode(self, data: bytes) -> np.ndarray:
        """An encoded image as (S, S, 3) uint8; :class:`DecoderEnded` where this was the last of this process."""
        with suppress(OSError):  # of a process that has ended
            self._requests.write(b"%d\n" % len(data))
            self._requests.write(data)
            self._requests.flush()
        line = self._answers.readline()
        said = json.loads(line) if line.endswith(b"\n") else None
        if said:
            raise (TooManyPixels if said["too_large"] else DataError)(said["reason"])
        pixels = np.empty((self._size, self._size, 3), dtype=np.uint8)
        if said is None or self._answers.readinto(pixels.reshape(-1).data) < pixels.nbytes:
            raise self._say_ended()
        return pixels

    def _say_ended(self) -> DecoderEnded:
        how = _how(self._process.wait())
        self.close()
        if how == "SIGALRM":
            reason = f"takes longer than {self._seconds:g} s to decode: make it smaller, or save it anew"
        else:
            reason = f"its decoder ended {_by(how)}: save it anew"
        return DecoderEnded(reason, how)

    def close(self) -> None:
        _end(self._process)


def serve_guarded(size: int, fit: Fit, max_pixels: int | None, seconds: float) -> None:
    """As :func:`serve`, what a :class:`GuardedDecoder` does: a line with a number of bytes, then the bytes."""
    _obey_alarm()
    answers = _take_output()
    warnings.simplefilter("ignore")  # what decoders remark about broken images is answered
    with suppress(BrokenPipeError):
        while (line := sys.stdin.buffer.readline()).endswith(b"\n"):
            data = sys.stdin.buffer.read(int(line))
            _end_after(seconds)
            try:
                answer = b"{}\n" + _decode_within(data, size, fit, max_pixels).tobytes()
            except DataError as error:
                said = {"too_large": isinstance(error, TooManyPixels), "reason": str(error)}
                answer = json.dumps(said).encode() + b"\n"
            _end_after(0)
            answers.write(answer)
            answers.flush()


def _obey_alarm() -> None:
    """Let the signal of :func:`_end_after` end this process, also where whoever started it ignores or blocks it."""
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _end_after(seconds: float) -> None:
    """End this process then, whatever it is doing; 0 takes it back."""
    if sys.platform != "win32":  # which has no such signal
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _decode_within(data: bytes, size: int, fit: Fit, max_pixels: int | None) -> np.ndarray:
    """As :func:`maple.data.decode.decode_bytes`; the number of pixels is checked before one is decoded."""
    if max_pixels is not None:
        width, height = read_dimensions(io.BytesIO(data))
        if width * height > max_pixels:
            raise TooManyPixels(f"{width} x {height} pixels, and {max_pixels:,} are the most: make it smaller")
    return decode_bytes(data, size, fit)
