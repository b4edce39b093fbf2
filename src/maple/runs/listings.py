"""Rows of ``maple data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from maple.data.catalogue import CATALOGUE, describe_data_set, find_data_set, locate
from maple.data.sources import is_built_in, list_data_sets, open_images, split_files
from maple.progress import counting

_MAX_SPLITS = 7  # named in a row; of more, the first three and their number


def list_sources(data_root: Path | None = None) -> list[dict[str, Any]]:
    """The data sets of the catalogue, found or not, those built in, and those under the data root."""
    rows: dict[str, dict[str, Any]] = {}
    for name in (*list_data_sets(data_root), *CATALOGUE):
        if name in rows or (name.rpartition("/")[0] in rows and not is_built_in(name)):  # cifar10 covers cifar10/test
            continue
        path = locate(name, data_root)
        splits = list(split_files(path)) if path is not None and path.is_dir() else []
        where = str(path.resolve()) if path is not None else f"not found, see maple data {name}"
        rows[name] = {
            "source": name,
            "splits": ", ".join(splits if len(splits) <= _MAX_SPLITS else [*splits[:3], f"{len(splits) - 3} more"]),
            "where": "built in" if is_built_in(name) else where,
            "found": is_built_in(name) or path is not None,
        }
    return list(rows.values())


def describe_source(source: str, data_root: Path | None = None) -> dict[str, Any]:
    """The content of a source; of a data set of the catalogue also its description, places searched and download."""
    data_set = find_data_set(source)
    about = {} if data_set is None else describe_data_set(data_set, data_root)
    if data_set is not None and not is_built_in(source) and locate(source, data_root) is None:
        return {"source": source, "found": False, **about}
    with counting("decoding") as progress:
        images = open_images(source, data_root=data_root, progress=progress)
    counts = np.bincount(images.labels[images.labels >= 0], minlength=len(images.class_names))
    return {
        "source": images.name,
        "found": True,
        "images": len(images),
        "classes": len(images.class_names),
        "per class": f"{counts.min()} to {counts.max()}" if len(counts) else "",
        "size": images.size,
        "skipped": len(images.skipped),
        **about,
    }
