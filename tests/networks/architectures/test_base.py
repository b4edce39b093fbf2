"""Registration of networks, and what all of them share."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks.architectures import create_network, is_network, list_networks
from maple.networks.architectures.base import (
    FAMILIES,
    NETWORKS,
    Network,
    conv1x1,
    conv3x3,
    register_family,
    register_network,
)


class Tiny(Network):
    """The mean colour, ``factor`` times as wide."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.embedding_size = 3 * factor
        self.conv = conv1x1(3, self.embedding_size)
        self._initialise()

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))


@pytest.fixture(autouse=True)
def registry():
    """Networks registered by a test are forgotten after it."""
    with patch.dict(NETWORKS), patch.dict(FAMILIES):
        yield


def test_a_registered_network_is_made_by_name():
    register_network("tiny")(Tiny)
    assert "tiny" in list_networks() and isinstance(create_network("tiny"), Tiny)
    with pytest.raises(UsageError, match="'tiny'"):
        register_network("tiny")(Tiny)


def test_a_family_takes_every_name_of_its_pattern():
    @register_family(r"tiny(?:-(\d+))?", examples=("tiny", "tiny-2"))
    def tiny(digits):
        return Tiny(int(digits or 1))

    assert [create_network(name).embedding_size for name in ("tiny", "tiny-2", "tiny-7")] == [3, 6, 21]
    assert {"tiny", "tiny-2"} <= set(list_networks()) and "tiny-7" not in list_networks()
    assert is_network("tiny-7") and not is_network("tiny-x")


def test_an_example_outside_its_family_is_refused():
    with pytest.raises(AssertionError, match="large"):
        register_family(r"tiny-(\d+)", examples=("large",))(Tiny)


def test_convolutions_keep_or_divide_the_image():
    x = torch.zeros(1, 3, 9, 9)
    for make in (conv3x3, conv1x1):
        assert make(3, 5)(x).shape == (1, 5, 9, 9) and make(3, 5, stride=2)(x).shape == (1, 5, 5, 5)
        assert make(3, 5).bias is None


def test_initial_filters_keep_the_variance_through_a_relu():
    """He et al. 2015: the variance of a filter is 2 / (its outputs times its pixels)."""
    torch.manual_seed(0)
    network = Tiny(200)
    assert network.conv.weight.var().item() == pytest.approx(2 / 600, rel=0.1)


def test_a_head_starts_as_torch_makes_it():
    head = nn.Linear(3, 2)
    before = head.weight.clone()
    Tiny().initialise_head(head)
    assert torch.equal(head.weight, before)
