"""The names of the files of a run, and the errors for a folder that lacks one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from maple.errors import RunError
from maple.files.drafts import find_replaced
from maple.files.paths import suggest_path

ANEW = "train again with --overwrite"  # remedy for an unusable file of a run


class RunFile(StrEnum):
    """The names of the files and folders inside a run folder."""

    CONFIG = "config.toml"  # origin of the images and all options; a folder with it holds a run
    CLASSES = "classes.json"  # classes, clusters, skipped files and digests of the images
    HISTORY = "history.csv"  # one row per epoch
    CHECKPOINT = "resume.safetensors"  # state of an unfinished training
    START = "start.safetensors"  # network that an unfinished training started from (--init)
    WEIGHTS = "weights.safetensors"  # the network
    DETECTOR = "detector.safetensors"  # Gaussians, calibration and decision; a folder with it holds a finished run
    MANIFEST = "manifest.json"  # SHA-256 of the weights, the detector and the files of network/
    RESULTS = "results.json"  # figures of the last evaluation
    LABELS = "labels.csv"  # the labels of its test images, those first that may be wrong
    REPORT = "report.html"
    GALLERY = "gallery"  # folder: images and projections drawn by the report
    MEMBERS = "members"  # folder: checkpoints of the members of an ensemble
    NETWORK = "network"  # folder: copy of a network that is a file itself
    MOMENTS = "moments.partial"  # folder: sums of an unfinished fit on Ray
    LOCK = ".lock"
    HOLDER = ".lock.json"  # the process that holds the lock


def no_run(folder: Path, name: str) -> RunError:
    """The error for a folder that lacks ``name``, without which it is no run."""
    check_replaced(folder)
    remedy = suggest_path(folder) or "give the folder that maple train or maple fit wrote"
    return RunError(f"'{folder}' is not a run folder, it has no {name}: {remedy}")


def check_finished(folder: Path) -> None:
    """Raise :class:`RunError` if a folder lacks a file without which a run cannot predict; nothing is loaded."""
    if not folder.exists() and folder.parts[:1] == ("hf:",) and len(folder.parts) > 2:  # Path makes hf:/ of hf://
        place = folder.relative_to("hf:").as_posix()
        name, _, revision = place.partition("@")
        fetch = f"hf download {name}{revision and f' --revision {revision}'} --local-dir {name.split('/')[-1]}"
        raise RunError(f"'hf://{place}' is on the hub, and this needs a folder: fetch it with {fetch}")
    if folder.is_file():
        raise RunError(f"'{folder}' is a file, not a run: give the folder of a run, or an exported .onnx file")
    if not folder.is_dir():
        check_replaced(folder)
        hint = suggest_path(folder) or f"train one with maple train DATA --out '{folder}'"
        raise RunError(f"'{folder}' is not a run folder: {hint}")
    if not (folder / RunFile.DETECTOR).is_file():
        if not (folder / RunFile.CONFIG).is_file():
            raise no_run(folder, RunFile.CONFIG)
        unfinished = f"'{folder}' is not a finished run, it has no {RunFile.DETECTOR}"
        raise RunError(f"{unfinished}: rerun the command that started it, with --resume or --overwrite")
    if not (folder / RunFile.WEIGHTS).is_file():
        raise no_file(folder / RunFile.WEIGHTS)


def check_replaced(folder: Path) -> None:
    """Raise :class:`RunError` where a run is missing because its replacement was interrupted between two renames."""
    if (old := find_replaced(folder)) is not None:
        raise RunError(f"'{folder}' was being replaced when its process was killed: rename '{old}' to '{folder}'")


def no_file(path: Path, otherwise: str = ANEW) -> RunError:
    """The error for a file of a run that does not exist."""
    return RunError(f"'{path}' does not exist: restore it from a copy or {otherwise}")
