"""The limit on the weights of a network that a description names."""

from __future__ import annotations

import pytest
import torch

from maple.networks import create_backbone
from maple.networks.limit import WeightLimit


def test_all_weights_of_a_network_are_counted():
    n = sum(tensor.numel() for tensor in create_backbone("resnet9", 10).state_dict().values())
    with WeightLimit(n + 100):
        again = create_backbone("resnet9", 10)
    assert sum(tensor.numel() for tensor in again.state_dict().values()) == n
    with pytest.raises(ValueError, match="weights"), WeightLimit(n - 100):
        create_backbone("resnet9", 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(10**9, 10**9),
        lambda: torch.zeros((10**9, 10**9), dtype=torch.int8),
        lambda: torch.rand(size=(10**18,), generator=torch.Generator()),
        lambda: torch.full((10**18,), 1.0),
        lambda: torch.arange(0, 10**17, step=2),
        lambda: torch.linspace(0, 1, steps=10**17),
        lambda: torch.eye(10**9),
        lambda: torch.nn.Embedding(10**9, 10**9),
        lambda: [torch.nn.Linear(500, 500) for _ in range(5)],
    ],
)
def test_tensors_are_refused_before_they_take_memory(make):
    with pytest.raises(ValueError, match="weights"), WeightLimit(10**6):
        make()


def test_small_tensors_are_as_without_it():
    with WeightLimit(10**4):
        torch.manual_seed(0)
        limited = torch.nn.Linear(8, 8).weight
    torch.manual_seed(0)
    assert torch.equal(limited, torch.nn.Linear(8, 8).weight)
