"""Modules made by timm, by torchvision, or by a function of the user."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from maple.errors import UsageError
from maple.networks._torchvision import import_extra, import_torchvision
from maple.networks.backbone import Preprocessing
from maple.networks.origin import Origin


def make_timm(origin: Origin) -> nn.Module:
    """The architecture ``timm/NAME`` with random weights."""
    timm = import_extra("timm")
    name = origin.spec.removeprefix("timm/")
    if not timm.is_model(name):
        _check_name(name, timm.list_models(), "timm")
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    options = {"img_size": origin.image_size} if fixed and origin.image_size else {}
    return timm.create_model(name, pretrained=False, num_classes=origin.n_classes, **options)


def resample_positions(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the position embedding of a timm transformer interpolated to the grid of ``module``.

    A ViT has one embedding (1, prefix + H x W, D) per patch, so that weights of 224 pixels fit no other size.
    """
    own, given = module.state_dict().get("pos_embed"), state.get("pos_embed")
    grid = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    if own is None or given is None or grid is None or own.shape == given.shape or own.shape[-1] != given.shape[-1]:
        return state
    prefix = own.shape[1] - grid[0] * grid[1]  # class tokens and the like, if they have a position
    if own.ndim != 3 or given.ndim != 3 or prefix < 0 or isqrt(given.shape[1] - prefix) ** 2 != given.shape[1] - prefix:
        return state
    resample = import_extra("timm").layers.resample_abs_pos_embed
    return {**state, "pos_embed": resample(given, new_size=list(grid), num_prefix_tokens=prefix)}


def make_torchvision(origin: Origin) -> nn.Module:
    """The architecture ``torchvision/NAME`` with random weights."""
    models = import_torchvision().models
    name = origin.spec.removeprefix("torchvision/")
    _check_name(name, models.list_models(module=models), "torchvision")
    options: dict[str, Any] = {}
    if name.startswith("vit_") and origin.image_size:
        options["image_size"] = origin.image_size
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # takes minutes, and the weights are loaded anyway
    return models.get_model(name, weights=None, num_classes=origin.n_classes, **options)


def torchvision_preprocessing(origin: Origin) -> Preprocessing:
    """From the transforms that belong to torchvision's default weights."""
    models = import_torchvision().models
    settings = models.get_model_weights(origin.spec.removeprefix("torchvision/")).DEFAULT.transforms()
    return Preprocessing(settings.mean, settings.std, settings.crop_size[0], "crop")


def _check_name(name: str, known: Sequence[str], package: str) -> None:
    """Raise ``UsageError`` with the nearest name if ``package`` has no network ``name``."""
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{package}/{nearest[0]}'?" if nearest else f"{package}'s list_models() lists the names"
        raise UsageError(f"unknown network '{package}/{name}': {hint}")


def make_python(origin: Origin) -> nn.Module:
    """Import the module of ``python:package.module:function`` and call its function."""
    spec = origin.spec
    name, _, function = spec.removeprefix("python:").partition(":")
    if not name or not function:
        raise UsageError(f"'{spec}' has no function: write python:package.module:function")
    with _current_folder_importable():
        try:
            make = getattr(import_module(name), function)
        except ImportError as error:
            raise UsageError(f"'{spec}' cannot be imported ({error}): install it, or change to its folder") from None
        except AttributeError:
            raise UsageError(f"the module '{name}' has no function '{function}': check '{spec}'") from None
        try:
            module = make()
        except Exception as error:  # the function may raise anything
            raise UsageError(f"'{spec}' failed ({type(error).__name__}: {error}): fix the function") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"'{spec}' returned {type(module).__name__}: let it return a torch.nn.Module")
    return module


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Inside the block, modules in the current folder can be imported; installed ones take precedence."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
