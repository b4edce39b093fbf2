"""Constants of the graph, and products with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SMALLEST = 1e-30  # lower bound of squared distances and norms, so that logarithms and powers stay finite


def constant(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor with its own copy of ``values``."""
    return torch.as_tensor(np.array(values), dtype=dtype)


class Affine(nn.Module):
    """x W + b in float64, with constant W (I, O) and b (O,), for x (N, I)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("weight", constant(weight))
        self.register_buffer("bias", constant(bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)
