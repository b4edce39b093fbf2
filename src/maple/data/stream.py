"""Images of any number, decoded ahead of the reader: memory does not grow with their number.

A :class:`Source` knows where images are and hands them out *encoded*, chunk by chunk; :func:`decode_stream` turns
chunks into pixels, in order, in a pool of processes if asked. Sources are the files of folders
(:mod:`maple.data.sources.folders`), the rows of tables (:mod:`maple.data.sources.tables`) and arrays
(:mod:`maple.data.image_set`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from maple.data._decoder import IMAGE_SECONDS, Batch, Decoding, Item, decode_items
from maple.data._pool import Chunk, DecoderPool
from maple.data.decode import Fit
from maple.types import Skipped

if TYPE_CHECKING:
    from pathlib import Path


class Decoded(NamedTuple):
    """Consecutive images of a source: those that could be decoded, and the others."""

    first: int  # position of the first of them in the source
    files: list[str]  # of the n that could be decoded
    pixels: np.ndarray  # (n, S, S, 3) uint8
    skipped: list[Skipped]

    @property
    def stop(self) -> int:
        """Position behind the last of them."""
        return self.first + len(self.files) + len(self.skipped)


class Source(ABC):
    """Images that can be counted, read in order from any position, and read one by one, without holding them.

    ``labels`` and ``class_names`` are those of a labelled source; else all labels are -1 and there is no class.
    """

    path: Path | None = None  # where all images are rows of one file
    skipped: tuple[Skipped, ...] = ()  # files found unusable when the source was listed
    is_decoded = False

    def __init__(self, name: str, labels: np.ndarray | None = None, class_names: tuple[str, ...] = ()) -> None:
        self.name, self.class_names = name, class_names
        self._labels = labels

    @property
    def labels(self) -> np.ndarray:
        """Class ids (N,) int64, -1 where unknown."""
        return np.full(len(self), -1, dtype=np.int64) if self._labels is None else self._labels

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
    def read(self, start: int) -> Iterator[tuple[str, Item]]:
        """Name of each image, and the image, from position ``start`` on."""

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        """Chunks of ``size`` images; the last may have fewer."""
        rows = self.read(start)
        while rows_of_chunk := list(islice(rows, size)):
            files, items = zip(*rows_of_chunk)
            yield Chunk(start, list(files), list(items))
            start += len(files)


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
    """Decode the images of a source from position ``start`` on, chunk by chunk and in order.

    ``workers`` processes decode ahead, one chunk each, so that at most ``workers`` + 1 chunks are in memory; few chunks
    start fewer processes. An image that takes a process longer than ``seconds``, or that crashes it, is skipped. With 0
    workers images are decoded in this process, without a time limit.

    >>> from maple.data.image_set import Arrays, ImageSet
    >>> source = Arrays(ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8), name="dark"))
    >>> [(chunk.files, chunk.pixels.shape) for chunk in decode_stream(source, size=8, chunk_size=3)]
    [(['dark#0', 'dark#1', 'dark#2'], (3, 8, 8, 3)), (['dark#3', 'dark#4'], (2, 8, 8, 3))]
    """
    n_chunks = -(-(len(source) - start) // chunk_size)
    workers = 0 if source.is_decoded else min(workers, -(-n_chunks // 2))
    how = Decoding(size, fit, seconds=seconds)
    with closing(decode_chunks(source.chunks(start, chunk_size), how, workers)) as decoded:
        for chunk, batch in decoded:
            failed = {failure.row: failure.reason for failure in batch.failures}
            files = [file for row, file in enumerate(chunk.files) if row not in failed]
            skipped = [Skipped(chunk.files[row], reason) for row, reason in failed.items()]
            yield Decoded(chunk.first, files, batch.pixels, skipped)


def decode_chunks(chunks: Iterable[Chunk], how: Decoding, workers: int) -> Generator[tuple[Chunk, Batch]]:
    """Decode chunks in order, in ``workers`` processes, or in this one."""
    if workers == 0:
        for chunk in chunks:
            yield chunk, decode_items(chunk.items, how)
        return
    with DecoderPool(how, workers) as pool:
        yield from pool.map(chunks)
