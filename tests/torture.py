"""``make torture``: the tests marked ``torture`` within a budget of time, and the tally that they add to.

    python tests/torture.py [--minutes 40] [--seed N] [--parts faults load fuzz ray] [--select 'test_kills and train']

A test marked ``torture`` takes the fixture ``torture`` and repeats what it does while ``torture.goes_on()``, with
random numbers from ``torture.rng``; what held is added with ``torture.count("kills", "train")``. Time that one part
leaves goes to the next. Outside of this command such tests are deselected; ``pytest -m torture PATH`` runs them for
some seconds and counts nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
TALLY = ROOT / "results" / "torture.json"
PARTS = {  # the share of the time of each part, and where its tests are; whatever is elsewhere belongs to "fuzz"
    "fuzz": (0.2, "tests"),
    "ray": (0.15, "tests/deploy/ray"),
    "load": (0.1, "tests/load"),
    "faults": (0.55, "tests/faults"),
}
SECONDS = 20.0  # of each session of tests outside the command
NO_TESTS = 5  # exit code of pytest


# --- the tally --------------------------------------------------------------------------------------------------------


@contextmanager
def changing(path: Path) -> Iterator[dict[str, Any]]:
    """The content of the tally, to be changed; several processes may add to it, and a kill leaves it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        content = read(path)
        yield content
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        os.close(folder)  # with its lock


def read(path: Path = TALLY) -> dict[str, Any]:
    """The tally: ``counts`` by kind and name, and one record per ``sessions``."""
    if not path.exists():
        return {"counts": {}, "sessions": []}
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass
class Torture:
    """The time, the random numbers and the tally of one test."""

    seconds: float
    seed: int
    tally: Path | None = None
    _started: float = field(default_factory=time.monotonic)
    _asked: bool = False

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def goes_on(self) -> bool:
        """Whether there is time left; at first always."""
        first, self._asked = not self._asked, True
        return first or time.monotonic() - self._started < self.seconds

    def count(self, kind: str, name: str, n: int = 1) -> None:
        """Add what was tried and held: ``count("kills", "train")``."""
        if self.tally is not None:
            with changing(self.tally) as content:
                counts = content["counts"].setdefault(kind, {})
                counts[name] = counts.get(name, 0) + n


def share(name: str, before: int, n_tests: int, elapsed: float) -> Torture:
    """What the environment grants to one of ``n_tests`` tests, when ``before`` of them are over."""
    left = float(os.environ.get("MAPLE_TORTURE_SECONDS", SECONDS)) - elapsed
    words = [int(os.environ.get("MAPLE_TORTURE_SEED", 0)), *name.encode()]
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    tally = os.environ.get("MAPLE_TORTURE_TALLY")
    return Torture(max(left, 1.0) / max(n_tests - before, 1), seed, Path(tally) if tally else None)


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--seed", type=int, help="random by default; it is printed and kept in the tally")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--select", default="", help="only tests that match, as -k of pytest")
    parser.add_argument("--tally", type=Path, default=TALLY)
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"torture: {arguments.minutes:g} minutes, seed {seed}", flush=True)
    failed, start = [], time.monotonic()
    for i, part in enumerate(arguments.parts):
        left = 60 * arguments.minutes - (time.monotonic() - start)
        weights = [PARTS[each][0] for each in arguments.parts[i:]]
        failed += run_part(part, left * weights[0] / sum(weights), seed, arguments.tally, arguments.select)
    with changing(arguments.tally) as content:
        minutes = round((time.monotonic() - start) / 60, 1)
        content["sessions"].append(
            {
                "date": date.today().isoformat(),
                "seed": seed,
                "minutes": minutes,
                "parts": arguments.parts,
                **({"select": arguments.select} if arguments.select else {}),
                "failed": failed,
            }
        )
    print(f"torture: {len(failed)} failed, seed {seed}; all counts are in {arguments.tally}")
    sys.exit(1 if failed else 0)


def run_part(part: str, seconds: float, seed: int, tally: Path, select: str = "") -> list[str]:
    """Run the tests of a part for so long; the names of those that failed."""
    others = [place for name, (_, place) in PARTS.items() if name != part and place != PARTS[part][1]]
    ignored = [f"--ignore={place}" for place in others if Path(place).is_relative_to(PARTS[part][1])]
    if not (ROOT / PARTS[part][1]).exists():
        return []
    print(f"torture: {part}, {seconds / 60:.1f} minutes", flush=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MAPLE_TORTURE_SECONDS": str(seconds),
        "MAPLE_TORTURE_SEED": str(seed),
        "MAPLE_TORTURE_TALLY": str(tally.resolve()),
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "torture",
            "--timeout=0",
            f"--junit-xml={report}",
            "-k",
            select,
        ]
        code = subprocess.run([*command, *ignored, PARTS[part][1]], cwd=ROOT, env=environment).returncode
        if code in (0, NO_TESTS):
            return []
        return _read_failed(report) or [f"{part}: pytest ended with {code}"]


def _read_failed(report: Path) -> list[str]:
    """The names of the tests that failed, from a JUnit file."""
    if not report.exists():
        return []
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


if __name__ == "__main__":
    main()
