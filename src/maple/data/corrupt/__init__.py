"""Corruptions of images: one file per group of families, applied to arrays, to image sets and to named sources."""

from maple.data.corrupt.images import (
    CORRUPTIONS,
    check_family,
    corrupt_images,
    corrupt_set,
    corrupted_sets,
    draw_corruptions,
)

__all__ = [
    "CORRUPTIONS",
    "check_family",
    "corrupt_images",
    "corrupt_set",
    "corrupted_sets",
    "draw_corruptions",
]
