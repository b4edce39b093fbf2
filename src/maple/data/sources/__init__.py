"""Sources of images: files of a folder or glob, rows of a Parquet or .npz table, built-in and corrupted sets.

:func:`open_images` opens them as an image set (train, fit, evaluate), :func:`open_source` as a stream (predict,
monitor); both list a source in the same way.
"""

from maple.data.catalogue.table import is_built_in, is_corrupted
from maple.data.sources.folders import LOOSE
from maple.data.sources.names import (
    SPLIT_NAMES,
    clean_source,
    find_data_root,
    find_source,
    find_split,
    list_data_sets,
    split_files,
)
from maple.data.sources.open import open_images, open_source

__all__ = [
    "LOOSE",
    "SPLIT_NAMES",
    "clean_source",
    "find_data_root",
    "find_source",
    "find_split",
    "is_built_in",
    "is_corrupted",
    "list_data_sets",
    "open_images",
    "open_source",
    "split_files",
]
