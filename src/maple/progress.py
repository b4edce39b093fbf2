"""Progress of long work: a live bar on a terminal, one line per step elsewhere; messages and warnings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from maple.text import duration, plural

if TYPE_CHECKING:  # loaded where a bar is drawn: short commands, such as --help, draw none
    from rich.progress import Progress

Item = TypeVar("Item")
LINE_SECONDS = 30.0  # between two lines about a count where there is no terminal


def is_first_process() -> bool:
    """Whether this process prints: those that Fabric, torchrun or SLURM started know their rank."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


console = Console(stderr=True, quiet=not is_first_process())


class TrainDisplay:
    """Epoch, losses, validation accuracy, number of clusters and time left while a network is trained."""

    def __init__(self, enabled: bool = True) -> None:
        from rich.progress import TextColumn, TimeRemainingColumn

        self._enabled = enabled
        self._live = enabled and console.is_terminal
        self._last = ""
        self._seconds: list[float] = []  # of the epochs that were seen
        ending = (TimeRemainingColumn(), TextColumn("{task.fields[losses]}"))
        self._bar = _bar("[bold]{task.description}", *ending, live=self._live)
        self._task = self._bar.add_task("epoch", total=None, losses="")

    def __enter__(self) -> TrainDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin_epoch(self, epoch: int, epochs: int, steps: int) -> None:
        """The bar counts the steps of all ``epochs``, so that its time left is that of the training."""
        done, total = (epoch - 1) * steps, epochs * steps
        title = f"epoch {epoch}/{epochs}"
        self._bar.update(self._task, completed=done, total=total, description=title, losses=self._last)

    def step(self, losses: dict[str, float]) -> None:
        if self._live:
            text = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            self._bar.update(self._task, advance=1, losses=f"{text}  {self._last}")

    def end_epoch(self, row: dict[str, Any], epochs: int) -> None:
        accuracy = f"validation accuracy {row['validation_accuracy']:.4f}  clusters {row['clusters']}"
        self._last = accuracy
        self._seconds.append(row["seconds"])
        if not self._enabled:
            return
        named: list[str] = [name for name in ("cross_entropy", "triplet") if name in row]
        losses = "  ".join(f"{name} {row[name]:.3f}" for name in named or ["loss"])
        split = f"  split {row['relabelled'].replace(';', ', ')}" if row["relabelled"] else ""
        left = (epochs - row["epoch"]) * sum(self._seconds) / len(self._seconds)
        ahead = f", about {duration(left)} left" if row["epoch"] < epochs else ""
        say(f"epoch {row['epoch']}/{epochs}  {losses}  {accuracy}  {row['seconds']:.0f} s{ahead}{split}")

    def say(self, message: str) -> None:
        if self._enabled:
            say(message)

    def warn(self, message: str) -> None:
        if self._enabled:
            warn(message)


def say(message: str) -> None:
    """Print a line on standard error; names in it are not markup, and lines are not broken."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning on standard error."""
    console.print("[yellow]warning:[/] ", end="")
    say(message)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate with a bar on a terminal; silently elsewhere."""
    if not console.is_terminal:
        yield from items
        return
    with _bar() as bar:
        yield from bar.track(items, description=description, total=total)


class CountDisplay:
    """A named step, then a count of images with the time left: a bar on a terminal, a line now and then elsewhere.

    The bar is there as soon as the display is entered, before anything is loaded.
    """

    def __init__(self, step: str) -> None:
        from rich.progress import TimeRemainingColumn

        self._step = step
        self._bar = _bar("{task.description}", TimeRemainingColumn(), live=console.is_terminal)
        self._task = self._bar.add_task(step, total=None)
        self._started = self._said = time.monotonic()
        self._first: int | None = None  # items done before the count began

    def __enter__(self) -> CountDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, step: str, done: int, total: int) -> None:
        """Count from now on: ``done`` of ``total`` items were done before."""
        self._step, self._first = step, done
        self._started = self._said = time.monotonic()
        self._bar.reset(self._task, description=step, completed=done, total=total)
        if not console.is_terminal:
            say(f"{step} {plural(total - done, 'image')}")

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if not console.is_terminal and now - self._said >= LINE_SECONDS and done < total:
            self._said = now
            left = (now - self._started) * (total - done) / max(done - (self._first or 0), 1)
            say(f"{self._step}: {done:,} of {total:,} images, about {duration(left)} left")


@contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for work that tells how many items are done and how many there are; ``None`` where there is no terminal."""
    if not console.is_terminal:
        yield None
        return
    with _bar() as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(description: str = "{task.description}", *ending: Any, live: bool = True) -> Progress:
    """A bar that vanishes when it is done; ``ending`` are columns behind the usual ones."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    usual = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redirected, standard output would go to standard error: rows printed into a file or pipe would be lost.
    return Progress(*usual, *ending, console=console, disable=not live, transient=True, redirect_stdout=False)
