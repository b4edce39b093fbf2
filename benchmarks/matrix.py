"""Run the tests with every Python and torch that can be had here, each in an environment of its own.

    make test-matrix                       # all combinations; goes on where it stopped
    python benchmarks/matrix.py run --python 3.12 --torch pinned --tests tests/stats tests/decisions
    python benchmarks/matrix.py table

Pythons are those on the path and those of pyenv. ``pinned`` is the torch of ``constraints.txt``, ``newest`` the newest
that the package index has, which may be a build for CUDA of 3 GB, and ``none`` the package without torch, with the
tests that need none. What cannot be installed is recorded with the reason: it is untested, and not claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "matrix"
VERSIONS = ("3.11", "3.12", "3.13")
TORCHES = ("pinned", "newest", "none")
WITHOUT_TORCH = ("tests/stats", "tests/decisions", "tests/theory", "tests/files", "tests/test_errors.py")
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--python", nargs="+", default=VERSIONS)
    parser.add_argument("--torch", nargs="+", choices=TORCHES, default=TORCHES)
    parser.add_argument("--tests", nargs="+", help="instead of all, to try the script; not recorded")
    parser.add_argument("--minutes", type=float, default=60, help="for the installation, and for the tests, of each")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "matrix.json")
    arguments = parser.parse_args()
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if arguments.command == "run":
        for version in arguments.python:
            for torch in arguments.torch:
                name = f"{version}/{torch}"
                if found.get(name, {}).get("outcome") in ("passed", "failed") and not (
                    arguments.again or arguments.tests
                ):
                    continue
                row = try_one(version, torch, arguments.tests, 60 * arguments.minutes)
                print(f"{name}: {row['outcome']} {row.get('reason', '')}", flush=True)
                if not arguments.tests:
                    found[name] = row
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def try_one(version: str, torch: str, tests: Sequence[str] | None, seconds: float) -> dict[str, Any]:
    """Install into an environment and run the tests: ``passed``, ``failed`` or ``not installed``, with the reason."""
    python = find_python(version)
    if python is None:
        return {"outcome": "not installed", "reason": "there is no such Python"}
    folder = ENVIRONMENTS / f"{version}-{torch}"
    own = folder / "bin" / "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    try:
        if not own.exists():
            run([python, "-m", "venv", folder], seconds)
        run([own, "-m", "pip", "install", "--quiet", *requirements(own, torch)], seconds)
        versions = json.loads(run([own, "-c", _VERSIONS], seconds, environment))
    except (subprocess.SubprocessError, OSError) as error:
        return {"outcome": "not installed", "reason": reason_of(error)}
    chosen = tests or (WITHOUT_TORCH if torch == "none" else ())
    quiet = ["-q", "-p", "no:cacheprovider", "--no-header", "-W", "default"]  # other versions have other warnings
    command = [own, "-m", "pytest", *quiet, *chosen]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return {"outcome": "failed", "reason": reason_of(error), **versions}
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return {"outcome": "failed" if done.returncode else "passed", "reason": summary, **versions}


_VERSIONS = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
import numpy, maple
try: import torch
except ModuleNotFoundError: pass
names = ("torch", "numpy", "scipy", "scikit-learn", "pillow", "pyarrow")
print(json.dumps({"python": sys.version.split()[0], **{name: version(name) for name in names}}))
"""


def find_python(version: str) -> str | None:
    """A Python of this version that starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        asked = [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return candidate
    return None


def requirements(python: Path, torch: str) -> list[str]:
    """Arguments of pip install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if torch == "none":
        return [*project["dependencies"], *TEST_TOOLS]
    if torch == "pinned":
        return ["--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[torch,dev]"]
    listed = run([python, "-m", "pip", "index", "versions", "torch"], 300)
    newest = re.search(r"^torch \(([\d.]+)\)", listed, flags=re.MULTILINE)
    if newest is None:
        raise OSError("the package index lists no torch")
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["dev"], "lightning-fabric", f"torch=={newest[1]}"]
    return [each for each in named if not each.startswith("maple")]


def run(command: Sequence[Any], seconds: float, environment: dict[str, str] | None = None) -> str:
    """The output of a command; an error with the last of what it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds, env=environment)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def reason_of(error: Exception) -> str:
    """One line without addresses."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took longer than {error.timeout:.0f} s"
    return re.sub(r"\S*(://|/)\S*", "...", str(error))[:200]


def table(found: dict[str, Any]) -> str:
    """Outcomes as Markdown.

    >>> print(table({"3.12/none": {"outcome": "passed", "python": "3.12.1", "torch": None, "reason": "9 passed"}}))
    | Python | torch | outcome | |
    |---|---|---|---|
    | 3.12.1 | none | passed | 9 passed |
    """
    rows = ["| Python | torch | outcome | |", "|---|---|---|---|"]
    for name, row in sorted(found.items()):
        version, torch = name.split("/")
        shown = row.get("torch") or torch
        rows.append(f"| {row.get('python', version)} | {shown} | {row['outcome']} | {row.get('reason', '')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
