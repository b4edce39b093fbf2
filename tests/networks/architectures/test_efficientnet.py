"""EfficientNet-B0."""

from __future__ import annotations

import torch

from maple.networks.architectures import create_network


def test_efficientnet_has_the_parameters_of_others() -> None:
    """torchvision's ``efficientnet_b0().features`` has 4,007,548."""
    with torch.device("meta"):
        network = create_network("efficientnet-b0")
        assert sum(p.numel() for p in network.parameters()) == 4_007_548
