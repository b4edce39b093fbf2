"""Failing file operations: below a folder, the n-th one raises an error or is the last thing the process does.

Every write, sync, rename, removal and new folder of Python code is counted, also those of libraries that are given a
Python file. The operations are those of the operating system: buffers are emptied, and a file is created, before a
``write`` or ``open`` counts.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REAL_OPEN = io.open
_CALLS = ("fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink", "sendfile")


@dataclass(frozen=True)
class Fault:
    """What happens to operation ``at`` (from 1; 0 is none) below ``folder``: the process is killed, or an error."""

    folder: str
    at: int = 0
    error: str | None = None  # name of an error number, such as ENOSPC; None kills
    lasts: bool = False  # whether all later operations but removals fail as well
    memory: int | None = None  # bytes that the process may take on top of what it has
    file_size: int | None = None  # bytes of a file


class Operations:
    """Counts the operations and lets one fail."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.n = fault, 0
        self._folder = Path(fault.folder).resolve()
        self._owner = os.getpid()

    def watches(self, place: Any, dir_fd: int | None = None) -> bool:
        if os.getpid() != self._owner:  # a process that this one started
            return False
        if isinstance(place, int):
            path = Path(f"/proc/self/fd/{place}").readlink()
            if not path.is_absolute():  # a pipe or a socket
                return False
        else:
            base = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
            path = base / os.fsdecode(place)
        return path.parent.resolve().is_relative_to(self._folder)

    def step(self, name: str, half: Callable[[], Any] | None = None) -> None:
        """Count an operation, which fails if it is its turn; ``half`` does a part of it first."""
        self.n += 1
        fault, removes = self.fault, name in ("unlink", "remove", "rmdir")
        if not fault.at or self.n < fault.at or (self.n > fault.at and (not fault.lasts or removes)):
            return
        if half is not None:
            half()
        if fault.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, fault.error or "")
        raise OSError(number, os.strerror(number), f"operation {self.n}: {name}")


def install(fault: Fault) -> Operations:
    """Let it happen in this process, from now on."""
    operations = Operations(fault)
    for name in _CALLS:
        setattr(os, name, _watch(operations, name, getattr(os, name)))
    builtins.open = io.open = _watch_open(operations)  # type: ignore[assignment]
    _watch_exchange(operations)
    if fault.file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_size, fault.file_size))
    if fault.memory is not None:
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + fault.memory, has + fault.memory))
    return operations


def _watch(operations: Operations, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        folders = [options[key] for key in ("dir_fd", "src_dir_fd") if options.get(key) is not None]
        place = args[1] if name == "symlink" else args[0]
        if operations.watches(place, *folders):
            operations.step(name)
        return real(*args, **options)

    return call


def _watch_exchange(operations: Operations) -> None:
    """The package swaps two folders by a call of its own, where the system can."""
    from maple.files import drafts

    drafts.exchange = _watch(operations, "exchange", drafts.exchange)


def _watch_open(operations: Operations) -> Callable[..., Any]:
    class File(io.FileIO):
        def write(self, data: Any) -> int:
            real = super().write
            operations.step("write", lambda: real(bytes(data)[: len(data) // 2]))
            return real(data)

    def open_watched(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wxa+") or not operations.watches(file):
            return _REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        operations.step("open")
        raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)

    return open_watched
