"""``maple monitor``: test for drift of one batch against the calibration images, or of a stream over many calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.decisions.conformal import check_rate
from maple.decisions.drift import Comparison, StreamMonitor, compare_scores
from maple.errors import RunError, UsageError
from maple.files import load_arrays, save_arrays, write_atomic
from maple.options import Values
from maple.prediction.base import BasePredictor
from maple.prediction.engine import LOCAL, Engine
from maple.progress import counting
from maple.reporting.plots import plot_drift, standalone_svg
from maple.runs.loading import MORE_CALIBRATION, open_like, ready_model, warn_of_skipped
from maple.runs.requests import MonitorRequest
from maple.text import percent, plural

_LEVEL = 0.01
_FEW_IMAGES = 20  # of which a quarter must be flagged, at the usual levels, before that is drift
_STATE_KIND = "monitor"
_SUFFIX = ".svg"


@dataclass(frozen=True, eq=False)
class Monitoring:
    """The outcome of the tests, and the verdict.

    For a single batch the two tests of ``batch`` decide. They ignore the order of the images: folders are often sorted
    by class, which a martingale would take for drift, so that it is not computed. For a stream with a state the
    martingale decides, because it is valid over all calls, and a test repeated with every call is not.
    """

    batch: Comparison
    stream: StreamMonitor | None = None  # of images in order of arrival; None for a batch
    alarm_file: str | None = None  # where the alarm went off, if among these images

    @property
    def drift(self) -> bool:
        return self.batch.drift if self.stream is None else self.stream.alarm_at_ is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``alarm_image`` counts from 1."""
        batch = self.batch
        return {
            "drift": self.drift,
            "decided_by": "batch" if self.stream is None else "stream",
            "level": batch.level,
            "images": batch.n_images,
            "calibration_images": batch.n_calibration,
            "batch": {
                "p_value": batch.p_value,
                "flagged": batch.n_flagged,
                "share_flagged": batch.share_flagged,
                "expected_share": batch.expected_share,
                "likely_shares": list(batch.likely_shares),
                "share_p_value": batch.share_p_value,
                "threshold": batch.threshold if math.isfinite(batch.threshold) else None,
                "ks_statistic": batch.ks_statistic,
                "ks_p_value": batch.ks_p_value,
                "scores": "higher" if batch.scores_rose else "lower",
            },
            "stream": None if self.stream is None else self._stream_dict(self.stream),
        }

    def _stream_dict(self, stream: StreamMonitor) -> dict[str, Any]:
        return {
            "images": len(stream),
            "log_wealth": float(stream.log_wealth_[-1]),
            "max_log_wealth": stream.max_log_wealth_,
            "alarm_log_wealth": stream.alarm_log_wealth,
            "alarm_image": None if stream.alarm_at_ is None else stream.alarm_at_ + 1,
            "alarm_file": self.alarm_file,
        }

    def describe(self) -> str:
        """The verdict and the figures behind it, as text."""
        rows = [
            self._verdict(),
            f"  images    {self.batch.n_images:,} new, {self.batch.n_calibration:,} for calibration",
            f"  flagged   {_describe_share(self.batch)}",
            f"  scores    {_describe_scores(self.batch)}",
            *([] if self.stream is None else [f"  stream    {self._describe_stream(self.stream)}"]),
            *(f"  note      {note}" for note in self._notes()),
        ]
        return "\n".join(rows)

    def _verdict(self) -> str:
        stream, level = self.stream, self.batch.level
        if stream is None:
            p = f"{_describe_p(self.batch.p_value)}, level {level:g}"
            if self.drift:
                return f"drift: these images differ from the calibration images ({p})"
            return f"no drift seen: these images do not differ from the calibration images ({p})"
        if stream.alarm_at_ is None:
            return f"no drift seen in {plural(len(stream), 'image')} of the stream (level {level:g}, over all calls)"
        before = stream.alarm_at_ < len(stream) - self.batch.n_images
        when = ", before these images" if before else ""
        return f"drift: the alarm went off at image {stream.alarm_at_ + 1:,} of the stream{when} (level {level:g})"

    def _describe_stream(self, stream: StreamMonitor) -> str:
        reached = f"not reached in {plural(len(stream), 'image')}"
        if stream.alarm_at_ is not None:
            file = f" ('{self.alarm_file}')" if self.alarm_file else ""
            reached = f"reached at image {stream.alarm_at_ + 1:,}{file}"
        most, now = _describe_wealth(stream.max_log_wealth_), _describe_wealth(float(stream.log_wealth_[-1]))
        return f"martingale {most} at most, {now} now; alarm at {1 / stream.level:,.0f}, {reached}"

    def _notes(self) -> list[str]:
        notes = []
        if (n := self.batch.n_images if self.stream is None else len(self.stream)) < _FEW_IMAGES:
            notes.append(f"only a large drift can be detected from {plural(n, 'image')}")
        if self.stream is None:
            notes.append("the order of the images was not tested; if they are in order of arrival, use --state")
        else:
            notes.append("flagged and scores are of this call alone; the stream decides, over all calls")
            if self.alarm_file is not None and not self.batch.drift:
                notes.append(
                    "as a batch these images do not differ from the calibration images: if they were not given in "
                    "order of arrival (folders are read by name), the order alone may have caused the alarm"
                )
        if self.drift:
            listed = "maple predict lists what is flagged; " if self.batch.n_flagged else ""
            notes.append(f"{listed}to accept such images, train or calibrate with them")
        return notes


def monitor_images(request: MonitorRequest, engine: Engine = LOCAL) -> Monitoring:
    """Compare images with the calibration images of a run; with ``state``, continue the stream that it holds.

    Without ``state`` nothing says that the images are in order of arrival, so that no stream is tested. ``engine`` runs
    the network.
    """
    out, state = request.out, request.state
    if out is not None and out.suffix != _SUFFIX:
        raise UsageError(f"--out '{out}': end the name in {_SUFFIX}")
    # One threshold for all classes: the share of images above it without drift is known exactly.
    decision: Values = {"confidence": None, "per_class": False}
    if request.false_alarm is not None:
        decision["false_alarm"] = request.false_alarm
    check = partial(_check_calibrated, folder=request.model)
    predictor = ready_model(request.model, decision, check=check, trust=request.trust)
    stream = None if state is None else _open_stream(predictor, request.level, state)
    level = stream.level if stream else _LEVEL if request.level is None else request.level
    check_rate(level, "level", _LEVEL)
    images = open_like(predictor, request.sources, request.data_root)
    warn_of_skipped(images.skipped)
    with counting("scoring") as progress:
        size, workers = request.batch_size, request.workers
        scores = engine.scores(predictor, images, batch_size=size, workers=workers, progress=progress)  # (N,)
    batch = compare_scores(scores, predictor.calibration_scores, predictor.false_alarm, level)
    if stream is not None:
        stream.update(scores)
    if out is not None:
        martingale = None if stream is None else stream.log_wealth_
        calibration = predictor.calibration_scores
        plot = plot_drift(calibration, scores, batch.threshold, batch.expected_share, martingale, level)
        write_atomic(out, standalone_svg(plot))
    if stream is None or state is None:
        return Monitoring(batch)
    save_arrays(state, stream.to_arrays(), {"kind": _STATE_KIND})  # last: a repeated call must not count images twice
    return Monitoring(batch, stream, _alarm_file(stream, images))


def _check_calibrated(predictor: BasePredictor, folder: Path) -> None:
    if not len(predictor.calibration):
        raise RunError(f"'{folder}' has no calibration images to compare new images with: {MORE_CALIBRATION}")


def _open_stream(predictor: BasePredictor, level: float | None, state: Path) -> StreamMonitor:
    """The stream of a state file, or a new one."""
    calibration = predictor.calibration_scores
    if state.is_dir():
        raise UsageError(f"--state '{state}' is a folder: give the name of a file in it")
    if not state.exists():
        return StreamMonitor(calibration, _LEVEL if level is None else level)
    try:
        arrays, metadata = load_arrays(state, otherwise="start a new stream")
        if metadata.get("kind") != _STATE_KIND:
            raise RunError(f"'{state}' was not written by maple monitor")
        stream = StreamMonitor.from_arrays(arrays)
    except RunError as error:
        raise RunError(f"--state: {error}; to start a new stream, give the name of a new file") from None
    if not np.array_equal(stream.calibration_scores, calibration):
        raise UsageError(
            f"--state '{state}' belongs to a stream of another run, or of this one before it was calibrated again: "
            "give the name of a new file"
        )
    if level is not None and level != stream.level:
        raise UsageError(
            f"--state '{state}' was started with --level {stream.level:g}, not with {level:g}: leave out --level, or "
            "give the name of a new file"
        )
    return stream


def _alarm_file(stream: StreamMonitor, images: ImageSet) -> str | None:
    """The image that raised the alarm, if it is one of ``images``, the last of the stream."""
    row = -1 if stream.alarm_at_ is None else stream.alarm_at_ - (len(stream) - len(images))
    return images.files[row] if row >= 0 else None


# --- text ------------------------------------------------------------------------------------------------------------


def _describe_share(batch: Comparison) -> str:
    low, high = batch.likely_shares
    expected = f"expected {percent(batch.expected_share)}, usually {percent(low)} to {percent(high)}"
    found = f"{batch.n_flagged:,} of {batch.n_images:,} ({percent(batch.share_flagged)})"
    return f"{found}; {expected}; {_describe_p(batch.share_p_value)}"


def _describe_scores(batch: Comparison) -> str:
    direction = "higher" if batch.scores_rose else "lower"
    distance = f"Kolmogorov-Smirnov distance {batch.ks_statistic:.3f}, {_describe_p(batch.ks_p_value)}"
    return f"{direction} where they differ most from the calibration images; {distance}"


def _describe_p(p: float) -> str:
    """
    >>> [_describe_p(p) for p in (0.4321, 0.000123, 1e-40)]
    ['p = 0.43', 'p = 0.00012', 'p < 1e-12']
    """
    return f"p = {p:.2g}" if p >= 1e-12 else "p < 1e-12"


def _describe_wealth(log_wealth: float) -> str:
    """
    >>> [_describe_wealth(math.log(10) * power) for power in (-0.5, 1.5, 8.2, 400)]
    ['0.316', '31.6', '10^8', '10^400']
    """
    power = log_wealth / math.log(10)
    return f"{10**power:.3g}" if power < 4 else f"10^{math.floor(power)}"
