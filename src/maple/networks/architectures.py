"""Networks from normalised image to embedding, without a head, and how to run them fast on a CPU.

Every network maps (N, 3, H, W), H and W at least ``min_size``, to (N, ``embedding_size``). Sizes adapt: the last step
is a global pooling, whatever is left of the image. All have dropout layers inside, with probability 0 unless a recipe
(MC-Dropout) sets another. The names of the parameters of the CIFAR ResNets are those of the
public weight files.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maple.errors import UsageError, suggest


def conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


def conv1x1(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False)


class Network(nn.Module):
    """Common to all networks: what they return, the smallest image they take, their initialisation."""

    min_size = 8  # three halvings must leave a pixel
    embedding_size: int
    shallow: str  # the layer half-way up, whose channels still see texture and colour

    def _initialise(self) -> None:
        """He et al. 2015 (https://arxiv.org/abs/1502.01852): convolutions keep the variance through ReLUs."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


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


class Residual(nn.Module):
    """x + two convolution blocks of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(width, width), ConvBlock(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


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
            Residual(2 * width),
            ConvBlock(2 * width, 4 * width, pool=True),
            ConvBlock(4 * width, 8 * width, pool=True),
            Residual(8 * width),
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


class SqueezeExcitation(nn.Module):
    """Each channel times a gate in (0, 1) that sees the means of all channels (Hu et al. 2018)."""

    def __init__(self, n_channels: int, n_hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(n_channels, n_hidden, 1)
        self.excite = nn.Conv2d(n_hidden, n_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.silu(self.squeeze(x.mean(dim=(2, 3), keepdim=True))))
        return x * gate.sigmoid()


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, weigh the channels, narrow; added to the input where shapes agree."""

    def __init__(self, n_in: int, n_out: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        n_wide = expansion * n_in
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [conv1x1(n_in, n_wide), nn.BatchNorm2d(n_wide), nn.SiLU(inplace=True)]
        each = nn.Conv2d(n_wide, n_wide, kernel, stride=stride, padding=kernel // 2, groups=n_wide, bias=False)
        layers += [each, nn.BatchNorm2d(n_wide), nn.SiLU(inplace=True)]
        layers += [SqueezeExcitation(n_wide, n_in // 4), conv1x1(n_wide, n_out), nn.BatchNorm2d(n_out), nn.Dropout(0.0)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and n_in == n_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


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
    shallow = "blocks.4"  # the last of 40 channels

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


def cifar_resnet(depth: int) -> ResNet:
    """ResNet-20, -32, -44, -56 of He et al. 2016, section 4.2: three stages of (depth - 2) / 6 blocks, embedding 64."""
    return ResNet((depth - 2) // 6, widths=(16, 32, 64), option="A")


def resnet18() -> ResNet:
    """ResNet-18 of He et al. 2016 with a 3x3 stem for small images: 11.2 M parameters, embedding 512."""
    return ResNet(2, widths=(64, 128, 256, 512), option="B")


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet9": ResNet9,
    "resnet18": resnet18,
    "efficientnet-b0": EfficientNetB0,
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (20, 32, 44, 56)},
    **{f"wrn-{depth}-{width}": partial(WideResNet, depth, width) for depth, width in ((16, 4), (28, 10), (40, 2))},
}


def create_network(name: str) -> Network:
    """The network called ``name``: a key of ``NETWORKS``, or ``wrn-D-W`` for any D = 6n + 4 and any W.

    >>> create_network("wrn-10-2").embedding_size
    128
    >>> create_network("wrn-27-10")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: 'wrn-27-10' has no whole number of blocks: the depth must be 6n + 4, such as 22 or 28
    """
    wide = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    if wide:
        depth, width = int(wide[1]), int(wide[2])
        if depth < 10 or depth % 6 != 4:
            below = max(10, depth - (depth - 4) % 6)
            raise UsageError(
                f"'{name}' has no whole number of blocks: the depth must be 6n + 4, such as {below} or {below + 6}"
            )
        if width < 1:
            raise UsageError(f"'{name}' has no channels: the width must be at least 1, such as wrn-{depth}-1")
        return WideResNet(depth, width)
    if name not in NETWORKS:
        raise UsageError(f"unknown backbone '{name}': {suggest(name, NETWORKS)}")
    return NETWORKS[name]()


def use_fast_allocator() -> bool:
    """Let glibc keep freed memory for the next training step; True where this worked (Linux with glibc).

    By default glibc maps each large tensor afresh and gives it back when it is freed, so that the kernel zeroes the
    same pages step after step. With mmap off and no trimming, tensors come from a heap that stays, and the page faults
    end after a few steps. What this is worth depends on machine, tensor sizes and precision: from a few per cent to
    several times. The process keeps its peak memory until it ends. Elsewhere (macOS, Windows, musl) nothing happens.
    Calling it again changes nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # from <malloc.h>
    return bool(libc.mallopt(m_mmap_max, 0)) and bool(libc.mallopt(m_trim_threshold, 2**31 - 1))


def bfloat16_is_fast(device: str | None = None) -> bool:
    """Whether ``device`` ('cpu', 'cuda', ...; None is the GPU if there is one) computes in bfloat16 natively.

    Without native instructions bfloat16 is emulated, and training is up to ten times slower than in float32.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and not _BFLOAT16_FLAGS.isdisjoint(_cpu_flags())


_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of the first processor; empty where the kernel does not list them."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return set(value.split())
    return set()
