"""The processes of a training: their number, who starts them, and how they share the network.

Every process runs the same program on its share of the images. They communicate by ``torch.distributed``, set up by
Lightning Fabric; torchrun or SLURM started them, or :mod:`maple.training.processes.children` does on this machine.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from maple.errors import UsageError
from maple.networks import bfloat16_is_fast, use_fast_allocator, use_threads
from maple.training.options import TrainOptions
from maple.training.processes.children import start_children

if TYPE_CHECKING:  # it takes two seconds to import, which only a training needs
    from lightning_fabric import Fabric

_LOGGERS = ("lightning_fabric", "lightning_fabric.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero")


def make_fabric(options: TrainOptions) -> Fabric:
    """Start the processes: one, ``devices`` on this machine, or as many as torchrun or SLURM started."""
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    for name in _LOGGERS:  # after the import, which sets a lower level: a line per process, backend and precision
        logging.getLogger(name).setLevel(logging.WARNING)
    devices, nodes = check_processes(options)
    on_cpu = options.accelerator == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if on_cpu:
        share_threads(devices)
        if options.allocator:
            use_fast_allocator()
    precision = options.precision
    if precision == "auto":
        precision = "bf16-mixed" if bfloat16_is_fast("cpu" if on_cpu else None) else "32-true"
    strategy: Any = "ddp" if devices * nodes > 1 else "auto"
    if options.strategy == "fsdp":
        from maple.training.processes.sharding import sharding_strategy

        strategy = sharding_strategy(devices * nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fabric's advice on processes and workers does not apply here
        try:
            fabric = Fabric(
                accelerator=options.accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=nodes,
                precision=precision,
            )
        except (MisconfigurationException, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            asked = f"--accelerator {options.accelerator} --devices {devices} --precision {precision}"
            raise UsageError(f"cannot train with {asked}: {reason}") from None
        if find_launch() is None:
            start_children(devices)
        fabric.launch()
    return fabric


def share_threads(n_processes: int) -> None:
    """Divide the processors among the processes of this machine, unless ``OMP_NUM_THREADS`` says how many each has.

    With a thread of every process on every processor, processes wait for each other in loops.
    """
    if n_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        use_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // n_processes)))


def check_processes(options: TrainOptions) -> tuple[int, int]:
    """Devices and nodes; refuses what cannot be started, or what ``fsdp`` cannot do."""
    devices, nodes = count_processes(options)
    if nodes > 1 and find_launch() is None:
        line = f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-endpoint FIRST:29500 -m maple train ..."
        raise UsageError(f"--nodes {nodes} needs torchrun or SLURM, which start the same command on all: {line}")
    if options.strategy == "fsdp":
        _check_sharding(options, devices * nodes)
    return devices, nodes


def _check_sharding(options: TrainOptions, n_processes: int) -> None:
    if n_processes == 1:
        raise UsageError("--strategy fsdp divides a network over processes, and there is one: add --devices")
    if options.optimizer == "muon":
        raise UsageError("--optimizer muon needs whole matrices, which --strategy fsdp divides: use --strategy ddp")
    if options.precision == "16-mixed":
        raise UsageError("--precision 16-mixed does not work with --strategy fsdp: use bf16-mixed or 32-true")


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
            raise UsageError(
                f"--{name} is {asked}, but {found.launcher} started {there}: leave --{name} out, or start {asked}"
            )
    return found.devices, found.nodes


def find_launch() -> Launch | None:
    """The launch that torchrun or SLURM describes in the environment; None if neither started this process."""
    from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launch("torchrun", devices, int(os.environ["WORLD_SIZE"]) // devices)
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return Launch("SLURM", int(os.environ["SLURM_NTASKS"]) // nodes, nodes)
    return None
