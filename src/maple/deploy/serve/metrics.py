"""Prometheus metrics of the service: requests, batches, scores, flagged images and drift.

Drift is watched as in :mod:`maple.decisions.drift`, in two ways. The conformal test martingale takes every image in its
order and raises an alarm once there is evidence; since it stores every image, a new stream begins after
``STREAM_IMAGES``, and the probability of an alarm without drift is its level in each of them. The Kolmogorov-Smirnov
distance compares the scores of the last ``WINDOW_IMAGES`` with those of calibration.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from maple.decisions.drift import StreamMonitor, kolmogorov_smirnov
from maple.deploy.serve.batching import BusyReason
from maple.types import Prediction

WINDOW_IMAGES = 500
STREAM_IMAGES = 50_000
PENDING_IMAGES = 1_000
LEVEL = 0.01
_QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_BEYOND = (1.0, 3.0, 9.0)  # buckets beyond the largest calibration score, in distances of it from the median
_UNCALIBRATED = tuple(10.0**power for power in range(-2, 7))
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def score_buckets(calibration_scores: np.ndarray) -> tuple[float, ...]:
    """Upper bounds for a histogram of scores: quantiles of the calibration scores (n,), and some bounds beyond.

    >>> score_buckets(np.arange(101.0))
    (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 100.0, 150.0, 250.0, 550.0)
    """
    known = calibration_scores[np.isfinite(calibration_scores)]
    if not len(known):
        return _UNCALIBRATED
    bounds = np.quantile(known, _QUANTILES)
    beyond = bounds[-1] + (bounds[-1] - np.median(known)) * np.array(_BEYOND)
    return tuple(sorted({float(f"{bound:.4g}") for bound in (*bounds, *beyond)}))


class DriftWatch:
    """Recent scores compared with the calibration scores, in constant memory.

    Updating the martingale costs about as much as a small network. Since its value does not depend on how the stream
    is cut, scores are collected until a value is read or ``PENDING_IMAGES`` have arrived.

    >>> watch = DriftWatch(np.random.default_rng(0).normal(size=300))
    >>> watch.update(np.random.default_rng(1).normal(2, size=200))
    >>> watch.alarm(), watch.log_wealth() > 4, 0.5 < watch.distance() < 1
    (True, True, True)
    """

    def __init__(self, calibration_scores: np.ndarray, level: float = LEVEL) -> None:
        self._calibration, self._level = calibration_scores, level
        self._window: deque[float] = deque(maxlen=WINDOW_IMAGES)
        self._pending: list[float] = []
        self._stream = StreamMonitor(calibration_scores, level)
        self._n_streams = 1
        self._alarm = False
        self._lock = threading.Lock()

    def follow(self, calibration_scores: np.ndarray) -> None:
        """Begin anew, with the calibration scores of another model."""
        with self._lock:
            self._calibration, self._stream = calibration_scores, StreamMonitor(calibration_scores, self._level)
            self._window.clear()
            self._pending, self._alarm = [], False

    def update(self, scores: np.ndarray) -> None:
        """The next scores (N,), in their order."""
        with self._lock:
            self._window.extend(scores.tolist())
            self._pending.extend(scores.tolist())
            if len(self._pending) >= PENDING_IMAGES:
                self._bet()

    def alarm(self) -> bool:
        """Whether an alarm was raised, in this stream or an earlier one."""
        with self._lock:
            self._bet()
            return self._alarm

    def log_wealth(self) -> float:
        """Log of the test martingale of the current stream; an alarm is raised at -log(level)."""
        with self._lock:
            self._bet()
            return float(self._stream.log_wealth_[-1]) if len(self._stream) else 0.0

    def distance(self) -> float:
        """Kolmogorov-Smirnov distance of the last images from the calibration images; 0 before there are any."""
        with self._lock:
            window = np.array(self._window)
        return kolmogorov_smirnov(window, self._calibration)[0] if len(window) else 0.0

    def _bet(self) -> None:
        if not self._pending:
            return
        if len(self._stream) >= STREAM_IMAGES:
            self._stream = StreamMonitor(self._calibration, self._level, seed=self._n_streams)
            self._n_streams += 1
        self._stream.update(self._pending)
        self._pending = []
        self._alarm = self._alarm or self._stream.alarm_at_ is not None


class ServeMetrics:
    """All metrics, in their own registry."""

    def __init__(self, calibration_scores: np.ndarray, n_waiting: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter("maple_requests", "Requests answered, by route and status.", ["route", "status"])
        self.seconds = histogram("maple_request_seconds", "Time to answer, by route.", ["route"], buckets=_SECONDS)
        self.refused = counter("maple_refused", "Requests to predict that were not served.", ["reason"])
        for reason in get_args(BusyReason):  # so that all are there from the beginning
            self.refused.labels(reason)
        self._batches = histogram("maple_batch_images", "Images per batch.", buckets=_IMAGES)
        self._images = counter("maple_images", "Images predicted.")
        self._flagged = counter("maple_images_flagged", "Images flagged as out-of-distribution.")
        about = "Scores; the bounds are quantiles of the calibration scores."
        self._scores = histogram("maple_score", about, buckets=score_buckets(calibration_scores))
        self._recent: deque[bool] = deque(maxlen=WINDOW_IMAGES)
        self._lock = threading.Lock()
        self._drift = DriftWatch(calibration_scores) if len(calibration_scores) else None
        for name, (text, value) in self._gauges(n_waiting).items():
            Gauge(name, text, registry=registry).set_function(value)

    def _gauges(self, n_waiting: Callable[[], int]) -> dict[str, tuple[str, Callable[[], float]]]:
        """Description and function of each value that is computed when it is read."""
        last = f"the last {WINDOW_IMAGES}"
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "maple_queue_images": ("Images accepted and not answered yet.", n_waiting),
            "maple_share_flagged": (
                f"Share of {last} images that was flagged as out-of-distribution.",
                self._share_flagged,
            ),
        }
        if self._drift is not None:
            wealth = f"Log of the conformal test martingale; an alarm is raised at {-np.log(LEVEL):.2f}."
            distance = f"Kolmogorov-Smirnov distance of {last} scores from the calibration scores."
            gauges["maple_drift_distance"] = distance, self._drift.distance
            gauges["maple_drift_log_wealth"] = wealth, self._drift.log_wealth
            gauges["maple_drift_alarm"] = "1 if the drift alarm was ever raised, else 0.", self._drift.alarm
        return gauges

    def _share_flagged(self) -> float:
        with self._lock:
            return sum(self._recent) / max(len(self._recent), 1)

    def follow(self, calibration_scores: np.ndarray) -> None:
        """Another model answers from now on: compare its scores with its own calibration scores."""
        if self._drift is not None:
            self._drift.follow(calibration_scores)

    def note_batch(self, prediction: Prediction) -> None:
        """One batch was predicted."""
        self._batches.observe(len(prediction))
        self._images.inc(len(prediction))
        self._flagged.inc(int(prediction.is_ood.sum()))
        with self._lock:
            self._recent.extend(prediction.is_ood.tolist())
        for score in prediction.score:
            self._scores.observe(float(score))
        if self._drift is not None:
            self._drift.update(prediction.score[np.isfinite(prediction.score)])

    def to_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)
