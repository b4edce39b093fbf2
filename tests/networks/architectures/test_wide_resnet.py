"""Wide ResNets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks.architectures import create_network
from maple.networks.architectures.wide_resnet import WideResNet


@pytest.mark.parametrize("size", [8, 32, 64])
def test_wide_networks_take_any_image_size(size: int) -> None:
    with torch.device("meta"):
        assert create_network("wrn-28-10")(torch.empty(2, 3, size, size)).shape == (2, 640)


@pytest.mark.parametrize("name", ["wrn-600004-1", "wrn-10-4000", "wrn-10-65", "airbench-100000"])
def test_networks_without_end_are_refused_at_once(name: str) -> None:
    with torch.device("meta"), pytest.raises(UsageError, match=name):
        create_network(name)


def test_wide_depth_counts_its_convolutions() -> None:
    for depth in (10, 16, 28):
        layers = [m for m in WideResNet(depth, 1).modules() if isinstance(m, nn.Conv2d)]
        on_main_path = [m for m in layers if m.kernel_size == (3, 3)]
        assert len(on_main_path) + 3 == depth  # the paper counts three 1x1 shortcuts as well
