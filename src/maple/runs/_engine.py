"""Flags of the engine that runs a command: this process, or a Ray cluster.

This module imports nothing heavy, so that ``--help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass

from maple.errors import UsageError, suggest
from maple.options import flag

ENGINES = ("local", "ray")
_PANEL = "Engine"


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Where a command runs; ``workers`` of the request is then the number of Ray workers, with one model each."""

    engine: str = flag("local", "local, in this process, or ray", metavar="|".join(ENGINES), panel=_PANEL)
    ray_address: str | None = flag(
        None,
        "HOST:PORT of the head of a Ray cluster, or auto for the one that this machine belongs to",
        shown="a cluster of this machine alone, for this command",
        metavar="HOST:PORT|auto",
        panel=_PANEL,
    )
    cpus_per_worker: float = flag(1.0, "processors of each Ray worker", panel=_PANEL)
    gpus_per_worker: float = flag(0.0, "GPUs of each Ray worker", panel=_PANEL)

    @property
    def on_ray(self) -> bool:
        """Whether the command runs on Ray; raises where flags contradict each other."""
        if self.engine not in ENGINES:
            raise UsageError(f"--engine {self.engine}: {suggest(self.engine, ENGINES)}")
        given = {
            "--ray-address": self.ray_address is not None,
            "--cpus-per-worker": self.cpus_per_worker != 1,
            "--gpus-per-worker": self.gpus_per_worker != 0,
        }
        if self.engine == "local" and (names := [name for name, is_given in given.items() if is_given]):
            raise UsageError(f"{names[0]} needs --engine ray: add it, or leave out {names[0]}")
        for name, number in (("--cpus-per-worker", self.cpus_per_worker), ("--gpus-per-worker", self.gpus_per_worker)):
            if not 0 <= number < float("inf"):
                raise UsageError(f"{name} {number:g}: give 0 or more")
        return self.engine == "ray"
