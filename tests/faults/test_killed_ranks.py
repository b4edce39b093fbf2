"""Trainings in two processes, one of which is killed at a random moment; the same command then finishes the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import LAUNCHER_VARIABLES
from maple.runs.folder import RunFolder
from torture import Torture

MINUTE = 60.0
MAPLE = ("-m", "maple", "train", "digits", "--epochs", "4", "--batch-size", "64", "--backbone", "resnet9")
LAUNCHES = {
    "devices": (*MAPLE, "--devices", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", *MAPLE),
}


def start(launch: str, folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, *LAUNCHES[launch], "--out", str(folder), "--resume", "auto", "--accelerator", "cpu"]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True, **pipes)


def ranks_of(folder: Path) -> list[int]:
    """The processes that train this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if str(folder) in words and "torch.distributed.run" not in words:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_killed_process_ends_the_others_and_the_same_command_finishes(launch: str, torture: Torture, tmp_path: Path):
    number, seconds = 0, 30.0
    while number == 0 or torture.goes_on():
        folder, number = tmp_path / f"run-{number}", number + 1
        started = time.monotonic()
        process = start(launch, folder)
        time.sleep(torture.rng.uniform(0.1, 1.0) * seconds)
        victims = ranks_of(folder) if process.poll() is None else []
        if victims:
            os.kill(int(torture.rng.choice(victims)), signal.SIGKILL)
            torture.count("kills", f"train, one of two processes by {launch}")
        killed = time.monotonic()
        _, told = process.communicate()
        if victims and process.returncode:
            assert time.monotonic() - killed < MINUTE, told
            assert launch == "torchrun" or "Traceback" not in told, told
            assert wait_for_end(folder), "a process goes on without the others"
        process = start(launch, folder)
        _, told = process.communicate()
        assert process.returncode == 0, told
        assert RunFolder(folder).is_finished() and not RunFolder(folder).has_checkpoint()
        seconds = min(seconds, time.monotonic() - started)


def wait_for_end(folder: Path) -> bool:
    """Whether all processes of a run end within a minute."""
    deadline = time.monotonic() + MINUTE
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    return not ranks_of(folder)
