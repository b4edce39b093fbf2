"""Backbones: from image to embedding to logits.

A ``Backbone`` takes images in [0, 1] and normalises them itself. ``create_backbone`` makes one by name,
``wrap_backbone`` (:mod:`maple.networks.head_finder`) from a trained classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maple.data.decode import Fit
from maple.errors import UsageError
from maple.networks.architectures import create_network, list_networks
from maple.networks.origin import MadeBy, Origin
from maple.types import LinearHead

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Preprocessing(NamedTuple):
    """Preprocessing of images, requested or from the configuration of a network; ``None`` where it is not given."""

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: int | None = None  # side of the square, in pixels
    fit: Fit | None = None  # how images are made square

    def over(self, default: Preprocessing) -> Preprocessing:
        """These settings, and those of ``default`` where none is given.

        >>> Preprocessing(size=32).over(Preprocessing(size=224, fit="crop"))
        Preprocessing(mean=None, std=None, size=32, fit='crop')
        """
        return default._replace(**{name: value for name, value in self._asdict().items() if value is not None})

    def normalise(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1] as the network takes them."""
        assert self.mean is not None and self.std is not None
        return normalise_images(images, per_channel(self.mean, "mean"), per_channel(self.std, "std"))


UNCHANGED = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # images in [0, 1]


class Backbone(nn.Module):
    """A network from images in [0, 1] to embeddings, and the head from embeddings to logits.

    ``body`` maps normalised images (x - mean) / std to (N, D'), ``embedding_layer`` these to embeddings (N, D) (the
    identity, unless an embedding size was given), ``head`` embeddings to logits (N, M). The embedding is exactly
    the input of the head, so the classification loss shapes the space in which distances are measured. With ``branch``
    the head reads the output of the body instead, and only losses of embeddings shape that space. ``mean`` and ``std``
    default to ImageNet's.

    >>> backbone = create_backbone("resnet9", n_classes=10)
    >>> embedding, logits = backbone(torch.rand(4, 3, 32, 32))
    >>> embedding.shape, logits.shape
    (torch.Size([4, 128]), torch.Size([4, 10]))
    """

    mean: Tensor  # (3,)
    std: Tensor  # (3,)

    def __init__(
        self,
        body: nn.Module,
        head: nn.Module | None,
        *,
        embedding_size: int,
        embedding_layer: nn.Module | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str = "",
        size: int | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        shallow: str | None = None,
        branch: bool = False,
    ) -> None:
        super().__init__()
        self.body = body
        self.branch = branch  # whether the head reads the output of the body, beside the embedding
        self.shallow = shallow  # name of the intermediate layer of the body for the ``shallow`` score
        self.embedding_layer = nn.Identity() if embedding_layer is None else embedding_layer
        self.head = head
        self.embedding_size = embedding_size
        self.name = name
        self.size = size  # side of its images in pixels, if known
        self.memory_format = memory_format
        self.made_by: MadeBy | None = None  # set where the head is not linear
        self.origin: Origin | None = None  # set where the layers are not those of create_backbone
        mean, std = IMAGENET_MEAN if mean is None else mean, IMAGENET_STD if std is None else std
        self.register_buffer("mean", per_channel(mean, "mean"))
        self.register_buffer("std", per_channel(std, "std"))
        if not bool((self.std > 0).all()):
            raise UsageError(f"std is {tuple(std)}: the standard deviation of each channel must be positive")

    @property
    def head_size(self) -> int:
        """Number of inputs of the head."""
        if not self.branch:
            return self.embedding_size
        assert isinstance(self.embedding_layer, nn.Linear)
        return self.embedding_layer.in_features

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings (N, D) float32 of images (N, 3, H, W) in [0, 1]."""
        return self.embedding_layer(self._pool(x)).float()

    def _pool(self, x: Tensor) -> Tensor:
        """Output (N, D') of the body for images (N, 3, H, W) in [0, 1]."""
        smallest = getattr(self.body, "min_size", 1)
        if x.ndim != 4 or x.shape[1] != 3 or min(x.shape[2:]) < smallest:
            raise UsageError(f"images of shape {tuple(x.shape)}: give (N, 3, H, W), H and W at least {smallest}")
        x = normalise_images(x, self.mean, self.std).contiguous(memory_format=self.memory_format)
        return self.body(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and logits (N, M), both float32, of images (N, 3, H, W) in [0, 1]."""
        if self.head is None:
            raise UsageError("the backbone has no head and so no logits: call Backbone.embed, or set backbone.head")
        if self.branch:
            pooled = self._pool(x)
            return self.embedding_layer(pooled).float(), self.head(pooled.float()).float()
        embedding = self.embed(x)
        return embedding, self.head(embedding).float()


class EnsembleBody(nn.Module):
    """Concatenated embeddings (N, S D) of S members; a member is a body followed by an embedding layer."""

    def __init__(self, members: Sequence[nn.Sequential]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.min_size = max(getattr(body, "min_size", 1) for body in self.member_bodies)

    @property
    def member_bodies(self) -> list[nn.Module]:
        """Bodies of the members, without their embedding layers."""
        return [next(member.children()) for member in self.members]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], dim=1)


def normalise_images(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std per channel; x (N, 3, H, W), mean and std (3,)."""
    return (x - mean[:, None, None]) / std[:, None, None]


def per_channel(values: Sequence[float], what: str) -> Tensor:
    """Mean or standard deviation of the three channels as a tensor (3,)."""
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if tensor.shape != (3,):
        raise UsageError(f"{what} is {values!r}: give three numbers, for red, green and blue")
    return tensor


def linear_head(backbone: Backbone) -> LinearHead:
    """The head as arrays, for detectors that recompute logits.

    >>> linear_head(create_backbone("resnet9", n_classes=10)).weight.shape
    (10, 128)
    """
    head = backbone.head
    if backbone.branch:
        raise UsageError("the head does not read the embedding: leave out --embedding-branch, or use another detector")
    if not isinstance(head, nn.Linear):
        kind = "no head" if head is None else f"a head of type {type(head).__name__}"
        raise UsageError(f"the backbone has {kind}: detectors that recompute logits need a linear one")
    weight = head.weight.detach().float().cpu().numpy()
    bias = np.zeros(len(weight), np.float32) if head.bias is None else head.bias.detach().float().cpu().numpy()
    return LinearHead(weight, bias)


def list_backbones() -> list[str]:
    """Names for ``create_backbone``; besides these, ``wrn-D-W`` for any depth 6n + 4 and ``airbench-W``."""
    return list_networks()


def create_backbone(
    name: str,
    n_classes: int,
    *,
    embedding_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    branch: bool = False,
) -> Backbone:
    """A backbone with random weights and a linear head with ``n_classes`` outputs.

    ``embedding_size`` adds a linear layer between network and head; its output is the embedding (the paper's ResNet-50
    has 640). With ``branch`` the head reads the output of the network, beside that layer. ``mean`` and ``std`` default
    to ImageNet's, which the public weights expect.

    >>> create_backbone("wrn-10-1", n_classes=5, embedding_size=48).embedding_size
    48
    >>> create_backbone("resnet81", n_classes=10)
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown backbone 'resnet81': did you mean 'resnet18'?
    """
    if n_classes < 1 or (embedding_size is not None and embedding_size < 1):
        raise UsageError(f"{n_classes} classes and an embedding of {embedding_size}: both must be at least 1")
    body = create_network(name)
    embedding_layer = None if embedding_size is None else nn.Linear(body.embedding_size, embedding_size)
    embedding_size = embedding_size or body.embedding_size
    if branch and embedding_layer is None:
        raise UsageError("--embedding-branch needs the size of the embedding: give --embedding-size, or leave it out")
    head = nn.Linear(body.embedding_size if branch else embedding_size, n_classes)
    body.initialise_head(head)
    backbone = Backbone(
        body,
        head,
        embedding_size=embedding_size,
        embedding_layer=embedding_layer,
        mean=mean,
        std=std,
        name=name,
        shallow=body.shallow,
        branch=branch,
    )
    return use_channels_last(backbone)


def use_channels_last(backbone: Backbone) -> Backbone:
    """Switch weights and inputs to channels_last memory, in which convolutions are faster on most machines.

    Only for known architectures: a ``view`` in the forward of other modules may fail, possibly at some sizes only.
    """
    backbone.memory_format = torch.channels_last
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
