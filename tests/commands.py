"""Run the command line inside the tests."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maple.cli.app import main

TIMEOUT = 240  # seconds, of a program that starts processes
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS")


def run(*arguments: object) -> int:
    """Run the command in this process, as the entry point does; the exit code."""
    argv = sys.argv
    sys.argv = ["maple", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = argv
    return 0


def flat(text: str) -> str:
    """Text on one line: the console breaks where it likes."""
    return " ".join(text.split())


def python_path() -> str:
    """PYTHONPATH of a child process that imports helpers of the tests: they come first, the present one behind."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def tiny(source: object, *more: object) -> int:
    """A training of one epoch on few images."""
    return run("train", source, "--epochs", 1, "--batch-size", 8, *more)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupt(*_arguments: object, **_options: object) -> None:
    """Stand in for a step at which the user presses Ctrl-C."""
    raise KeyboardInterrupt


def read_until(process: Any, start: str) -> None:
    """Read standard error up to a line; a process that ends before it fails the test."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(start):
            return
    pytest.fail(f"no line starts with '{start}': {''.join(lines)}")


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end and that of the processes it started: they share its pipes."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1", **variables},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its processes
        _, errors = process.communicate()
        pytest.fail(f"the processes did not end within {TIMEOUT} s: {errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
