"""The engine that decodes images of sources: processes of this machine, or those of a cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from maple.data.decode import Decoding
from maple.data.stream import Decoded, Source, decode_stream


class DecodeStream(Protocol):
    """How the images of a source are decoded from the first on; ``keep`` is false if only names and keys are used."""

    def __call__(
        self, source: Source, how: Decoding, *, chunk_size: int, workers: int, keep: bool
    ) -> Generator[Decoded]: ...


def _decode_here(source: Source, how: Decoding, *, chunk_size: int, workers: int, keep: bool) -> Generator[Decoded]:
    return decode_stream(source, how, chunk_size=chunk_size, workers=workers)


_decoder: ContextVar[DecodeStream] = ContextVar("decoder", default=_decode_here)


@contextmanager
def decoding_by(stream: DecodeStream) -> Iterator[None]:
    """Within it, sources are opened with the images that ``stream`` decodes, for example on other machines."""
    token = _decoder.set(stream)
    try:
        yield
    finally:
        _decoder.reset(token)


def current_decoder() -> DecodeStream:
    """The function that decodes images of sources now."""
    return _decoder.get()
