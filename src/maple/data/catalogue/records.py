"""Records of the catalogue: a data set, its originals and splits, and one image on its way into a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Checksum:
    """Size and checksums of a file that are known before it is fetched; ``None`` where they are not."""

    bytes: int | None = None
    md5: str | None = None
    sha256: str | None = None

    @property
    def known(self) -> bool:
        return self.md5 is not None or self.sha256 is not None


class Row(NamedTuple):
    """One image of a split."""

    image: bytes  # encoded
    label: int
    label_name: str
    file: str = ""  # name in an image folder


Rows = Callable[[Mapping[str, Path]], Iterator[Row]]  # from the paths of the originals, by name


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; without ``url`` it has to be fetched by hand."""

    name: str
    url: str = ""
    expected: Checksum = Checksum()


@dataclass(frozen=True)
class Split:
    """A part of a data set: the number of images, their reader and the originals that it reads."""

    name: str
    images: int
    rows: Rows | None = None
    originals: tuple[str, ...] = ()


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
