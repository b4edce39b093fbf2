"""Sources of any number of images, and their decoding in processes, ahead of the reader and in constant memory.

A :class:`Source` knows where images are and hands them out *encoded*, chunk by chunk; :func:`decode_stream` turns
chunks into pixels, in order. Sources are the files of folders (:mod:`maple.data.sources.folders`), the rows of tables
(:mod:`maple.data.sources.tables`) and image sets (:mod:`maple.data.image_set`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maple.data._decoder import Batch, Item
from maple.data.decode import Decoding
from maple.data.decoders import ATTEMPTS, DecoderKilled, DecoderPool, decode_kept
from maple.errors import DataError, RunError
from maple.types import Skipped

BESIDE = 256  # images before and after some that are gone: if all are, their folder is


class Decoded(NamedTuple):
    """Consecutive images of a source: those that could be decoded, and the others."""

    first: int  # position of the first of them in the source
    rows: list[int]  # positions of the n that could be decoded
    files: list[str]  # n names
    pixels: np.ndarray  # (n, S, S, 3) uint8
    keys: list[str]  # n digests, if asked for
    skipped: list[Skipped]

    @property
    def stop(self) -> int:
        """Position behind the last of them."""
        return self.first + len(self.files) + len(self.skipped)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Images that are decoded together."""

    first: int  # position of the first of them in their source
    files: Sequence[str]  # name of each
    items: Sequence[Item]

    def decoded(self, batch: Batch) -> Decoded:
        """The answer of a decoder, with the names of the images."""
        skipped = {failure.row: Skipped(self.files[failure.row], failure.reason) for failure in batch.failures}
        kept = [row for row in range(len(self.files)) if row not in skipped]
        rows, files = [self.first + row for row in kept], [self.files[row] for row in kept]
        return Decoded(self.first, rows, files, batch.pixels, batch.keys, list(skipped.values()))


class Source(ABC):
    """Images that can be counted, read in order from any position, and read one by one, without holding them."""

    name: str
    labels: np.ndarray | None  # (N,) int64 class ids of a labelled source; -1 where unknown
    class_names: tuple[str, ...]
    skipped: tuple[Skipped, ...]  # files found unusable when the source was listed
    path: Path | None = None  # where all images are rows of one file

    @property
    def is_decoded(self) -> bool:
        """Whether images need no decoding."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Number of images, whether or not they can be decoded."""

    @abstractmethod
    def digest(self) -> str:
        """Digest that changes when images are added, removed or changed."""

    @abstractmethod
    def item(self, i: int) -> Item:
        """The image at position ``i``."""

    @abstractmethod
    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        """Name of each image, and the image, from position ``start`` on."""

    def is_gone(self, i: int) -> bool:
        """Whether the image at position ``i`` was listed and is not there any more."""
        return False

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        """Chunks of ``size`` images; the last may have fewer."""
        rows = self.items(start)
        while rows_of_chunk := list(islice(rows, size)):
            yield Chunk(start, *zip(*rows_of_chunk))
            start += len(rows_of_chunk)


def decode_stream(
    source: Source, how: Decoding, *, chunk_size: int = 256, start: int = 0, workers: int = 0
) -> Generator[Decoded]:
    """Decode the images of a source from position ``start`` on, chunk by chunk and in order.

    ``workers`` processes decode ahead, one chunk each, so that at most ``workers`` + 1 chunks are in memory; few chunks
    start fewer processes. An image that takes a process longer than ``how.seconds``, or that crashes it, is skipped.
    With 0 workers nothing is decoded ahead, by the one process that this process keeps.

    >>> from maple.data.image_set import ImageSet
    >>> dark = ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8), name="dark")
    >>> [(chunk.files, chunk.pixels.shape) for chunk in decode_stream(dark, Decoding(8), chunk_size=3)]
    [(['dark#0', 'dark#1', 'dark#2'], (3, 8, 8, 3)), (['dark#3', 'dark#4'], (2, 8, 8, 3))]
    """
    n_chunks = -(-(len(source) - start) // chunk_size)
    workers = 0 if source.is_decoded else min(workers, -(-n_chunks // 2))
    yield from decode_chunks(source.chunks(start, chunk_size), how, workers)


def decode_chunks(chunks: Iterable[Chunk], how: Decoding, workers: int) -> Generator[Decoded]:
    """Decode chunks in order, in ``workers`` processes ahead, or in the kept one when they are asked for."""
    if workers == 0:
        for chunk in chunks:
            with _naming(chunk):
                yield chunk.decoded(decode_kept(chunk.items, how))
        return
    with DecoderPool(how, workers) as pool:
        yield from _decode_ahead(chunks, pool)


def check_present(source: Source, rows: Iterable[int], decoded: Decoded) -> None:
    """Raise ``DataError`` where no image of ``rows`` is there any more, as when a folder is renamed or a disk removed.

    Images that go one by one are skipped like others that cannot be used, so that ``rows`` are to be those of
    ``decoded`` and ``BESIDE`` before and after them.
    """
    if decoded.skipped and all(map(source.is_gone, rows)):
        raise DataError(
            f"'{decoded.skipped[0].file}' and all images beside it are gone: make them available again, where they are "
            "read, and rerun the same command to resume"
        )


def read_sizes(source: Source, chunk_size: int) -> list[tuple[int, int]]:
    """Widths and heights of the images whose headers can be read; decoding will report the others."""
    how = Decoding(1, only_headers=True)
    found: list[tuple[int, int]] = []
    for chunk in source.chunks(0, chunk_size):
        with _naming(chunk):
            found += decode_kept(chunk.items, how).dimensions
    return found


def _decode_ahead(chunks: Iterable[Chunk], pool: DecoderPool) -> Generator[Decoded]:
    """Decode one chunk after the other, ``pool.n`` at a time; answers come in the order of the chunks."""
    ahead: deque[tuple[Chunk, Future[Batch]]] = deque()
    with ThreadPoolExecutor(pool.n, "decode") as threads:
        try:
            for chunk in chunks:
                done = _wait(*ahead.popleft()) if len(ahead) == pool.n else None
                ahead.append((chunk, threads.submit(pool.decode, chunk.items, ATTEMPTS)))
                if done is not None:  # all processes are busy while the caller works with it
                    yield done
            while ahead:
                yield _wait(*ahead.popleft())
        finally:
            if ahead:  # the caller has left: do not wait for what nobody wants
                pool.kill()


def _wait(chunk: Chunk, answer: Future[Batch]) -> Decoded:
    with _naming(chunk):
        return chunk.decoded(answer.result())


@contextmanager
def _naming(chunk: Chunk) -> Iterator[None]:
    """Within it the error for a process that was killed names the images it had, and the remedy."""
    try:
        yield
    except DecoderKilled as error:
        where = f"at one of '{chunk.files[0]}' to '{chunk.files[-1]}'"
        remedy = "free some memory, or run the same command again with --workers 1 or a smaller --batch-size"
        raise RunError(f"{error}, {where}, perhaps because memory ran out: {remedy}") from None
