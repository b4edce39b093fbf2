"""The data sets that the project knows, from ``data_sets.toml``: what each is, and how its splits are made."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from maple.data.catalogue.records import Checksum, DataSet, Original, Split
from maple.data.catalogue.rows import READERS, cifar_c_rows

BUILT_IN = ("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far")
CORRUPTED = "corrupted:"  # prefix of a source that is another one, corrupted
STANDARD_FAMILIES = (  # of CIFAR-10-C: the 15 that published means are taken over
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
EXTRA_FAMILIES = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def _load_catalogue() -> dict[str, DataSet]:
    tables = tomllib.loads(Path(__file__).with_name("data_sets.toml").read_text(encoding="utf-8"))
    return {name: _read_entry(name, dict(table), tables) for name, table in tables.items()}


def _read_entry(name: str, table: dict[str, Any], tables: Mapping[str, Any]) -> DataSet:
    """One entry; ``corrupts`` names the data set whose test images it corrupts."""
    originals = tuple(_read_original(original) for original in table.pop("originals", ()))
    splits, class_names = table.pop("splits", ()), tuple(table.pop("class_names", ()))
    if clean := table.pop("corrupts", None):
        class_names = tuple(tables[clean]["class_names"])
        made = tuple(_corrupted_splits(originals[0].name, class_names))
    else:
        made = tuple(_read_split(split, class_names) for split in splits)
    return DataSet(name=name, class_names=class_names, originals=originals, splits=made, **table)


def _read_original(table: Mapping[str, Any]) -> Original:
    return Original(
        table["name"], table.get("url", ""), Checksum(table.get("bytes"), table.get("md5"), table.get("sha256"))
    )


def _read_split(table: Mapping[str, Any], class_names: Sequence[str]) -> Split:
    named = {"names": class_names} if class_names else {}
    rows = partial(READERS[table["reader"]], **table.get("arguments", {}), **named)
    return Split(table["name"], table["images"], rows, tuple(table["originals"]))


def _corrupted_splits(archive: str, names: Sequence[str]) -> Iterator[Split]:
    """``test`` draws one standard family and severity per image; ``fog-3`` is one family at one severity."""
    pairs = {"test": [(family, severity) for family in STANDARD_FAMILIES for severity in range(1, 6)]}
    for family in (*STANDARD_FAMILIES, *EXTRA_FAMILIES):
        pairs |= {f"{family.replace('_', '-')}-{severity}": [(family, severity)] for severity in range(1, 6)}
    for split, drawn in pairs.items():
        yield Split(split, 10_000, partial(cifar_c_rows, archive=archive, pairs=drawn, names=names), (archive,))


CATALOGUE: Mapping[str, DataSet] = _load_catalogue()


def is_corrupted(source: Any) -> bool:
    """Whether a source is another one, corrupted."""
    return isinstance(source, str) and source.startswith(CORRUPTED)


def is_built_in(source: Any) -> bool:
    """Whether images are made, not read from a file: a built-in set, or a corrupted one.

    ``digits`` is always the built-in set; a folder of that name is ``./digits``.
    """
    if is_corrupted(source):
        return True
    name = source.partition("?")[0] if isinstance(source, str) else ""
    return name in BUILT_IN or (name.partition("/")[0] in BUILT_IN and not Path(source).exists())


def find_data_set(source: str) -> DataSet | None:
    """The entry for a name, a name with one of its splits, or ``None``.

    >>> find_data_set("cifar10/test").classes, find_data_set("cifar10/tst"), find_data_set("my/folder")
    (10, None, None)
    """
    name, _, split = str(source).partition("?")[0].partition("/")
    data_set = CATALOGUE.get(name)
    if data_set is None or is_built_in(source):
        return data_set
    return data_set if split in ("", *(part.name for part in data_set.splits)) else None
