"""The data sets that the project knows, from ``data_sets.toml``: what each is, and how its splits are made."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maple.data.catalogue.rows import READERS, Row
from maple.errors import UsageError

BUILT_IN = ("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far")
CORRUPTED = "corrupted:"  # prefix of a source that is another one, corrupted
STANDARD_FAMILIES = (  # of CIFAR-10-C: the 15 that published means are taken over
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
_ARCHIVES = {"textures": "texture"}  # of OpenOOD, where a list has another name
EXTRA_FAMILIES = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


@dataclass(frozen=True)
class Checksum:
    """Size and checksums of a file that are known before it is fetched; ``None`` where they are not."""

    bytes: int | None = None
    md5: str | None = None
    sha256: str | None = None

    @property
    def known(self) -> bool:
        return self.md5 is not None or self.sha256 is not None


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; without ``url`` it has to be fetched by hand."""

    name: str
    url: str = ""
    expected: Checksum = Checksum()


@dataclass(frozen=True)
class Split:
    """A part of a data set: the number of images, the originals that it is made of, and their reader."""

    name: str
    images: int  # 0 where the number is not published
    reader: str
    originals: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the reader

    def rows(self, originals: Mapping[str, Path]) -> Iterator[Row]:
        """The images, from the paths of the originals."""
        return READERS[self.reader](originals, **self.arguments)


@dataclass(frozen=True)
class DataSet:
    """A data set of the catalogue."""

    name: str
    title: str
    paper: str
    licence: str
    classes: int
    class_names: tuple[str, ...] = ()  # where the originals do not name them
    page: str = ""
    originals: tuple[Original, ...] = ()
    splits: tuple[Split, ...] = ()
    as_folder: bool = False  # image folders instead of Parquet
    note: str = ""  # further advice for getting or using it
    path: str = ""  # file or folder of a data set that a plug-in adds


def _load_catalogue() -> dict[str, DataSet]:
    tables = tomllib.loads(Path(__file__).with_name("data_sets.toml").read_text(encoding="utf-8"))
    return {name: _read_entry(name, dict(table), tables) for name, table in tables.items()}


def _read_entry(name: str, entry: dict[str, Any], tables: Mapping[str, Any]) -> DataSet:
    """One entry; ``corrupts`` names the data set whose test images it corrupts."""
    clean = entry.pop("corrupts", name)
    class_names = tuple(tables[clean].get("class_names", ()))
    originals = tuple(_read_original(**original) for original in entry.pop("originals", ()))
    splits = entry.pop("splits", ()) if clean == name else _corrupted_splits(originals[0].name)
    if lists := entry.pop("lists", {}):
        splits = _listed_splits(lists, tables)
    named = {"names": class_names} if class_names else {}
    entry["splits"] = tuple(Split(**split | {"arguments": split.get("arguments", {}) | named}) for split in splits)
    return DataSet(**entry | {"name": name, "class_names": class_names, "originals": originals})


def _read_original(name: str, url: str = "", **expected: Any) -> Original:
    return Original(name, url, Checksum(**expected))


def _listed_splits(lists: Mapping[str, str], tables: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits ``cifar10-tin`` from the image lists of each benchmark; ``cifar10-test`` holds the known images."""
    texts = "benchmark_imglist.zip"
    for known, others in lists.items():
        for other in others.split():
            archive = f"{_ARCHIVES.get(other, other)}.zip"
            member = f"benchmark_imglist/{known}/test_{other}.txt"
            arguments: dict[str, Any] = {"archive": archive, "lists": texts, "member": member}
            if other == known:
                arguments["names"] = tables[known]["class_names"]
            made = {"reader": "image_list", "originals": (texts, archive), "arguments": arguments}
            yield {"name": f"{known}-{'test' if other == known else other}", "images": 0, **made}


def _corrupted_splits(archive: str) -> Iterator[dict[str, Any]]:
    """``test`` draws one standard family and severity per image; ``fog-3`` is one family at one severity."""
    pairs = {"test": [(family, severity) for family in STANDARD_FAMILIES for severity in range(1, 6)]}
    for family in (*STANDARD_FAMILIES, *EXTRA_FAMILIES):
        pairs |= {f"{family.replace('_', '-')}-{severity}": [(family, severity)] for severity in range(1, 6)}
    for split, drawn in pairs.items():
        made = {"reader": "cifar_c", "originals": (archive,), "arguments": {"archive": archive, "pairs": drawn}}
        yield {"name": split, "images": 10_000, **made}


CATALOGUE: dict[str, DataSet] = _load_catalogue()


def register_data_set(data_set: DataSet) -> None:
    """Make a data set of a plug-in known by its name, which must be free."""
    known = CATALOGUE.get(data_set.name)
    if "/" in data_set.name or "?" in data_set.name or data_set.name in BUILT_IN or (known and not known.path):
        raise UsageError(f"the name '{data_set.name}' of a data set is taken or has '/' or '?': choose another name")
    CATALOGUE[data_set.name] = data_set


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
    if data_set is None or data_set.path or is_built_in(source):
        return data_set
    return data_set if split in ("", *(part.name for part in data_set.splits)) else None
