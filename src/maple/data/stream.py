"""Images of any number, decoded ahead of the reader: memory does not grow with their number.

A :class:`Source` knows where images are and hands them out *encoded*, chunk by chunk; :func:`decode_stream` turns
chunks into pixels, in order, in a pool of processes if asked. Sources are the files of folders
(:mod:`maple.data.sources.folders`), the rows of tables (:mod:`maple.data.sources.tables`) and image sets
(:mod:`maple.data.image_set`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from maple.data._decoder import Decoding, Item, decode_items
from maple.data._pool import Chunk, Decoded, DecoderPool
from maple.types import Skipped


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
    With 0 workers images are decoded in this process, without a time limit.

    >>> from maple.data.image_set import ImageSet
    >>> dark = ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8), name="dark")
    >>> [(chunk.files, chunk.pixels.shape) for chunk in decode_stream(dark, Decoding(8), chunk_size=3)]
    [(['dark#0', 'dark#1', 'dark#2'], (3, 8, 8, 3)), (['dark#3', 'dark#4'], (2, 8, 8, 3))]
    """
    n_chunks = -(-(len(source) - start) // chunk_size)
    workers = 0 if source.is_decoded else min(workers, -(-n_chunks // 2))
    yield from decode_chunks(source.chunks(start, chunk_size), how, workers)


def decode_chunks(chunks: Iterable[Chunk], how: Decoding, workers: int) -> Generator[Decoded]:
    """Decode chunks in order, in ``workers`` processes, or in this one."""
    if workers == 0:
        for chunk in chunks:
            yield chunk.decoded(decode_items(chunk.items, how))
        return
    with DecoderPool(how, workers) as pool:
        yield from pool.map(chunks)
