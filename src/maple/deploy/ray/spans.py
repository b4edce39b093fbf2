"""Ranges of a source that travel to workers, and their decoding there.

A worker reads and decodes with the limits of the one-process engine: images are decoded in a process of their own
(:mod:`maple.data.stream`), which each worker process keeps. An image that ends it, however often, costs that image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from maple.data._decoder import Batch, Failure, decode_items
from maple.data.decode import Decoding
from maple.data.image_set import ImageSet
from maple.data.sources.folders import Files, Paths
from maple.data.sources.remote import GONE, RemoteFiles
from maple.data.sources.tables import Table, Tables
from maple.data.stream import Chunk, Decoded, DecoderKilled, DecoderPool, Item, Source
from maple.errors import DataError, RunError

_ATTEMPTS = 2  # at an image whose decoder is killed from outside, perhaps because memory runs out
_TOO_MANY = 4  # images in a row at which decoders are killed: the machine is at fault
_pools: dict[Decoding, DecoderPool] = {}  # of this process


@dataclass(frozen=True, eq=False)
class Span:
    """Images ``first`` to ``stop`` of a source; they are at ``rows`` of ``source``, which holds little else."""

    first: int
    stop: int
    source: Source
    rows: Sequence[int]
    names: Sequence[str] | None = None  # of the images, if not those of ``source``

    @classmethod
    def cut(cls, source: Source, first: int, stop: int) -> Span:
        """A range of a source: paths and arrays are cut to it, a table is opened again by the worker.

        Workers have another working folder, so that paths become absolute; names stay.
        """
        if isinstance(source, ImageSet) and source.pixels is not None:
            return cls(first, stop, source.subset(np.arange(first, stop)), range(stop - first))
        if not isinstance(source, ImageSet):
            return cls(first, stop, *_cut(source, range(first, stop)), _names(source, first, stop))
        assert source.store is not None and source.rows is not None
        rows, names = source.rows[first:stop].tolist(), source.files[first:stop]
        return cls(first, stop, *_cut(source.store, rows), names)

    def __len__(self) -> int:
        return self.stop - self.first

    def chunks(self, size: int) -> list[Chunk]:
        """Chunks of ``size`` images, the last may have fewer; their positions are those in the whole source."""
        found = self._read()
        if len(found) < len(self):
            raise DataError(f"'{self.source.name}' has fewer images than when the command started: {_RESTORE}")
        names = [name for name, _ in found] if self.names is None else self.names
        starts = range(0, len(found), size)
        return [
            Chunk(self.first + at, names[at : at + size], [item for _, item in found[at : at + size]]) for at in starts
        ]

    def _read(self) -> list[tuple[str, Item]]:
        """Names and images, read in the order of the source."""
        found, wanted = {}, set(self.rows)
        first, last = min(self.rows), max(self.rows)
        for row, entry in enumerate(islice(self.source.items(first), last + 1 - first), first):
            if row in wanted:
                found[row] = entry
        return [found[row] for row in self.rows if row in found]

    def decode(self, how: Decoding, size: int) -> list[Decoded]:
        """Decode all images, ``size`` at a time; ``DataError`` where none of them is there any more."""
        chunks = self.chunks(size)
        decoded = [decode_chunk(chunk, how) for chunk in chunks]
        items = [item for chunk in chunks for item in chunk.items]
        if not any(chunk.files for chunk in decoded) and all(map(_is_gone, items)):
            raise DataError(f"all of {len(items):,} images are gone, first '{chunks[0].files[0]}': {_RESTORE}")
        return decoded


_RESTORE = "make them available on all nodes and rerun the same command to resume"


def _is_gone(item: Item) -> bool:
    return str(item) == GONE if isinstance(item, DataError) else isinstance(item, str) and not Path(item).exists()


def can_cut(source: Source) -> bool:
    """Whether a source can be read by other processes."""
    if isinstance(source, ImageSet):
        return source.pixels is not None or (source.store is not None and can_cut(source.store))
    return isinstance(source, Files | Table | Tables | RemoteFiles)


def _names(source: Source, first: int, stop: int) -> list[str] | None:
    """Names of images that do not stay the same when paths become absolute."""
    return [name for name, _ in islice(source.items(first), stop - first)] if isinstance(source, Files) else None


def _cut(source: Source, rows: Sequence[int]) -> tuple[Source, Sequence[int]]:
    """What reads these rows in another process, and their positions there."""
    if isinstance(source, Files):
        paths = Paths(str(Path(source.paths[i]).absolute()) for i in rows)
        return Files(paths, source.name), range(len(rows))
    if isinstance(source, RemoteFiles):
        return source.only(rows), range(len(rows))
    assert isinstance(source, Table | Tables)
    return source.without_rows(), rows


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
        pass
    batches: list[Batch] = []
    for row in range(len(chunk.items)):
        batches.append(_decode_one(pool, chunk, row, how))
        if row + 1 == _TOO_MANY and not any(len(batch.pixels) for batch in batches):  # no image is to blame
            raise RunError(f"'{chunk.files[0]}' and all images behind it: {batches[0].failures[0].reason}")
    pixels = np.concatenate([batch.pixels for batch in batches])
    failures = [failure._replace(row=row) for row, batch in enumerate(batches) for failure in batch.failures]
    return Batch(pixels, [key for batch in batches for key in batch.keys], failures)


def _decode_one(pool: DecoderPool, chunk: Chunk, row: int, how: Decoding) -> Batch:
    try:
        return pool.decode([chunk.items[row]], _ATTEMPTS)
    except DecoderKilled as error:
        reason = f"{error} {_ATTEMPTS} times, perhaps because memory ran out: make it smaller"
        return Batch(np.empty((0, how.size, how.size, 3), np.uint8), [], [Failure(0, reason)])
