"""Images for which a network gives NaN: every command ends with the name of the first, or lists it and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import flat, run

NETWORK = """
import torch
from torch import nn


class Roots(nn.Module):
    # Some pixels; NaN for a white image
    def forward(self, x):
        root = torch.sqrt(0.99 - x.mean((1, 2, 3), keepdim=True))
        return (root - root + x).flatten(1)[:, :6]


def make():
    torch.manual_seed(0)
    return nn.Sequential(Roots(), nn.Linear(6, 2))
"""


def draw(path: Path, rng: np.random.Generator, level: int, n: int = 1) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.fromarray(rng.integers(level - 30, level + 30, (8, 8, 3)).astype(np.uint8)).save(path / f"{i:03}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of that network, and ``new`` with a white image among others."""
    folder, rng = tmp_path_factory.mktemp("broken"), np.random.default_rng(0)
    for part, n in (("train", 40), ("calibration", 40), ("new", 3)):
        draw(folder / part / "dark", rng, 60, n)
        draw(folder / part / "light", rng, 190, n)
    Image.new("RGB", (8, 8), (255, 255, 255)).save(folder / "new" / "light" / "white.png")
    name, before = f"broken_zoo_{os.getpid()}", Path.cwd()
    (folder / f"{name}.py").write_text(NETWORK)
    os.chdir(folder)
    try:
        sources = ("--data", folder / "train", "--calibrate", folder / "calibration")
        code = run(
            "fit", f"python:{name}:make", *sources, "--size", 8, "--out", folder / "run", "--workers", 0, "--trust"
        )
        assert code == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "arguments",
    [
        ("monitor", "run", "new"),
        ("evaluate", "run", "--ind", "new"),
        ("evaluate", "run", "--ind", "calibration", "--ood", "other=new"),
        ("explain", "run", "new", "--out", "page.html"),
        ("update", "run", "--data", "new"),
    ],
    ids=["monitor", "evaluate --ind", "evaluate --ood", "explain", "update"],
)
def test_a_command_ends_with_the_name_of_the_image(place, capsys, arguments):
    before = (place / "run" / "detector.safetensors").read_bytes()
    assert run(*arguments, "--workers", 0, "--trust") == 1
    said = flat(capsys.readouterr().err)
    assert "white.png" in said and "NaN" in said
    assert (place / "run" / "detector.safetensors").read_bytes() == before


def test_fitting_names_the_image(place, capsys):
    (network,) = place.glob("broken_zoo_*.py")
    sources = ("--data", "new", "--calibrate", "calibration", "--size", 8, "--out", "other", "--workers", 0)
    assert run("fit", f"python:{network.stem}:make", *sources, "--trust") == 1
    assert "white.png" in flat(capsys.readouterr().err)


def test_predicting_skips_and_lists_it(place, tmp_path):
    assert run("predict", "run", "new", "--out", tmp_path / "p.csv", "--workers", 0, "--trust") == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 6
    assert "white.png" in (tmp_path / "p.skipped.csv").read_text()
