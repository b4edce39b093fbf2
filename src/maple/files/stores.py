"""Tensors and JSON with the version of their format, written atomically and checked when they are read."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maple.errors import MapleError, RunError
from maple.files.drafts import write_atomic
from maple.files.formats import FORMAT_VERSION, OLDEST_FORMAT, Content, bring_forward
from maple.files.run_files import ANEW, no_file

Record = TypeVar("Record")
_METADATA_KEY = "maple"
_DIGEST = "digest"  # in the metadata: digest of the rest of them
_ARRAYS = "arrays"  # in the metadata: digest of the arrays


# --- damage -----------------------------------------------------------------------------------------------------------

# What reading and using the content of a file raises where it is not what maple wrote.
_DAMAGE = (
    SafetensorError,
    csv.Error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    OSError,
)


@contextmanager
def naming_damage(path: Path, otherwise: str = ANEW, let: type[MapleError] = RunError) -> Iterator[None]:
    """Within it, content that maple cannot have written is a :class:`RunError` that names the file and the remedy.

    Errors of the class ``let`` stay as they are, as those that a flag remedies.

    >>> with naming_damage(Path("a.json"), "write it again"):
    ...     {}["classes"]
    Traceback (most recent call last):
    ...
    maple.errors.RunError: 'a.json' is damaged (it lacks 'classes'): restore it from a copy or write it again
    """
    try:
        yield
    except (MapleError, *_DAMAGE) as error:
        if isinstance(error, RunError | let):
            raise
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
    """The description of a network without the folder that it was opened from, which must not be published.

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


def load_record(path: Path, build: Callable[[dict[str, Any]], Record]) -> Record:
    """The record that ``build`` makes of the content of a file of :func:`save_json`."""
    value = load_json(path)
    with naming_damage(path):
        return build(value)


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
