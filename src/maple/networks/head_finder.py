"""Finding the head, and with it the embedding, inside a trained classifier."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maple.data.decode import Fit
from maple.errors import UsageError, suggest
from maple.networks.backbone import UNCHANGED, Backbone, Preprocessing
from maple.networks.embedding import as_image_batch
from maple.networks.hooks import evaluating, listening
from maple.networks.origin import Origin
from maple.networks.shallow_finder import AUTO, OFF, find_shallow

Array = Tensor | np.ndarray
EXAMPLE_SIZES = (32, 64, 224)  # tried in turn where the size of a module's images is not known


class Pick(nn.Module):
    """A module that returns one entry of the dictionary or tuple that another module returns."""

    def __init__(self, module: nn.Module, path: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x)
        for key in self.path:
            output = output[key]
        return output


class _Call(NamedTuple):
    """Input and output of one call of a layer."""

    input: Tensor
    output: Tensor


def wrap_backbone(
    module: nn.Module,
    *,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    example: Array | None = None,
    shallow: str | None = AUTO,
) -> Backbone:
    """A trained classifier as a backbone: its embedding is the input of the linear layer that gives its logits.

    The head is the linear layer whose output is the output of the module (or an entry of it, if the module returns a
    tuple or a dictionary). It is found by running ``example``, a batch of images in [0, 1] (random ones by default).
    ``head`` names it ("classifier.1") if there are several or if it is no ``nn.Linear``. head(embedding) equals the
    logits of the module, which is checked on the example. The module is not changed: the backbone holds a copy.

    ``mean`` and ``std`` are those of the module's training; the default is that of a timm model's configuration, else
    (0, 0, 0) and (1, 1, 1), so the module gets images in [0, 1]. ``shallow`` names an intermediate layer with channels
    (N, F, H, W) or tokens (N, T, F) for the ``shallow`` score ("layer2"); "auto" finds one, if there is one
    (:mod:`maple.networks.shallow_finder`), and "none" or ``None`` does without.

    >>> classifier = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    >>> wrap_backbone(classifier).embedding_size
    8
    """
    size = None if example is None else int(np.shape(example)[-2])  # of (N, 3, H, W) or (N, H, W, 3): a square
    return wrap_module(module, Preprocessing(mean, std, size), head, shallow, example)


def wrap_module(
    module: nn.Module, wanted: Preprocessing, head: str | None, shallow: str | None, example: Array | None = None
) -> Backbone:
    """Like :func:`wrap_backbone`; the ``wanted`` preprocessing takes precedence over that of a timm model."""
    if isinstance(module, Backbone):
        return module
    check_dtype(module)
    wanted = wanted.over(timm_preprocessing(module)).over(UNCHANGED)
    module = copy.deepcopy(module)
    if shallow not in (None, AUTO, OFF) and shallow not in dict(module.named_modules()):
        raise UsageError(f"the module has no layer '{shallow}': {suggest(str(shallow), dict(module.named_modules()))}")
    layers = _possible_heads(module, head)
    with evaluating(module):
        x, calls, output = run_example(module, wanted, layers, example)
        name, path = _find_head(calls, dict(leaves(output)), head)
        body, found = split_head(module, name, path)
        embedding = _check_split(name, calls[name], body, found, x)
        if shallow == AUTO:
            layer = find_shallow(body, x)
        else:
            layer = None if shallow in (None, OFF) else f"module.{shallow}" if path else shallow
    backbone = Backbone(
        body,
        found,
        embedding_size=embedding.shape[1],
        mean=wanted.mean,
        std=wanted.std,
        name=type(module).__name__,
        size=wanted.size,
        shallow=layer,
    )
    backbone.origin = Origin(head=name, path=path)
    return backbone.to(embedding.device)


def _check_split(name: str, call: _Call, body: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    """Embeddings (N, D) of ``x``; refuses a split in which body or head differ from the recorded ``call``."""
    if call.input.ndim != 2:
        raise UsageError(f"head '{name}' reads {tuple(call.input.shape)}, not (N, D): name a layer after the pooling")
    embedding = body(x)
    if not same_values(embedding, call.input) or not same_values(head(embedding), call.output):
        raise UsageError(f"the module changes input or output of its head '{name}': call it once, return its output")
    return embedding


def check_dtype(module: nn.Module) -> None:
    """Raise ``UsageError`` for networks that do not compute in float32."""
    if other := {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}:
        raise UsageError(f"the module computes in {other.pop()}: call module.float() before wrapping it")


def split_head(module: nn.Module, head: str, path: Sequence[Any] = ()) -> tuple[nn.Module, nn.Module]:
    """The module with the layer ``head`` replaced by the identity, and that layer; ``path`` leads to the logits.

    >>> body, head = split_head(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), "1")
    >>> body(torch.rand(2, 3, 2, 2)).shape, head.out_features
    (torch.Size([2, 12]), 5)
    """
    layer = module.get_submodule(head)
    module.set_submodule(head, nn.Identity())
    return (Pick(module, tuple(path)) if path else module), layer


def timm_preprocessing(module: nn.Module) -> Preprocessing:
    """From the configuration of a timm model; empty for other modules."""
    found = getattr(module, "pretrained_cfg", None)
    settings = found if isinstance(found, Mapping) else {}
    size = settings["input_size"][-1] if "input_size" in settings else None
    fits: dict[str, Fit] = {"center": "crop", "squash": "stretch", "border": "pad"}
    return Preprocessing(settings.get("mean"), settings.get("std"), size, fits.get(settings.get("crop_mode", "")))


def _possible_heads(module: nn.Module, head: str | None) -> Mapping[str, nn.Module]:
    """All linear layers by name, or the one layer that ``head`` names."""
    layers = {name: layer for name, layer in module.named_modules() if name}
    linear = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    if head is None:
        return linear
    if head not in layers:
        raise UsageError(f"the module has no layer '{head}'; its linear layers: {', '.join(linear) or 'none'}")
    return {head: layers[head]}


def run_example(
    module: nn.Module,
    wanted: Preprocessing,
    layers: Mapping[str, nn.Module] | None = None,
    example: Array | None = None,
) -> tuple[Tensor, dict[str, _Call], Any]:
    """Run the module once; returns normalised input, last call of each layer (in order of calls), and output."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if example is not None:
        examples = [as_image_batch(example)]
    else:
        generator = torch.Generator().manual_seed(0)
        sizes = EXAMPLE_SIZES if wanted.size is None else (wanted.size,)
        examples = [torch.rand(2, 3, s, s, generator=generator) for s in sizes]
    failure: Exception | None = None
    for images in examples:
        x = wanted.normalise(images).contiguous().to(device)
        try:
            return x, *_trace(module, layers or {}, x)
        except Exception as error:  # the forward of any module may raise anything
            failure = error
    tried = ", ".join(f"{images.shape[-1]}" for images in examples)
    reason = " ".join(str(failure).split())
    raise UsageError(
        f"the module failed on images of {tried} pixels ({type(failure).__name__}: {reason}): "
        "pass example=, a batch (N, 3, H, W) in [0, 1] of the size it takes (maple fit: --size)"
    ) from failure


def _trace(module: nn.Module, layers: Mapping[str, nn.Module], x: Tensor) -> tuple[dict[str, _Call], Any]:
    """The last call of each layer while ``module`` runs on ``x``, and the output of the module."""
    calls: dict[str, _Call] = {}

    def record(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            calls.pop(name, None)
            calls[name] = _Call(inputs[0].clone(), output.clone())  # against in-place operations behind it

    with listening(layers, record):
        return calls, module(x)


def leaves(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor in nested tuples, lists and dictionaries, with the keys that lead to it."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping | tuple | list):
        for key, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from leaves(value, (*path, key))


def _find_head(
    calls: dict[str, _Call], leaves: dict[tuple[Any, ...], Tensor], head: str | None
) -> tuple[str, tuple[Any, ...]]:
    """The layer whose output is an entry of the module's output, and the keys that lead to that entry."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, call in calls.items():
        for path, leaf in leaves.items():
            if name not in found and same_values(leaf, call.output):
                found[name] = path
    if len(found) > 1:
        raise UsageError(f"the module has several heads ({', '.join(found)}): name one, head='{next(iter(found))}'")
    if found:
        return next(iter(found.items()))
    if head is not None:
        raise UsageError(f"'{head}' does not give the output of the module: name the layer of its logits (no softmax)")
    raise UsageError(
        "no linear layer gives the output of the module: let forward return its logits unchanged (no softmax), name "
        "the head with head=..., or, if the module returns embeddings, use Backbone(module, None, embedding_size=D)"
    )


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and types, and values equal up to rounding."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
