"""The head of a network in training: the one that its recipe starts with, and its growth when classes are split.

:func:`prepare_backbone` gives a backbone the head of a recipe. :func:`grow_backbone` replaces it after a split and
returns the state with which the optimiser continues: :func:`~maple.training.loop.train_backbone` makes a new optimiser
from it, an own loop exchanges the parameters of its optimiser with :func:`replace_head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from maple.errors import UsageError
from maple.networks import Backbone, MadeBy
from maple.training.maple import MapleRecipe
from maple.training.recipe import RECIPES, Recipe
from maple.types import Relabelling

if TYPE_CHECKING:
    from lightning_fabric import Fabric

HEAD = "head."  # how the names of the head's parameters begin
NamedState = dict[str, dict[str, Tensor]]  # state of an optimiser by parameter name


def prepare_backbone(backbone: Backbone, recipe: Recipe, n_outputs: int, fabric: Fabric) -> None:
    """Give a backbone the head of the recipe and let the recipe change it, in place."""
    if recipe.one_process and fabric.world_size > 1:
        raise UsageError(f"recipe '{recipe.name}' trains in one process: leave out --devices and --nodes")
    backbone.head = fit_head(backbone, recipe, n_outputs)
    backbone.made_by = describe_maker(recipe, n_outputs)
    recipe.prepare(backbone)


def fit_head(backbone: Backbone, recipe: Recipe, n_outputs: int) -> nn.Module:
    """The head of the backbone, if it has ``n_outputs``; a new one if it has none or the recipe brings its own."""
    if backbone.branch and not recipe.takes_branch:
        raise UsageError(f"the head of recipe '{recipe.name}' reads the embedding: leave out --embedding-branch")
    if backbone.head is None or recipe.own_head:
        return recipe.build_head(backbone.head_size, n_outputs).to(backbone.mean.device)
    found = count_outputs(backbone.head, backbone.head_size)
    if found != n_outputs:
        raise UsageError(
            f"the head has {found} outputs for {n_outputs} classes: set backbone.head = None for a new one"
        )
    return backbone.head


def describe_maker(recipe: Recipe, n_outputs: int) -> MadeBy | None:
    """How to build the network of a recipe again; ``None`` if it is one of ``create_backbone``."""
    if isinstance(recipe, MapleRecipe):
        return None
    options = {key: value for key, value in recipe.options().items() if key != "recipe"}
    return MadeBy(recipe.name, options, n_outputs, plugin=RECIPES.plugin_of(recipe.name))


def count_outputs(head: nn.Module, head_size: int) -> int:
    """The number of logits of a head: its ``out_features``, else found by calling it.

    >>> count_outputs(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), head_size=8)
    3
    """
    if isinstance(n_outputs := getattr(head, "out_features", None), int):
        return n_outputs
    like = next(head.parameters(), torch.empty(0))
    mode = head.training
    with torch.no_grad():
        logits = head.eval()(like.new_zeros(1, head_size))
    head.train(mode)
    return logits.shape[1]


def head_for(head: nn.Module, recipe: Recipe, head_size: int, weights: dict[str, Tensor], n: int) -> nn.Module:
    """A head with ``n`` outputs into which the weights of a checkpoint fit; ``head`` itself if it does."""
    if isinstance(head, nn.Linear):
        return nn.Linear(head_size, n, bias="head.bias" in weights)
    if count_outputs(head, head_size) == n:
        return head
    return recipe.build_head(head_size, n)


# --- growth -----------------------------------------------------------------------------------------------------------


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> NamedState:
    """The state of the optimiser by parameter name."""
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }


def set_named_state(optimizer: torch.optim.Optimizer, module: nn.Module, state: NamedState) -> None:
    """Give the optimiser a state by parameter name; parameters without an entry start without one."""
    for name, parameter in module.named_parameters():
        if name in state:
            optimizer.state[parameter] = dict(state[name])


def inherit_rows(state: NamedState, prefix: str, parents: np.ndarray) -> None:
    """Give each new row of the head the momentum of its parent's row, in place."""
    index = torch.from_numpy(parents)
    for name, values in state.items():
        if name.startswith(prefix):
            values.update({key: value[index] for key, value in values.items() if np.ndim(value) > 0})


def grow_backbone(backbone: Backbone, recipe: Recipe, after: Relabelling, state: NamedState) -> NamedState:
    """Give the backbone a head for the clusters of ``after``, in place; returns the state of its optimiser.

    The state of other layers is kept, that of the head if its new rows continue former ones.

    >>> from maple.networks import create_backbone
    >>> split = Relabelling(np.array([0, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0.5, 0.5, 1.0]))
    >>> backbone = create_backbone("resnet9", n_classes=2)
    >>> momentum = {"momentum_buffer": torch.tensor([1.0, 2.0])}
    >>> state = grow_backbone(backbone, MapleRecipe(), split, {"head.bias": momentum, "body.0.weight": {}})
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


def _has_rows(values: Mapping[str, Tensor], shape: torch.Size) -> bool:
    """Whether each tensor of a state is a number or has the parameter's shape; not so in Adafactor."""
    return all(np.ndim(value) == 0 or value.shape == shape for value in values.values())


def replace_head(optimizer: torch.optim.Optimizer, before: nn.Module, backbone: Backbone, state: NamedState) -> None:
    """Let an optimiser continue with the backbone's head instead of the head ``before``, in place.

    Each parameter takes the place of the former one in its group; a parameter that the former head did not have (a
    bias) joins the first of these groups. ``state`` is the result of :func:`grow_backbone`.
    """
    assert backbone.head is not None
    old, new = dict(before.named_parameters()), dict(backbone.head.named_parameters())
    check_optimizes(optimizer, before)
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


def optimizes(optimizer: torch.optim.Optimizer, head: nn.Module) -> bool:
    """Whether an optimiser has all parameters of a head."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return all(parameter in known for parameter in head.parameters())


def check_optimizes(optimizer: torch.optim.Optimizer, head: nn.Module) -> None:
    """Raise ``UsageError`` for an optimiser that does not train the head."""
    if not optimizes(optimizer, head):
        raise UsageError("the optimiser lacks parameters of the head: create it with backbone.parameters()")
