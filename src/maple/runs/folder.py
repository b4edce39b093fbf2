"""``RunFolder``: the one owner of what a run folder holds.

Names are those of :class:`maple.files.RunFile`, which modules below ``runs/`` join to a path on their own.
Everything else goes through here: reading and writing ``config.toml`` and ``classes.json``, whether a run is there,
finished or resumable, clearing it, and the lock.

A command that writes a run holds its lock (``with RunFolder(path).lock(command): ...``); a second one fails with the
command, process, host and start time of the first. Commands that only read take no lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maple.errors import RunError, UsageError
from maple.files import (
    ANEW,
    RunFile,
    check_format,
    check_unlocked,
    expand_home,
    load_record,
    lock_folder,
    no_run,
    save_json,
    write_atomic,
)
from maple.files.formats import FORMAT_VERSION, Content, bring_forward
from maple.options import Values, read_toml, to_toml
from maple.types import RunClasses

if TYPE_CHECKING:
    from maple.runs.setup.config import RunConfig

_FOLDERS = (RunFile.GALLERY, RunFile.MEMBERS, RunFile.NETWORK, RunFile.MOMENTS)
_LOCKS = (RunFile.LOCK, RunFile.HOLDER)
_FILES = tuple(name for name in RunFile if name not in (*_FOLDERS, *_LOCKS))


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Section [origin] of ``config.toml``: images, network and command of a run; paths are absolute."""

    source: str
    data_root: str | None = None
    test: str | None = None
    classes: tuple[str, ...] | None = None  # in the order of the head's outputs, if not that of the data
    validation: str | None = None
    calibration: str | None = None
    init: str | None = None  # network that the training started from
    weights: str | None = None
    head: str | None = None
    preset: str | None = None
    calibrate: str | None = None  # of maple fit: images that the network was not trained on
    model: str | None = None  # of maple fit
    command: str | None = None
    plugin: str | None = None  # module that registered the recipe: a record, never imported from here

    @classmethod
    def from_toml(cls, section: Mapping[str, Any]) -> RunOrigin:
        """The origin; :class:`ValueError` names a key whose value has another type."""
        from pydantic import TypeAdapter, ValidationError

        known = {f.name: section[f.name] for f in fields(cls) if section.get(f.name) not in (None, [])}
        try:
            return TypeAdapter(cls).validate_python(known)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{first['loc'][0]}: {first['msg'].lower()}") from None

    def to_toml(self) -> dict[str, Any]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    @property
    def root(self) -> Path | None:
        """The folder of named data sets that the run was made with."""
        return Path(self.data_root) if self.data_root else None


@dataclass(frozen=True)
class RunSettings:
    """The content of ``config.toml``: where the images come from, and the options by section."""

    origin: RunOrigin
    sections: dict[str, Values]

    def resolve(self, flags: Mapping[str, Any] | None = None) -> RunConfig:
        """The options of the run with ``flags`` over them; an error names the plug-in if its recipe is unknown."""
        from maple.runs.setup.config import resolve_config  # loads torch, which a report does without

        return resolve_config(flags, self.sections, plugin=self.origin.plugin)


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds a run, or is chosen for one."""

    path: Path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    # -- what is there

    def holds_run(self) -> bool:
        """Whether there is a run; a file of the name of ``config.toml`` that is not a run's is an error."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"'{self.path}' is a file: choose a folder for --out")
        if not (self / RunFile.CONFIG).exists():
            return False
        self.read_config()
        return True

    def is_finished(self) -> bool:
        """Whether the run can predict."""
        return (self / RunFile.DETECTOR).exists()

    def has_checkpoint(self) -> bool:
        """Whether there is a training to resume."""
        return (self / RunFile.CHECKPOINT).exists() or any(self._member_checkpoints())

    def owns(self, path: Path) -> bool:
        """Whether an existing path belongs to the run, so that ``--overwrite`` would remove it."""
        full, own = expand_home(path).resolve(), expand_home(self.path).resolve()
        if not full.exists() or not full.is_relative_to(own) or full == own:
            return False
        return full.relative_to(own).parts[0] in (*_FILES, *_FOLDERS)

    # -- reading and writing

    def read_config(self) -> RunSettings:
        """The settings of the run."""
        path = self / RunFile.CONFIG
        if not path.is_file():
            raise no_run(self.path, RunFile.CONFIG)
        sections = read_toml(path)
        origin = sections.pop("origin", {})
        found = check_format(origin, path)
        sections = bring_forward(RunFile.CONFIG, found, Content(sections, {})).metadata
        try:
            return RunSettings(RunOrigin.from_toml({"source": "", **origin}), sections)
        except ValueError as error:
            raise RunError(f"'{path}' is damaged ({error}): restore it from a copy or {ANEW}") from None

    def write_config(self, settings: RunSettings) -> None:
        """Write ``config.toml``: from now on the folder holds a run."""
        write_atomic(self / RunFile.CONFIG, to_toml({"origin": settings.origin.to_toml(), **settings.sections}))

    def read_classes(self) -> RunClasses:
        return load_record(self / RunFile.CLASSES, RunClasses.from_json)

    def write_classes(self, classes: RunClasses) -> None:
        save_json(self / RunFile.CLASSES, classes.to_json())

    # -- removing

    def clear(self) -> None:
        """Remove everything that belongs to a run; other files in the folder stay.

        What a process leaves that is killed meanwhile is an unfinished run.
        """
        self.remove(RunFile.DETECTOR, *(name for name in _FILES if name != RunFile.CONFIG))
        for name in _FOLDERS:
            shutil.rmtree(self / name, ignore_errors=True)
        self.remove(RunFile.CONFIG)

    def remove_training_state(self) -> None:
        """Remove the files that only an unfinished training needs."""
        self.remove(RunFile.CHECKPOINT, RunFile.START)
        for path in self._member_checkpoints():
            path.unlink()

    def remove(self, *names: RunFile) -> None:
        """Remove files of the run, if they exist."""
        for name in names:
            (self / name).unlink(missing_ok=True)

    def _member_checkpoints(self) -> Sequence[Path]:
        return list((self / RunFile.MEMBERS).glob(f"*/{RunFile.CHECKPOINT}"))

    # -- the lock

    def lock(self, command: str) -> AbstractContextManager[None]:
        """Hold the lock of the run while ``command`` writes it; :class:`RunError` names another holder."""
        return lock_folder(self.path, command)

    @contextmanager
    def changing(self, command: str) -> Iterator[RunSettings]:
        """Hold the lock of an existing run while ``command`` reads and changes it; yields its settings."""
        self.read_config()  # a folder without a run gets no lock file
        with self.lock(command):
            yield self.read_config()

    def check_unlocked(self) -> None:
        """Raise :class:`RunError` if another process is writing the run; the folder need not exist."""
        check_unlocked(self.path)
