"""Records of a search: the values an option may take, and trials with their criteria."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from maple.options import Values
from maple.text import compact

Settings = Values  # of a trial
CRITERIA = {
    "nll": "negative log-likelihood of the class probabilities",
    "gaussian": "Gaussian test: mean distance of squared distances from chi-square quantiles, over their mean",
    "errors": "share of images that are wrong and not flagged, where right ones are flagged at the false-alarm rate",
}


@dataclass(frozen=True)
class Choices:
    """An option that takes one of several values."""

    values: tuple[Any, ...]

    @property
    def size(self) -> float:
        """Number of values."""
        return len(self.values)

    def nearest(self, value: Any) -> Any:
        """The value itself if it is one of them, else the middle one."""
        return value if value in self.values else self.values[len(self.values) // 2]

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)

    def __str__(self) -> str:
        return ", ".join(map(compact, self.values))


@dataclass(frozen=True)
class Span:
    """An option between two bounds, both included."""

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """Number of values."""
        return self.high - self.low + 1 if self.is_whole else math.inf

    def nearest(self, value: Any) -> Any:
        """The value itself if it is between the bounds, else the nearer bound."""
        return min(max(value, self.low), self.high)

    def suggest(self, trial: Any, name: str) -> Any:
        suggest = trial.suggest_int if self.is_whole else trial.suggest_float
        return suggest(name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{compact(self.low)} to {compact(self.high)}{', by factors' if self.log else ''}"


Space = dict[str, Choices | Span]  # by name of the option


@dataclass(frozen=True)
class Trial:
    """One setting of the options and its outcome."""

    number: int  # from 1
    state: Literal["finished", "pruned", "diverged", "failed", "interrupted", "running", "waiting"]
    settings: Settings
    criteria: dict[str, float] = field(default_factory=dict)  # `CRITERIA` and accuracy; only of finished trials
    epochs: int = 0  # that were trained
    seconds: float = math.nan
    clusters: int | None = None
    reason: str = ""  # why it diverged or failed
    folder: str = ""  # of its history, inside ``trials``

    @property
    def is_done(self) -> bool:
        """Whether the search is finished with it."""
        return self.state in ("finished", "pruned", "diverged", "failed")

    def to_dict(self) -> dict[str, Any]:
        measured = {name: self.criteria.get(name) for name in (*CRITERIA, "accuracy")}
        return {
            "trial": self.number,
            "state": self.state,
            **measured,
            "clusters": self.clusters,
            "epochs": self.epochs,
            "seconds": None if math.isnan(self.seconds) else self.seconds,
            **self.settings,
            "folder": self.folder,
            "reason": self.reason,
        }
