"""A limit on the weights of a network that is made from a description: they are counted before they exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAKERS = (  # functions that make a tensor of any size
    *(torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace),
    *(torch.ones, torch.rand, torch.randn, torch.zeros),
)
_COUNTED = ("size", "stride", "fill_value", "n", "m", "start", "end", "step", "steps")  # keywords that decide the shape


class WeightLimit(TorchFunctionMode):
    """Within it, tensors of more than ``most`` numbers in all are a ``ValueError``, before they take memory.

    >>> with WeightLimit(1_000):
    ...     torch.nn.Linear(30, 1_000_000)
    Traceback (most recent call last):
    ...
    ValueError: the network has more than 1,000 weights
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = self._left = most

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in _MAKERS:
            shape = {name: value for name, value in given.items() if name in _COUNTED}
            self._left -= function(*args, **shape, device="meta").numel()  # without memory
            if self._left < 0:
                raise ValueError(f"the network has more than {self._most:,} weights")
        return function(*args, **given)
