"""A module with functions that return networks, for ``python:`` specifications."""

from __future__ import annotations

from pathlib import Path

import pytest

ZOO = """
import torch
from torch import nn
from maple.networks import Backbone

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return {"mean": x.mean(), "scores": [self.out(self.layers(x))]}

made = []

def make():
    made.append(Net())
    return made[-1]

def embedding():
    return Backbone(nn.Sequential(nn.AvgPool2d(4), nn.Flatten()), None, embedding_size=48, name="pooled")

def number():
    return 5

def broken():
    raise RuntimeError("no such file")
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, new for each test."""
    name = f"zoo_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    return name
