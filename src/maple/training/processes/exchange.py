"""Arrays and work of several processes: each does its share, all get the whole.

Rows are shared out in blocks of the batch size of :func:`~maple.networks.embed`, so that every process runs the very
batches of a single process: embeddings are then equal to the last bit on equal processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from maple.data.image_set import ImageSet
from maple.networks import Backbone, embed
from maple.networks.embedding import BATCH_SIZE
from maple.training.processes.agreement import together
from maple.types import Outputs

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Item = TypeVar("Item")
Found = TypeVar("Found")


# --- rows -------------------------------------------------------------------------------------------------------------


def share_of(n: int, rank: int, world_size: int, block: int = BATCH_SIZE) -> np.ndarray:
    """The positions, of ``n``, that one process works on: every ``world_size``-th block.

    >>> share_of(7, rank=0, world_size=2, block=2), share_of(7, rank=1, world_size=2, block=2)
    (array([0, 1, 4, 5]), array([2, 3, 6]))
    """
    rows = np.arange(n)
    return rows[rows // block % world_size == rank]


def gather_rows(fabric: Fabric, rows: np.ndarray, n: int, block: int = BATCH_SIZE) -> np.ndarray:
    """All ``n`` rows in order in every process, where each holds those of :func:`share_of`."""
    if fabric.world_size == 1:
        return rows
    blocks = -(-n // (block * fabric.world_size))  # per process
    padded = np.zeros((blocks * block, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    mine = torch.from_numpy(padded).to(fabric.device)
    parts = [torch.empty_like(mine) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(parts, mine)
    in_blocks = _numpy(torch.stack(parts)).reshape(fabric.world_size, blocks, block, *rows.shape[1:])
    return in_blocks.swapaxes(0, 1).reshape(-1, *rows.shape[1:])[:n]


def embed_shared(
    fabric: Fabric | None, backbone: Backbone, images: ImageSet, rows: np.ndarray | None = None, **options: Any
) -> Outputs:
    """:func:`~maple.networks.embed` of all images, or of those at ``rows``: each process runs its share."""
    rows = np.arange(len(images)) if rows is None else rows
    if fabric is None or fabric.world_size == 1:
        return embed(backbone, images, indices=rows, **options)
    share = share_of(len(rows), fabric.global_rank, fabric.world_size)
    with together(fabric):
        mine = embed(backbone, images, indices=rows[share], **options)
    whole = {
        name: gather_rows(fabric, values, len(rows))
        for name in ("embeddings", "logits", "shallow")
        if (values := getattr(mine, name)) is not None
    }
    return replace(mine, **whole, labels=images.labels[rows], cluster_ids=None)  # not empty where a share is


# --- numbers ----------------------------------------------------------------------------------------------------------


def sum_over_ranks(fabric: Fabric, array: np.ndarray) -> np.ndarray:
    """The sum of an array over all processes, on their devices: NCCL needs device memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(fabric.device)
    return _numpy(fabric.all_reduce(tensor, reduce_op="sum"))


def mean_over_ranks(fabric: Fabric, values: dict[str, float]) -> dict[str, float]:
    """The mean of each value over all processes."""
    mine = torch.tensor(list(values.values()), dtype=torch.float32, device=fabric.device)
    return dict(zip(values, _numpy(fabric.all_reduce(mine, reduce_op="mean")).tolist()))


def agree_on_buffers(fabric: Fabric, module: nn.Module) -> None:
    """Give all processes the buffers (batch-norm statistics) of the first."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, 0)


def agree_on_state(fabric: Fabric, module: nn.Module) -> None:
    """Give all processes the parameters and buffers of the first."""
    agree_on_buffers(fabric, module)
    if fabric.world_size > 1:
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.data, 0)


def _numpy(tensor: Any) -> np.ndarray:
    return torch.as_tensor(tensor).cpu().numpy()


# --- work -------------------------------------------------------------------------------------------------------------


def share_work(fabric: Fabric, work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """``work`` of all items in every process, each doing every ``world_size``-th; the results in order.

    An error in one process is raised in all. ``work`` must not communicate; its results must be picklable.
    """
    if fabric.world_size == 1:
        return [work(item) for item in items]
    with together(fabric):
        mine = [work(item) for item in items[fabric.global_rank :: fabric.world_size]]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, mine)
    return [found[i % fabric.world_size][i // fabric.world_size] for i in range(len(items))]
