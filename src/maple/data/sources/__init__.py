"""Sources of images: files of a folder or glob, rows of a Parquet or .npz table, built-in and corrupted sets.

A torch ``Dataset`` or ``DataLoader`` is a source as well (:mod:`maple.data.sources.torch_data`).

:func:`open_images` opens them as an image set (train, fit, evaluate), :func:`open_source` as a stream (predict,
monitor); both list a source in the same way.
"""

from maple.data.sources.open import open_images, open_like, open_source
from maple.data.sources.torch_data import holds_pictures, is_torch_data
