"""Several networks side by side as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class EnsembleBody(nn.Module):
    """The embeddings of all members, side by side (N, S D); a member is a body and an embedding layer."""

    def __init__(self, members: Sequence[nn.Sequential]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.min_size = max(getattr(body, "min_size", 1) for body in self.member_bodies)

    @property
    def member_bodies(self) -> list[nn.Module]:
        """The bodies of the members, without their embedding layers."""
        return [next(member.children()) for member in self.members]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], dim=1)
