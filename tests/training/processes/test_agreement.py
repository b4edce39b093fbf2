"""Processes fail together, and end when one of them is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from maple.errors import DataError, LostProcessError
from maple.training.options import TrainOptions
from maple.training.processes import gather_rows, make_fabric, naming_lost_processes, together
from processes import in_processes, run_processes

CPU = TrainOptions(accelerator="cpu", precision="32-true")


def fail_in_turn() -> list[list[str]]:
    fabric = make_fabric(CPU)
    return [_error_when(fabric, rank) for rank in (0, 1)]


def _error_when(fabric: Any, rank: int) -> list[str]:
    try:
        with together(fabric):
            if fabric.global_rank == rank:
                raise (DataError("bad image"), KeyError("bug"))[rank]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def test_error_of_one_process_is_raised_in_all():
    first, second = in_processes(fail_in_turn)
    assert first[0] == second[0] == ["DataError", "bad image"]
    assert first[1] == ["TrainError", "process 1 failed with KeyError: 'bug'"]
    assert second[1] == ["KeyError", "'bug'"]


def lose_a_process(lost: int) -> tuple[str, float]:
    fabric = make_fabric(CPU)
    fabric.barrier()
    started = time.monotonic()
    try:
        with naming_lost_processes(fabric):
            if fabric.global_rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(1000):
                gather_rows(fabric, np.zeros((8, 8)), 16)
    except LostProcessError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_process_ends_the_others_within_a_minute(lost):
    found = run_processes(lose_a_process, lost, n=3)
    assert found[lost] == (-signal.SIGKILL, None)
    for code, answer in (each for rank, each in enumerate(found) if rank != lost):
        assert code == 0 and isinstance(answer, tuple), answer
        sentence, seconds = answer[0]
        assert "--resume" in sentence and seconds < 60


def raise_in_a_block() -> str:
    fabric = make_fabric(CPU)
    with pytest.raises(RuntimeError, match="mine"), naming_lost_processes(fabric):
        raise RuntimeError("mine")
    return "as it was"


def test_other_errors_stay_as_they_are():
    assert in_processes(raise_in_a_block) == ["as it was"] * 2
