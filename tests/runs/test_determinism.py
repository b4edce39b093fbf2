"""The same seed gives the same bytes: in other processes, with other decoding workers, hash seeds and restarts."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import python_path, run
from processes import fork_maple

OPTIONS = (
    "--backbone", "wrn-10-1", "--epochs", 3, "--batch-size", 16, "--relabel-every", 1, "--hard-class-error", 0.01,
    "--min-cluster-size", 4, "--splits", "0.6,0.2,0.2,0", "--seed", 3,
)  # fmt: skip
SAME = ("weights.safetensors", "detector.safetensors", "classes.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of noise with a colour each, as files, so that workers decode them."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, colour in (("red", (180, 60, 60)), ("green", (60, 180, 60)), ("grey", (110, 110, 110))):
        (folder / name).mkdir()
        for i in range(30):
            pixels = np.clip(rng.normal(colour, 60, (12, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this process, which reads the images itself and may use deterministic algorithms alone."""
    out = tmp_path_factory.mktemp("run") / "run"
    torch.use_deterministic_algorithms(True)
    try:
        assert run("train", folder, "--out", out, "--workers", 0, *OPTIONS) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return out


def start(folder: Path, out: Path, *more: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONHASHSEED": "7"}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "maple", "train", folder, "--out", out, *OPTIONS, *more]
    return subprocess.Popen(
        [str(part) for part in command], env=environment | threads, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def history(run_folder: Path) -> list[dict[str, str]]:
    """The rows without times."""
    with (run_folder / "history.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if "seconds" not in name} for row in csv.DictReader(file)]


def assert_same(left: Path, right: Path) -> None:
    assert history(left) == history(right)
    for name in SAME:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def test_another_process_with_decoding_workers_trains_the_same(folder, expected, tmp_path):
    process = start(folder, tmp_path / "run", "--workers", 2)
    assert process.wait(timeout=300) == 0
    assert any(row["relabelled"] for row in history(expected))  # clusters were made, by a random search
    assert_same(tmp_path / "run", expected)


def test_a_training_that_was_killed_goes_on_to_the_same(folder, expected, tmp_path):
    out = tmp_path / "run"
    process = fork_maple("train", folder, "--out", out, *OPTIONS, "--workers", 0)
    while process.poll() is None and not (out / "resume.safetensors").exists():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "detector.safetensors").exists(), "it ended before it could be killed"
    assert run("train", folder, "--out", out, "--resume", "--workers", 0, *OPTIONS) == 0
    assert_same(out, expected)


def test_predictions_are_the_same_whatever_decodes_the_images(folder, expected, tmp_path):
    for workers in (0, 2):
        assert run("predict", expected, folder, "--out", tmp_path / f"{workers}.csv", "--workers", workers) == 0
    assert (tmp_path / "0.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
