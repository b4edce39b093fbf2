"""Files of a run: tensors and JSON, written whole or not at all, with a format version, never pickled.

A file is first written beside its target, flushed to the disk and then renamed over it, so a crash or a full disk
leaves the previous version in place.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maple.errors import RunError

FORMAT_VERSION = 2
_METADATA_KEY = "maple"
ANEW = "train again with --overwrite"  # about a file of a run that is of no more use


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content``; on failure the old file stays and :class:`RunError` says what to do."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        remedy = "free some space or choose another folder" if is_full(error) else "choose another name or folder"
        raise RunError(
            f"cannot write '{path}' ({len(data) / 1e6:.1f} MB): {error.strerror or error}; "
            f"{remedy}, then try again: what was saved before is intact"
        ) from None
    finally:  # also on Ctrl-C
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether there is no space left, on the disk or for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def take_lock(path: Path, wait: bool = False) -> Any:
    """The lock of that name, held; without ``wait``, None where another process holds it.

    It is released by the system should a process end without having done so.
    """
    from filelock import FileLock, Timeout  # comes with torch

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    return lock


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Write arrays and JSON-able metadata into one safetensors file, atomically."""
    header = {_METADATA_KEY: json.dumps({"format": FORMAT_VERSION, **metadata})}
    write_atomic(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}, header))


def load_arrays(path: Path, otherwise: str = ANEW) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read what :func:`save_arrays` wrote; ``otherwise`` says what to do about a file that can no longer be read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> save_arrays(path, {"mean": np.arange(3.0)}, {"classes": ["a"]})
    >>> arrays, metadata = load_arrays(path)
    >>> arrays["mean"], metadata["classes"]
    (array([0., 1., 2.]), ['a'])
    """
    if not path.is_file():
        raise RunError(f"'{path}' does not exist: is '{path.parent}' the folder of a finished run?")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, OSError) as error:
        raise RunError(f"'{path}' is damaged ({error}): restore it from a copy or {otherwise}") from None
    check_format(metadata, path, otherwise=otherwise)
    return arrays, metadata


def save_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with the format version, atomically; numbers that JSON lacks (NaN, infinity) become null."""
    write_atomic(path, json.dumps(_finite({"format": FORMAT_VERSION, **value}), indent=1, allow_nan=False) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    """Read what :func:`save_json` wrote."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read '{path}': {error.strerror or error}; is '{path.parent}' a run folder?") from None
    except ValueError as error:
        raise RunError(f"'{path}' is damaged ({error}): restore it from a copy or {ANEW}") from None
    check_format(value, path)
    return value


def check_format(metadata: Mapping[str, Any], path: Path, oldest: int = FORMAT_VERSION, otherwise: str = ANEW) -> None:
    """Refuse files of a newer format than this version writes, and of an older one than ``oldest``."""
    found = metadata.get("format") if isinstance(metadata, Mapping) else None
    if not isinstance(found, int):
        raise RunError(f"'{path}' was not written by maple: it has no format version")
    if found > FORMAT_VERSION:
        raise RunError(
            f"'{path}' has format {found}, this maple reads up to {FORMAT_VERSION}: "
            "upgrade with pip install --upgrade maple-uncertainty"
        )
    if found < oldest:
        raise RunError(
            f"'{path}' was written by an older maple (format {found}, now {FORMAT_VERSION}): {otherwise}, or use "
            "that maple"
        )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
