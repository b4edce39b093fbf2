"""MC-Dropout: average probabilities over passes with dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn

from maple.baselines.base import CrossEntropy, average_logits
from maple.errors import UsageError
from maple.networks import Backbone, listening
from maple.options import Range, option
from maple.training.recipe import register_recipe
from maple.types import About


def dropout_mask(shape: Sequence[int], share: float, generator: torch.Generator) -> Tensor:
    """One draw of inverted dropout: 0 with probability ``share``, else 1 / (1 - share), with mean 1.

    >>> dropout_mask((8,), 0.5, torch.Generator().manual_seed(0))
    tensor([0., 2., 0., 0., 0., 2., 0., 2.])
    """
    return (torch.rand(tuple(shape), generator=generator) >= share).float() / (1 - share)


class SampledBackbone(Backbone):
    """A backbone whose logits, in evaluation mode, are averages over ``n_samples`` passes with dropout.

    **Sample s is one thinned network.** Its masks are drawn from the seed s alone, one for each dropout layer, and all
    images share them. A mask drops single units (a channel at one position), as in training. For a single image this
    is a draw of the dropout distribution like a mask of its own, so the average estimates the same expectation;
    only the errors of different images are now correlated. In return, up to rounding, the probability of an image
    depends only on the image and its size: not on its batch, its position there, earlier calls or the device. Separate
    masks would have to be drawn from the position in the batch, or from the pixels, where one grey level would change
    the result.

    All layers are in evaluation mode: batch normalisation uses its running statistics. The embedding is that of one
    more pass without dropout.
    """

    n_samples: int

    @classmethod
    def from_backbone(cls, backbone: Backbone, n_samples: int) -> SampledBackbone:
        """The same layers, with sampling."""
        sampled = cls(
            backbone.body,
            backbone.head,
            embedding_size=backbone.embedding_size,
            embedding_layer=backbone.embedding_layer,
            branch=backbone.branch,
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
        """Logits (N, C) of one thinned network, in evaluation mode."""
        with _thinned(self, seed=number):
            return super().forward(x)[1]


def dropout_layers(module: nn.Module) -> list[nn.Dropout]:
    """All dropout layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]


@contextmanager
def _thinned(module: nn.Module, seed: int) -> Iterator[None]:
    """Inside the block, dropout layers in evaluation mode drop the units that ``seed`` determines."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU for any device

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
        0.1, "share of the units dropped", search=Range((0.05, 0.1, 0.2, 0.3), (0.02, 0.5), log=True)
    )
    samples: Annotated[int, Interval(ge=1, le=1000)] = option(10, "passes per image at test time")

    about: ClassVar[About] = About(
        "MC-Dropout", "Gal & Ghahramani 2016", "https://arxiv.org/abs/1506.02142", passes="10 samples + 1"
    )
    former_prefix: ClassVar[str] = "dropout_"

    def prepare(self, backbone: Backbone) -> None:
        layers = dropout_layers(backbone.body)
        if not layers:
            raise UsageError(f"backbone '{backbone.name}' has no dropout layers: add nn.Dropout, or use resnet9")
        for layer in layers:
            layer.p = self.dropout

    def finish(self, backbone: Backbone) -> Backbone:
        return SampledBackbone.from_backbone(backbone, self.samples)

    def rebuild(self, backbone: Backbone) -> Backbone:
        self.prepare(backbone)
        return self.finish(backbone)
