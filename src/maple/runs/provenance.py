"""Provenance of results: the command, options and decision, the commit of a checkout, and the hardware.

:func:`maple.evaluation.evaluate.evaluate` adds the seed and the versions of the packages.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def find_commit(source: Path = Path(__file__)) -> str | None:
    """The commit of the checkout that tracks the file ``source``; ``None`` where there is none, or no git."""
    folder = source.resolve().parent
    tracked = _git(folder, "ls-files", source.name)  # not so in an environment that lies inside another checkout
    return _git(folder, "rev-parse", "--short", "HEAD") if tracked else None


def describe_hardware() -> str:
    """Processor architecture and number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        asked = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
