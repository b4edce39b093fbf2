"""Functions in several real processes of one training, without the seconds that a new interpreter takes.

The processes are forked from one that has imported the package, and get the environment that torchrun would give them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
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
)


def in_processes(work: Callable[..., Any], *arguments: Any, n: int = 2) -> list[Any]:
    """What ``work(*arguments)``, a function of a module, returns in each of ``n`` processes; errors fail the test."""
    found = run_processes(work, *arguments, n=n)
    for rank, (code, answer) in enumerate(found):
        if code or isinstance(answer, str):
            pytest.fail(f"process {rank} ended with code {code}: {answer}")
    return [answer[0] for _, answer in found]


def run_processes(work: Callable[..., Any], *arguments: Any, n: int = 2) -> list[tuple[int, Any]]:
    """Exit code of each process, and its result as a tuple, its traceback as text, or nothing if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
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
