"""Commands, and functions in several processes of one training, without the seconds that a new interpreter takes.

The processes are forked from one that has imported the package; those of a training get the environment that torchrun
would give them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SECONDS = 250  # until processes that wait for each other are ended
_PRELOADED = (
    "lightning_fabric",
    "maple.training.loop",
    "maple.training.processes.sharding",
    "maple.stats.clustering.splitting",
    "maple.prediction.fit",
    "maple.runs.train",
    "maple.runs.benchmark.suites",
    "maple.reporting.report",
    "maple.cli.app",
    "maple.deploy.serve.server",
)
MAPLE = "from maple.cli.app import main; main()"


class Forked:
    """Python code in a forked process, with the methods of ``subprocess.Popen`` that tests use.

    ``variables`` are added to those of the environment; ``None`` removes one.
    """

    def __init__(self, code: str, *arguments: object, cwd: Path | None = None, **variables: str | None) -> None:
        import torch

        context = _forkserver()
        self._out = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115 (closed when it is read)
        reader, writer = context.Pipe(duplex=False)
        how = (list(map(str, arguments)), str(cwd or Path.cwd()), {**os.environ, **variables}, torch.get_num_threads())
        self._process = context.Process(target=_run_code, args=(code, *how, self._out.name, writer))
        self._process.start()
        writer.close()
        self.pid = self._process.pid
        self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """What it has printed, and what it has said on standard error since it was last read."""
        with self.stderr:
            errors = self.stderr.read()
        self.wait(timeout)
        with self._out:
            return self._out.read(), errors

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_maple(*arguments: object, cwd: Path | None = None, **variables: str | None) -> Forked:
    """Start ``maple ARGUMENTS``."""
    return Forked(MAPLE, *arguments, cwd=cwd, **variables)


def _run_code(
    code: str, arguments: list[str], cwd: str, environment: dict[str, str | None], threads: int, out: str, err: Any
) -> None:
    """The process: as if an interpreter had been started."""
    import torch

    from maple.progress import console, is_first_process

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(out, os.O_WRONLY), 1)
    os.dup2(err.fileno(), 2)
    err.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    torch.set_num_threads(threads)
    console.quiet = not is_first_process()
    sys.argv = ["maple", *arguments]
    exec(code, {"__name__": "__main__"})  # noqa: S102 (code of tests)


# --- several processes of one training --------------------------------------------------------------------------------


def in_processes(work: Callable[..., Any], *arguments: Any, n: int = 2) -> list[Any]:
    """What ``work(*arguments)``, a function of a module, returns in each of ``n`` processes; errors fail the test."""
    found = run_processes(work, *arguments, n=n)
    for rank, (code, answer) in enumerate(found):
        if code or isinstance(answer, str):
            pytest.fail(f"process {rank} ended with code {code}: {answer}")
    return [answer[0] for _, answer in found]


def run_processes(work: Callable[..., Any], *arguments: Any, n: int = 2) -> list[tuple[int, Any]]:
    """Exit code of each process, and its result as a tuple, its traceback as text, or nothing if it was killed."""
    context = _forkserver()
    port, pipes, processes = _free_port(), [], []
    for rank in range(n):
        mine, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_enter, args=(rank, n, port, theirs, work, arguments)))
        pipes.append(mine)
        processes[-1].start()
        theirs.close()
    answers = [_receive(pipe) for pipe in pipes]
    for process in processes:
        process.join(SECONDS)
        process.kill()
        process.join()
    return [(process.exitcode, answer) for process, answer in zip(processes, answers)]


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(SECONDS) else "no answer"
    except EOFError:  # it was killed
        return None


def _enter(rank: int, n: int, port: int, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A process: join the others, work, answer, and leave without taking the threads of gloo apart."""
    ids = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in ids.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    if n == 1:
        for name in (*ids, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    import torch

    from maple.progress import console, is_first_process

    torch.set_num_threads(1)
    console.quiet = not is_first_process()  # as if it had been imported here
    try:
        answer: Any = (work(*arguments),)
    except BaseException:
        answer = traceback.format_exc()
    pipe.send(answer)
    if n > 1 and torch.distributed.is_initialized() and isinstance(answer, tuple):
        with suppress(RuntimeError):  # another one was killed
            torch.distributed.barrier()
    os._exit(0)
