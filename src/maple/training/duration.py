"""How long to train: the number of epochs that fit into a time limit, and whether more of them may help."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maple.text import duration
from maple.training.options import TrainOptions

FIRST_LOOK = 0.1  # share of an epoch after which its time is first estimated
SLOWER = 1.05  # epochs may become slower: by this factor they still fit
VALIDATION = 1.2  # time of a whole epoch over that of its steps, while no epoch has ended
RECENT = 3  # epochs whose mean time is expected of the next


def epochs_that_fit(position: float, left: float, per_epoch: float) -> int:
    """Epochs in all that end within ``left`` seconds, when ``position`` epochs are done; the present one always ends.

    >>> epochs_that_fit(0.1, left=60, per_epoch=10), epochs_that_fit(3, left=60, per_epoch=10)
    (6, 9)
    >>> epochs_that_fit(0.1, left=2, per_epoch=10)
    1
    """
    return max(math.ceil(position), math.floor(position + max(left, 0) / per_epoch))


def shorten(options: TrainOptions, epochs: int) -> TrainOptions:
    """The options with fewer epochs: the same schedule, compressed.

    >>> shorten(TrainOptions(epochs=100, schedule="step", milestones=(60, 80)), 10).milestones
    (6, 8)
    """
    milestones = dict.fromkeys(max(1, round(m * epochs / options.epochs)) for m in options.milestones)
    return replace(options, epochs=epochs, milestones=tuple(milestones))


@dataclass
class Clock:
    """Plans the number of epochs of a training with a time limit; without one, those of the options.

    The number may grow until the first epoch and half of all are done, and only falls later, so that the learning rate
    does not rise again. The present epoch is always finished: its schedule is compressed so that it can be the last.
    The first step, which is slower than the others, is left out of the first estimate.
    """

    options: TrainOptions
    before: float = 0.0  # seconds of epochs before a training was resumed
    _started: float = field(default_factory=time.monotonic)
    _first_step: tuple[float, float] = (0.0, 0.0)  # seconds spent and share of the epoch when it was done

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self._started

    def looks(self, steps: int) -> set[int]:
        """The steps of an epoch, from 1 on, after which the plan is made anew."""
        if self.options.time_limit is None:
            return set()
        return {1, min(steps, max(2, math.ceil(FIRST_LOOK * steps))), steps}

    def plan(self, now: TrainOptions, seconds: Sequence[float], epoch: int, share: float) -> TrainOptions:
        """The options with the epochs that fit, when ``share`` of ``epoch`` is done; ``seconds`` of those before."""
        limit = self.options.time_limit
        assert limit is not None
        spent, position, recent = self.spent, epoch - 1 + share, seconds[-RECENT:]
        if recent:
            per_epoch = sum(recent) / len(recent)
        else:
            before, done = self._first_step
            self._first_step = self._first_step if done else (spent, share)
            per_epoch = VALIDATION * (spent - before) / (share - done)
            if not done and share < 1:
                return now
        fit = epochs_that_fit(position, limit - spent, SLOWER * per_epoch)
        most = self.options.epochs if position <= max(1.0, now.epochs / 2) else now.epochs
        return now if min(fit, most) == now.epochs else shorten(self.options, min(fit, most))

    def describe(self, epochs: int) -> str | None:
        """What the limit has done to a training of ``epochs`` epochs; None if it changed nothing."""
        limit = self.options.time_limit
        if limit is None or epochs >= self.options.epochs:
            return None
        return (
            f"--time-limit {duration(limit)}: stopped after {epochs} of {self.options.epochs} epochs, with the whole "
            f"schedule compressed into them; training took {duration(self.spent)}"
        )


def describe_rise(history: Sequence[Mapping[str, Any]], n_images: int) -> str | None:
    """Advice if validation accuracy was still rising at the end; None if not, or if that cannot be told.

    Means over the last fifth of the epochs and the fifth before are compared; a rise counts if it is larger than the
    standard error of an accuracy over ``n_images``.

    >>> rows = [{"validation_accuracy": accuracy} for accuracy in (0.5, 0.6, 0.7, 0.8)]
    >>> describe_rise(rows, 1000)
    'validation accuracy was still rising at the end, from 0.700 to 0.800: more epochs may help, add --epochs 8'
    >>> describe_rise([*rows, *rows[-1:]], 1000) is None
    True
    """
    n = max(1, len(history) // 5)
    accuracies = [float(row["validation_accuracy"]) for row in history]
    if len(accuracies) < 2 * n or n_images < 1:
        return None
    before, end = sum(accuracies[-2 * n : -n]) / n, sum(accuracies[-n:]) / n
    if end - before <= math.sqrt(end * (1 - end) / n_images):
        return None
    more = f"more epochs may help, add --epochs {2 * len(history)}"
    return f"validation accuracy was still rising at the end, from {before:.3f} to {end:.3f}: {more}"
