"""Two threads that stand for two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def in_two_ranks(work: Callable[[int, Callable[[np.ndarray], np.ndarray]], Any]) -> list[Any]:
    """What ``work(rank, sum_over_ranks)`` returns for both ranks; sums are taken over both."""
    gate, slots = threading.Barrier(2, timeout=20), [None, None]

    def run(rank: int) -> Any:
        def sum_over_ranks(array: np.ndarray) -> np.ndarray:
            slots[rank] = array
            gate.wait()
            total = slots[0] + slots[1]
            gate.wait()
            return total

        return work(rank, sum_over_ranks)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))
