"""Residual networks: ResNet-9, the CIFAR ResNets and ResNet-18 for small images, ResNet-50 for images of 224 pixels.

The parameter names of the CIFAR ResNets and of ResNet-50 are those of the public weight files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from maple.errors import UsageError
from maple.networks.architectures.base import Network, conv1x1, conv3x3, register_family, register_network


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
        self.n_out = n_out
        self.conv1 = conv3x3(n_in, n_out, stride)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = conv3x3(n_out, n_out)
        self.bn2 = nn.BatchNorm2d(n_out)
        subsamples = option == "A" and n_in != n_out
        self.shortcut = Subsample(n_out - n_in) if subsamples else _projection(n_in, n_out, stride)

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


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2016); ``stride`` is that of the 3x3 convolution."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.n_out = 4 * width
        self.conv1 = conv1x1(n_in, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.0)
        self.conv3 = conv1x1(width, self.n_out)
        self.bn3 = nn.BatchNorm2d(self.n_out)
        self.downsample = _projection(n_in, self.n_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.dropout(F.relu(self.bn2(self.conv2(y)), inplace=True))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


def _projection(n_in: int, n_out: int, stride: int) -> nn.Module:
    """A shortcut between any shapes: the identity, or a 1x1 convolution where they differ."""
    if stride == 1 and n_in == n_out:
        return nn.Identity()
    return nn.Sequential(conv1x1(n_in, n_out, stride), nn.BatchNorm2d(n_out))


class ResNet(Network):
    """Residual network (He et al. 2016, https://arxiv.org/abs/1512.03385): a stem, then one stage per width.

    Every stage but the first halves the image. ``block`` makes a block from its input channels, width and stride.
    """

    shallow = "layer2"

    def __init__(
        self,
        stem: nn.Conv2d,
        block: Callable[[int, int, int], BasicBlock | Bottleneck],
        widths: Sequence[int],
        n_blocks: Sequence[int],
    ) -> None:
        super().__init__()
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(stem.out_channels)
        n_in, self.stages = stem.out_channels, [f"layer{stage}" for stage in range(1, len(widths) + 1)]
        for stage, width, n in zip(self.stages, widths, n_blocks):
            blocks: list[BasicBlock | Bottleneck] = []
            for _ in range(n):
                blocks.append(block(n_in, width, 1 if blocks or stage == "layer1" else 2))
                n_in = blocks[-1].n_out
            self.add_module(stage, nn.Sequential(*blocks))
        self.embedding_size = n_in
        self._initialise()

    def start(self, x: Tensor) -> Tensor:
        """The stem (N, F, H, W)."""
        return F.relu(self.bn1(self.conv1(x)), inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return x.mean(dim=(2, 3))  # (N, D)


def cifar_resnet(depth: int) -> ResNet:
    """ResNet-20, -32, -44, -56 of He et al. 2016, section 4.2: three stages of (depth - 2) / 6 blocks, embedding 64."""
    return ResNet(conv3x3(3, 16), partial(BasicBlock, option="A"), (16, 32, 64), 3 * [(depth - 2) // 6])


@register_network("resnet18")
def resnet18() -> ResNet:
    """ResNet-18 of He et al. 2016 with a 3x3 stem for small images: 11.2 M parameters, embedding 512."""
    return ResNet(conv3x3(3, 64), partial(BasicBlock, option="B"), (64, 128, 256, 512), 4 * [2])


@register_family(r"resnet18-(\d+)", examples=("resnet18-16",))
def narrow_resnet18(digits: str) -> ResNet:
    """ResNet-18 with another width of the first stage than 64; each further stage is twice as wide.

    >>> narrow_resnet18("16").embedding_size
    128
    """
    width = int(digits)
    if width < 1:
        raise UsageError(f"'resnet18-{digits}' has no channels: the width must be at least 1, such as resnet18-16")
    return ResNet(conv3x3(3, width), partial(BasicBlock, option="B"), [width * 2**stage for stage in range(4)], 4 * [2])


@register_network("resnet50")
class ResNet50(ResNet):
    """ResNet-50 (He et al. 2016) with a 7x7 stem, for images of 224 pixels: the paper's network for ImageNet.

    23.5 M parameters, an embedding of 2048 (in the paper 640, behind a linear layer).
    """

    min_size = 32

    def __init__(self) -> None:
        stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        super().__init__(stem, Bottleneck, (64, 128, 256, 512), (3, 4, 6, 3))

    def start(self, x: Tensor) -> Tensor:
        return F.max_pool2d(super().start(x), 3, stride=2, padding=1)


for _depth in (20, 32, 44, 56):
    register_network(f"resnet{_depth}")(partial(cifar_resnet, _depth))
