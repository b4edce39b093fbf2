"""``--strategy fsdp``: gradients and the state of the optimiser divided over all processes (FSDP 2 of torch).

The network that is trained is a divided copy. After an epoch its weights are collected into the whole network, which
validates, is clustered, grows its head and is saved as in a training of one process: nothing else needs to know. Each
process thus holds the weights once in whole, and beside them its share of weights, gradients and optimiser state; the
blocks of a network are gathered one after another during a step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from maple.networks import Backbone
from maple.training.head import NamedState

BLOCK_PARAMETERS = 1_000_000  # smaller blocks are not worth a message of their own


def sharding_strategy(n_processes: int) -> ModelParallelStrategy:
    """The strategy of Fabric for ``n_processes`` that share one network."""
    return ModelParallelStrategy(_divide, data_parallel_size=n_processes, tensor_parallel_size=1)


def _divide(module: nn.Module, mesh: Any) -> nn.Module:
    """Divide a network over the processes, in place: large blocks each for itself, then what is left."""
    for block in find_blocks(module):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Parts of a network that are gathered for themselves: elements of its sequences and lists with many parameters.

    >>> wide = nn.Linear(1000, 1000)
    >>> len(find_blocks(nn.Sequential(nn.Sequential(wide, nn.ReLU()), nn.Linear(1000, 10))))
    1
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        is_large = sum(parameter.numel() for parameter in child.parameters()) >= BLOCK_PARAMETERS
        inner = find_blocks(child) if is_large else []
        if inner:
            blocks += inner
        elif is_large and isinstance(module, nn.Sequential | nn.ModuleList):
            blocks.append(child)
    return blocks


class Sharding:
    """A divided copy of a backbone that is trained in its place."""

    def __init__(self, backbone: Backbone) -> None:
        self.whole = backbone
        self.network = copy.deepcopy(backbone)
        for parameter in self.network.parameters():
            parameter.data = parameter.data.contiguous()  # as FSDP asks; only speed depends on the layout

    def collect(self) -> None:
        """Copy weights and buffers of the divided network into the whole one, in all processes."""
        with torch.no_grad():
            divided = self.network.state_dict()
            for name, values in self.whole.state_dict().items():
                values.copy_(_whole_tensor(divided[name]))

    def collect_state(self, divided: NamedState) -> NamedState:
        """The whole state of the optimiser by parameter name, in all processes."""
        return {name: {key: _whole_tensor(value) for key, value in values.items()} for name, values in divided.items()}

    def divide_state(self, state: NamedState) -> NamedState:
        """The state of the optimiser by parameter name, divided like the parameters."""
        parameters = dict(self.network.named_parameters())
        return {
            name: {key: _divide_like(parameters[name], value) for key, value in values.items()}
            for name, values in state.items()
            if name in parameters
        }


def _divide_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor of the shape of a divided parameter, divided in the same way; others (counters) as they are."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.contiguous(), parameter.device_mesh, parameter.placements)


def _whole_tensor(value: Any) -> Any:
    """A divided tensor collected from all processes, each of which must ask for it; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
