"""The options of ``maple serve``: where it listens, how it batches, what it accepts; loaded for the help too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from maple.errors import UsageError
from maple.options import option

Format = Literal["jpeg", "png", "webp", "bmp", "gif", "tiff", "ppm"]  # as in maple.data.decode
MOST_PIXELS = 100_000_000  # as in maple.data.decode, which is not loaded for the help


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the service listens, how it batches, and what it accepts."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 is every address of this machine")
    port: Annotated[int, Interval(ge=0, le=65535)] = option(8000, "port to listen at; 0 takes any that is free")
    api_key: str | None = option(None, "key that requests must send in the header X-API-Key", flag=False)
    max_batch: Annotated[int, Interval(ge=1, le=4096)] = option(32, "images per forward pass, at most")
    max_wait_ms: Annotated[float, Interval(ge=0, le=10_000)] = option(5.0, "longest wait of a batch for more images")
    queue: Annotated[int, Interval(ge=1, le=1_000_000)] = option(256, "images accepted and not answered yet, at most")
    deadline_ms: Annotated[float, Interval(ge=1, le=3_600_000)] = option(10_000.0, "longest time to an answer")
    max_images: Annotated[int, Interval(ge=1, le=100_000)] = option(64, "images per request, at most")
    max_bytes: Annotated[int, Interval(ge=1, le=2**31)] = option(32 * 2**20, "bytes per request, at most")
    max_pixels: Annotated[int, Interval(ge=1, le=MOST_PIXELS)] = option(25_000_000, "pixels per image, at most")
    formats: tuple[Format, ...] = option(
        ("jpeg", "png", "webp"), "image formats that are accepted, of jpeg, png, webp, bmp, gif, tiff and ppm"
    )
    access_log: bool = option(False, "one line per request on standard error")

    def __post_init__(self) -> None:
        """Options that do not fit together are refused before a model is loaded."""
        if self.queue < self.max_images:
            raise UsageError(
                f"--queue {self.queue} is shorter than one request of --max-images {self.max_images}: make the queue "
                "longer, or allow fewer images"
            )
        if not self.formats:
            raise UsageError("--formats names no format: leave it out, or give at least one, such as jpeg,png")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise UsageError("the API key must be visible ASCII characters: choose another, or set none at all")
