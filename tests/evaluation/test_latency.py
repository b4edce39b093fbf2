"""Time per image."""

from __future__ import annotations

import time

import numpy as np
import pytest

from maple.errors import DataError, UsageError
from maple.evaluation.latency import measure_latency


def test_latency_is_per_image_and_warmed_up(monkeypatch):
    clock = iter([0.0, 0.010, 1.0, 1.020, 2.0, 2.030])  # 10, 20 and 30 ms
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls = []
    latency = measure_latency(lambda batch: calls.append(len(batch)), np.zeros((4, 3)), repeats=3)
    assert calls == [4] * 4
    assert latency.median_ms == pytest.approx(5.0)
    assert latency.spread_ms == pytest.approx(2.5)


def test_latency_of_nothing_is_refused():
    with pytest.raises(DataError, match="batch"):
        measure_latency(len, [])
    with pytest.raises(UsageError, match="repeats"):
        measure_latency(len, [1], repeats=0)
