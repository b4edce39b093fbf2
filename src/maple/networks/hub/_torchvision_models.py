"""Architectures of torchvision: ``torchvision/NAME``."""

from __future__ import annotations

from typing import Any

from torch import nn

from maple.networks._torchvision import import_torchvision
from maple.networks.hub.base import Preprocessing, check_name
from maple.networks.origin import Origin


def make(origin: Origin) -> nn.Module:
    """The architecture with random weights."""
    models = import_torchvision().models
    name = origin.spec.removeprefix("torchvision/")
    check_name(name, models.list_models(module=models), "torchvision")
    options: dict[str, Any] = {}
    if name.startswith("vit_") and origin.image_size:
        options["image_size"] = origin.image_size
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # theirs takes minutes, and the weights are loaded anyway
    return models.get_model(name, weights=None, num_classes=origin.n_classes, **options)


def read_preprocessing(origin: Origin, module: nn.Module) -> Preprocessing:
    """From the transforms that belong to torchvision's default weights."""
    models = import_torchvision().models
    settings = models.get_model_weights(origin.spec.removeprefix("torchvision/")).DEFAULT.transforms()
    return Preprocessing(settings.mean, settings.std, settings.crop_size[0], "crop")
