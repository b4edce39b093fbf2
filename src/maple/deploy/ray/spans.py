"""Ranges of a source that travel to workers, and their decoding there.

A worker reads and decodes with the limits of the one-process engine, in the decoding process that each process keeps
(:mod:`maple.data.decoders`). An image that ends it, however often, costs that image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from maple.data._decoder import Batch, Failure, Item
from maple.data.decode import Decoding
from maple.data.decoders import ATTEMPTS, DecoderKilled, decode_kept, join_batches
from maple.data.image_set import ImageSet
from maple.data.sources.folders import Files
from maple.data.sources.remote import RemoteFiles
from maple.data.sources.tables import Table, Tables
from maple.data.stream import BESIDE, Chunk, Decoded, Source, check_present
from maple.errors import DataError, RunError

SPAN_BYTES = 2**25  # pixels of a task's images, at most
_Cuttable = Files | Table | Tables | RemoteFiles
_TOO_MANY = 4  # images in a row at which decoders are killed: the machine is at fault


@dataclass(frozen=True, eq=False)
class Span:
    """Images ``first`` to ``stop`` of a source; they are at ``rows`` of ``source``, which holds little else."""

    first: int
    stop: int
    source: Source
    rows: Sequence[int]
    names: Sequence[str] | None = None  # of the images, if not those of ``source``
    beside: Sequence[int] = ()  # where ``source`` has the images of the span and some before and after it

    @classmethod
    def cut(cls, source: Source, first: int, stop: int) -> Span:
        """A range of a source: paths and arrays are cut to it, a table is opened again by the worker; names stay."""
        if isinstance(source, _Cuttable):
            own, rows, beside = _take(source, range(len(source)), first, stop)
            return cls(first, stop, own, rows, _names(source, first, stop), beside)
        assert isinstance(source, ImageSet)
        if source.pixels is not None:
            return cls(first, stop, source.subset(np.arange(first, stop)), range(stop - first))
        assert isinstance(source.store, _Cuttable) and source.rows is not None
        own, rows, beside = _take(source.store, source.rows, first, stop)
        return cls(first, stop, own, rows, source.files[first:stop], beside)

    def __len__(self) -> int:
        return self.stop - self.first

    def chunks(self, size: int) -> list[Chunk]:
        """Chunks of ``size`` images, the last may have fewer; their positions are those in the whole source."""
        found = self._read()
        if len(found) < len(self):
            raise DataError(f"'{self.source.name}' has fewer images than when the command started: restore it")
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
        """Decode all images, ``size`` at a time; ``DataError`` where none of them is there any more, nor any beside."""
        decoded = [decode_chunk(chunk, how) for chunk in self.chunks(size)]
        for chunk in decoded:
            check_present(self.source, self.beside, chunk)
        return decoded


def _take(
    source: _Cuttable, positions: range | np.ndarray, first: int, stop: int
) -> tuple[Source, Sequence[int], Sequence[int]]:
    """What reads some images elsewhere, and where it has these, and these with some before and after them."""
    begin = max(first - BESIDE, 0)
    wanted = positions[begin : stop + BESIDE]
    own, beside = source.only(wanted.tolist() if isinstance(wanted, np.ndarray) else wanted)
    return own, beside[first - begin : stop - begin], beside


def cut_spans(source: Source, images: range, size: int, batch_size: int, at_least: int = 1) -> Iterator[Span]:
    """Some images as spans of whole batches, of at most ``SPAN_BYTES`` pixels; ``at_least`` so many, if possible."""
    step = min(SPAN_BYTES // (3 * size * size), -(-len(images) // at_least))
    step = max(step // batch_size, 1) * batch_size
    for first, stop in pairwise([*images[::step], images.stop]):
        yield Span.cut(source, first, stop)


def can_cut(source: Source) -> bool:
    """Whether a source can be read by other processes."""
    if isinstance(source, ImageSet):
        return source.pixels is not None or (source.store is not None and can_cut(source.store))
    return isinstance(source, _Cuttable)


def _names(source: Source, first: int, stop: int) -> list[str] | None:
    """Names of images that do not stay the same when paths become absolute."""
    return [name for name, _ in islice(source.items(first), stop - first)] if isinstance(source, Files) else None


def decode_chunk(chunk: Chunk, how: Decoding) -> Decoded:
    """Decode a chunk in the kept process; an image at which that is killed again and again fails alone."""
    try:
        return chunk.decoded(decode_kept(chunk.items, how))
    except DecoderKilled:
        pass
    batches: list[Batch] = []
    for item in chunk.items:
        batches.append(_decode_one(item, how))
        if len(batches) == _TOO_MANY and not any(len(batch.pixels) for batch in batches):  # no image is to blame
            raise RunError(f"'{chunk.files[0]}' and all images behind it: {batches[0].failures[0].reason}")
    return chunk.decoded(join_batches(batches))


def _decode_one(item: Item, how: Decoding) -> Batch:
    try:
        return decode_kept([item], how)
    except DecoderKilled as error:
        reason = f"{error} {ATTEMPTS} times, perhaps because memory ran out: make it smaller"
        return Batch(np.empty((0, how.size, how.size, 3), np.uint8), [], [Failure(0, reason)])
