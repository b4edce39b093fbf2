"""Images shared by the tests of averages."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
