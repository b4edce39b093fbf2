"""Requests: what a command that makes a run was asked to do, and which folder it writes."""

from __future__ import annotations

import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from maple.data.catalogue.table import CORRUPTED, is_built_in, is_corrupted
from maple.data.sources.names import SPLIT_NAMES, clean_source, find_source
from maple.options import Values
from maple.runs.folder import RunOrigin

LEFT_OUT = "left-out"  # source of unknown images: those of the classes that the run left out


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments that ``maple train`` and ``maple fit`` share."""

    source: str
    out: Path
    data_root: Path | None = None
    test: str | None = None
    ood: dict[str, str] = field(default_factory=dict)  # sources of unknown images for the evaluation, by name
    class_names: tuple[str, ...] = ()  # in the order of the head's outputs, if not that of the data
    flags: Values = field(default_factory=dict)
    overwrite: bool = False
    report: bool = True  # whether to write the report; maple report does so at any time
    trust: bool = False  # whether to allow a network that runs code
    command: str
    sources: ClassVar[tuple[str, ...]] = ("source", "data_root", "test")  # fields that name images, files or folders

    def origin(self) -> RunOrigin:
        """Section [origin] of ``config.toml``, with paths that hold in every working directory."""
        known: dict[str, Any] = {name: absolute_source(getattr(self, name)) for name in self.sources}
        return RunOrigin(**known, classes=self.class_names or None)


AnyRequest = TypeVar("AnyRequest", bound=RunRequest)


def absolute_source(source: str | Path | None) -> str | None:
    """A source with an existing path made absolute; the name of a data set stays as it is.

    >>> absolute_source("digits"), absolute_source(".") == absolute_source(Path()) == str(Path.cwd())
    ('digits', True)
    """
    if isinstance(source, Path):
        return str(source.expanduser().resolve())
    if source is None or is_built_in(clean := clean_source(source)) or not Path(clean).expanduser().exists():
        return source
    prefix = CORRUPTED if is_corrupted(source) else ""
    query = source.removeprefix(prefix)[len(clean) :]
    return f"{prefix}{Path(clean).expanduser().resolve()}{query}"


def default_out(source: str) -> Path:
    """The run folder for a source if none is named.

    >>> str(default_out("digits")), str(default_out("slides/diatoms/train")), str(default_out("simulated-diatoms?n=99"))
    ('runs/digits', 'runs/diatoms', 'runs/simulated-diatoms')
    """
    name = source.partition("?")[0] if is_built_in(source) else source
    path = Path(name).expanduser().resolve()
    path = path.with_suffix("") if path.is_file() else path
    return Path("runs") / (path.parent if path.name in SPLIT_NAMES["train"] else path).name


def check_unknown(request: RunRequest) -> None:
    """Refuse missing sources of unknown images before any work is done."""
    for source in map(clean_source, request.ood.values()):
        if source != LEFT_OUT and not is_built_in(source) and not glob.has_magic(source):
            find_source(source, request.data_root)
