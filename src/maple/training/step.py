"""The one training step: forward pass, loss, backward pass, update.

:class:`TrainingStep` is the whole step, used by the training loop and by the timing of suites. An own loop, which
updates the network itself, calls its first half: :func:`forward_batch` and the loss of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maple.errors import TrainError
from maple.networks import Backbone
from maple.training.head import NamedState, named_state, set_named_state
from maple.training.loss import weighted_sum
from maple.training.optimizers import learning_rate_at, make_optimizer
from maple.training.options import TrainOptions
from maple.training.processes import together
from maple.training.recipe import Recipe, Step

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from maple.training.processes.sharding import Sharding

Forward = Callable[[Tensor], tuple[Tensor, Tensor]]  # images to embeddings and logits


def forward_batch(
    recipe: Recipe, backbone: Backbone, images: Tensor, targets: Tensor, progress: float, forward: Forward | None = None
) -> Step:
    """Run images (B, 3, H, W) with targets (B,) through the backbone, on its device.

    ``forward`` replaces the plain call of the backbone, for wrappers around it.
    """
    images, targets = images.to(backbone.mean.device), targets.to(backbone.mean.device)
    if recipe.needs_image_gradients:
        images.requires_grad_()
    extra = recipe.extra_images(images)
    embeddings, logits = (forward or backbone)(images if extra is None else torch.cat([images, extra]))
    embeddings, logits = embeddings.float(), logits.float()
    if extra is None:
        return Step(images, embeddings, logits, targets, progress, backbone)
    n = len(images)
    return Step(images, embeddings[:n], logits[:n], targets, progress, backbone, embeddings[n:], logits[n:])


class TrainingStep:
    """The whole step of the training loop, with the optimiser of ``options``; ``state`` is where that starts from.

    Several processes must hold equal backbones. ``network`` is what is trained: the backbone, or its divided copy.
    """

    def __init__(
        self, fabric: Fabric, recipe: Recipe, backbone: Backbone, options: TrainOptions, state: NamedState | None = None
    ) -> None:
        from lightning_fabric.strategies import ModelParallelStrategy

        self.fabric, self.recipe, self.options = fabric, recipe, options
        self.network = backbone.to(fabric.device)
        self._sharding: Sharding | None = None
        state = state or {}
        if isinstance(fabric.strategy, ModelParallelStrategy):
            from maple.training.processes.sharding import Sharding

            self._sharding = Sharding(backbone)
            self.network = self._sharding.network
            self.module = fabric.setup_module(self.network)
            state = self._sharding.divide_state(state)
        self.raw_optimizer = make_optimizer(self.network, options)
        set_named_state(self.raw_optimizer, self.network, state)
        if self._sharding is None:
            self.module, self.optimizer = fabric.setup(self.network, self.raw_optimizer)
        else:
            self.optimizer = fabric.setup_optimizers(self.raw_optimizer)

    def collect(self) -> NamedState:
        """Bring the backbone up to date and return the state of the optimiser by parameter name, in all processes."""
        if self._sharding is None:
            return named_state(self.raw_optimizer, self.network)
        self._sharding.collect()
        return self._sharding.collect_state(named_state(self.raw_optimizer, self.network))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.raw_optimizer.param_groups[0]["lr"])

    def __call__(self, images: Tensor, targets: Tensor, epoch: int, share: float) -> dict[str, float]:
        """One update, when ``share`` of ``epoch`` (counted from 1) is done; the loss and its unweighted terms."""
        progress = min(1.0, (epoch - 1 + share) / self.options.epochs)
        for group in self.raw_optimizer.param_groups:
            group["lr"] = group.get("rate_factor", 1.0) * learning_rate_at(progress, self.options)
        step = forward_batch(self.recipe, self.network, images, targets, progress, self._forward)
        with together(self.fabric):
            terms = self.recipe.loss(step)
            loss = weighted_sum(terms)
            self.check_finite(epoch, "the loss", loss.item())
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        self.optimizer.step()
        with torch.no_grad():
            self.recipe.after_step(step.detached())
        return {"loss": loss.item(), **{name: term.value.item() for name, term in terms.items()}}

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Forward pass; without Fabric's wrapper if the loss takes gradients itself, which the wrapper refuses."""
        if not self.recipe.needs_image_gradients:
            return self.module(images)
        with self.fabric.autocast():
            return self.network(images)

    def check_finite(self, epoch: int, what: str, *values: Any) -> None:
        """Raise ``TrainError`` before values that are not finite reach a checkpoint."""
        if not all(np.isfinite(value).all() for value in values):
            rate = self.options.learning_rate
            raise TrainError(
                f"{what} of recipe '{self.recipe.name}' is no longer finite in epoch {epoch}: start again with "
                f"--overwrite and {self.recipe.remedy} (such as --learning-rate {rate / 10:g}; it was {rate:g})"
            )
