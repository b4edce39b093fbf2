"""The network that a training starts from, ``maple train --init``: a trained network or a run.

It keeps its weights, its normalisation and the size of its images, and its head where that is a linear one for these
classes. A copy lies in the run folder while the training lasts, so that it can be resumed without the original.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from maple.data.batches import to_input
from maple.data.decode import Fit
from maple.data.image_set import ImageSet
from maple.errors import MapleError, UsageError
from maple.files import RunFile, expand_home
from maple.networks import GRAPHS, Backbone, Origin, embed, evaluating, find_kind, needs_weights, open_model
from maple.prediction.store import load_predictor
from maple.runs.setup.config import RunConfig
from maple.training.head import count_outputs, prepare_backbone
from maple.training.recipe import Recipe, find_recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MOST_CHANGE = 0.05  # of an embedding, relative to its length, by a recipe that prepares a trained network


@dataclass(frozen=True, eq=False)
class Start:
    """A trained network, with the images and classes that it was made for."""

    backbone: Backbone
    fit: Fit | None = None  # how its images became square, if known
    class_names: tuple[str, ...] = ()  # in the order of its head's outputs, if known
    recipe: str | None = None  # that its head belonged to, if that was removed


def open_start(
    spec: str,
    *,
    weights: Path | None = None,
    head: str | None = None,
    size: int | None = None,
    trust: bool = False,
) -> Start:
    """Open what ``--init`` names: a run folder, or a network of :func:`~maple.networks.open_model` that can be trained.

    ``size`` is that of the images, if not the network's own.
    """
    folder = expand_home(spec)
    if folder.is_dir() and any((folder / name).is_file() for name in (RunFile.DETECTOR, RunFile.CONFIG)):
        if weights is not None or head is not None:
            raise UsageError(f"'{spec}' is a run with its own weights: leave out --weights and --head")
        return _open_run(folder, size, trust)
    check_weights(spec, weights)
    _check_kind(find_kind(spec), spec)
    backbone = open_model(spec, weights=weights, head=head, size=size, trust=trust)
    origin = backbone.origin or Origin()
    names = origin.class_names
    numbered = names == tuple(f"LABEL_{i}" for i in range(len(names)))  # what Hugging Face calls classes without names
    return Start(backbone, origin.fit, () if numbered else names)


def _open_run(folder: Path, size: int | None, trust: bool) -> Start:
    """The network of a finished run, without a head that belongs to a recipe."""
    predictor = load_predictor(folder, trust=trust)
    backbone = predictor.backbone
    _check_kind((backbone.origin or Origin()).kind, str(folder))
    recipe = None if backbone.made_by is None else backbone.made_by.recipe
    if recipe is not None:
        if not find_recipe(recipe).kind.own_head:
            raise UsageError(
                f"the run '{folder}' of recipe '{recipe}' averages several networks, and --init needs a single one: "
                "start from a run of another recipe"
            )
        backbone.head, backbone.made_by = None, None
    backbone.size = size or predictor.size
    return Start(backbone, predictor.fit, predictor.class_names, recipe)


def check_weights(spec: str, weights: Path | None) -> None:
    """Refuse an architecture alone."""
    if weights is None and needs_weights(spec):
        raise UsageError(
            f"'{spec}' is a network without weights: give them with --weights FILE (nothing is downloaded)"
        )


def _check_kind(kind: str | None, spec: str) -> None:
    """Refuse compiled networks: their layers have no training mode."""
    if kind in (*GRAPHS, "onnx"):
        raise UsageError(
            f"'{spec}' is a compiled graph, which cannot be trained: use it as it is with maple fit, or open the "
            "module it was made from with python:package.module:function"
        )


def follow_network(config: RunConfig, size: int | None, fit: Fit | None, given: Collection[str]) -> RunConfig:
    """The options with the network's size and shape of images, except those that were ``given``."""
    data = dataclasses.replace(
        config.data,
        size=config.data.size if size is None else size,
        fit=config.data.fit if "fit" in given or fit is None else fit,
    )
    return dataclasses.replace(config, data=data)


def describe_network(backbone: Backbone) -> str:
    """One line about a network: embedding, logits, what it does to images, and its intermediate layer."""
    mean, std = (", ".join(f"{value:g}" for value in part.tolist()) for part in (backbone.mean, backbone.std))
    n_outputs = 0 if backbone.head is None else count_outputs(backbone.head, backbone.head_size)
    head = f"{n_outputs} logits" if n_outputs else "no head"
    shallow = "none" if backbone.shallow is None else f"'{backbone.shallow}'"
    return (
        f"{backbone.name}: embedding of {backbone.embedding_size}, {head}; mean {mean} and deviation {std} of images; "
        f"intermediate layer for the score: {shallow}"
    )


# --- its head ---------------------------------------------------------------------------------------------------------


def why_new_head(start: Start, class_names: Sequence[str]) -> str | None:
    """The reason why the network needs a new head for these classes; ``None`` if it keeps its own.

    >>> from maple.networks import create_backbone
    >>> start = Start(create_backbone("resnet9", n_classes=2), class_names=("cat", "dog"))
    >>> why_new_head(start, ["dog", "cat"])
    >>> why_new_head(start, ["fox", "cat"])
    'its own is for other classes'
    """
    head = start.backbone.head
    if head is None:
        return "it has none of its own" if start.recipe is None else f"its own belongs to recipe '{start.recipe}'"
    if not isinstance(head, nn.Linear):
        return f"its own is a {type(head).__name__}, not linear"
    if head.out_features != len(class_names):
        return f"its own has {head.out_features} outputs"
    if start.class_names and set(start.class_names) != set(class_names):
        return "its own is for other classes"
    return None


# --- whether it can be trained ----------------------------------------------------------------------------------------


@contextmanager
def _refusing(failure: str, remedy: str) -> Iterator[None]:
    """Turn an error of foreign code, which may be any, into one that says what failed."""
    try:
        yield
    except MapleError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{failure} ({type(error).__name__}: {reason}): {remedy}") from error


def try_image(backbone: Backbone, images: ImageSet) -> None:
    """Run the network on an image, so that a failure is known before the run folder is written."""
    failure = f"'{backbone.name}' failed on an image of {images.size} pixels"
    with _refusing(failure, "give the size that it takes with --size"):
        embed(backbone, images, indices=np.arange(1))


def leave_out_unused(backbone: Backbone, images: ImageSet) -> None:
    """Mark parameters that have no part in the embedding as not to be trained, in place.

    They would learn nothing, and several processes would wait for their gradients without end.
    """
    body = (*backbone.body.parameters(), *backbone.embedding_layer.parameters())
    learning = [parameter for parameter in body if parameter.requires_grad]
    x = to_input(torch.from_numpy(images.read(0)[None])).to(backbone.mean.device)
    with evaluating(backbone), torch.enable_grad():
        embedding = backbone.embed(x)
        if not learning or not embedding.requires_grad:
            raise UsageError(
                f"'{backbone.name}' has no weights that can be trained: use it as it is with maple fit, or let them "
                "require gradients"
            )
        gradients = torch.autograd.grad(embedding.sum(), learning, allow_unused=True)
    for parameter, gradient in zip(learning, gradients):
        parameter.requires_grad_(gradient is not None)


def try_recipe(recipe: Recipe, start: Backbone, n_outputs: int, fabric: Fabric, images: ImageSet) -> None:
    """Refuse a recipe that cannot prepare a trained network, or would change what that computes before it learns.

    Those that bound layers do so where weights are larger than their bound.
    """
    trial = copy.deepcopy(start)
    with _refusing(f"recipe '{recipe.name}' cannot prepare the layers of '{start.name}'", "choose another recipe"):
        prepare_backbone(trial, recipe, n_outputs, fabric)
        before, after = (embed(one, images, indices=np.arange(1), logits=False).embeddings for one in (start, trial))
    if np.linalg.norm(after - before) > MOST_CHANGE * np.linalg.norm(before):
        raise UsageError(
            f"recipe '{recipe.name}' bounds the layers of '{start.name}', which would change its embedding before the "
            "first step: choose another recipe, or train a new network with this one, without --init"
        )
