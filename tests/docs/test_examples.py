"""The examples run as they stand, and add as little to a training loop as they say."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def added_lines(name: str) -> list[str]:
    return [line for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines() if "  # +" in line]


def test_own_loop(capsys):
    names = runpy.run_path(str(EXAMPLES / "plain_pytorch.py"))
    assert (names["prediction"].class_id == names["splits"].test.labels).mean() > 0.9
    assert names["session"].n_clusters == names["model"].head.out_features > 10
    assert "split ['" in capsys.readouterr().out
    assert len(added_lines("plain_pytorch.py")) <= 12


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, short epochs, renamed functions of torch
def test_lightning(capsys):
    from maple.networks._torchvision import import_torchvision

    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    names = runpy.run_path(str(EXAMPLES / "lightning_callback.py"))
    assert (names["prediction"].class_id == names["splits"].test.labels).mean() > 0.9
    assert names["callback"].session.n_clusters > 10
    assert "epoch 5" in capsys.readouterr().out
    assert len(added_lines("lightning_callback.py")) <= 12
