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
FALLING = ("triangular", "linear", "cosine")  # schedules that end at zero
# Share of the validation loss: CIFAR-10 after 5 epochs has 1.0 (10 epochs gain 0.010 in accuracy), plankton after 6 has
# 0.65 (16 gain 0.11), CIFAR-10 after 24 has 0.42 (near AUROC as after 8), digits after 16 have 0.06.
ROOM = 0.5
SHORTEST = 0.005  # seconds of an epoch, which the history rounds to hundredths


def epochs_that_fit(epoch: int, share: float, left: float, per_epoch: float) -> int:
    """Epochs in all that end within ``left`` seconds, when ``share`` of ``epoch`` is done; that one always ends.

    >>> epochs_that_fit(1, 0.1, left=60, per_epoch=10), epochs_that_fit(4, 0.0, left=60, per_epoch=10)
    (6, 9)
    >>> epochs_that_fit(1, 0.1, left=2, per_epoch=10)
    1
    """
    return max(epoch, math.floor(epoch - 1 + share + max(left, 0) / per_epoch))


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
        fit = epochs_that_fit(epoch, share, limit - spent, SLOWER * max(per_epoch, SHORTEST))
        most = self.options.epochs if position <= max(1.0, now.epochs / 2) else now.epochs
        return now if min(fit, most) == now.epochs else shorten(self.options, min(fit, most))

    def describe(self, epochs: int) -> str | None:
        """What the limit has done to a training of ``epochs`` epochs; None if it changed nothing."""
        limit = self.options.time_limit
        if limit is None or epochs >= self.options.epochs:
            return None
        return (
            f"time limit of {duration(limit)}: stopped after {epochs} of {self.options.epochs} epochs, with the whole "
            f"schedule compressed into them; training took {duration(self.spent)}"
        )


def describe_rise(history: Sequence[Mapping[str, Any]], n_images: int, options: TrainOptions) -> str | None:
    """Advice if a longer training may raise validation accuracy; None if not, or if that cannot be told.

    None also where the last epoch has no mistake left. Means over the last fifth of the epochs and the fifth before
    are compared; a rise counts if it is larger than the standard error of an accuracy over ``n_images``. Where the
    learning rate falls to zero, accuracy rises at the end of every training: then the training images must still teach
    something too (:func:`_has_room`).

    >>> rows = [{"validation_accuracy": accuracy} for accuracy in (0.5, 0.6, 0.7, 0.8)]
    >>> constant = TrainOptions(epochs=4, schedule="constant")
    >>> describe_rise(rows, 1000, constant)
    'validation accuracy was still rising at the end, from 0.700 to 0.800: more epochs may help, 8 instead of 4'
    >>> describe_rise([*rows, *rows[-1:]], 1000, constant) is None
    True
    """
    n = max(1, len(history) // 5)
    accuracies = [float(row["validation_accuracy"]) for row in history]
    if len(accuracies) < 2 * n or n_images < 1:
        return None
    before, end = sum(accuracies[-2 * n : -n]) / n, sum(accuracies[-n:]) / n
    likely = (end * n_images + 1) / (n_images + 2)  # so that one image of few, from 0 right to 1, is no rise
    if end - before <= math.sqrt(likely * (1 - likely) / n_images) or accuracies[-1] >= 1:
        return None
    if options.schedule in FALLING and not _has_room(history):
        return None
    more = f"epochs may help, {2 * len(history)} instead of {len(history)}"
    if options.time_limit is not None and len(history) < options.epochs:
        more = "time may help, such as twice the --time-limit"
    return f"validation accuracy was still rising at the end, from {before:.3f} to {end:.3f}: more {more}"


def _has_room(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the training images were not learned by heart yet: their cross-entropy is at least ``ROOM`` times that of
    the validation images. False if it is not known, or about clusters instead of classes.

    >>> row = {"cross_entropy": 0.4, "validation_loss": 0.5, "clusters": 10}
    >>> _has_room([row]), _has_room([{**row, "cross_entropy": 0.1}]), _has_room([row, {**row, "clusters": 14}])
    (True, False, False)
    """
    first, last = history[0], history[-1]
    if not last.get("cross_entropy") or last.get("clusters") != first.get("clusters"):
        return False
    return float(last["cross_entropy"]) >= ROOM * float(last["validation_loss"])
