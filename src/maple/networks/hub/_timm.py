"""Architectures of timm: ``timm/NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from maple.data.decode import Fit
from maple.networks.hub.base import Preprocessing, check_name, import_extra
from maple.networks.origin import Origin


def make(origin: Origin) -> nn.Module:
    """The architecture with random weights."""
    timm = import_extra("timm")
    name = origin.spec.removeprefix("timm/")
    if not timm.is_model(name):
        check_name(name, timm.list_models(), "timm")
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    options = {"img_size": origin.image_size} if fixed and origin.image_size else {}
    return timm.create_model(name, pretrained=False, num_classes=origin.n_classes, **options)


def read_preprocessing(origin: Origin, module: nn.Module) -> Preprocessing:
    """From the model's own configuration; empty for modules of other packages."""
    settings: Mapping[str, Any] = dict(getattr(module, "pretrained_cfg", None) or {})
    fits: dict[str, Fit] = {"center": "crop", "squash": "stretch", "border": "pad"}
    size = settings["input_size"][-1] if "input_size" in settings else None
    return Preprocessing(settings.get("mean"), settings.get("std"), size, fits.get(settings.get("crop_mode", "")))
