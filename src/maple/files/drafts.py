"""Atomic writes by drafts: what is written before it takes its final name, and what a killed process left of it.

A draft of ``run.json`` is ``.run.json.XXXXXXXX.draft`` beside it. Its process holds a lock on it, which the operating
system releases however the process ends; a draft that nobody holds is removed by the next one of the same target.
Where the system has no such locks (Windows), drafts of killed processes stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from maple.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".draft"
_OLD = "old"  # inside the draft of a folder: the version that is being replaced
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


# --- writing ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content``; on failure the old file stays and :class:`RunError` names the remedy."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(path) as (file, draft):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            draft.chmod(0o644)
            draft.replace(path)
    except OSError as error:
        remedy = "free some space or choose another folder" if is_full(error) else "choose another name or folder"
        raise RunError(
            f"cannot write '{path}' ({len(data) / 1e6:.1f} MB): {error.strerror or error}; "
            f"{remedy}, then try again; the previous version is unchanged"
        ) from None


@contextmanager
def draft_folder(target: Path, replace: bool = True) -> Iterator[Path]:
    """A path beside ``target`` for a folder that takes its place on success; on failure ``target`` is unchanged.

    Without ``replace``, a ``target`` that is not empty is an :class:`OSError`.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with draft_beside(target) as beside:
        new = beside / "new"
        yield new
        if replace:
            swap_in(new, target)
        else:
            new.replace(target)


def is_full(error: OSError) -> bool:
    """Whether the disk is full or the user's quota used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


# --- drafts -----------------------------------------------------------------------------------------------------------


@contextmanager
def draft_file(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A file beside ``target`` and its path; it is removed at the end unless it has been renamed."""
    remove_stale(target)
    while True:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", suffix=_SUFFIX, delete=False
        ) as file:
            path = Path(file.name)
            try:
                if _hold(file.fileno(), path):
                    yield file, path  # type: ignore[misc]
                    return
            finally:  # also on Ctrl-C
                path.unlink(missing_ok=True)


@contextmanager
def draft_beside(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target``, removed at the end with all that it still holds."""
    remove_stale(target)
    while True:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=_SUFFIX))
        descriptor = os.open(folder, os.O_RDONLY) if fcntl else None
        try:
            if descriptor is None or _hold(descriptor, folder):
                yield folder
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)


def swap_in(new: Path, target: Path) -> None:
    """Let the folder ``new`` take the place of ``target``; in one step where the system can."""
    if not target.exists():
        new.replace(target)
    elif not exchange(new, target):
        old = new.with_name(_OLD)
        target.replace(old)
        try:
            new.replace(target)
        except BaseException:
            old.replace(target)
            raise


def exchange(a: Path, b: Path) -> bool:
    """Let two paths change places in one step; false, and nothing is done, where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def remove_stale(target: Path) -> None:
    """Remove drafts of ``target`` whose processes are gone; the last version of a folder is kept if it is missing."""
    for draft in _drafts(target):
        if not target.exists() and (draft / _OLD).exists():
            continue
        with contextlib.suppress(OSError), _locked(draft) as stale:
            if stale and draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            elif stale:
                draft.unlink()


def find_replaced(target: Path) -> Path | None:
    """Where the last version of a folder lies whose replacement was interrupted between two renames."""
    if target.exists():
        return None
    return next((draft / _OLD for draft in _drafts(target) if (draft / _OLD).exists()), None)


def _drafts(target: Path) -> list[Path]:
    start = f".{target.name}."
    try:
        with os.scandir(target.parent) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    return [target.parent / name for name in names if name.startswith(start) and name.endswith(_SUFFIX)]


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a draft; yields whether it was free, so that its process is gone."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _hold(descriptor: int, path: Path) -> bool:
    """Take the lock of a new draft; false if another process took it for stale and removed it just before."""
    if fcntl is None:
        return True
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path.exists()
