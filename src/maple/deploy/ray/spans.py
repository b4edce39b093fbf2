"""Ranges of a source that travel to workers, and their decoding there.

A worker reads and decodes with the limits of the one-process engine: images are decoded in a process of their own
(:mod:`maple.data.stream`), which each worker process keeps. An image that ends it, however often, costs that image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from maple.data._decoder import Batch, Failure, decode_items
from maple.data.decode import Decoding
from maple.data.image_set import ImageSet
from maple.data.sources.folders import Files, Paths
from maple.data.sources.tables import Table
from maple.data.stream import Chunk, Decoded, DecoderKilled, DecoderPool, Source
from maple.errors import DataError

_ATTEMPTS = 2  # at an image whose decoder is killed from outside, perhaps because memory runs out
_pools: dict[Decoding, DecoderPool] = {}  # of this process


@dataclass(frozen=True, eq=False)
class Span:
    """Images ``first`` to ``stop`` of a source, of which ``source`` holds only what is needed to read them."""

    first: int
    stop: int
    source: Source
    start: int  # position of the first image in ``source``
    names: Sequence[str] | None = None  # of the images, if not those of ``source``

    @classmethod
    def cut(cls, source: Source, first: int, stop: int) -> Span:
        """A range of a source: paths and arrays are cut to it, a table is opened again by the worker.

        Workers have another working folder, so that paths become absolute; names stay.
        """
        if isinstance(source, Files):
            names = [name for name, _ in islice(source.items(first), stop - first)]
            paths = Paths(str(Path(source.paths[i]).absolute()) for i in range(first, stop))
            return cls(first, stop, Files(paths, source.name), 0, names)
        if isinstance(source, ImageSet):
            return cls(first, stop, source.subset(np.arange(first, stop)), 0)
        if isinstance(source, Table):
            source = copy(source)
            source.path = source.path.absolute()
        return cls(first, stop, source, first)

    def __len__(self) -> int:
        return self.stop - self.first

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Chunks of ``size`` images, the last may have fewer; their positions are those in the whole source."""
        items, first = islice(self.source.items(self.start), len(self)), self.first
        while found := list(islice(items, size)):
            own, encoded = zip(*found)
            at = first - self.first
            yield Chunk(first, own if self.names is None else self.names[at : at + len(found)], encoded)
            first += len(found)

    def decode(self, how: Decoding, size: int) -> list[Decoded]:
        """Decode all images, ``size`` at a time; ``DataError`` where none of them is there any more."""
        chunks = list(self.chunks(size))
        if sum(len(chunk.files) for chunk in chunks) < len(self):
            raise DataError(f"'{self.source.name}' has fewer images than when the command started: {_RESTORE}")
        decoded = [decode_chunk(chunk, how) for chunk in chunks]
        paths = [item for chunk in chunks for item in chunk.items if isinstance(item, str)]
        is_nothing_left = len(paths) == len(self) and not any(chunk.files for chunk in decoded)
        if is_nothing_left and not any(Path(path).exists() for path in paths):
            raise DataError(f"all of {len(paths):,} images are gone, first '{paths[0]}': {_RESTORE}")
        return decoded


_RESTORE = "make them available on all nodes and rerun the same command to resume"


def decode_chunk(chunk: Chunk, how: Decoding) -> Decoded:
    """Decode images in the decoder of this process; those that are pixels already need none."""
    if all(isinstance(item, np.ndarray | DataError) for item in chunk.items):
        return chunk.decoded(decode_items(chunk.items, how))
    if how not in _pools:
        _pools[how] = DecoderPool(how, 1)
    return chunk.decoded(decode_all(_pools[how], chunk, how))


def decode_all(pool: DecoderPool, chunk: Chunk, how: Decoding) -> Batch:
    """Decode a chunk; an image at which the decoder is killed again and again fails alone."""
    try:
        return pool.decode(chunk.items, _ATTEMPTS)
    except DecoderKilled:
        batches = [_decode_one(pool, chunk, row, how) for row in range(len(chunk.items))]
    pixels = np.concatenate([batch.pixels for batch in batches])
    failures = [failure._replace(row=row) for row, batch in enumerate(batches) for failure in batch.failures]
    return Batch(pixels, [key for batch in batches for key in batch.keys], failures)


def _decode_one(pool: DecoderPool, chunk: Chunk, row: int, how: Decoding) -> Batch:
    try:
        return pool.decode([chunk.items[row]], _ATTEMPTS)
    except DecoderKilled as error:
        reason = f"{error} {_ATTEMPTS} times, perhaps because memory ran out: make it smaller"
        return Batch(np.empty((0, how.size, how.size, 3), np.uint8), [], [Failure(0, reason)])
