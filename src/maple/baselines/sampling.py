"""Averages over several networks: MC-Dropout and deep ensembles, each a backbone like any other.

Both average probabilities. So that every detector finds what it reads, the averages are given as logits log p + F,
where p is the average probability of a class and F the mean log-sum-exp of the parts: the softmax of these logits is
the average probability, and their log-sum-exp the average of those of the parts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn import functional as F

from maple.errors import UsageError
from maple.networks import Backbone, EnsembleBody, listening
from maple.options import Range, option
from maple.training.loss import LossTerm
from maple.training.recipe import Recipe, Step, register_recipe
from maple.types import About

MAX_MEMBERS = 100  # of an ensemble: the seed of a member is the seed of the ensemble times this, plus its number


def average_logits(logits: Tensor) -> Tensor:
    """Logits (N, C) of the average probabilities of S parts, from theirs (S, N, C).

    >>> parts = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]]).log()
    >>> average_logits(parts).softmax(dim=1)
    tensor([[0.6000, 0.4000]])
    """
    log_mean = logits.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(logits))  # (N, C)
    return log_mean + logits.logsumexp(dim=2).mean(dim=0)[:, None]


class CrossEntropy(Recipe):
    """The loss of a network that is trained like any other."""

    def loss(self, step: Step) -> dict[str, LossTerm]:
        return {"cross_entropy": LossTerm(F.cross_entropy(step.logits, step.targets))}


# --- MC-Dropout ------------------------------------------------------------------------------------------------------


def dropout_mask(shape: Sequence[int], share: float, generator: torch.Generator) -> Tensor:
    """One draw of inverted dropout: 0 with probability ``share``, else 1 / (1 - share), so that it is 1 on average.

    >>> dropout_mask((8,), 0.5, torch.Generator().manual_seed(0))
    tensor([0., 2., 0., 0., 0., 2., 0., 2.])
    """
    return (torch.rand(tuple(shape), generator=generator) >= share).float() / (1 - share)


class SampledBackbone(Backbone):
    """A backbone whose logits, in evaluation mode, are averages over ``n_samples`` passes with dropout.

    **Sample s is one thinned network.** Its masks are drawn from the seed s alone, one for each dropout layer, and all
    images share them. A mask leaves out single units (a channel at one position), as those of the training do. For any
    one image this is as good a draw of the dropout distribution as a mask of its own, so that the average estimates the
    same expectation; only the errors of different images now go together. In return an image's probability depends on
    that image and the size of images alone: not on its batch, its place there, what was asked before or the device, but
    for rounding. Masks of their own would have to be drawn from the place in the batch, or from the pixels, where one
    grey level gives another answer.

    All layers are in evaluation mode: batch normalisation uses its running statistics. The embedding is that of one
    more pass without dropout.
    """

    n_samples: int

    @classmethod
    def from_backbone(cls, backbone: Backbone, n_samples: int) -> SampledBackbone:
        """The same layers, sampled."""
        sampled = cls(
            backbone.body,
            backbone.head,
            embedding_size=backbone.embedding_size,
            embedding_layer=backbone.embedding_layer,
            mean=backbone.mean.tolist(),
            std=backbone.std.tolist(),
            name=backbone.name,
            size=backbone.size,
            memory_format=backbone.memory_format,
            shallow=backbone.shallow,
        )
        sampled.n_samples, sampled.made_by, sampled.origin = n_samples, backbone.made_by, backbone.origin
        return sampled.to(backbone.mean.device).train(backbone.training)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            return super().forward(x)
        samples = torch.stack([self.sample(x, number) for number in range(self.n_samples)])  # (S, N, C)
        return self.embed(x), average_logits(samples)

    def sample(self, x: Tensor, number: int) -> Tensor:
        """Logits (N, C) of one of the thinned networks, in evaluation mode."""
        with _thinned(self, seed=number):
            return super().forward(x)[1]


def dropout_layers(module: nn.Module) -> list[nn.Dropout]:
    """The layers of a module that leave out units."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]


@contextmanager
def _thinned(module: nn.Module, seed: int) -> Iterator[None]:
    """While it lasts, dropout layers that are in evaluation mode leave out the units that the seed says."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, whatever the device

    def drop(index: int, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert isinstance(layer, nn.Dropout)
        return output * dropout_mask(output.shape[1:], layer.p, generator).to(output)

    with listening(dict(enumerate(dropout_layers(module))), drop):
        yield


@register_recipe("mc-dropout")
@dataclass(frozen=True, kw_only=True)
class DropoutRecipe(CrossEntropy):
    """MC-Dropout (Gal & Ghahramani 2016): dropout inside the network, also at test time; probabilities are averaged.

    At test time the samples are the same ``samples`` networks for all images: see :class:`SampledBackbone`.

    >>> DropoutRecipe(dropout=0.2).samples
    10
    """

    dropout: Annotated[float, Interval(gt=0, lt=1)] = option(
        0.1, "share of the units left out", search=Range((0.05, 0.1, 0.2, 0.3), (0.02, 0.5), log=True)
    )
    samples: Annotated[int, Interval(ge=1, le=1000)] = option(
        10, "passes per image at test time", was="dropout_samples"
    )

    about: ClassVar[About] = About(
        "MC-Dropout", "Gal & Ghahramani 2016", "https://arxiv.org/abs/1506.02142", passes="10 samples + 1"
    )

    def prepare(self, backbone: Backbone) -> None:
        layers = dropout_layers(backbone.body)
        if not layers:
            raise UsageError(
                f"the backbone '{backbone.name}' has no dropout layers: put nn.Dropout into it, or take resnet9"
            )
        for layer in layers:
            layer.p = self.dropout

    def finish(self, backbone: Backbone) -> Backbone:
        return SampledBackbone.from_backbone(backbone, self.samples)

    def rebuild(self, backbone: Backbone) -> Backbone:
        self.prepare(backbone)
        return self.finish(backbone)


# --- deep ensembles --------------------------------------------------------------------------------------------------


class EnsembleHead(nn.Module):
    """Each member's head on its own part of the embedding; the logits of their average probabilities."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, embeddings: Tensor) -> Tensor:
        parts = embeddings.chunk(len(self.members), dim=1)
        return average_logits(torch.stack([head(part) for head, part in zip(self.members, parts)]))


def join_members(members: Sequence[Backbone]) -> Backbone:
    """One backbone that is the ensemble of its members, which must be alike but for their weights.

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
            raise UsageError(
                "the members of an ensemble differ in size or normalisation: train them on the same images"
            )
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
    """Deep ensemble (Lakshminarayanan et al. 2017): the loss of a member, and how members make a whole."""

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
