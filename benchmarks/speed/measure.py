"""Timing of two or more sides in turns, and the ratios that follow: one pair per repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Bound = Literal["at least", "at most"]


@dataclass(frozen=True)
class Effort:
    """How long to measure; ``quick`` is a trial of the scripts, whose figures mean little."""

    repeats: int = 5
    quick: bool = False

    @property
    def few(self) -> int:
        """Repeats of what takes minutes."""
        return max(2, (self.repeats + 1) // 2)

    def scale(self, n: int, least: int = 1) -> int:
        """A size, or a tenth of it in a quick run."""
        return max(n // 10, least) if self.quick else n


@dataclass(frozen=True)
class Row:
    """A ratio with its spread: of times as fast as the peer (``at least``), or of times as long (``at most``)."""

    work: str
    peer: str
    seconds: float  # median of ours
    peer_seconds: float  # median of the peer's
    ratio: float  # median over the repeats
    lowest: float
    highest: float
    repeats: int
    bound: Bound = "at least"
    target: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None without a target."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.bound == "at least" else self.ratio <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.is_met}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        return cls(**{name: value for name, value in values.items() if name != "met"})


def compare(
    work: str,
    peer: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    bound: Bound = "at least",
    target: float | None = None,
    note: str = "",
) -> Row:
    """The row of paired times.

    >>> compare("ours", "theirs", [1.0, 2.0, 1.0], [2.0, 2.0, 3.0], target=2.0).ratio
    2.0
    """
    mine, other = np.array(ours), np.array(theirs)
    ratios = other / mine if bound == "at least" else mine / other
    middle, low, high = (float(f"{value:.4g}") for value in (np.median(ratios), ratios.min(), ratios.max()))
    medians = (float(f"{np.median(values):.4g}") for values in (mine, other))
    return Row(work, peer, *medians, middle, low, high, len(mine), bound, target, note)


def take_turns(sides: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each side in each repeat; the order is reversed every time, and a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    if warm_up:
        for side in sides.values():
            side()
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            seconds[name].append(elapsed(sides[name]))
    return seconds


def elapsed(side: Callable[[], object]) -> float:
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def fastest(work: Callable[..., object], *arguments: Any, repeats: int = 2) -> float:
    """The least seconds of a few calls."""
    return min(elapsed(lambda: work(*arguments)) for _ in range(repeats))


def slope(sizes: Sequence[float], costs: Sequence[float], last: int = 3) -> float:
    """The slope of log cost over log size (least squares) between the largest sizes.

    >>> round(slope([1, 2, 4, 8], [9.0, 4.0, 16.0, 64.0]), 3)
    2.0
    """
    return float(np.polyfit(np.log(sizes[-last:]), np.log(costs[-last:]), 1)[0])
