"""The request of a run to be made: its section [origin], the default of its folder, and its sources of images."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from maple.data.catalogue.table import CORRUPTED, is_built_in, is_corrupted
from maple.data.sources.names import SPLIT_NAMES, clean_source, find_placed, find_source
from maple.data.sources.remote import is_remote
from maple.errors import UsageError
from maple.files import check_weights_file, expand_home
from maple.runs.folder import RunOrigin
from maple.runs.requests import RunRequest, TrainRequest

AUTO = "auto"  # --init: the best of the pretrained networks on this machine; --resume: if there is a run
LEFT_OUT = "left-out"  # source of unknown images: those of the classes that the run left out


_SOURCES = ("source", "data_root", "test")  # fields that name images, files or folders
_TRAIN_SOURCES = (*_SOURCES, "validation", "calibration", "init", "weights")
_FIT_SOURCES = (*_SOURCES, "calibrate", "model", "weights")


def describe_request(request: RunRequest) -> RunOrigin:
    """Section [origin] of ``config.toml``, with paths that hold in every working directory."""
    sources = _TRAIN_SOURCES if isinstance(request, TrainRequest) else _FIT_SOURCES
    known: dict[str, Any] = {name: absolute_source(getattr(request, name)) for name in sources}
    if isinstance(request, TrainRequest):
        known |= {"head": request.head, "preset": request.preset}
    return RunOrigin(**known, classes=request.class_names or None)


def absolute_source(source: str | Path | None) -> str | None:
    """A source with an existing path made absolute, also that of a plug-in; other names of data sets stay.

    >>> absolute_source("digits"), absolute_source(".") == absolute_source(Path()) == str(Path.cwd())
    ('digits', True)
    """
    if isinstance(source, Path):
        return str(expand_home(source).resolve())
    if source is None or is_remote(source) or is_built_in(clean := clean_source(source)):
        return source
    path = expand_home(clean)
    place = path if path.exists() else find_placed(clean)
    if place is None:
        return source
    prefix = CORRUPTED if is_corrupted(source) else ""
    query = source.removeprefix(prefix)[len(clean) :]
    return f"{prefix}{place.resolve()}{query}"


def default_out(source: str) -> Path:
    """The run folder for a source if none is named.

    >>> str(default_out("digits")), str(default_out("slides/diatoms/train")), str(default_out("simulated-diatoms?n=99"))
    ('runs/digits', 'runs/diatoms', 'runs/simulated-diatoms')
    """
    name = source.partition("?")[0] if is_built_in(source) else source
    path = expand_home(name).resolve()
    path = path.with_suffix("") if path.is_file() else path
    return Path("runs") / (path.parent if path.name in SPLIT_NAMES["train"] else path).name


def check_unknown(request: RunRequest) -> None:
    """Refuse missing sources of unknown images before any work is done."""
    for source in map(clean_source, request.ood.values()):
        if source != LEFT_OUT and not is_built_in(source) and not is_remote(source) and not glob.has_magic(source):
            find_source(source, request.data_root)


def check_start(request: TrainRequest) -> None:
    """Refuse a description of a network to start from that is not named."""
    if request.init in (None, AUTO) and (request.weights or request.head):
        raise UsageError("--weights and --head describe the network to start from: give it with --init")


def check_files(request: RunRequest) -> None:
    """Refuse a missing weights file or source of unknown images, before torch is imported and a network is built."""
    if isinstance(request, TrainRequest):
        check_start(request)
    if request.weights is not None:
        check_weights_file(request.weights)
    check_unknown(request)
