"""Deep ensembles: average probabilities of networks trained from different seeds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn

from maple.baselines.base import CrossEntropy, average_logits
from maple.errors import UsageError
from maple.networks import Backbone, EnsembleBody
from maple.options import option
from maple.training.recipe import register_recipe
from maple.types import About

MAX_MEMBERS = 100  # of an ensemble: the seed of a member is the seed of the ensemble times this, plus its number


class EnsembleHead(nn.Module):
    """Heads of the members, each on its part of the embedding; gives logits of their average probabilities."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, embeddings: Tensor) -> Tensor:
        parts = embeddings.chunk(len(self.members), dim=1)
        return average_logits(torch.stack([head(part) for head, part in zip(self.members, parts)]))


def join_members(members: Sequence[Backbone]) -> Backbone:
    """The ensemble of several backbones as one; they must have equal embedding size and normalisation.

    >>> from maple.networks import create_backbone
    >>> ensemble = join_members([create_backbone("resnet9", n_classes=10) for _ in range(3)])
    >>> ensemble.embedding_size
    384
    """
    first = members[0]
    heads = [member.head for member in members if member.head is not None]
    if len(heads) < len(members):
        raise UsageError("a member of the ensemble has no head: train it first")
    for member in members[1:]:
        same = (member.mean.allclose(first.mean), member.std.allclose(first.std))
        if not all(same) or member.embedding_size != first.embedding_size:
            raise UsageError("members of an ensemble differ in size or normalisation: train them on the same images")
    return Backbone(
        EnsembleBody([nn.Sequential(member.body, member.embedding_layer) for member in members]),
        EnsembleHead(heads),
        embedding_size=first.embedding_size * len(members),
        mean=first.mean.tolist(),
        std=first.std.tolist(),
        name=first.name,
        size=first.size,
        memory_format=first.memory_format,
        shallow=f"members.0.0.{first.shallow}" if first.shallow else None,
    ).to(first.mean.device)


@register_recipe("ensemble")
@dataclass(frozen=True, kw_only=True)
class EnsembleRecipe(CrossEntropy):
    """Deep ensemble (Lakshminarayanan et al. 2017): the average of networks trained from different seeds.

    Members are trained one by one by :func:`~maple.baselines.ensemble_training.train_ensemble`.
    """

    members: Annotated[int, Interval(ge=1, le=MAX_MEMBERS)] = option(
        5, "networks in the ensemble (the paper has 10, 3 for ImageNet)"
    )

    about: ClassVar[About] = About(
        "Deep ensemble",
        "Lakshminarayanan et al. 2017",
        "https://arxiv.org/abs/1612.01474",
        passes="one per member",
        adds="the weights of every further member",
    )

    def rebuild(self, backbone: Backbone) -> Backbone:
        joined = join_members([copy.deepcopy(backbone) for _ in range(self.members)])
        joined.made_by, joined.origin = backbone.made_by, backbone.origin
        return joined
