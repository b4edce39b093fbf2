"""Run the command line inside the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from maple.cli.app import main


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
