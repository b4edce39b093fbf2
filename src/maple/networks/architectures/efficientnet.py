"""EfficientNet-B0 with a stem for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from maple.networks.architectures.base import Network, conv1x1, conv3x3, register_network


class SqueezeExcitation(nn.Module):
    """Multiply each channel by a gate in (0, 1), computed from the means of all channels (Hu et al. 2018)."""

    def __init__(self, n_channels: int, n_hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(n_channels, n_hidden, 1)
        self.excite = nn.Conv2d(n_hidden, n_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.silu(self.squeeze(x.mean(dim=(2, 3), keepdim=True))))
        return x * gate.sigmoid()


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, squeeze-and-excitation, 1x1 projection; residual where shapes agree."""

    def __init__(self, n_in: int, n_out: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        n_wide = expansion * n_in
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [conv1x1(n_in, n_wide), nn.BatchNorm2d(n_wide), nn.SiLU(inplace=True)]
        depthwise = nn.Conv2d(n_wide, n_wide, kernel, stride=stride, padding=kernel // 2, groups=n_wide, bias=False)
        layers += [depthwise, nn.BatchNorm2d(n_wide), nn.SiLU(inplace=True)]
        layers += [SqueezeExcitation(n_wide, n_in // 4), conv1x1(n_wide, n_out), nn.BatchNorm2d(n_out), nn.Dropout(0.0)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and n_in == n_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


@register_network("efficientnet-b0")
class EfficientNetB0(Network):
    """EfficientNet-B0 (Tan & Le 2019, https://arxiv.org/abs/1905.11946) with a stem that does not halve small images.

    4.0 M parameters, an embedding of 1280. The paper's stochastic depth is left out.
    """

    # expansion, kernel, stride of the first block, channels, blocks
    stages = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )
    embedding_size = 1280
    shallow = "blocks.4"  # the last block of 40 channels

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3x3(3, 32), nn.BatchNorm2d(32), nn.SiLU(inplace=True))
        blocks: list[nn.Module] = []
        n_in = 32
        for expansion, kernel, stride, n_out, n_blocks in self.stages:
            for i in range(n_blocks):
                blocks.append(InvertedResidual(n_in, n_out, expansion, kernel, stride if i == 0 else 1))
                n_in = n_out
        self.blocks = nn.Sequential(*blocks)
        self.top = nn.Sequential(
            conv1x1(n_in, self.embedding_size), nn.BatchNorm2d(self.embedding_size), nn.SiLU(inplace=True)
        )
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.blocks(self.stem(x))).mean(dim=(2, 3))  # (N, D)
