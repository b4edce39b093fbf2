"""Damage files as chance or an enemy would: their bytes, and the values of the JSON, TOML and arrays inside."""

from __future__ import annotations

import io
import json
import struct
import tomllib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tomli_w

Mutator = Callable[[bytes, np.random.Generator], bytes]
LONGEST = 2**18  # bytes of a mutated file

ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0\0\0\0",
    b"\x80",
    b"\r\n",
    b'"',
    b"{",
    b"-1",
    b"e999",
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, -(2**70), 10**40, 0.5, -1e308, float("inf"), float("nan"), ""),
    *("x" * 3000, "\0", "\ud800", "../../etc/passwd", "__class__", [], {}, [[]], [None], {"a": {}}, [1, "a", {}]),
)


# --- bytes -----------------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip, set, cut, repeat, insert or move some bytes, once or several times."""
    for _ in range(rng.integers(1, 6)):
        data = _CHANGES[rng.integers(len(_CHANGES))](data, rng)[:LONGEST]
    return data


def _flip(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.integers(len(changed))] ^= 1 << rng.integers(8)
    return bytes(changed)


def _set(data: bytes, rng: np.random.Generator) -> bytes:
    odd, at = ODD_BYTES[rng.integers(len(ODD_BYTES))], rng.integers(len(data) + 1)
    return data[:at] + odd + data[at + len(odd) :]


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    first, last = sorted(rng.integers(0, len(data) + 1, 2))
    return data[:first] + data[min(last, first + 64) :] if rng.random() < 0.7 else data[:last]


def _repeat(data: bytes, rng: np.random.Generator) -> bytes:
    first, last = sorted(rng.integers(0, len(data) + 1, 2))
    piece = data[first : min(last, first + 256)]
    return data[:first] + piece * int(rng.integers(2, 20)) + data[first:]


def _insert(data: bytes, rng: np.random.Generator) -> bytes:
    at = rng.integers(len(data) + 1)
    return data[:at] + rng.bytes(rng.integers(1, 20)) + data[at:]


def _move(data: bytes, rng: np.random.Generator) -> bytes:
    first, middle, last = sorted(rng.integers(0, len(data) + 1, 3))
    return data[:first] + data[middle:last] + data[first:middle] + data[last:]


_CHANGES = (_flip, _set, _cut, _repeat, _insert, _move)


# --- values ----------------------------------------------------------------------------------------------------------


def mutate_value(value: Any, rng: np.random.Generator) -> Any:
    """Replace, remove or add something somewhere in nested lists and dictionaries."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, changed = keys[rng.integers(len(keys))], value.copy()
        if rng.random() < 0.15:
            del changed[key]
        elif isinstance(changed, dict) and rng.random() < 0.1:
            changed[f"{key}x"] = changed.pop(key)
        else:
            changed[key] = mutate_value(changed[key], rng)
        return changed
    return ODD_VALUES[rng.integers(len(ODD_VALUES))]


def mutate_json(data: bytes, rng: np.random.Generator) -> bytes:
    """Change a value of a JSON text, or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    if rng.random() < 0.02:
        return b"[" * 100_000
    return json.dumps(_often(json.loads(data), rng)).encode()


def _often(value: Any, rng: np.random.Generator) -> Any:
    for _ in range(rng.integers(1, 4)):
        value = mutate_value(value, rng)
    return value


def mutate_toml(data: bytes, rng: np.random.Generator) -> bytes:
    """Change a value of a TOML file, or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    if rng.random() < 0.02:
        return b"a = " + b"[" * 20_000
    try:
        return tomli_w.dumps(_often(tomllib.loads(data.decode()), rng)).encode("utf-8", "surrogatepass")
    except (TypeError, AttributeError, ValueError):  # TOML has no null, and its top is a table
        return mutate_bytes(data, rng)


def mutate_safetensors(data: bytes, rng: np.random.Generator) -> bytes:
    """Change the header, the JSON of maple within it, or the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    n = struct.unpack_from("<Q", data)[0]
    header, rest = json.loads(data[8 : 8 + n]), data[8 + n :]
    said = header.get("__metadata__", {})
    if "maple" in said and rng.random() < 0.7:
        said["maple"] = mutate_json(said["maple"].encode(), rng).decode("utf-8", "replace")
    elif rng.random() < 0.3:
        name = list(header)[rng.integers(len(header))]
        header[f"{name}x"] = header.pop(name)
    else:
        header = _often(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def mutate_zip(data: bytes, rng: np.random.Generator) -> bytes:
    """Change a member, whose checksum is then right, or the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = list(members)[rng.integers(len(members))]
    if rng.random() < 0.15:
        odd = str(ODD_VALUES[rng.integers(len(ODD_VALUES))]).replace("\ud800", "").replace("\0", "")
        members[odd or "x"] = members.pop(name)
    else:
        members[name] = mutate_bytes(members[name], rng)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


BY_SUFFIX: dict[str, Mutator] = {
    ".json": mutate_json,
    ".toml": mutate_toml,
    ".safetensors": mutate_safetensors,
    ".npz": mutate_zip,
    ".zip": mutate_zip,
    ".pth": mutate_zip,
}


def mutate(name: str, data: bytes, rng: np.random.Generator) -> bytes:
    """Damage a file by the kind that its name tells."""
    suffix = name[name.rindex(".") :] if "." in name else ""
    try:
        return BY_SUFFIX.get(suffix, mutate_bytes)(data, rng)
    except Exception:  # an input that once failed need not be of its kind
        return mutate_bytes(data, rng)
