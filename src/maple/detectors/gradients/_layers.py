"""Features of several layers of a backbone: one layer per stage, averaged over height and width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maple.detectors.gradients.base import image_gradients
from maple.errors import UsageError, suggest
from maple.networks import Backbone, EnsembleBody, listening, same_values

_EMBEDDING = "embedding"  # the name of the embedding among the layers


class _Finished(NamedTuple):
    """A finished layer: name, height and width of the output, and whether it contains layers (a block)."""

    name: str
    size: tuple[int, int]
    is_block: bool


def find_layers(backbone: Backbone, images: Tensor) -> tuple[str, ...]:
    """One layer per stage, from shallow to deep, and the embedding.

    A stage is the set of layers with the same output height and width. It is represented by its last block (a layer
    that contains layers), or its last layer if it has no block: single layers after the last block belong to the next,
    downsampling block. Names are those of the modules of ``backbone.body``, or of one member of an ensemble, whose
    members are alike. Stages of one pixel are skipped, and stages whose average equals that of a later one or the
    embedding.

    >>> from maple.networks import create_backbone
    >>> find_layers(create_backbone("resnet20", n_classes=10), torch.rand(2, 3, 32, 32))
    ('layer1', 'layer2', 'embedding')
    >>> find_layers(create_backbone("wrn-10-1", n_classes=10), torch.rand(2, 3, 32, 32))
    ('blocks.0', 'blocks.1', 'blocks', 'embedding')
    """
    with image_gradients(backbone), torch.no_grad():
        calls = _watch(backbone, images)
        last = {call.size: call for call in calls if not call.is_block}  # later calls replace earlier ones
        last |= {call.size: call for call in calls if call.is_block}
        names = [call.name for call in calls if last[call.size] is call]
        names.append(_EMBEDDING)
        features = average_layers(backbone, images, names)
    repeated = {a for a, b in combinations(names, 2) if same_values(features[a], features[b])}
    return tuple(name for name in names if name not in repeated)


def _watch(backbone: Backbone, images: Tensor) -> list[_Finished]:
    """The layers of one body with outputs (B, F, H, W), in the order of completion; layers called twice are skipped."""
    calls: list[_Finished] = []
    height, width = images.shape[2:]

    def watch(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim != 4:
            return
        h, w = output.shape[2:]
        if h * w > 1 and abs(h * width - w * height) <= max(height, width):  # else not laid out as (B, F, H, W)
            calls.append(_Finished(name, (h, w), is_block=next(layer.children(), None) is not None))

    with listening(_named_layers(_bodies(backbone)[0]), watch):
        backbone.embed(images)
    times = Counter(call.name for call in calls)
    return [call for call in calls if times[call.name] == 1]


def average_layers(backbone: Backbone, images: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Features (B, F) of each layer of the body: averages over height and width; ``embedding`` is the embedding.

    For an ensemble, the features of the same layer of all members are concatenated, like its embedding.

    >>> from maple.networks import create_backbone
    >>> found = average_layers(create_backbone("resnet20", n_classes=10), torch.rand(2, 3, 32, 32), ["layer1"])
    >>> found["layer1"].shape
    torch.Size([2, 16])
    """
    bodies = [_named_layers(body) for body in _bodies(backbone)]
    if unknown := [name for name in layers if name not in bodies[0] and name != _EMBEDDING]:
        raise UsageError(f"the backbone has no layer '{unknown[0]}': {suggest(unknown[0], [*bodies[0], _EMBEDDING])}")
    found: dict[tuple[str, int], Tensor] = {}  # by layer and member

    def average(key: tuple[str, int], layer: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim not in (2, 4):
            raise UsageError(f"the output of layer '{key[0]}' is not (N, F, H, W) or (N, F): name another layer")
        found[key] = (output.mean(dim=(2, 3)) if output.ndim == 4 else output).float()

    watched = {(name, i): body[name] for i, body in enumerate(bodies) for name in layers if name != _EMBEDDING}
    with listening(watched, average):
        embedding = backbone.embed(images)
    if silent := [name for name, i in watched if (name, i) not in found]:
        raise UsageError(f"layer '{silent[0]}' is not used by the embedding: name another layer")
    members = range(len(bodies))
    return {
        name: embedding if name == _EMBEDDING else torch.cat([found[name, i] for i in members], dim=1)
        for name in layers
    }


def _bodies(backbone: Backbone) -> list[nn.Module]:
    """The body, or the bodies of all members of an ensemble."""
    if isinstance(backbone.body, EnsembleBody):
        return backbone.body.member_bodies
    return [backbone.body]


def _named_layers(body: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in body.named_modules() if name}
