r"""What every architecture shares: the base class, two convolutions, and registration by name.

An architecture is one file in this folder. It registers a class or function under a name, or a family of names under
a pattern::

    @register_network("resnet9")
    class ResNet9(Network): ...

    @register_family(r"wrn-(\d+)-(\d+)", examples=("wrn-16-4", "wrn-28-10"))
    def wide_resnet(depth: str, width: str) -> WideResNet: ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import nn

from maple.errors import UsageError
from maple.registry import note_plugin

Maker = TypeVar("Maker", bound=Callable[..., "Network"])


class Network(nn.Module):
    """A network from normalised images (N, 3, H, W) to embeddings (N, ``embedding_size``), without a head.

    H and W are at least ``min_size``. The last step is a global pooling, so the network takes images of any larger
    size. It has dropout layers of probability 0, which the MC-Dropout recipe sets to its own.
    """

    min_size = 8  # three halvings leave one pixel
    embedding_size: int
    shallow: str  # intermediate layer for the ``shallow`` score: its channels still respond to texture and colour

    def initialise_head(self, head: nn.Linear) -> None:
        """Set the initial weights of a new head, in place; by default those of torch."""

    def _initialise(self) -> None:
        """He et al. 2015 (https://arxiv.org/abs/1502.01852): convolutions keep the variance through ReLUs."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


NETWORKS: dict[str, Callable[[], Network]] = {}
FAMILIES: dict[str, Callable[..., Network]] = {}  # regular expression to a function of its groups


def register_network(name: str) -> Callable[[Maker], Maker]:
    """Decorator: make a class or a function without arguments known to ``create_network`` as ``name``."""

    def register(make: Maker) -> Maker:
        if name in NETWORKS:
            raise UsageError(f"a network '{name}' is registered already: choose another name")
        NETWORKS[name] = make
        note_plugin(make)
        return make

    return register


def register_family(pattern: str, examples: Sequence[str]) -> Callable[[Maker], Maker]:
    """Decorator: make all names that match ``pattern`` known; listings show the ``examples``.

    The decorated function takes the groups of the pattern; an optional group that is absent is ``None``.
    """

    def register(make: Maker) -> Maker:
        FAMILIES[pattern] = make
        note_plugin(make)
        for name in examples:
            match = re.fullmatch(pattern, name)
            assert match is not None, name
            NETWORKS[name] = partial(make, *match.groups())
        return make

    return register


def conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


def conv1x1(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False)
