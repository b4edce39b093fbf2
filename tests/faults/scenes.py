"""Commands on small data, the state they start from, and what must be the same however often they were interrupted."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

from faults.server import Ended, Forge
from maple.files import RunFile

TINY = ("--epochs", "2", "--batch-size", "16", "--backbone", "resnet9", "--workers", "0", "--relabel-every", "1")
TINY += ("--hard-class-error", "0", "--min-cluster-size", "3")
BENCHMARK = ["benchmark", "clusters", "--profile", "tiny", "--out", "bench"]
TIMES = re.compile(
    "seconds|latency|minutes|command|commit"
)  # names of values that differ between two runs of one command


@dataclass(frozen=True)
class Scene:
    """A command in a folder, and what a user does after an interruption."""

    command: str  # its name in the tally
    argv: tuple[str, ...]
    starts_with: tuple[str, ...] = ()  # what is in the folder before
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""  # what the second call says if nothing is left to do

    def prepare(self, world: World) -> Path:
        """A new folder, always at the same path, with what is there before."""
        world.trial.mkdir(exist_ok=True)
        for path in world.trial.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in self.starts_with:
            shutil.copytree(world.folder / name, world.trial / name)
        return world.trial

    def start(self, world: World, **how: Any) -> Ended:
        """The command, from the start; its reference comes before, since that needs the same folder."""
        world.reference(self.command)
        return world.forge.run(self.argv, self.prepare(world), **how)

    def repeat(self, world: World, **how: Any) -> Ended:
        """The command once more, on what was left."""
        return world.forge.run(self.argv, world.trial, **how)


TRAIN = ("train", "../few.npz", "--out", "run", *TINY)
SCENES = {
    each.command: each
    for each in (
        Scene("train", (*TRAIN, "--resume", "auto")),
        Scene("train --overwrite", (*TRAIN, "--seed", "1", "--overwrite"), starts_with=("run",)),
        Scene(
            "fit",
            ("fit", "resnet20", "--weights", "../resnet20.safetensors", "--drop-head", "--data", "../few.npz")
            + ("--out", "fitted", "--overwrite", "--workers", "0"),
        ),
        Scene("predict", ("predict", "run", "../images", "--out", "p.csv", "--batch-size", "4"), starts_with=("run",)),
        Scene(
            "update",
            ("update", "run", "--data", "../new", "--workers", "0"),
            starts_with=("run",),
            refused="has learned from the images",
        ),
        Scene("evaluate", ("evaluate", "run", "--ood", "noise=../images", "--workers", "0"), starts_with=("run",)),
        Scene("export", ("export", "run", "run.onnx"), starts_with=("run",)),
        Scene("benchmark", tuple(BENCHMARK)),
    )
}


@dataclass
class World:
    """A folder with data and a finished run, and the process that forks."""

    folder: Path
    forge: Forge
    _references: dict[str, Reference] = field(default_factory=dict)

    @property
    def trial(self) -> Path:
        return self.folder / "trial"

    def build(self) -> World:
        """Write the data, and train the run that other commands start from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        digits = load_digits()
        few = np.concatenate([np.flatnonzero(digits.target == c)[:40] for c in range(3)])
        images = np.repeat((digits.images[few] * 15.9).astype(np.uint8)[..., None], 3, axis=-1)
        np.savez(self.folder / "few.npz", images=images, labels=digits.target[few])
        _write_images(self.folder / "images", digits.images[200:240], broken=7)
        _write_images(self.folder / "new" / "seven", digits.images[digits.target == 7][:12])
        _write_weights(self.folder / "resnet20.safetensors")
        self.trial.mkdir(exist_ok=True)
        ended = self.forge.run(TRAIN, self.trial)
        assert ended.code == 0, ended.err
        (self.trial / "run").rename(self.folder / "run")
        return self

    def reference(self, command: str) -> Reference:
        """The command without interruption: once for each."""
        if command not in self._references:
            scene = SCENES[command]
            before = scene.prepare(self)
            found = contents(before)
            ended = self.forge.run(scene.argv, before)
            assert ended.code == 0, ended.err
            self._references[command] = Reference(ended.seconds, ended.operations, contents(before), found)
        return self._references[command]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted command: its seconds and file operations, and what it left and found."""

    seconds: float
    operations: int
    after: dict[str, Any]
    before: dict[str, Any]


def _write_images(folder: Path, images: np.ndarray, broken: int = 0) -> None:
    """Pictures of digits; every ``broken``-th is not one."""
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        path = folder / f"{i:03}.png"
        Image.fromarray((image * 15.9).astype(np.uint8)).save(path)
        if broken and i % broken == broken - 1:
            path.write_bytes(b"not an image")


def _write_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from maple.networks import create_backbone

    torch.manual_seed(0)
    save_file({name: value.contiguous() for name, value in create_backbone("resnet20", 3).state_dict().items()}, path)


# --- what lies in a folder --------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, Any]:
    """Every file below a folder, hidden ones too, without what differs between two runs of one command.

    Nor with the note on who holds a lock, which a killed process leaves and the lock makes void.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != RunFile.HOLDER)
    return {str(path.relative_to(folder)): _comparable(path) for path in files}


def _comparable(path: Path) -> Any:
    if path.name == ".lock":
        return ""
    if path.suffix == ".html":
        return "a page"  # which prints the time and the command
    if path.suffix == ".json":
        return _without_times(json.loads(path.read_bytes()))
    if path.name == "history.csv":
        rows = csv.DictReader(io.StringIO(path.read_text()))
        return [{name: value for name, value in row.items() if not TIMES.search(name)} for row in rows]
    return path.read_bytes()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(each) for name, each in value.items() if not TIMES.search(name)}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def check_whole(folder: Path) -> None:
    """Every file with a final name can be read to its end; drafts and parts have names of their own."""
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") or ".partial" in part for part in inside.parts):
            try:
                _READERS.get(path.suffix, Path.read_bytes)(path)
            except Exception as error:
                raise AssertionError(f"'{inside}' is not whole: {error!r}") from error


def _read_table(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") and len({len(row) for row in csv.reader(io.StringIO(text))}) == 1


def _read_arrays(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            file.get_tensor(name)


def _read_image(path: Path) -> None:
    with Image.open(path) as image:
        image.load()


def _read_graph(path: Path) -> None:
    import onnx

    onnx.checker.check_model(onnx.load(path))


_READERS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_bytes()),
    ".toml": lambda path: tomllib.loads(path.read_text()),
    ".csv": _read_table,
    ".safetensors": _read_arrays,
    ".png": _read_image,
    ".parquet": pq.read_table,
    ".onnx": _read_graph,
    ".html": lambda path: _must(path.read_text().rstrip().endswith("</html>")),
    ".svg": ElementTree.parse,
}


def _must(holds: bool) -> None:
    assert holds
