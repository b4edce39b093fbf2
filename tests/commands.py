"""Run the command line inside the tests."""

from __future__ import annotations

import sys

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
