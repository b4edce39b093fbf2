"""Small disks that really fill up, or that cannot be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LARGE = 2**16  # KiB


@contextmanager
def disk(folder: Path, kibibytes: int = LARGE) -> Iterator[Path]:
    """A disk of its own in the place of a folder; skips where none can be mounted."""
    folder.mkdir(exist_ok=True)
    options = f"size={kibibytes}k,mode=755"
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "maple", folder]).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def change(folder: Path, option: str) -> None:
    """Mount a disk anew, such as with ``ro``, or ``size=100k``."""
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)
