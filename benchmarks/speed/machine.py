"""What a figure of speed depends on: processor, memory, system, versions, commit, and what else was running."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "ray", "pyclustering", "pytorch-ood", "pillow", "pyarrow")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine(threads: int) -> dict[str, Any]:
    """Hardware, versions, commit and load; a dirty worktree is marked by ``+``."""
    cpu, memory = _read("/proc/cpuinfo"), _read("/proc/meminfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpu, re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB", memory, re.MULTILINE)
    flags = set(cpu.split())
    return {
        "processor": model[1] if model else platform.processor(),
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit of this checkout, with ``+`` if files were changed since."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/benchmarks"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # not on Linux
        return ""
