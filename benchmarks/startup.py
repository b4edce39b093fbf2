"""Time ``import maple`` and ``maple --help``, each in a separate process.

    python benchmarks/startup.py [--repeats 15] [--json results/startup.json]

Wall-clock time minus that of an empty program, median and range over the repeats; the three alternate. The machine
should be idle. Targets: at most 0.3 s and 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = {"empty": ["-c", ""], "import maple": ["-c", "import maple"], "maple --help": ["-m", "maple", "--help"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(arguments.repeats + 1):
        for name, program in PROGRAMS.items():
            seconds[name].append(run(program))
    empty = statistics.median(seconds["empty"][1:])  # the first round fills the disk cache
    rows = {}
    for name in list(PROGRAMS)[1:]:
        extra = [each - empty for each in seconds[name][1:]]
        rows[name] = {"median": statistics.median(extra), "lowest": min(extra), "highest": max(extra)}
        print(f"{name}: " + ", ".join(f"{key} {value:.3f} s" for key, value in rows[name].items()))
    if arguments.json:
        about = {"repeats": arguments.repeats, "python": platform.python_version(), "cores": os.cpu_count()}
        load = os.getloadavg()[0]
        arguments.json.write_text(json.dumps({**about, "load": round(load, 2), "seconds": rows}, indent=2) + "\n")


def run(program: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
