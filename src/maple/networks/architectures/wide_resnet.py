"""Wide residual networks, ``wrn-DEPTH-WIDTH``."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from maple.errors import UsageError
from maple.networks.architectures.base import Network, conv1x1, conv3x3, register_family


class PreActivationBlock(nn.Module):
    """Batch normalisation and ReLU in front of each convolution; dropout between the two (WRN)."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(n_in)
        self.conv1 = conv3x3(n_in, n_out, stride)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = conv3x3(n_out, n_out)
        self.shortcut = None if stride == 1 and n_in == n_out else conv1x1(n_in, n_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x), inplace=True)
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.dropout(F.relu(self.bn2(self.conv1(y)), inplace=True))
        return shortcut + self.conv2(y)


class WideResNet(Network):
    """WRN-depth-width, pre-activation (Zagoruyko & Komodakis 2016, https://arxiv.org/abs/1605.07146).

    The paper's backbone is WRN-28-10: 36.5 M parameters, an embedding of 640.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embedding_size = 64 * width
        n_blocks = (depth - 4) // 6
        self.shallow = f"blocks.{2 * n_blocks - 1}"
        channels = [16, 16 * width, 32 * width, 64 * width]
        blocks: list[nn.Module] = []
        for stage, (n_in, n_out) in enumerate(pairwise(channels)):
            first_stride = 1 if stage == 0 else 2
            blocks.append(PreActivationBlock(n_in, n_out, first_stride))
            blocks += [PreActivationBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)]
        self.conv = conv3x3(3, 16)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(self.embedding_size)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv(x))
        return F.relu(self.bn(x), inplace=True).mean(dim=(2, 3))  # (N, D)


MAX_DEPTH, MAX_WIDTH = 1000, 64  # a run from elsewhere may name any network: larger ones take all memory or hours


@register_family(r"wrn-(\d+)-(\d+)", examples=("wrn-16-4", "wrn-28-10", "wrn-40-2"))
def wide_resnet(depth_digits: str, width_digits: str) -> WideResNet:
    """A wide ResNet of a depth 6n + 4 and any width, up to a thousand layers and 64 times as wide."""
    depth, width = int(depth_digits), int(width_digits)
    name = f"wrn-{depth}-{width}"
    if depth < 10 or depth % 6 != 4:
        below = max(10, depth - (depth - 4) % 6)
        raise UsageError(f"'{name}': the depth of a wide ResNet is 6n + 4, such as {below} or {below + 6}")
    if width < 1:
        raise UsageError(f"'{name}' has no channels: the width must be at least 1, such as wrn-{depth}-1")
    if depth > MAX_DEPTH or width > MAX_WIDTH:
        raise UsageError(f"'{name}' is too large: the depth is at most {MAX_DEPTH}, the width {MAX_WIDTH}")
    return WideResNet(depth, width)
