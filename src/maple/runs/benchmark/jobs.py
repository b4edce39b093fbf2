"""The networks that suites ask for, each known by a digest of everything that decides what it learns.

The *key* of a job covers options, seed, sources and the bytes of their files. Suites that ask for the same network
share one folder; other data or options make another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from maple.data.catalogue.table import is_built_in
from maple.data.sources.names import clean_source, find_source, split_files
from maple.errors import UsageError
from maple.evaluation.paper.profiles import Profile, Protocol
from maple.evaluation.paper.rows import Training
from maple.evaluation.paper.suites import Suite
from maple.files import RunFile
from maple.files.formats import FORMAT_VERSION
from maple.options import Values
from maple.runs.setup.config import RunConfig, check_used, drop_unused, resolve_config
from maple.training.resume import FREE_OPTIONS

_TRAININGS = "trainings"
_SHORT = {  # how titles say a flag, in the paper's letters where it has some
    "backbone": "{}",
    "cluster_method": "{}",
    "cluster_space": "{}",
    "hard_class_error": "t={:g}",
    "max_clusters": "K<={}",
    "members": "{} members",
    "metric_loss": "{}",
    "relabel_every": "p={}",
}


@dataclass(frozen=True, eq=False)
class Job:
    """One network of one seed, and where it is kept."""

    training: Training
    profile: Profile
    seed: int
    root: Path
    data_root: Path | None = None
    changes: Values = field(default_factory=dict)  # flags of the command line, which go before all others

    @property
    def protocol(self) -> Protocol:
        return self.profile.protocols[self.training.protocol]

    @property
    def preset(self) -> str | None:
        return (self.protocol.preset or None) if self.profile.as_paper else None

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return str(dict(self.training.flags).get("recipe", "maple"))

    @property
    def flags(self) -> Values:
        """The flags of ``maple train``."""
        asked = {**self.profile.flags, **self.protocol.flags, **dict(self.training.flags)}
        return drop_unused(asked, self.recipe) | drop_unused(self.changes, self.recipe) | {"seed": self.seed}

    @cached_property
    def config(self) -> RunConfig:
        return resolve_config(self.flags, preset=self.preset)

    @cached_property
    def key(self) -> str:
        """The digest of everything that decides what is learned."""
        sections = self.config.sections()
        sections["train"] = {k: v for k, v in sections["train"].items() if k not in FREE_OPTIONS}
        decides = {
            "format": FORMAT_VERSION,
            "options": sections,
            "source": [self.protocol.source, self.protocol.test],
            "files": [digest_source(source, self.data_root) for source in self._sources],
        }
        return digest(json.dumps(decides, sort_keys=True, default=str).encode())

    @property
    def _sources(self) -> list[str]:
        return [source for source in (self.protocol.source, self.protocol.test) if source is not None]

    @property
    def folder(self) -> Path:
        return self.root / _TRAININGS / self.key

    @property
    def lock(self) -> Path:
        """Held by the process that is at work on it."""
        return self.root / "locks" / self.key

    @property
    def name(self) -> str:
        """A short name that is unique within its seed: ``maple on cifar10, xmeans raw t=0.3 K<=5 p=4``."""
        said = [_say_flag(key, value) for key, value in self.training.flags if key != "recipe"]
        return f"{self.config.model.recipe} on {self.training.protocol}{', ' if said else ''}{' '.join(said)}"

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        return (self.folder / RunFile.RESULTS).exists()

    @property
    def is_started(self) -> bool:
        return not self.is_finished and any(self.folder.rglob(RunFile.CHECKPOINT.value))


def _say_flag(key: str, value: Any) -> str:
    if key == "max_clusters" and value == 0:
        return "any K"
    return _SHORT.get(key, f"{key}={{}}").format(value)


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()


def digest_source(source: str, data_root: Path | None = None) -> dict[str, str]:
    """The digest of each file of a source; of image folders that of the names and sizes.

    >>> digest_source("digits")
    {}
    """
    source = clean_source(source)
    if is_built_in(source):
        return {}
    path = find_source(source, data_root)
    files = [path] if path.is_file() else [file for file in split_files(path).values() if file.is_file()]
    if files:
        return {file.name: _digest_file(file, file.stat().st_mtime_ns) for file in files}
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    return {"listing": digest("\n".join(f"{f.relative_to(path)} {f.stat().st_size}" for f in inside).encode())}


@cache
def _digest_file(path: Path, changed: int) -> str:
    """Of a file as it was when last ``changed``: all networks of a suite ask for the same files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=10)).hexdigest()


def check_changes(changes: Values, jobs: Sequence[Job]) -> None:
    """Refuse flags that would have no effect on any of the jobs, or that the suites decide."""
    refused = {
        "model.recipe": "the suites name the recipes: leave it out",
        "train.seed": "give --seeds",
        "train.time_limit": "networks of a table have the same epochs: leave it out",
    }
    for key, reason in refused.items():
        if key in changes:
            raise UsageError(f"--set {key} cannot be set here: {reason}")
    check_used(changes, list(dict.fromkeys(job.recipe for job in jobs)))


def list_jobs(
    suites: Sequence[Suite],
    profile: Profile,
    seeds: Sequence[int],
    root: Path,
    data_root: Path | None = None,
    changes: Values | None = None,
) -> list[Job]:
    """The networks that suites need, each once, in the order in which they are needed; seed by seed."""
    trainings = dict.fromkeys(training for suite in suites for training in suite.trainings(profile))
    return [Job(training, profile, seed, root, data_root, changes or {}) for seed in seeds for training in trainings]
