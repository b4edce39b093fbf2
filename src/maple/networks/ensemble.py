"""The body of an ensemble: several networks side by side as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class EnsembleBody(nn.Module):
    """Concatenated embeddings (N, S D) of S members; a member is a body followed by an embedding layer."""

    def __init__(self, members: Sequence[nn.Sequential]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.min_size = max(getattr(body, "min_size", 1) for body in self.member_bodies)

    @property
    def member_bodies(self) -> list[nn.Module]:
        """Bodies of the members, without their embedding layers."""
        return [next(member.children()) for member in self.members]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], dim=1)
