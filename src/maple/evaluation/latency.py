"""Time per image of a predictor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from maple.errors import DataError, UsageError


class Latency(NamedTuple):
    """Milliseconds per image over repeated batches."""

    median_ms: float
    spread_ms: float  # interquartile range


def measure_latency(predict: Callable[[Any], Any], batch: Any, repeats: int = 10) -> Latency:
    """Time ``predict(batch)`` after a warm-up call: median and interquartile range, per image.

    >>> measure_latency(sum, [1.0, 2.0, 3.0], repeats=5).median_ms >= 0
    True
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}: give at least 1")
    if len(batch) == 0:
        raise DataError("the batch is empty: give at least one image")
    predict(batch)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        predict(batch)
        seconds.append(time.perf_counter() - started)
    low, median, high = np.quantile(np.array(seconds) * 1000 / len(batch), (0.25, 0.5, 0.75))
    return Latency(float(median), float(high - low))
