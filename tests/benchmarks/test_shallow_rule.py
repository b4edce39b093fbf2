"""The comparison of scores with and without the layer that was found, on a small network and simulated outputs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import shallow_rule  # noqa: E402
from maple.data.image_set import ImageSet  # noqa: E402
from maple.networks import create_backbone  # noqa: E402


def test_best_single_score_is_no_sum():
    scores = {"energy": 0.9, "distance": 0.8, "fused": 0.95, "fused without": 0.91}
    assert shallow_rule.best_single(scores) == ("energy", 0.9)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # to where it was interrupted
def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = ImageSet.from_arrays(rng.integers(0, 256, (300, 4, 4, 3), dtype=np.uint8), np.arange(300) % 3)

    def train(path):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return shallow_rule.train_module(module, images, 3, 0.01, path).state_dict()

    whole, save = train(tmp_path / "whole.safetensors"), shallow_rule.save_state

    def stop_after_the_second(path, module, optimizer, epochs):
        save(path, module, optimizer, epochs)
        if epochs == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(shallow_rule, "save_state", stop_after_the_second)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part.safetensors")
    resumed = train(tmp_path / "part.safetensors")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_row_has_every_score_with_and_without_the_layer(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    names = ("train", "test", *shallow_rule.OOD)
    sets = {
        name: ImageSet.from_arrays(rng.integers(0, 256, (200, 16, 16, 3), dtype=np.uint8), np.arange(200) % 4)
        for name in names
    }
    sets["svhn"] = ImageSet.from_arrays(np.repeat(sets["svhn"].pixels[:, :, :, :1] // 4, 3, axis=3))  # dark and grey
    monkeypatch.setitem(shallow_rule.MAKERS, "resnet20", lambda train, arguments: create_backbone("resnet9", 4))
    row = shallow_rule.measure(
        "resnet20", sets, argparse.Namespace(fit=200, images=200, train=200, epochs=1, precision="32-true")
    )
    assert row["shallow"] == "blocks.2" and set(row["auroc"]) == {*shallow_rule.OOD, "mean"}
    svhn = row["auroc"]["svhn"]
    assert svhn["shallow"] > 0.9
    near = row["auroc"]["cifar100"]
    assert len({near[name] for name in ("fused", "fused without", "fused, shallow x4")}) == 3
    factor = shallow_rule.weigh(row["error_auroc"])
    assert near["fused, weighed"] == pytest.approx(near[f"fused, shallow x{round(factor)}"]) or factor % 1
    shallow_rule.print_table([row])
    assert capsys.readouterr().out.count("| resnet20 |") == 4
