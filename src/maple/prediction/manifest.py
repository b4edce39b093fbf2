"""``manifest.json``: the SHA-256 of each file of a run that predictions follow from, checked whenever one is read.

It finds files that were damaged, exchanged or mixed from two runs. It is no signature: who can write the run can write
the manifest, too. Runs of earlier versions have none, and are read without a check.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from maple.errors import RunError
from maple.files import RunFile, load_json, naming_damage, save_json


def write_manifest(folder: Path) -> None:
    """List the weights, the detector and the copy of a network; the last step of writing a run."""
    digests = {_name(path, folder): file_digest(path) for path in _listed(folder)}
    save_json(folder / RunFile.MANIFEST, {"files": digests})


def check_digests(folder: Path) -> None:
    """:func:`check_digest` of every file that the manifest lists, for commands that read none of them."""
    for path in _listed(folder):
        check_digest(path, folder)


def check_digest(path: Path, folder: Path) -> None:
    """Raise :class:`RunError` if a file of the run in ``folder`` is not the one that its manifest lists."""
    manifest = folder / RunFile.MANIFEST
    if not manifest.is_file() or not path.is_file():
        return
    value = load_json(manifest)
    with naming_damage(manifest, "delete it, if you trust the other files"):
        expected = dict(value["files"]).get(_name(path, folder))
    if expected != file_digest(path):
        raise RunError(
            f"'{path}' is not the file that the run was written with, by its SHA-256 in {RunFile.MANIFEST}: restore it "
            f"from a copy, or delete '{manifest}' if you have changed it on purpose"
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(folder: Path) -> list[Path]:
    network = sorted(path for path in (folder / RunFile.NETWORK).glob("*") if path.is_file())
    return [folder / RunFile.WEIGHTS, folder / RunFile.DETECTOR, *network]


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
