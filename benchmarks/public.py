"""Public networks of the benchmarks, and their outputs: computed once, kept on disk, shared by all scripts.

Outputs are stored in float16, in parts of 1,000 images, so an interrupted computation continues where it stopped. The
WRN-20-10 has weights of one bit.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.files import load_arrays, save_arrays
from maple.networks import Backbone, embed, wrap_backbone
from maple.types import Outputs
from resnet20 import public_resnet20

PART = 1000  # images per file of the cache
FIT_IMAGES = {"resnet20": 50_000, "densenet": 50_000, "wrn": 10_000}
OOD_IMAGES = {"resnet20": None, "densenet": None, "wrn": 5_000}  # the first of each OOD set; None: all
SHARED_OOD = {"tiny_imagenet": "tiny_imagenet/val", "svhn": "svhn/test"}
NETWORKS = {  # the data set that each was trained on
    "resnet20-cifar10": "cifar10",
    "densenet-cifar10": "cifar10",
    "densenet-cifar100": "cifar100",
    "wrn-cifar10": "cifar10",
    "wrn-cifar100": "cifar100",
}
FILES = {"densenet": "densenet_bc100_12_{}_fp16", "wrn": "wrn20_10_1bit_{}"}


# --- networks ---------------------------------------------------------------------------------------------------------


class Staged(nn.Module):
    """A network as stages of feature maps (in bfloat16 if ``half_maps``), global average pooling and a linear head."""

    def __init__(self, stages: list[nn.Module], fc: nn.Linear) -> None:
        super().__init__()
        self.stages, self.fc, self.half_maps = nn.ModuleList(stages), fc, False

    def maps(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half_maps):
            for stage in self.stages:
                x = stage(x)
        return x.float()  # (N, D, h, w)

    def head(self, maps: Tensor) -> Tensor:
        return self.fc(maps.mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x))


class Call(nn.Module):
    """A function as a module, so that hooks can listen to it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def binary_stages(network: Any) -> list[nn.Module]:
    """The WRN-20-10 of public_networks.py in three stages; the last ends with its normalisation and ReLU."""

    def run(x: Tensor, stage: int) -> Tensor:
        for block in range(3):
            i = 1 + 6 * stage + 2 * block
            down = stage > 0 and block == 0
            h, weight = F.relu(network._norm(x, i)), getattr(network, f"conv{i}")
            h = F.conv2d(F.pad(h, (0, 1, 0, 1)), weight, stride=2) if down else F.conv2d(h, weight, padding=1)
            h = F.conv2d(F.relu(network._norm(h, i + 1)), getattr(network, f"conv{i + 1}"), padding=1)
            if down:  # average pool 3, stride 2, padding not counted; channels doubled with zeros
                ones = F.avg_pool2d(F.pad(torch.ones_like(x[:1, :1]), (0, 1, 0, 1)), 3, 2)
                x = F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2) / ones
                x = torch.cat([x, torch.zeros_like(x)], 1)
            x = x + h
        return x

    first = Call(lambda x: run(F.conv2d(network._norm(x, 0), network.conv0, padding=1), 0))
    last = Call(lambda x: F.relu(network._norm(run(x, 2), 19)))
    return [first, Call(lambda x: run(x, 1)), last]


def load_public(shared: Path) -> Any:
    """The module public_networks.py beside the weights."""
    spec = importlib.util.spec_from_file_location("public_networks", shared / "weights" / "public_networks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_network(name: str, shared: Path) -> tuple[Staged, Any, Any]:
    """A public network in three stages, with the mean and deviation of its input."""
    kind = name.split("-")[0]
    if kind == "resnet20":
        backbone = public_resnet20(shared)
        body: Any = backbone.body
        stages = [nn.Sequential(body.conv1, body.bn1, nn.ReLU(), body.layer1), body.layer2, body.layer3]
        return Staged(stages, backbone.head).eval(), backbone.mean.tolist(), backbone.std.tolist()  # type: ignore[arg-type]
    network, mean, std = load_public(shared).load(FILES[kind].format(NETWORKS[name]))
    if kind == "wrn":
        stages = binary_stages(network)
    else:
        stages = [
            nn.Sequential(network.conv1, network.block1),
            nn.Sequential(network.trans1, network.block2),
            nn.Sequential(network.trans2, network.block3, network.bn1, nn.ReLU()),
        ]
    return Staged(stages, network.fc).eval(), mean, std


# --- outputs ----------------------------------------------------------------------------------------------------------


def cached_outputs(
    folder: Path, name: str, backbone: Callable[[], Backbone], images: ImageSet, n: int | None = None
) -> Outputs:
    """Outputs of the first ``n`` images, from the parts in ``folder``; missing parts are computed and stored."""
    n = len(images) if n is None else min(n, len(images))
    parts = [_part(folder, name, backbone, images, start) for start in range(0, n, PART)]
    merged = {key: np.concatenate([part[key] for part in parts])[:n].astype(np.float32) for key in parts[0]}
    return Outputs(**merged, labels=images.labels[:n])


def _part(
    folder: Path, name: str, backbone: Callable[[], Backbone], images: ImageSet, start: int
) -> dict[str, np.ndarray]:
    path = folder / f"{name}-{len(images)}-{start}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = embed(backbone(), images, indices=np.arange(start, min(start + PART, len(images))))
        arrays = {"embeddings": found.embeddings, "logits": found.logits, "shallow": found.shallow}
        given = {key: np.asarray(value, np.float16) for key, value in arrays.items() if value is not None}
        save_arrays(path, given, {})
    return load_arrays(path)[0]


@dataclass(frozen=True)
class Study:
    """One network with its images and cached outputs."""

    name: str
    shared: Path
    cache: Path
    precision: str = "32-true"
    with_ood: bool = True

    @cached_property
    def network(self) -> tuple[Staged, Any, Any]:
        return load_network(self.name, self.shared)

    @cached_property
    def backbone(self) -> Backbone:
        network, mean, std = self.network
        network.half_maps = self.precision == "bf16-mixed"
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
        return wrap_backbone(
            network, head="fc", mean=mean, std=std, shallow="stages.1", example=torch.zeros(2, 3, 32, 32)
        )

    @cached_property
    def images(self) -> dict[str, ImageSet]:
        """Images to fit on, test images and OOD sets; a part of the training images for slow networks."""
        known = NETWORKS[self.name]
        other = {"cifar100" if known == "cifar10" else "cifar10"}
        sources = {"train": f"{known}/train", "test": f"{known}/test", **{name: f"{name}/test" for name in other}}
        found = {
            name: open_images(source, size=32, data_root=self.shared / "data")
            for name, source in {**sources, **SHARED_OOD}.items()
            if self.with_ood or name in ("train", "test")
        }
        kind = self.name.split("-")[0]
        n = FIT_IMAGES[kind]
        if n < len(found["train"]):
            rows = np.random.default_rng(0).permutation(len(found["train"]))[:n]
            found["train"] = found["train"].subset(np.sort(rows))
        known = ("train", "test")
        return {
            name: of if name in known else of.subset(np.arange(len(of))[: OOD_IMAGES[kind]])
            for name, of in found.items()
        }

    @property
    def ood(self) -> list[str]:
        return [name for name in self.images if name not in ("train", "test")]

    @cached_property
    def outputs(self) -> dict[str, Outputs]:
        return {name: self.first(name) for name in self.images}

    def first(self, name: str, n: int | None = None) -> Outputs:
        """Outputs of all images of a set, or of the first ``n``."""
        folder = self.name if self.precision == "32-true" else f"{self.name}-bf16"
        return cached_outputs(self.cache / folder, name, lambda: self.backbone, self.images[name], n)

    @cached_property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the test images: for validation, and to be measured on."""
        validation, measured = np.split(np.random.default_rng(0).permutation(len(self.images["test"])), 2)
        return np.sort(validation), np.sort(measured)

    @cached_property
    def measured(self) -> dict[str, Outputs]:
        """The outputs that detectors are measured on."""
        return {"test": self.outputs["test"][self.halves[1]], **{name: self.outputs[name] for name in self.ood}}

    def measured_images(self, n: int) -> dict[str, ImageSet]:
        rows = {"test": self.halves[1][:n]}
        return {name: self.images[name].subset(rows.get(name, np.arange(n))) for name in ("test", *self.ood)}


# --- arguments --------------------------------------------------------------------------------------------------------


def study_parser(description: str | None, results: str) -> argparse.ArgumentParser:
    """The arguments of a script that measures networks, or prints the table of those in ``results``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["measure", "table"], default="measure")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--cache", type=Path, help="folder of the outputs, outside the project")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"], help="of the networks")
    parser.add_argument("--json", type=Path, default=Path(results), help="read and written")
    return parser


def parse_study(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of :func:`study_parser`, which measures with a folder for the outputs only."""
    arguments = parser.parse_args()
    if arguments.mode == "measure" and arguments.cache is None:
        parser.error("--cache is needed: a folder outside the project for the outputs of the networks")
    return arguments
