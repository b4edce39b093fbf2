"""How a head and its optimiser grow when classes are split while a network is trained.

The optimiser belongs to whoever owns the loop: :func:`~maple.training.loop.train_backbone` makes a new one from the
state that
:func:`grow_head` returns, and a loop of someone's own keeps its optimiser, in which :func:`replace_head` exchanges the
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks import Backbone
from maple.training.recipe import Recipe
from maple.types import Outputs, Relabelling

HEAD = "head."  # how the names of the head's parameters begin
NamedState = dict[str, dict[str, torch.Tensor]]  # of an optimiser: parameter name, then what it keeps of it


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> NamedState:
    """The optimiser's state by parameter name."""
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }


def set_named_state(optimizer: torch.optim.Optimizer, module: nn.Module, state: NamedState) -> None:
    """Give the optimiser a state by parameter name; parameters without an entry start afresh."""
    for name, parameter in module.named_parameters():
        if name in state:
            optimizer.state[parameter] = dict(state[name])


def inherit_rows(state: NamedState, prefix: str, parents: np.ndarray) -> None:
    """Let each new row of the head carry the momentum of its parent's row, in place."""
    index = torch.from_numpy(parents)
    for name, values in state.items():
        if name.startswith(prefix):
            values.update({key: value[index] for key, value in values.items() if np.ndim(value) > 0})


def grow_head(backbone: Backbone, recipe: Recipe, after: Relabelling, state: NamedState) -> NamedState:
    """Give the backbone a head for the clusters of ``after``, in place; what its optimiser goes on with.

    The optimiser keeps what it knows, of the head where its rows live on.

    >>> from maple.networks import create_backbone
    >>> from maple.training.maple import MapleRecipe
    >>> split = Relabelling(np.array([0, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0.5, 0.5, 1.0]))
    >>> backbone = create_backbone("resnet9", n_classes=2)
    >>> momentum = {"momentum_buffer": torch.tensor([1.0, 2.0])}
    >>> state = grow_head(backbone, MapleRecipe(), split, {"head.bias": momentum, "body.0.weight": {}})
    >>> backbone.head.out_features, state["head.bias"]["momentum_buffer"]
    (3, tensor([1., 1., 2.]))
    """
    assert backbone.head is not None
    shapes = {HEAD + name: parameter.shape for name, parameter in backbone.head.named_parameters()}
    backbone.head, inherits = recipe.grow_head(backbone.head, after)
    kept = {
        name: values
        for name, values in state.items()
        if not name.startswith(HEAD) or (inherits and _has_rows(values, shapes[name]))
    }
    if inherits:
        inherit_rows(kept, HEAD, after.parents)
    return kept


def _has_rows(values: Mapping[str, torch.Tensor], shape: torch.Size) -> bool:
    """Whether all that an optimiser keeps of a parameter is single numbers or has its shape; Adafactor's has not."""
    return all(np.ndim(value) == 0 or value.shape == shape for value in values.values())


def replace_head(optimizer: torch.optim.Optimizer, before: nn.Module, backbone: Backbone, state: NamedState) -> None:
    """Let an optimiser go on with the backbone's head in the place of the one it had ``before``, in place.

    Each parameter stays in the group of the one that it takes the place of; one that the former head had not (a bias)
    joins the first of these. ``state`` is what :func:`grow_head` returned.
    """
    assert backbone.head is not None
    old, new = dict(before.named_parameters()), dict(backbone.head.named_parameters())
    check_knows_head(optimizer, before)
    names = {parameter: name for name, parameter in old.items()}
    further = [name for name in new if name not in old]
    for group in optimizer.param_groups:
        if not any(parameter in names for parameter in group["params"]):
            continue
        group["params"] = [new[names[p]] if p in names else p for p in group["params"]]
        group["params"] += [new[name] for name in further]
        if "param_names" in group:
            group["param_names"] += [HEAD + name for name in further]
        further = []
    for parameter in old.values():
        optimizer.state.pop(parameter, None)
    set_named_state(optimizer, backbone, {name: values for name, values in state.items() if name.startswith(HEAD)})


def knows_head(optimizer: torch.optim.Optimizer, head: nn.Module) -> bool:
    """Whether an optimiser trains all parameters of a head."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return all(parameter in known for parameter in head.parameters())


def check_knows_head(optimizer: torch.optim.Optimizer, head: nn.Module) -> None:
    """Refuse an optimiser that would leave a head as it is."""
    if not knows_head(optimizer, head):
        raise UsageError(
            "the optimiser does not know the head of the backbone, which would stay as it is: make it with "
            "backbone.parameters()"
        )


def probability_shift(
    recipe: Recipe, backbone: Backbone, after: Relabelling, validation: Outputs, probabilities: np.ndarray
) -> float:
    """How far the last relabelling moved any class probability (N, C) of the validation images."""
    assert backbone.head is not None
    with torch.no_grad():
        embeddings = torch.from_numpy(validation.embeddings).to(backbone.mean.device)
        logits = backbone.head(embeddings).float().cpu().numpy()
    moved = Outputs(validation.embeddings, logits, cluster_to_class=after.cluster_to_class)
    return float(np.abs(recipe.class_probabilities(moved) - probabilities).max())
