"""Errors of several processes: what fails in one ends all of them, with one sentence."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from maple.errors import LostProcessError, MapleError, TrainError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

LOST = (
    "another process of this training has ended without a message, killed or lost with its machine: finished epochs "
    "are saved, add --resume to continue"
)
FAREWELL_SECONDS = 3.0  # until a process notices that the one that started it has ended


@contextmanager
def together(fabric: Fabric) -> Iterator[None]:
    """A block whose error in one process is raised in all of them.

    Without it the other processes would wait for the failed one for ever. The block itself must not communicate.
    """
    if fabric.world_size == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = torch.tensor(float(error is not None), device=fabric.device)
    torch.distributed.all_reduce(failed)
    if failed:
        errors = _share(fabric, error)
        raise error or errors[0]


def _share(fabric: Fabric, error: Exception | None) -> list[MapleError]:
    """The errors of all processes, in order of their ranks."""
    if error is not None and not isinstance(error, MapleError):  # of a type that may not be serialisable
        error = TrainError(f"process {fabric.global_rank} failed with {type(error).__name__}: {error}")
    found: list[MapleError | None] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, error)
    return [item for item in found if item is not None]


@contextmanager
def naming_lost_processes(fabric: Fabric) -> Iterator[None]:
    """A block in which the loss of another process, killed or on a machine that failed, is said in one sentence.

    The first process says it. If that one was lost, and had started the others itself, the second does.
    """
    parent = os.getppid()
    try:
        yield
    except RuntimeError as error:
        if fabric.world_size == 1 or not _is_of_connection(error):
            raise
        lost = LostProcessError(LOST)
        lost.said_here = fabric.global_rank == 1 and _has_ended(parent)
        raise lost from None


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether the processes could not communicate; errors of gloo are known by their text only."""
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)


def _has_ended(parent: int) -> bool:
    """Whether the process that started this one has ended."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.05)
    return os.getppid() != parent
