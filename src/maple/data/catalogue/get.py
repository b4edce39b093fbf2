"""Get a data set: fetch and verify its originals, then write the splits that are missing, one image at a time.

    <root>/.originals/<name>/<file>      the originals; may be removed after conversion
    <root>/<name>/<split>.parquet        columns image (encoded bytes), label (int64), label_name (string)
    <root>/originals.lock.json           size and checksums of every original at its first download

ImageNet alone becomes folders, ``<root>/imagenet/train/<class>/``: 140 GB of encoded images do not fit into memory,
where a Parquet column is held for random access, while image folders are read one file at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from maple.data.catalogue.archive import BROKEN
from maple.data.catalogue.download import download, verify
from maple.data.catalogue.records import Checksum, DataSet, Original, Row, Split
from maple.data.catalogue.table import find_data_set, is_built_in
from maple.data.catalogue.write import write_folder, write_parquet
from maple.data.decode import check_file_size
from maple.data.image_set import Progress
from maple.data.sources.names import find_data_root, split_files
from maple.errors import DataError, RunError, UsageError
from maple.files import load_json, save_json
from maple.progress import counting, say, warn

LOCK = "originals.lock.json"
ORIGINALS = ".originals"


def get_data_set(source: str, data_root: str | Path | None = None) -> list[Path]:
    """Fetch the originals of a data set, and write the missing splits under the data root; returns their paths.

    Existing splits are left alone. If some originals have to be fetched by hand, the splits that need none are made.
    """
    data_set = find_data_set(source)
    if data_set is None:
        raise UsageError(f"'{source}' is not in the catalogue: 'maple data' lists what can be got")
    if not data_set.originals:
        reason = (
            "is built in, there is nothing to get"
            if is_built_in(data_set.name)
            else f"cannot be fetched: {data_set.note}"
        )
        raise UsageError(f"'{data_set.name}' {reason}")
    root = find_data_root(data_root)
    if root is None:
        raise UsageError("there is no folder for data sets: set MAPLE_DATA or give --data-root")
    there = split_files(root / data_set.name) if (root / data_set.name).is_dir() else {}
    missing = [split for split in data_set.splits if split.name not in there]
    ready = [split for split in missing if not _to_fetch_by_hand(data_set, split, root)]
    if missing and not ready:
        raise DataError(_ask_for(data_set, missing, root))
    if len(ready) < len(missing):
        warn(_ask_for(data_set, [split for split in missing if split not in ready], root))
    originals = {
        name: _fetch(data_set, _original(data_set, name), root)
        for name in dict.fromkeys(name for split in ready for name in split.originals)
    }
    return [_convert(data_set, split, originals, root) for split in ready]


def _original(data_set: DataSet, name: str) -> Original:
    return next(original for original in data_set.originals if original.name == name)


def original_path(data_set: DataSet, original: Original, root: Path) -> Path:
    """Path of an original under the data root."""
    return root / ORIGINALS / data_set.name / original.name


def _to_fetch_by_hand(data_set: DataSet, split: Split, root: Path) -> list[Original]:
    """Missing originals of a split that only the user can fetch."""
    needed = [_original(data_set, name) for name in split.originals]
    return [o for o in needed if not o.url and not original_path(data_set, o, root).is_file()]


def _ask_for(data_set: DataSet, splits: Sequence[Split], root: Path) -> str:
    absent = list(dict.fromkeys(o for split in splits for o in _to_fetch_by_hand(data_set, split, root)))
    names, paths = ", ".join(o.name for o in absent), ", ".join(f"'{original_path(data_set, o, root)}'" for o in absent)
    which = ", ".join(split.name for split in splits)
    return (
        f"{data_set.name}/{which} needs {names}, which cannot be fetched without you: get it from {data_set.page}, put "
        f"it at {paths}, then run the same command"
    )


def _fetch(data_set: DataSet, original: Original, root: Path) -> Path:
    """Fetch or verify an original, and record its checksums."""
    path, lock, key = original_path(data_set, original, root), root / LOCK, f"{data_set.name}/{original.name}"
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
        return download(original.url, path, expected, progress=progress)


def _read_lock(path: Path) -> dict[str, Checksum]:
    if not path.exists():
        return {}
    try:
        return {name: Checksum(**entry) for name, entry in load_json(path)["originals"].items()}
    except (RunError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' is damaged ({error}): remove it, then run the same command") from None


def _convert(data_set: DataSet, split: Split, originals: Mapping[str, Path], root: Path) -> Path:
    assert split.rows is not None
    where = f"{data_set.name}/{split.name}"
    with counting(f"converting {where}") as progress:
        try:
            rows = _counted(split.rows(originals), split.images, where, progress)
            write = write_folder if data_set.as_folder else write_parquet
            path = write(root / data_set.name / split.name, rows)
        except BROKEN as error:
            used = ", ".join(f"'{originals[name]}'" for name in split.originals)
            raise DataError(
                f"cannot make {where} from {used}: {error}; check the disk, or fetch the files again"
            ) from None
    say(f"{where}: {split.images:,} images, {path}")
    return path


def _counted(rows: Iterator[Row], images: int, where: str, progress: Progress | None) -> Iterator[Row]:
    """Pass rows through, and check that there are as many as published."""
    n = 0
    for row in rows:
        check_file_size(len(row.image))
        yield row
        n += 1
        if progress is not None and (n % 100 == 0 or n == images):
            progress(n, images)
    if n != images:
        raise DataError(
            f"{where} has {n:,} images, should be {images:,}: the originals are not those that were expected"
        )
