"""Locks of files and run folders; the operating system releases them when their process ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from maple.errors import RunError
from maple.files.drafts import remove_stale, write_atomic
from maple.files.run_files import RunFile


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
