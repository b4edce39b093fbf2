"""Processes of a training: their number, and how they exchange arrays and errors.

Every process runs the same program on its share of the images. They communicate by ``torch.distributed``, set up by
Lightning Fabric, which starts them or uses those that torchrun or SLURM started.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from maple.errors import MapleError, TrainError, UsageError
from maple.networks import bfloat16_is_fast, use_fast_allocator
from maple.training.options import TrainOptions

logging.getLogger("lightning_fabric.utilities.rank_zero").setLevel(logging.WARNING)  # names its precision every time


def make_fabric(options: TrainOptions) -> Fabric:
    """Start the processes: one, ``devices`` on this machine, or as many as torchrun or SLURM started."""
    devices, nodes = count_processes(options)
    on_cpu = options.accelerator == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if options.allocator and on_cpu:
        use_fast_allocator()
    precision = options.precision
    if precision == "auto":
        precision = "bf16-mixed" if bfloat16_is_fast("cpu" if on_cpu else None) else "32-true"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fabric's advice on processes and workers does not apply here
        try:
            fabric = Fabric(
                accelerator=options.accelerator,
                strategy="ddp" if devices * nodes > 1 else "auto",
                devices=devices,
                num_nodes=nodes,
                precision=precision,
            )
        except (MisconfigurationException, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            asked = f"--accelerator {options.accelerator} --devices {devices} --precision {precision}"
            raise UsageError(f"cannot train with {asked}: {reason}") from None
        fabric.launch()
    return fabric


# --- number of processes ---------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """The processes that a launcher started."""

    launcher: str
    devices: int  # on this machine
    nodes: int


def count_processes(options: TrainOptions) -> tuple[int, int]:
    """Devices and nodes: those of torchrun or SLURM if one of them started this process, else those of the options.

    An option at its default, 1, follows the launcher; any other number must equal that of the launcher.
    """
    found = find_launch()
    if found is None:
        return options.devices, options.nodes
    for name, asked, there in (("devices", options.devices, found.devices), ("nodes", options.nodes, found.nodes)):
        if asked not in (1, there):
            raise UsageError(f"--{name} is {asked}, but {found.launcher} started {there}: leave --{name} out")
    return found.devices, found.nodes


def find_launch() -> Launch | None:
    """The launch that torchrun or SLURM describes in the environment; None if neither started this process."""
    if TorchElasticEnvironment.detect():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launch("torchrun", devices, int(os.environ["WORLD_SIZE"]) // devices)
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return Launch("SLURM", int(os.environ["SLURM_NTASKS"]) // nodes, nodes)
    return None


# --- agreement -------------------------------------------------------------------------------------------------------


@contextmanager
def together(fabric: Fabric) -> Iterator[None]:
    """A block whose error in one process is raised in all of them.

    Without it the other processes would wait for the failed one for ever. The block itself must not communicate.
    """
    if fabric.world_size == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = torch.tensor(float(error is not None), device=fabric.device)
    torch.distributed.all_reduce(failed)
    if failed:
        errors = _share(fabric, error)
        raise error or errors[0]


@contextmanager
def naming_lost_processes(fabric: Fabric) -> Iterator[None]:
    """A block in which the loss of another process, killed or on a machine that failed, is said in one sentence."""
    try:
        yield
    except RuntimeError as error:
        if fabric.world_size == 1 or not _is_of_connection(error):
            raise
        raise TrainError(
            "another process of this training has ended without a message, killed or lost with its machine: finished "
            "epochs are saved, add --resume to continue"
        ) from None


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether the processes could not communicate; errors of gloo are known by their text only."""
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)


def _share(fabric: Fabric, error: Exception | None) -> list[MapleError]:
    """The errors of all processes, in order of their ranks."""
    if error is not None and not isinstance(error, MapleError):  # of a type that may not be serialisable
        error = TrainError(f"process {fabric.global_rank} failed with {type(error).__name__}: {error}")
    found: list[MapleError | None] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, error)
    return [item for item in found if item is not None]


def gather_rows(fabric: Fabric, rows: np.ndarray, n: int) -> np.ndarray:
    """All ``n`` rows in order on every rank, where rank r of R holds the rows r, r + R, r + 2R, ..."""
    if fabric.world_size == 1:
        return rows
    longest = -(-n // fabric.world_size)
    padded = np.zeros((longest, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    stacked = _numpy(fabric.all_gather(torch.from_numpy(padded).to(fabric.device)))  # (R, longest, ...)
    return stacked.swapaxes(0, 1).reshape(-1, *rows.shape[1:])[:n]


def mean_over_ranks(fabric: Fabric, values: dict[str, float]) -> dict[str, float]:
    """The mean of each value over all processes."""
    mine = torch.tensor(list(values.values()), dtype=torch.float32, device=fabric.device)
    return dict(zip(values, _numpy(fabric.all_reduce(mine, reduce_op="mean")).tolist()))


def agree_on_buffers(fabric: Fabric, module: nn.Module) -> None:
    """Give all processes the buffers (batch-norm statistics) of the first."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, 0)


def _numpy(tensor: Any) -> np.ndarray:
    return torch.as_tensor(tensor).cpu().numpy()
