"""Feed mutated files to the parsers, in a process with limits on memory and time.

    python tests/fuzz/run.py [--inputs 20] [--seconds S] [--seed 0] [--keep FOLDER] [TARGET ...]

Every file of the corpus is read as it is, then mutated ones. The answer is one line of JSON per target on standard
output: how many inputs it took, and every failure with the input and the end of its traceback. An input may end with a
``MapleError`` of one sentence; anything else is a failure, as are more than ``INPUT_SECONDS`` of processor time and
memory beyond ``SPARE_BYTES``. The last input is kept in ``FOLDER``, where it is found if the process ends itself.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from mutations import mutate
from targets import TARGETS, read_corpus

from maple.errors import MapleError

FOUND = "~"  # found-1~a.png is an input that once failed, and is read as a.png
LONGEST = 3000  # characters of an error
INPUT_SECONDS = 10.0
SPARE_BYTES = 3 * 2**30  # address space for what parsers allocate


class TooSlow(BaseException):
    """An input over its time."""


def feed(name: str, path: Path) -> str | None:
    """Give a file to a target; the end of the traceback if it fails."""
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
    try:
        TARGETS[name](path)
    except MapleError as error:
        return (
            None if 10 <= len(str(error)) < 3000 and "\n" not in str(error) else f"no sentence: {str(error)[:3000]!r}"
        )
    except (Exception, TooSlow):
        return traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def fuzz(name: str, folder: Path, inputs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Feed a target the corpus, then mutated files until there are enough of them, or the time is over."""
    rng = np.random.default_rng([seed, *name.encode()])
    corpus = read_corpus(name)
    files = list(corpus)
    start, n, failures = time.monotonic(), 0, []
    while n < len(files) + inputs or time.monotonic() - start < seconds:
        file = files[n] if n < len(files) else files[rng.integers(len(files))]
        data = corpus[file] if n < len(files) else mutate(file, corpus[file], rng)
        path = folder / file.rpartition(FOUND)[2]
        path.write_bytes(data)
        if (failure := feed(name, path)) is not None:
            failures.append({"file": file, "data": base64.b64encode(data).decode(), "error": failure})
        path.unlink()
        n += 1
    return {"target": name, "inputs": n, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"by default all: {', '.join(TARGETS)}")
    parser.add_argument("--inputs", type=int, default=20, help="mutated files per target")
    parser.add_argument("--seconds", type=float, default=0.0, help="time per target, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder of the file that is being read")
    arguments = parser.parse_args()
    _limit()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where libraries print
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        os.chdir(folder)
        for name in arguments.targets or TARGETS:
            found = fuzz(name, folder, arguments.inputs, arguments.seconds, arguments.seed)
            print(json.dumps(found), file=answers, flush=True)


def _limit() -> None:
    """Limit the memory of this process beyond what its libraries have, and the time of an input."""
    warnings.simplefilter("ignore")
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {INPUT_SECONDS:g} s of processor time")

    signal.signal(signal.SIGPROF, stop)


if __name__ == "__main__":
    main()
