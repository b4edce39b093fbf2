"""The further processes of ``--devices N``, started by the first one on its machine.

Lightning would start them too, but it kills the first process without a word where one of them is lost. Here the first
process has time to say what happened, and ends with exit code 1. The others end some time after the first: one that is
still connecting to it would wait for half an hour.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn

GRACE_SECONDS = 20.0  # for the first process to end with an error of its own, after another has failed
LOST = (
    "error: another process of this training has ended{how}, and this one was waiting for it: finished epochs are "
    "saved, add --resume to continue"
)
_CHILD = "MAPLE_CHILD"  # environment variable of processes whose standard input ends with the first process


def start_children(n_processes: int) -> None:
    """Start this program once more for each further process, unless it was done before.

    The processes find each other by the variables that Lightning reads.
    """
    if os.environ.get(_CHILD):
        threading.Thread(target=_watch_first, daemon=True, name="maple-first").start()
    if n_processes == 1 or "LOCAL_RANK" in os.environ:
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_find_port()))
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(n_processes)}
    shared = os.environ | {_CHILD: "1"}
    children = [
        subprocess.Popen(_this_program(), env=shared | {"LOCAL_RANK": str(rank)}, stdin=subprocess.PIPE)
        for rank in range(1, n_processes)
    ]
    threading.Thread(target=_watch, args=(children,), daemon=True, name="maple-children").start()


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _this_program() -> list[str]:
    """The command line that started this process."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH100
    name = spec.name.removesuffix(".__main__")
    return [sys.executable, "-m", name, *sys.argv[1:]]


def _watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End all processes, the first included, some time after one has failed."""
    while not any(codes := [child.poll() for child in children]):
        if None not in codes:
            return  # all are done
        time.sleep(0.5)
    time.sleep(GRACE_SECONDS)  # most errors reach the first process by themselves
    for child in children:
        child.kill()
    _end(f" with code {next(code for code in codes if code)}")


def _watch_first() -> None:
    """End this process some time after the first one, which holds the other end of its standard input."""
    while os.read(0, 1):
        pass
    time.sleep(GRACE_SECONDS)
    _end()


def _end(how: str = "") -> NoReturn:
    print(LOST.format(how=how), file=sys.stderr, flush=True)  # the console is silent in all processes but the first
    os._exit(1)
