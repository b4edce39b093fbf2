"""Every file of a run truncated, with bytes flipped, or missing: commands work as before or name what is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from faults.scenes import World
from faults.server import Ended
from maple.files import RunFile
from torture import Torture

COMMANDS = {
    "predict": ("predict", "run", "../images", "--workers", "0"),
    "update": ("update", "run", "--data", "../new", "--workers", "0", "--out", "updated"),
    "evaluate": ("evaluate", "run", "--workers", "0"),
    "report": ("report", "run"),
    "export": ("export", "run", "run.onnx"),
    "explain": ("explain", "run", "../images", "--workers", "0", "--limit", "1"),
    "monitor": ("monitor", "run", "../images", "--workers", "0"),
    "resume": ("train", "../few.npz", "--out", "run", "--resume"),
}
HASHED = (RunFile.WEIGHTS, RunFile.DETECTOR)  # of which no change goes unnoticed


def prepare(world: World) -> Path:
    """A copy of the run in the folder of trials."""
    shutil.rmtree(world.trial, ignore_errors=True)
    return Path(shutil.copytree(world.folder / "run", world.trial / "run"))


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name != ".lock")


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, at: int, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


REMEDIES = ("restore", "delete", "rerun", "give", "choose", "upgrade", "use", "again")


def check(ended: Ended, name: str) -> None:
    """The command worked without the file or despite the damage, or its error names the file and a remedy."""
    assert ended.is_clean, ended.err
    if ended.code:
        last = ended.err[ended.err.rindex("error:") :].replace("\n", " ")
        assert Path(name).name in last or "finished run" in last, last
        assert any(word in last for word in REMEDIES), last


@pytest.mark.parametrize("name", [RunFile.WEIGHTS, RunFile.DETECTOR, RunFile.CLASSES, RunFile.CONFIG])
def test_truncated(name: str, world: World) -> None:
    path = prepare(world) / name
    truncate(path, path.stat().st_size // 2)
    for command in ("predict", "update"):
        ended = world.forge.run(COMMANDS[command], world.trial)
        check(ended, name)
        assert ended.code or name in (RunFile.CLASSES, RunFile.CONFIG)


@pytest.mark.parametrize("name", HASHED)
def test_a_flipped_bit_is_found(name: str, world: World) -> None:
    """In a number in the middle, where the file can be read all the same."""
    path = prepare(world) / name
    flip(path, path.stat().st_size * 3 // 4, 1)
    ended = world.forge.run(COMMANDS["predict"], world.trial)
    assert ended.code == 1
    check(ended, name)


# --- make torture -----------------------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.parametrize("command", COMMANDS)
def test_every_file_damaged(command: str, world: World, torture: Torture) -> None:
    run = prepare(world)
    names = files_of(run)
    said = world.forge.run(COMMANDS["predict"], world.trial).out
    i = int(torture.rng.integers(len(names)))
    while torture.goes_on():
        i = (i + 1) % len(names)
        path = prepare(world) / names[i]
        how = damage(path, torture.rng)
        ended = world.forge.run(COMMANDS[command], world.trial)
        check(ended, names[i])
        if how == "flipped" and command == "predict" and not ended.code:
            assert ended.out == said, names[i]
        torture.count("damaged files", how)


def damage(path: Path, rng: np.random.Generator) -> str:
    size, how = path.stat().st_size, str(rng.choice(["truncated", "flipped", "flipped", "missing"]))
    if how == "missing":
        path.unlink()
    elif how == "truncated" or not size:
        truncate(path, int(rng.choice([0, 1, size // 2, max(size - 1, 0), rng.integers(size + 1)])))
    else:
        flip(path, int(rng.integers(size)), int(rng.integers(1, 256)))
    return how
