"""Residual networks: ResNet-9, the CIFAR ResNets and ResNet-18 for small images, ResNet-50 for images of 224 pixels.

The parameter names of the CIFAR ResNets and of ResNet-50 are those of the public weight files.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from maple.networks.architectures.base import Network, conv1x1, conv3x3, register_network


class ConvBlock(nn.Sequential):
    """Convolution, batch normalisation, ReLU, dropout; with ``pool``, the image is halved.

    The maximum is taken straight after the convolution: ReLU commutes with it, and the two memory-bound layers behind
    it then see a quarter of the pixels (training steps on a CPU take about a tenth less time).
    """

    def __init__(self, n_in: int, n_out: int, pool: bool = False) -> None:
        layers: list[nn.Module] = [conv3x3(n_in, n_out)]
        if pool:
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True), nn.Dropout(0.0))


class ResidualBlocks(nn.Module):
    """x + two convolution blocks of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(width, width), ConvBlock(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


@register_network("resnet9")
class ResNet9(Network):
    """The short residual network of DAWNBench (Page 2018, "How to train your ResNet"), 16 to 128 channels wide.

    0.4 M parameters and a max-pooled embedding of 128: the default on a CPU.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding_size = 8 * width
        self.shallow = "blocks.2"
        self.blocks = nn.Sequential(
            ConvBlock(3, width),
            ConvBlock(width, 2 * width, pool=True),
            ResidualBlocks(2 * width),
            ConvBlock(2 * width, 4 * width, pool=True),
            ConvBlock(4 * width, 8 * width, pool=True),
            ResidualBlocks(8 * width),
        )
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).amax(dim=(2, 3))  # (N, 8 width, H/8, W/8) -> (N, D)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016).

    Where the shape changes, the shortcut is option A (``subsample``: every second pixel, new channels zero, no
    parameters) or option B (a 1x1 convolution).
    """

    def __init__(self, n_in: int, n_out: int, stride: int, option: str) -> None:
        super().__init__()
        self.conv1 = conv3x3(n_in, n_out, stride)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = conv3x3(n_out, n_out)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.shortcut = (
                Subsample(n_out - n_in)
                if option == "A"
                else nn.Sequential(conv1x1(n_in, n_out, stride), nn.BatchNorm2d(n_out))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.bn1(self.conv1(x)), inplace=True))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class Subsample(nn.Module):
    """Shortcut without parameters: every second pixel; ``n_new`` zero channels, half in front and half behind."""

    def __init__(self, n_new: int) -> None:
        super().__init__()
        self.n_new = n_new

    def forward(self, x: Tensor) -> Tensor:
        front = self.n_new // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, front, self.n_new - front))


class ResNet(Network):
    """Residual network (He et al. 2016, https://arxiv.org/abs/1512.03385) for small images: 3x3 stem, no max pool.

    One stage per entry of ``widths``, ``n_blocks`` basic blocks each; every stage but the first halves the image.
    """

    def __init__(self, n_blocks: int, widths: tuple[int, ...], option: str) -> None:
        super().__init__()
        self.embedding_size = widths[-1]
        self.shallow = "layer2"
        self.conv1 = conv3x3(3, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.n_stages = len(widths)
        n_in = widths[0]
        for stage, width in enumerate(widths, start=1):
            strides = [1 if stage == 1 else 2] + [1] * (n_blocks - 1)
            inputs = [n_in] + [width] * (n_blocks - 1)
            blocks = [BasicBlock(i, width, stride, option) for i, stride in zip(inputs, strides)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            n_in = width
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        for stage in range(1, self.n_stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean(dim=(2, 3))  # (N, D)


def cifar_resnet(depth: int) -> ResNet:
    """ResNet-20, -32, -44, -56 of He et al. 2016, section 4.2: three stages of (depth - 2) / 6 blocks, embedding 64."""
    return ResNet((depth - 2) // 6, widths=(16, 32, 64), option="A")


@register_network("resnet18")
def resnet18() -> ResNet:
    """ResNet-18 of He et al. 2016 with a 3x3 stem for small images: 11.2 M parameters, embedding 512."""
    return ResNet(2, widths=(64, 128, 256, 512), option="B")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016); ``stride`` is that of the 3x3 convolution."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.conv1 = conv1x1(n_in, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.0)
        self.conv3 = conv1x1(width, n_out)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.downsample = nn.Sequential(conv1x1(n_in, n_out, stride), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.dropout(F.relu(self.bn2(self.conv2(y)), inplace=True))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


@register_network("resnet50")
class ResNet50(Network):
    """ResNet-50 (He et al. 2016) with a 7x7 stem, for images of 224 pixels: the paper's network for ImageNet.

    23.5 M parameters, an embedding of 2048 (in the paper 640, behind a linear layer).
    """

    min_size = 32
    embedding_size = 2048
    shallow = "layer2"

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        n_in = 64
        for stage, n_blocks in enumerate((3, 4, 6, 3), start=1):
            width = 32 * 2**stage
            blocks = [
                Bottleneck(4 * width if i else n_in, width, 2 if stage > 1 and i == 0 else 1) for i in range(n_blocks)
            ]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            n_in = 4 * width
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, stride=2, padding=1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean(dim=(2, 3))  # (N, D)


for _depth in (20, 32, 44, 56):
    register_network(f"resnet{_depth}")(partial(cifar_resnet, _depth))
