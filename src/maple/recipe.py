"""Recipes: how a network learns. A recipe owns the head, the loss and what happens between epochs.

Four recipes come from two switches:

===============  =======  ==========
name             triplet  clustering
===============  =======  ==========
cross-entropy    no       no
triplet          yes      no
clustering       no       yes
maple            yes      yes
===============  =======  ==========
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.config import RecipeOptions, as_dict, build_options
from maple.errors import ConfigError, UsageError, suggest
from maple.loss import LossTerm, prototype_loss, triplet_loss
from maple.relabel import changed_classes, class_probabilities, hard_classes, split_clusters
from maple.types import Outputs, Relabelling

RECIPES: dict[str, dict[str, bool]] = {
    "cross-entropy": {"triplet": False, "clustering": False},
    "triplet": {"triplet": True, "clustering": False},
    "clustering": {"triplet": False, "clustering": True},
    "maple": {"triplet": True, "clustering": True},
}
COLLAPSED_SPREAD = 0.02  # relative spread of the embeddings below which they are almost one point
AT_MARGIN = 0.02  # relative distance within which the triplet loss counts as equal to its margin


class Recipe(ABC):
    """What the one training loop asks of a method."""

    @property
    def compares_images(self) -> bool:
        """Whether the loss compares images of a batch, so that small batches must hold several of a class."""
        return False

    def build_head(self, embedding_size: int, n_outputs: int) -> nn.Module:
        """A new head from embeddings (N, D) to logits (N, M), for a backbone that has none."""
        return nn.Linear(embedding_size, n_outputs)

    @abstractmethod
    def loss(
        self, embeddings: Tensor, logits: Tensor, targets: Tensor, progress: float, head: nn.Module
    ) -> dict[str, LossTerm]:
        """The terms of the loss by name. ``progress`` runs from 0 to 1 over the training."""

    def class_probabilities(self, outputs: Outputs) -> np.ndarray:
        """Class probabilities (N, C) for validation."""
        assert outputs.logits is not None and outputs.cluster_to_class is not None
        return class_probabilities(outputs.logits, outputs.cluster_to_class)

    def relabel(
        self,
        epoch: int,
        probabilities: np.ndarray,
        labels: np.ndarray,
        current: Relabelling,
        embed_rows: Callable[[np.ndarray], np.ndarray],
        seed: int,
    ) -> Relabelling | None:
        """New pseudo-labels after ``epoch`` (counted from 1), or ``None`` to go on with the current ones.

        ``probabilities`` (N, C) and ``labels`` (N,) are those of the validation images; ``embed_rows`` gives the
        embeddings of training images by index.
        """
        return None

    def grow_head(self, head: nn.Module, relabelling: Relabelling) -> tuple[nn.Module, bool]:
        """The head for the new clusters, and whether its rows are their parents' (so that momentum is carried over)."""
        raise NotImplementedError(f"{type(self).__name__} relabels, but does not say how its head grows")

    def find_collapse(self, history: list[dict[str, Any]], epochs: int) -> str | None:
        """A warning if the embeddings have lost what told the classes apart, else ``None``.

        ``history`` has one row per finished epoch of ``epochs``: among others ``epoch``, the mean of each loss term and
        ``spread``, the relative spread of the validation embeddings.
        """
        spread = history[-1]["spread"]
        if spread < COLLAPSED_SPREAD:
            return (
                f"the embeddings have collapsed to almost one point (relative spread {spread:.4f}): "
                "lower --learning-rate"
            )
        return None

    def options(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run it continues."""
        return as_dict(self) if is_dataclass(self) else {}


@dataclass(frozen=True, kw_only=True)
class MapleRecipe(RecipeOptions, Recipe):
    """Cross-entropy, with the triplet loss and with relabelling unless switched off.

    >>> MapleRecipe(margin=0.5, clustering=False).margin
    0.5
    """

    def __post_init__(self) -> None:
        if self.clustering and self.head_growth == "keep" and self.cluster_scope == "class":
            raise ConfigError(
                "head_growth 'keep' needs cluster_scope 'cluster': a class clustered anew has no parents to keep; "
                "choose head_growth 'fresh' or cluster_scope 'cluster'"
            )

    @property
    def name(self) -> str:
        """What the two switches make: a key of ``RECIPES``."""
        switches = {"triplet": self.triplet, "clustering": self.clustering}
        return next(name for name, these in RECIPES.items() if these == switches)

    @property
    def compares_images(self) -> bool:
        return self.triplet

    def loss(
        self, embeddings: Tensor, logits: Tensor, targets: Tensor, progress: float, head: nn.Module
    ) -> dict[str, LossTerm]:
        terms = {"cross_entropy": LossTerm(F.cross_entropy(logits, targets))}
        if self.triplet:
            points = self._space(embeddings, self.triplet_space)
            value = triplet_loss(points, targets, self.margin, self.triplet_softness)
            terms["triplet"] = LossTerm(value, self.triplet_weight * self._warmed_up(progress))
        if self.triplet and self.prototype_weight and isinstance(head, nn.Linear):
            value = prototype_loss(embeddings, head.weight, targets, self.prototype_scale)
            terms["prototype"] = LossTerm(value, self.prototype_weight)
        return terms

    def find_collapse(self, history: list[dict[str, Any]], epochs: int) -> str | None:
        found = super().find_collapse(history, epochs)
        if not self.triplet:
            return found
        if not found and self._sits_at_margin(history, epochs):
            found = f"the triplet loss sits at its margin ({history[-1]['triplet']:.3f}): lower --learning-rate"
        return found and f"{found}, raise --triplet-warmup, or use --triplet-space normalised"

    def _sits_at_margin(self, history: list[dict[str, Any]], epochs: int) -> bool:
        """Whether the last two epochs, at full weight, had a triplet loss equal to the margin; one may pass by."""
        return len(history) > 1 and all(
            self._warmed_up((row["epoch"] - 1) / epochs) == 1
            and abs(row["triplet"] - self.margin) < AT_MARGIN * self.margin
            for row in history[-2:]
        )

    def options(self) -> dict[str, Any]:
        settings = {key: value for key, value in as_dict(self).items() if key not in RECIPES["maple"]}
        return {"recipe": self.name, **settings}

    def class_probabilities(self, outputs: Outputs) -> np.ndarray:
        assert outputs.logits is not None and outputs.cluster_to_class is not None
        return class_probabilities(outputs.logits, outputs.cluster_to_class, self.class_rule)

    def relabel(
        self,
        epoch: int,
        probabilities: np.ndarray,
        labels: np.ndarray,
        current: Relabelling,
        embed_rows: Callable[[np.ndarray], np.ndarray],
        seed: int,
    ) -> Relabelling | None:
        if not self.clustering or epoch % self.relabel_every:
            return None
        n_classes = probabilities.shape[1]
        hard = hard_classes(probabilities.argmax(1), labels, n_classes, self.hard_class_error)
        if len(hard) == 0 and self.cluster_scope == "cluster":
            return None
        rows = np.flatnonzero(np.isin(current.cluster_to_class[current.cluster_ids], hard))
        embeddings = embed_rows(rows) if len(rows) else np.empty((0, 1), np.float32)
        after = split_clusters(
            embeddings,
            rows,
            current,
            hard,
            method=self.cluster_method,
            scope=self.cluster_scope,
            space=self.cluster_space,
            n_components=self.cluster_components,
            max_clusters=self.max_clusters,
            min_cluster_size=self.min_cluster_size,
            seed=seed + epoch,
        )
        return after if len(changed_classes(current, after)) else None

    def grow_head(self, head: nn.Module, relabelling: Relabelling) -> tuple[nn.Module, bool]:
        if not isinstance(head, nn.Linear):
            raise UsageError(
                f"relabelling needs a linear head, not {type(head).__name__}: use recipe 'triplet' instead"
            )
        if self.head_growth == "fresh":
            return self.build_head(head.in_features, relabelling.n_clusters).to(head.weight), False
        return grow_linear(head, relabelling), True

    def _warmed_up(self, progress: float) -> float:
        """The share of its weight that the triplet loss has by now."""
        return min(1.0, progress / self.triplet_warmup) if self.triplet_warmup else 1.0

    @staticmethod
    def _space(embeddings: Tensor, space: str) -> Tensor:
        return F.normalize(embeddings, dim=1) if space == "normalised" else embeddings


def grow_linear(head: nn.Linear, relabelling: Relabelling) -> nn.Linear:
    r"""A head whose children share their parent's row, with bias :math:`b + \log(n_j / n)`.

    Since :math:`\sum_j \exp(w^\top e + b + \log(n_j/n)) = \exp(w^\top e + b)`, no class probability changes.

    >>> clusters, parents = np.array([0, 1, 2]), np.array([0, 0, 1])
    >>> split = Relabelling(clusters, cluster_to_class=parents, parents=parents, shares=np.array([0.25, 0.75, 1]))
    >>> grow_linear(nn.Linear(8, 2), split).weight.shape
    torch.Size([3, 8])
    """
    parents = torch.from_numpy(relabelling.parents)
    grown = nn.Linear(head.in_features, relabelling.n_clusters).to(head.weight)
    shift = torch.from_numpy(np.log(relabelling.shares)).to(head.weight)
    with torch.no_grad():
        grown.weight.copy_(head.weight[parents])
        grown.bias.copy_(shift if head.bias is None else head.bias[parents] + shift)
    return grown


def create_recipe(name: str, **options: Any) -> MapleRecipe:
    """A recipe by name, with options.

    >>> create_recipe("cross-entropy").triplet
    False
    """
    if name not in RECIPES:
        raise UsageError(f"unknown recipe '{name}': {suggest(name, RECIPES)}")
    return build_options(MapleRecipe, {**options, **RECIPES[name]}, "recipe options")
