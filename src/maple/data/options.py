"""Options of reading and splitting images; light, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from maple.options import Positive, Seed, Share, option


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How images are read and split."""

    size: Literal["auto"] | Positive = option("auto", "side of the square images in pixels, or 'auto'")
    fit: Literal["pad", "stretch", "crop"] = option("pad", "how images that are not square become square", rare=True)
    splits: tuple[Share, Share, Share, Share] = option(
        (0.7, 0.1, 0.1, 0.1), "shares of train, validation, calibration and test; test is 0 if there is a test file"
    )
    min_images: Annotated[int, Interval(ge=0)] = option(0, "leave out classes with fewer images than this", rare=True)
    leave_out: tuple[str, ...] = option((), "classes to leave out, or @FILE with one per line; see --ood NAME=left-out")
    split_seed: Seed = option(0, "seed of the split", rare=True)
