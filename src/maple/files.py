"""Files and locks: run file names, atomic writes, folder locks, tensors and JSON with a format version, CSV.

:class:`RunFile` lists every name inside a run folder. Modules of any row join it to a path
(``folder / RunFile.RESULTS``); ``maple.runs.folder.RunFolder`` reads, writes and locks the folder as a whole.

A file is written beside its target, flushed to disk and renamed over it, so a crash or a full disk leaves the previous
version in place. Nothing is pickled.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maple.drafts import draft_folder as draft_folder
from maple.drafts import find_replaced, remove_stale, write_atomic
from maple.drafts import is_full as is_full
from maple.errors import MapleError, RunError, UsageError
from maple.formats import FORMAT_VERSION, OLDEST_FORMAT, Content, bring_forward
from maple.types import SET_SEPARATOR

_METADATA_KEY = "maple"
_DIGEST = "digest"  # in the metadata: digest of the rest of them
_ARRAYS = "arrays"  # in the metadata: digest of the arrays
Row = dict[str, Any]  # of a table, by column
ANEW = "train again with --overwrite"  # remedy for an unusable file of a run


class RunFile(StrEnum):
    """The names of the files and folders inside a run folder."""

    CONFIG = "config.toml"  # origin of the images and all options; a folder with it holds a run
    CLASSES = "classes.json"  # classes, clusters, skipped files and digests of the images
    HISTORY = "history.csv"  # one row per epoch
    CHECKPOINT = "resume.safetensors"  # state of an unfinished training
    START = "start.safetensors"  # network that an unfinished training started from (--init)
    WEIGHTS = "weights.safetensors"  # the network
    DETECTOR = "detector.safetensors"  # Gaussians, calibration and decision; a folder with it holds a finished run
    MANIFEST = "manifest.json"  # SHA-256 of the weights, the detector and the files of network/
    RESULTS = "results.json"  # figures of the last evaluation
    LABELS = "labels.csv"  # the labels of its test images, those first that may be wrong
    REPORT = "report.html"
    GALLERY = "gallery"  # folder: images and projections drawn by the report
    MEMBERS = "members"  # folder: checkpoints of the members of an ensemble
    NETWORK = "network"  # folder: copy of a network that is a file itself
    MOMENTS = "moments.partial"  # folder: sums of an unfinished fit on Ray
    LOCK = ".lock"
    HOLDER = ".lock.json"  # the process that holds the lock


def no_run(folder: Path, name: str) -> RunError:
    """The error for a folder that lacks ``name``, without which it is no run."""
    check_replaced(folder)
    remedy = suggest_path(folder) or "give the folder that maple train or maple fit wrote"
    return RunError(f"'{folder}' is not a run folder, it has no {name}: {remedy}")


def check_finished(folder: Path) -> None:
    """Raise :class:`RunError` if a folder lacks a file without which a run cannot predict; nothing is loaded."""
    if folder.is_file():
        raise RunError(f"'{folder}' is a file, not a run: give the folder of a run, or an exported .onnx file")
    if not folder.is_dir():
        check_replaced(folder)
        hint = suggest_path(folder) or f"train one with maple train DATA --out '{folder}'"
        raise RunError(f"'{folder}' is not a run folder: {hint}")
    if not (folder / RunFile.DETECTOR).is_file():
        if not (folder / RunFile.CONFIG).is_file():
            raise no_run(folder, RunFile.CONFIG)
        unfinished = f"'{folder}' is not a finished run, it has no {RunFile.DETECTOR}"
        raise RunError(f"{unfinished}: rerun the command that started it, with --resume or --overwrite")
    if not (folder / RunFile.WEIGHTS).is_file():
        raise no_file(folder / RunFile.WEIGHTS)


def check_replaced(folder: Path) -> None:
    """Raise :class:`RunError` where a run is missing because its replacement was interrupted between two renames."""
    if (old := find_replaced(folder)) is not None:
        raise RunError(f"'{folder}' was being replaced when its process was killed: rename '{old}' to '{folder}'")


def no_file(path: Path, otherwise: str = ANEW) -> RunError:
    """The error for a file of a run that does not exist."""
    return RunError(f"'{path}' does not exist: restore it from a copy or {otherwise}")


def check_weights_file(path: Path) -> None:
    """Raise :class:`UsageError` if there is no such file; nothing is loaded."""
    if not path.is_file():
        raise UsageError(f"weights file '{path}' does not exist: {suggest_path(path) or 'check the path'}")


def expand_home(path: str | Path) -> Path:
    """The path with ``~`` replaced; other names that begin so stay, for which ``Path.expanduser`` raises an error.

    >>> expand_home("~$table.png").name
    '~$table.png'
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


# --- misspelt paths ---------------------------------------------------------------------------------------------------


def nearest_path(path: Path) -> Path | None:
    """The existing path that is spelt most like one that does not exist; None if nothing beside it is.

    Only the first missing part is corrected: ``slide/train`` becomes ``slides/train``, if there is such a folder.

    >>> folder = getfixture("tmp_path")
    >>> (folder / "slides" / "train").mkdir(parents=True)
    >>> nearest_path(folder / "slide" / "train").relative_to(folder).as_posix()
    'slides/train'
    """
    missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
    if missing is None:
        return None
    try:
        names = [entry.name for entry in missing.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return None
    nearest = difflib.get_close_matches(missing.name, sorted(names), n=1, cutoff=0.6)
    found = [missing.parent / name / path.relative_to(missing) for name in nearest]
    return next((each for each in found if each.exists()), None)


def suggest_path(path: Path) -> str:
    """A hint for a path that does not exist: the one next to it, or nothing."""
    nearest = nearest_path(path)
    return "" if nearest is None else f"did you mean '{nearest}'?"


# --- locks ------------------------------------------------------------------------------------------------------------


def take_lock(path: Path, wait: bool = False) -> Any:
    """The lock at ``path``, acquired; ``None`` if another process holds it and ``wait`` is false.

    The operating system releases it when its process ends, however that happens.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    return lock


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a folder."""

    pid: int
    host: str
    command: str
    since: str

    @classmethod
    def this_process(cls, command: str) -> Holder:
        return cls(os.getpid(), socket.gethostname(), command, datetime.now().astimezone().isoformat(" ", "seconds"))

    def __str__(self) -> str:
        return f"{self.command} (process {self.pid} on {self.host}, since {self.since})"


@contextmanager
def lock_folder(folder: Path, command: str) -> Iterator[None]:
    """Hold the lock of ``folder``; :class:`RunError` names the process that already holds it.

    A file left by a process that died is no obstacle: the lock itself belongs to the operating system.
    """
    note = folder / RunFile.HOLDER
    try:
        lock = take_lock(folder / RunFile.LOCK)
    except OSError as error:
        raise RunError(f"cannot write in '{folder}': {error.strerror or error}; choose another folder") from None
    if lock is None:
        raise RunError(f"'{folder}' is being written by {_read_holder(note)}: wait until it ends, or stop it")
    holder = Holder.this_process(command)
    try:
        remove_stale(folder)  # left by an update that was killed
        write_atomic(note, json.dumps(asdict(holder)))
        yield
    finally:
        if _read_holder(note) == holder:  # the folder may have been replaced, and locked by another process
            note.unlink(missing_ok=True)
        lock.release()


def check_unlocked(folder: Path) -> None:
    """Raise :class:`RunError` if another process holds the lock of ``folder``, which need not exist."""
    if (folder / RunFile.LOCK).exists():
        with lock_folder(folder, "maple"):
            pass


def _read_holder(note: Path) -> Holder | str:
    try:
        return Holder(**json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not written yet, or removed just now
        return "another process"


# --- damage -----------------------------------------------------------------------------------------------------------

# What reading and using the content of a file raises where it is not what maple wrote.
_DAMAGE = (
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    OSError,
)


@contextmanager
def naming_damage(path: Path, otherwise: str = ANEW) -> Iterator[None]:
    """Within it, content that maple cannot have written is a :class:`RunError` that names the file and the remedy.

    >>> with naming_damage(Path("a.json"), "write it again"):
    ...     {}["classes"]
    Traceback (most recent call last):
    ...
    maple.errors.RunError: 'a.json' is damaged (it lacks 'classes'): restore it from a copy or write it again
    """
    try:
        yield
    except (RunError, UsageError):
        raise
    except (MapleError, *_DAMAGE) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise RunError(f"'{path}' is damaged ({reason}): restore it from a copy or {otherwise}") from None


# --- tensors and JSON -------------------------------------------------------------------------------------------------


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Write arrays and JSON-able metadata into one safetensors file, atomically, with digests of both."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps({"format": FORMAT_VERSION, **metadata, _ARRAYS: _digest("", arrays)})
    described = json.dumps({**json.loads(text), _DIGEST: _digest(text)})  # in one key: the order of several is random
    write_atomic(path, save(arrays, {_METADATA_KEY: described}))


def _digest(text: str, arrays: Mapping[str, np.ndarray] | None = None) -> str:
    """A digest of a text, and of the names, types, shapes and values of arrays."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted((arrays or {}).items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def load_arrays(path: Path, otherwise: str = ANEW) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file of :func:`save_arrays`; ``otherwise`` is the remedy that errors name for a damaged file.

    >>> path = getfixture("tmp_path") / "a.safetensors"
    >>> save_arrays(path, {"mean": np.arange(3.0)}, {"classes": ["a"]})
    >>> arrays, metadata = load_arrays(path)
    >>> arrays["mean"], metadata["classes"]
    (array([0., 1., 2.]), ['a'])
    """
    if not path.is_file():
        raise no_file(path, otherwise)
    with naming_damage(path, otherwise), safe_open(path, framework="numpy") as file:
        metadata = _read_header(file)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if metadata.pop(_ARRAYS, None) not in (None, _digest("", arrays)):
            raise ValueError("its arrays have changed since it was written")
    found = check_format(metadata, path)
    with naming_damage(path, otherwise):
        metadata, arrays = bring_forward(path.name, found, Content(metadata, arrays))
    return arrays, metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a file of :func:`save_arrays`, without reading its arrays."""
    with naming_damage(path), safe_open(path, framework="numpy") as file:
        return _read_header(file)


def _read_header(file: Any) -> dict[str, Any]:
    """The metadata of an open file; files of earlier versions have no digests."""
    found = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
    if not isinstance(found, dict) or found.pop(_DIGEST, None) not in (None, _digest(json.dumps(found))):
        raise ValueError("its description has changed since it was written")
    return found


def without_paths(metadata: dict[str, Any]) -> dict[str, Any]:
    """The description of a network without the folder that it was opened from, which is nobody else's business.

    >>> without_paths({"backbone": "/home/me/vit", "origin": {"kind": "huggingface", "spec": "/home/me/vit"}})
    {'backbone': 'vit', 'origin': {'kind': 'huggingface', 'spec': 'vit'}}
    """
    origin = metadata.get("origin") or {}
    if origin.get("kind") not in ("huggingface", "torchscript", "export", "onnx"):
        return metadata
    name = PurePath(origin["spec"]).name
    return {**metadata, "backbone": name, "origin": {**origin, "spec": name}}


def save_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with the format version, atomically; NaN and infinity, which JSON lacks, become null."""
    text = json.dumps({"format": FORMAT_VERSION, **value}, default=lambda numpy_value: numpy_value.tolist())
    finite = json.loads(text, parse_constant=lambda _: None)
    write_atomic(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    """Read a file of :func:`save_json`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read '{path}': {error.strerror or error}; is '{path.parent}' a run folder?") from None
    with naming_damage(path):
        value = json.loads(text)
    check_format(value, path)
    return value


def check_format(metadata: Mapping[str, Any], path: Path) -> int:
    """The format of a file; one that this version cannot read, such as that of a later version, is refused."""
    found = metadata.get("format") if isinstance(metadata, Mapping) else None
    if not isinstance(found, int):
        raise RunError(f"'{path}' was not written by maple: it has no format version")
    if found > FORMAT_VERSION:
        raise RunError(
            f"'{path}' has format {found}, this maple reads up to {FORMAT_VERSION}: "
            "upgrade with pip install --upgrade maple-uncertainty"
        )
    if found < OLDEST_FORMAT:
        raise RunError(f"'{path}' has format {found}, there is none below {OLDEST_FORMAT}: restore it from a copy")
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def to_csv(rows: Iterable[Row], columns: Sequence[str], header: bool = False) -> str:
    """Rows as CSV.

    >>> to_csv([{"file": "a.png", "prediction_set": ["cat", "dog"]}], ["file", "prediction_set"], header=True)
    'file,prediction_set\\na.png,cat | dog\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return SET_SEPARATOR.join(value)
    return value.replace("\r", "\\r") if isinstance(value, str) else value  # Python does not quote \r
