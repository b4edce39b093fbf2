"""Preparing a network for a recipe: its head, its record, and the checks before a training starts."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from maple.errors import UsageError
from maple.networks import Backbone, MadeBy
from maple.training.maple import MapleRecipe
from maple.training.recipe import RECIPES, Recipe


def prepare_backbone(backbone: Backbone, recipe: Recipe, n_outputs: int, fabric: Fabric) -> None:
    """Give a backbone the head of the recipe and let the recipe change it, in place."""
    if recipe.one_process and fabric.world_size > 1:
        raise UsageError(f"recipe '{recipe.name}' trains in one process: leave out --devices and --nodes")
    backbone.head = fit_head(backbone, recipe, n_outputs)
    backbone.made_by = describe_maker(recipe, n_outputs)
    recipe.prepare(backbone)


def fit_head(backbone: Backbone, recipe: Recipe, n_outputs: int) -> nn.Module:
    """The head of the backbone, if it has ``n_outputs``; a new one if it has none or the recipe brings its own."""
    if backbone.branch and not isinstance(recipe, MapleRecipe):
        raise UsageError(f"the head of recipe '{recipe.name}' reads the embedding: leave out --embedding-branch")
    if backbone.head is None or recipe.own_head:
        return recipe.build_head(backbone.head_size, n_outputs).to(backbone.mean.device)
    found = count_outputs(backbone.head, backbone.head_size)
    if found != n_outputs:
        raise UsageError(
            f"the head of the backbone has {found} outputs, but there are {n_outputs} classes: "
            "set backbone.head = None to start with a new head"
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
