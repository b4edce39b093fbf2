"""``--resume auto``: the command of a job script, killed at any moment and given again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import maple.runs.train as train
import maple.training.loop as loop
from commands import run
from maple.runs.folder import RunFolder
from processes import run_processes

MOMENTS = {  # functions, where they are looked up, and whether they still run before the kill
    "no folder": (train, "make_fabric", False),
    "no run in it": (train, "prepare_folder", False),
    "the first epoch": (loop.Checkpoint, "save", True),
    "the end": (RunFolder, "remove_training_state", False),
}


def command(source: Path, folder: Path, moment: str | None = None) -> int:
    """The command, which is killed at a moment."""
    if moment is not None:
        owner, name, runs = MOMENTS[moment]
        original = getattr(owner, name)

        def killed(*arguments: object, **keywords: object) -> None:
            if runs:
                original(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, killed)
    return run("train", source, "--out", folder, "--resume", "auto", "--epochs", 2, "--batch-size", 8)


def give(source: Path, folder: Path, moment: str | None = None) -> tuple[int, int | None]:
    """Exit code of a process, and that of the command in it if it was not killed."""
    ((code, answer),) = run_processes(command, source, folder, moment, n=1)
    assert not isinstance(answer, str), answer
    return code, answer and answer[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise, dark and bright."""
    path, labels = tmp_path_factory.mktemp("images") / "noise.npz", np.arange(40) % 2
    pixels = np.random.default_rng(0).integers(0, 120, (40, 16, 16, 3)) + 120 * labels[:, None, None, None]
    np.savez(path, images=pixels.astype(np.uint8), labels=labels)
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert give(source, folder) == (0, 0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_command_ends_what_a_kill_left(source, whole, tmp_path, moment):
    folder = tmp_path / "run"
    assert give(source, folder, moment) == (-signal.SIGKILL, None)
    assert folder.exists() == (moment != "no folder")
    assert RunFolder(folder).has_checkpoint() == (moment in ("the first epoch", "the end"))
    assert give(source, folder) == (0, 0)
    assert not RunFolder(folder).has_checkpoint()
    for file in ("weights.safetensors", "detector.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert give(source, folder) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
