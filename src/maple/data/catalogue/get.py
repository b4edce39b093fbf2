"""Describe a data set, and get it: fetch and verify its originals, then write the splits that are missing.

    <root>/.originals/<name>/<file>      the originals; may be removed after conversion
    <root>/<name>/<split>.parquet        columns image (encoded bytes), label (int64), label_name (string)
    <root>/originals.lock.json           size and checksums of every original at its first download

ImageNet alone becomes folders, ``<root>/imagenet/train/<class>/``: 140 GB of encoded images do not fit into memory,
where a Parquet column is held for random access, while image folders are read one file at a time. Images are converted
one at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from maple.data.catalogue.archive import BROKEN
from maple.data.catalogue.download import Download, verify
from maple.data.catalogue.rows import Row
from maple.data.catalogue.table import Checksum, DataSet, Original, Split, find_data_set, is_built_in
from maple.data.decode import check_file_size
from maple.data.image_set import Progress
from maple.data.sources.names import find_data_root, find_source, split_files
from maple.errors import DataError, RunError, UsageError
from maple.files import load_json, save_json
from maple.progress import counting, say, warn

LOCK = "originals.lock.json"
ORIGINALS = ".originals"
_ROW_GROUP_BYTES = 32 * 2**20
_SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int64()), ("label_name", pa.string())])


# --- description -----------------------------------------------------------------------------------------------------


def locate(source: str, data_root: str | Path | None = None) -> Path | None:
    """File or folder of a source, or ``None`` where it is missing or empty."""
    try:
        path = None if is_built_in(source) else find_source(source, data_root)
    except UsageError:
        return None
    if path is not None and path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()):
        return None
    return path


def describe_data_set(data_set: DataSet, data_root: str | Path | None = None) -> dict[str, str | list[str]]:
    """Describe a data set: title, licence, where it was looked for, how to get it."""
    root = find_data_root(data_root)
    return {
        "title": data_set.title,
        "paper": data_set.paper,
        "licence": data_set.licence,
        "original": _original_size(data_set),
        "looked in": _looked_in(data_set, root),
        "how to get": _how_to_get(data_set, root),
    }


def _original_size(data_set: DataSet) -> str:
    """Numbers of images and classes: ``train 50,000, test 10,000; 10 classes``."""
    shown = [f"{split.name} {split.images:,}" if split.images else split.name for split in data_set.splits[:3]]
    more = [f"{len(data_set.splits) - 3} more"] if len(data_set.splits) > 3 else []
    classes = [f"{data_set.classes:,} classes"] if data_set.classes else []
    return "; ".join([", ".join(shown + more), *classes] if data_set.splits else classes)


def _looked_in(data_set: DataSet, root: Path | None) -> list[str]:
    if is_built_in(data_set.name):
        return ["built in"]
    no_root = "no data root: set MAPLE_DATA or give --data-root"
    return [str(Path(data_set.name).absolute()), str((root / data_set.name).absolute()) if root else no_root]


def _how_to_get(data_set: DataSet, root: Path | None) -> list[str]:
    """Instructions, one per line."""
    note = [data_set.note] if data_set.note else []
    if not data_set.originals:
        return note or ["nothing to get"]
    command = f"maple data {data_set.name} --get" + ("" if root is not None else " --data-root FOLDER")
    first = f"by hand from {data_set.page} to the places below; then {command} converts"
    if all(original.url for original in data_set.originals):
        first = f"{command} fetches and converts"
    paths = {original: _original_path(data_set, original, root or Path("FOLDER")) for original in data_set.originals}
    return [first, *(f"{o.url or o.name} ({_facts(o)}) to {path}" for o, path in paths.items()), *note]


def _facts(original: Original) -> str:
    size, md5 = original.expected.bytes, original.expected.md5
    shown = [] if size is None else [f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"]
    return ", ".join([*shown, f"md5 {md5}" if md5 else f"no published checksum: the first one is kept in {LOCK}"])


# --- originals -------------------------------------------------------------------------------------------------------


def get_data_set(source: str, data_root: str | Path | None = None) -> list[Path]:
    """Fetch the originals of a data set, and write the missing splits under the data root; returns their paths.

    Existing splits are left alone. If some originals have to be fetched by hand, the splits that need none are made.
    """
    data_set = find_data_set(source)
    if data_set is None:
        raise UsageError(f"'{source}' is not in the catalogue: 'maple data' lists its data sets")
    if is_built_in(data_set.name):
        raise UsageError(f"'{data_set.name}' is built in: use it without --get")
    if not data_set.originals:
        raise UsageError(f"'{data_set.name}' cannot be fetched: {data_set.note}")
    root = find_data_root(data_root)
    if root is None:
        raise UsageError("there is no folder for data sets: set MAPLE_DATA or give --data-root")
    there = split_files(root / data_set.name) if (root / data_set.name).is_dir() else {}
    missing = [split for split in data_set.splits if split.name not in there]
    blocked = [split for split in missing if _to_fetch_by_hand(data_set, split, root)]
    if blocked and blocked == missing:
        raise DataError(_ask_for(data_set, blocked, root))
    if blocked:
        warn(_ask_for(data_set, blocked, root))
    ready = [split for split in missing if split not in blocked]
    needed = dict.fromkeys(name for split in ready for name in split.originals)
    originals = {o.name: _fetch(data_set, o, root) for o in data_set.originals if o.name in needed}
    return [_convert(data_set, split, originals, root) for split in ready]


def _original_path(data_set: DataSet, original: Original, root: Path) -> Path:
    return root / ORIGINALS / data_set.name / original.name


def _to_fetch_by_hand(data_set: DataSet, split: Split, root: Path) -> list[Original]:
    """Missing originals of a split that only the user can fetch."""
    needed = [original for original in data_set.originals if original.name in split.originals]
    return [o for o in needed if not o.url and not _original_path(data_set, o, root).is_file()]


def _ask_for(data_set: DataSet, splits: Sequence[Split], root: Path) -> str:
    absent = dict.fromkeys(o for split in splits for o in _to_fetch_by_hand(data_set, split, root))
    paths = ", ".join(f"'{_original_path(data_set, o, root)}'" for o in absent)
    return (
        f"{data_set.name}/{', '.join(split.name for split in splits)} needs {', '.join(o.name for o in absent)}, which "
        f"can only be fetched by hand: get it from {data_set.page}, put it at {paths}, then run the same command"
    )


def _fetch(data_set: DataSet, original: Original, root: Path) -> Path:
    """Fetch or verify an original, and record its checksums."""
    path, lock, key = _original_path(data_set, original, root), root / LOCK, f"{data_set.name}/{original.name}"
    recorded = _read_lock(lock).get(key)
    expected = original.expected if original.expected.known or recorded is None else recorded
    try:
        found = _download(original, path, expected) if original.url else verify(path, expected)
    except DataError as error:
        if expected is recorded:
            raise DataError(f"{error}; if its authors replaced it, remove '{key}' from '{lock}'") from None
        raise
    if recorded is None:
        files = {**_read_lock(lock), key: found}
        save_json(lock, {"originals": {name: asdict(checksum) for name, checksum in sorted(files.items())}})
    return path


def _download(original: Original, path: Path, expected: Checksum) -> Checksum:
    with counting(f"fetching {original.name} (MB)") as bar:
        progress = None if bar is None else (lambda done, total: bar(done // 10**6, total // 10**6))
        return Download(original.url, path, expected, progress=progress).fetch()


def _read_lock(path: Path) -> dict[str, Checksum]:
    if not path.exists():
        return {}
    try:
        return {name: Checksum(**entry) for name, entry in load_json(path)["originals"].items()}
    except (RunError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' is damaged ({error}): remove it, then run the same command") from None


# --- conversion ------------------------------------------------------------------------------------------------------


def _convert(data_set: DataSet, split: Split, originals: Mapping[str, Path], root: Path) -> Path:
    where = f"{data_set.name}/{split.name}"
    with counting(f"converting {where}") as progress:
        try:
            rows = _counted(split.rows(originals), split.images, where, progress)
            write = write_folder if data_set.as_folder else write_parquet
            path = write(root / data_set.name / split.name, rows)
        except BROKEN as error:
            used = ", ".join(f"'{originals[name]}'" for name in split.originals)
            remedy = "check the disk, or fetch the files again"
            raise DataError(f"cannot make {where} from {used}: {error}; {remedy}") from None
    say(f"{where}: {_counts_of(path, split)}{path}")
    return path


def _counts_of(path: Path, split: Split) -> str:
    n = split.images or (pq.read_metadata(path).num_rows if path.is_file() else 0)
    return f"{n:,} images, " if n else ""


def _counted(rows: Iterator[Row], images: int, where: str, progress: Progress | None) -> Iterator[Row]:
    """Pass rows through, and check that there are as many as published."""
    n = 0
    for n, row in enumerate(rows, 1):
        check_file_size(len(row.image))
        yield row
        if progress is not None and (n % 100 == 0 or n == images):
            progress(n, images)
    if not n or (images and n != images):
        raise DataError(f"{where} has {n:,} images, expected {images:,}: fetch the originals again")


def write_parquet(path: Path, rows: Iterator[Row]) -> Path:
    """Write rows to ``<path>.parquet``, which appears when complete; at most one row group is in memory."""
    target = path.with_name(path.name + ".parquet")
    with _temporary(target) as part, pq.ParquetWriter(part, _SCHEMA, compression="zstd") as writer:
        group: list[Row] = []
        size = 0
        for row in rows:
            group.append(row)
            size += len(row.image)
            if size >= _ROW_GROUP_BYTES:
                writer.write_table(_table(group))
                group, size = [], 0
        if group:
            writer.write_table(_table(group))
    return target


def _table(group: Sequence[Row]) -> pa.Table:
    image, label, label_name, _ = zip(*group)
    return pa.table([image, label, label_name], schema=_SCHEMA)


def write_folder(path: Path, rows: Iterator[Row]) -> Path:
    """Write rows to ``<path>/<class>/<file>``; the folder appears when complete."""
    with _temporary(path) as part:
        for row in rows:
            for name in (row.label_name, row.file):
                if not name or name.startswith(".") or "/" in name or "\\" in name:
                    raise DataError(f"'{name}' cannot be the name of a file or folder: fetch the originals again")
            folder = part / row.label_name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / row.file).write_bytes(row.image)
    return path


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Temporary path beside ``target`` that is renamed to it at the end, or removed."""
    workplace = target.with_name(f".{target.name}.part")
    shutil.rmtree(workplace, ignore_errors=True)  # left by a process that was killed
    workplace.mkdir(parents=True)
    part = workplace / target.name
    try:
        yield part
        if part.is_file():
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:  # also on Ctrl-C
        shutil.rmtree(workplace, ignore_errors=True)
        if not any(target.parent.iterdir()):
            target.parent.rmdir()  # an empty folder would count as a data set
