"""``--strategy fsdp`` trains the network of ``ddp``, and divides what it says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from maple.errors import UsageError
from maple.networks import create_backbone
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.processes.sharding import find_blocks
from maple.training.recipe import create_recipe
from maple.training.step import TrainingStep
from processes import in_processes
from short_parallel import describe, train_digits


def test_only_large_elements_of_sequences_are_blocks():
    large, small = nn.Linear(1000, 1000, bias=False), nn.Linear(10, 10)
    stages = nn.ModuleList([nn.Sequential(large, small), large, small])
    assert find_blocks(nn.ModuleDict({"stem": large, "stages": stages})) == [large, large]
    assert find_blocks(nn.Sequential(small)) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "--devices"),
        ({"devices": 2, "optimizer": "muon"}, "muon"),
        ({"devices": 2, "precision": "16-mixed"}, "16-mixed"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, named):
    with pytest.raises(UsageError, match=named):
        make_fabric(TrainOptions(strategy="fsdp", **options))


def take_steps(optimizer: str, strategy: str) -> dict[str, Any]:
    """Two steps; how much of the optimiser's state is in this process, and the whole."""
    options = TrainOptions(optimizer=optimizer, strategy=strategy, accelerator="cpu", precision="32-true")
    fabric = make_fabric(options)
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    step = TrainingStep(fabric, create_recipe("triplet"), backbone, options)
    for _ in range(2):
        images = torch.rand(16, 3, 16, 16)[fabric.global_rank :: fabric.world_size]
        step(images, torch.arange(8) % 4, epoch=1, share=0.5)
    state = step.collect()
    local = [value for values in step.raw_optimizer.state.values() for value in values.values() if value.ndim]
    return {
        "numbers": sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in local),
        "whole": sum(value.numel() for values in state.values() for value in values.values() if value.ndim),
        "arrays": {
            **{name: values.detach().numpy() for name, values in backbone.named_parameters()},
            **{f"{name}/{key}": value.numpy() for name, values in state.items() for key, value in values.items()},
        },
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_process_holds_its_share_and_learns_as_with_ddp(optimizer):
    first, second = in_processes(take_steps, optimizer, "fsdp")
    other, _ = in_processes(take_steps, optimizer, "ddp")
    assert first["numbers"] + second["numbers"] == first["whole"] == other["numbers"] == other["whole"]
    assert 0.4 < first["numbers"] / first["whole"] < 0.6
    assert first["arrays"].keys() == other["arrays"].keys()
    for name, values in first["arrays"].items():
        np.testing.assert_array_equal(values, second["arrays"][name])
        if optimizer == "sgd":  # Adam's steps depend on the sign of gradients that are zero but for rounding
            np.testing.assert_allclose(values, other["arrays"][name], rtol=1e-3, atol=1e-4, err_msg=name)


def train_twice(folder: Path) -> list[dict[str, Any]]:
    """A training, and one that is interrupted after its first epoch and resumed; clusters are split in it."""
    whole = train_digits(strategy="fsdp")
    with suppress(KeyboardInterrupt):
        train_digits(folder=folder, stop_after=1, strategy="fsdp")
    return [describe(whole), describe(train_digits(folder=folder, resume=True, strategy="fsdp"))]


@pytest.mark.slow
def test_a_divided_training_splits_classes_and_is_resumed(tmp_path):
    first, second = in_processes(train_twice, tmp_path)
    assert first == second
    assert first[0] == first[1] and first[0]["history"][-1]["clusters"] > 10
