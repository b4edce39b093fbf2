"""Reading weight files into backbones, without pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from maple.errors import UsageError, is_out_of_memory
from maple.files import check_weights_file
from maple.networks.backbone import Backbone
from maple.networks.head_finder import Pick
from maple.text import shorten_list


def load_weights(backbone: Backbone, path: str | Path) -> Backbone:
    """Load a weights file into the backbone and return it. Untrusted files are safe: pickle is not used.

    Reads ``.safetensors`` and the files that ``torch.load(weights_only=True)`` reads: a state dictionary, or a
    checkpoint with one under ``state_dict`` or ``model``; a ``module.`` in front of every name is dropped. The names
    are those of a backbone, or of the network inside it; then the one layer that the body lacks is the head. The
    backbone is changed only if all tensors fit.
    """
    path = Path(path)
    load_state(backbone, rename_state(read_state(path), backbone, path), path, backbone.name)
    return backbone


def load_state(module: nn.Module, state: Mapping[str, Tensor], path: Path, name: str) -> None:
    """Load tensors read from ``path`` into a network called ``name``, only if all of them fit."""
    own = module.state_dict()
    if further := [key for key in state if key not in own]:
        raise UsageError(f"'{path}' also contains {shorten_list(further)}: it belongs to another network than '{name}'")
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    missing = [key for key in missing if key not in ("mean", "std")]
    if missing:
        raise UsageError(f"'{path}' lacks {shorten_list(missing)}: it belongs to another network than '{name}'")
    for key, value in state.items():
        a_number = own[key].ndim == 0 and value.numel() == 1  # some files store it as a vector (1,)
        if value.shape != own[key].shape and not a_number:
            raise UsageError(
                f"'{path}' has {key} of shape {tuple(value.shape)}, the backbone {tuple(own[key].shape)}: "
                "create the backbone with the network, number of classes and embedding size of the file"
            )
    module.load_state_dict({**own, **state})


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name, without a ``module.`` in front of all of them; see ``load_weights``."""
    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            return _without_wrapper(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(f"'{path}' holds pickled objects, which could run code: save its state_dict()") from None
    except Exception as error:  # the unpickler raises whatever a damaged file makes of its stack
        if is_out_of_memory(error):
            raise
        raise UsageError(f"cannot read the weights '{path}' ({error}): is the file complete?") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UsageError(f"'{path}' contains no state dictionary: save it as torch.save(model.state_dict(), ...)")
    return _without_wrapper(dict(content))


def _without_wrapper(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the ``module.`` that DataParallel puts in front of every name."""
    wrapped = all(key.startswith("module.") for key in state)
    return {key.removeprefix("module."): value for key, value in state.items()} if wrapped else state


def rename_state(state: dict[str, Tensor], backbone: Backbone, path: Path) -> dict[str, Tensor]:
    """Translate the names of the file into those of the backbone."""
    own = backbone.state_dict()
    if all(key in own for key in state):
        return state
    prefix = "body.module." if isinstance(backbone.body, Pick) else "body."
    renamed = {prefix + key: value for key, value in state.items() if prefix + key in own}
    left = {key: value for key, value in state.items() if prefix + key not in own}
    layers = {key.rpartition(".")[0] for key in left}
    if len(layers) == 1:
        renamed |= {f"head.{key.rpartition('.')[2]}": value for key, value in left.items()}
    if len(layers) > 1 or any(key not in own for key in renamed):
        raise UsageError(f"'{path}' also contains {shorten_list(list(left))}, which '{backbone.name}' does not have")
    return renamed
