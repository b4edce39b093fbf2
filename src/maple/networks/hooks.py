"""Temporary changes of a module: forward hooks and evaluation mode, undone on leaving the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Key = TypeVar("Key")


@contextmanager
def listening(
    layers: Mapping[Key, nn.Module], hook: Callable[[Key, nn.Module, tuple[Any, ...], Any], Tensor | None]
) -> Iterator[None]:
    """Inside the block, call ``hook(key, layer, inputs, output)`` after each forward pass of a layer.

    A result other than None replaces the output.

    >>> layer = nn.Identity()
    >>> with listening({"doubled": layer}, lambda key, layer, inputs, output: 2 * output):
    ...     layer(torch.ones(2))
    tensor([2., 2.])
    >>> layer(torch.ones(2))
    tensor([1., 1.])
    """
    handles = [layer.register_forward_hook(partial(hook, key)) for key, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each layer has its former mode, also after an exception."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training
