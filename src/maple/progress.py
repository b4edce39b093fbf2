"""What long work shows: a live bar on a terminal, one line per step of the work elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")

console = Console(stderr=True)


class TrainDisplay:
    """Epoch, losses, validation accuracy and number of clusters while a network is trained."""

    def __init__(self, epochs: int, enabled: bool = True) -> None:
        self._enabled = enabled
        self._live = enabled and console.is_terminal
        self._epochs = epochs
        self._last = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[losses]}"),
            console=console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task("epoch", total=None, losses="")

    def __enter__(self) -> TrainDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin_epoch(self, epoch: int, steps: int) -> None:
        self._bar.reset(self._task, total=steps, description=f"epoch {epoch}/{self._epochs}", losses=self._last)

    def step(self, losses: dict[str, float]) -> None:
        if self._live:
            text = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            self._bar.update(self._task, advance=1, losses=f"{text}  {self._last}")

    def end_epoch(self, row: dict[str, Any]) -> None:
        accuracy = f"validation accuracy {row['validation_accuracy']:.4f}  clusters {row['clusters']}"
        self._last = accuracy
        if not self._enabled:
            return
        losses = "  ".join(f"{name} {row[name]:.3f}" for name in ("cross_entropy", "triplet") if name in row)
        split = f"  split {row['relabelled'].replace(';', ', ')}" if row["relabelled"] else ""
        console.print(
            f"epoch {row['epoch']}/{self._epochs}  {losses}  {accuracy}  {row['seconds']:.0f} s{split}", highlight=False
        )

    def warn(self, message: str) -> None:
        if self._enabled:
            warn(message)


def warn(message: str) -> None:
    """A warning for the person at the terminal."""
    console.print(f"[yellow]warning:[/] {message}", highlight=False)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate with a bar on a terminal; silently elsewhere."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, description=description, total=total)
