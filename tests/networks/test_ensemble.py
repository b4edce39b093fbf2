"""Several networks side by side as one body."""

from __future__ import annotations

import torch
from torch import nn

from maple.networks import EnsembleBody
from maple.networks.architectures import create_network


def test_embeddings_are_concatenated() -> None:
    members = [nn.Sequential(create_network("resnet9").eval(), nn.Linear(128, size)) for size in (3, 5)]
    body, x = EnsembleBody(members), torch.rand(2, 3, 16, 16)
    assert body.min_size == 8 and body.member_bodies == [member[0] for member in members]
    torch.testing.assert_close(body(x), torch.cat([member(x) for member in members], dim=1))
