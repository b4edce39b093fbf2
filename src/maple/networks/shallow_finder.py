"""Finding the intermediate layer for the ``shallow`` score inside a network, from one traced forward pass.

The layer is the last one at the middle of the network's resolutions: of 32, 16 and 8 pixels that at 16, of 112, 56, 28,
14 and 7 that at 28. Its channels still respond to texture and colour, while the embedding has forgotten most of it.
The architectures of this package have theirs at the same place. Of a transformer, whose tokens keep their number, it is
the block at a third of its depth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from maple.networks.hooks import listening

AUTO, OFF = "auto", "none"  # values of ``shallow`` that name no layer
MAX_CHANNELS = 4096  # a covariance of more is slow to fit and to apply
_PASSED = re.compile("pool|drop|softmax|identity", re.IGNORECASE)  # types of layers that make no maps of their own
_FEWEST = 3  # maps of one resolution, or blocks of tokens, from which on some are earlier than others


class Call(NamedTuple):
    """The output of a layer that ran once: (N, F, H, W) or (N, T, F)."""

    name: str
    shape: tuple[int, ...]

    @property
    def side(self) -> int:
        return self.shape[-1]

    @property
    def depth(self) -> int:
        return self.name.count(".")


def find_shallow(body: nn.Module, x: Tensor) -> str | None:
    """The name of the layer of ``body``, run on ``x`` in evaluation mode; ``None`` where there is no such layer.

    >>> import torch
    >>> stages = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)]
    >>> find_shallow(nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.zeros(2, 3, 32, 32))
    '2'
    """
    calls = _trace_shapes(body, x)
    return _choose_map([call for call in calls if len(call.shape) == 4]) or _choose_block(calls)


def _trace_shapes(body: nn.Module, x: Tensor) -> list[Call]:
    """Layers that ran exactly once, in the order in which they ended, with square maps or with tokens."""
    ended: list[Call] = []
    layers = {name: layer for name, layer in body.named_modules() if name and not _PASSED.search(type(layer).__name__)}

    def record(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        ended.append(Call(name, tuple(output.shape) if isinstance(output, Tensor) else ()))

    with listening(layers, record):
        body(x)
    counts: dict[str, int] = {}
    for call in ended:
        counts[call.name] = counts.get(call.name, 0) + 1
    return [call for call in ended if counts[call.name] == 1 and _is_usable(call.shape, len(x))]


def _is_usable(shape: Sequence[int], n: int) -> bool:
    """Whether a shape is that of square maps (N, F, S, S) or tokens (N, T, F), with channels that can be fitted."""
    if len(shape) not in (3, 4) or shape[0] != n:
        return False
    is_map = len(shape) == 4
    return (not is_map or shape[2] == shape[3]) and shape[1 if is_map else 2] <= MAX_CHANNELS


def _choose_map(calls: Sequence[Call]) -> str | None:
    """The last of the outermost layers at the middle resolution."""
    main = [call for i, call in enumerate(calls) if all(later.side <= call.side for later in calls[i + 1 :])]
    if len(main) < _FEWEST:
        return None
    sides = _resolutions(main)
    if len(sides) == 1:
        same = _outermost(main)
        return same[(len(same) - 1) // 2].name if len(same) >= _FEWEST else None
    return _outermost([call for call in main if call.side == sides[(len(sides) - 1) // 2]])[-1].name


def _resolutions(calls: Sequence[Call]) -> list[int]:
    """Sides of the maps, largest first; one less than a quarter of the one before it is a pooled vector."""
    sides = sorted({call.side for call in calls}, reverse=True)
    pooled = [i for i in range(1, len(sides)) if 4 * sides[i] < sides[i - 1]]
    return sides[: pooled[0]] if pooled else sides


def _outermost(calls: Sequence[Call]) -> list[Call]:
    """Stages rather than the layers inside them."""
    depth = min(call.depth for call in calls)
    return [call for call in calls if call.depth == depth]


def _choose_block(calls: Sequence[Call]) -> str | None:
    """The block of tokens at a third of the depth; names of blocks differ by their number."""
    blocks: dict[str, list[str]] = {}
    for call in calls:
        if len(call.shape) == 3 and (found := re.fullmatch(r"(.*?)\d+", call.name)):
            blocks.setdefault(found[1], []).append(call.name)
    longest = max(blocks.values(), key=len, default=[])
    return longest[len(longest) // 3] if len(longest) >= _FEWEST else None
