"""Measure the speed of all parts relative to peers, and the growth of cost: ``make bench``.

    python benchmarks/bench.py [--parts clustering fit score training predict growth profile] [--fresh] [--quick]
        [--threads 2] [--repeats 5] [--json results/speed.json] [--page docs/speed.md]

The machine should be idle; two cores take less than 20 minutes. Every part runs in a process of its own and is stored
when it ends; parts that are stored for the same commit and machine are not repeated, so that an interrupted run goes
on. The page and its picture are drawn from the stored figures alone (``--parts`` without names only draws them).
pyclustering and pytorch-ood are needed for their rows: ``pip install -c constraints.txt '.[torch,ray,serve,bench]'``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from speed.drawing import draw_growth
from speed.machine import describe_machine
from speed.measure import Effort
from speed.tables import write_page

ROOT = Path(__file__).parents[1]
PARTS = {
    "clustering": "speed.clustering",
    "fit": "speed.fitting",
    "score": "speed.scoring",
    "training": "speed.training",
    "predict": "speed.predicting",
    "growth": "speed.growth",
    "profile": "speed.profiling",
}
PICTURE = "images/growth.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure stored parts again")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes: to try the scripts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "speed.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "speed.md")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # the file for one part, in its own process
    arguments = parser.parse_args()
    effort = Effort(arguments.repeats, arguments.quick)
    if arguments.one:
        found = importlib.import_module(PARTS[arguments.parts[0]]).run(effort)
        arguments.one.write_text(json.dumps(found))
        return
    results = read_results(arguments.json)
    for name in arguments.parts:
        machine = describe_machine(arguments.threads)
        if not arguments.fresh and is_stored(results, name, machine, effort):
            print(f"{name}: stored already for commit {machine['commit']}", flush=True)
            continue
        print(f"{name}: measuring", flush=True)
        results["parts"][name] = measure(name, arguments, machine)
        write_results(results, arguments.json, arguments.page)
    write_results(results, arguments.json, arguments.page)


def measure(name: str, arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Run a part in a process of its own: what one part does to the allocator or the threads is gone with it."""
    threads = str(arguments.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--parts", name, "--repeats", str(arguments.repeats), "--one", str(file)]
        ended = subprocess.run([*command, *(["--quick"] if arguments.quick else [])], env=environment)
        if ended.returncode:
            sys.exit(f"{name} failed; the other parts are stored: run again with --parts {name}")
        found = json.loads(file.read_text())
    about = {"machine": machine, "quick": arguments.quick, "took": round(time.perf_counter() - start, 1)}
    return {**about, **found}


def is_stored(results: dict[str, Any], name: str, machine: dict[str, Any], effort: Effort) -> bool:
    """Whether a part was measured for this commit, processor and number of threads, in full unless ``quick``."""
    part = results["parts"].get(name)
    if part is None or (part["quick"] and not effort.quick) or machine["commit"].endswith("+"):
        return False
    return all(part["machine"][key] == machine[key] for key in ("commit", "processor", "cores", "threads"))


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"parts": {}}


def write_results(results: dict[str, Any], path: Path, page: Path) -> None:
    """Store the figures, and draw the page from them; text below the table about missed targets is kept in a file."""
    path.write_text(json.dumps(results, indent=1) + "\n")
    curves = [curve for part in results["parts"].values() for curve in part.get("growth", ())]
    if curves:
        (page.parent / PICTURE).parent.mkdir(exist_ok=True)
        draw_growth(curves, page.parent / PICTURE)
    profile = Path(__file__).with_name("speed") / "profile.md"
    page.write_text(write_page(results, PICTURE, profile.read_text() if profile.exists() else ""))


if __name__ == "__main__":
    main()
