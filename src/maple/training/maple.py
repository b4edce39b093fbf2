"""MAPLE's recipe and its ablations: cross-entropy, and two switches.

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

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.decisions.probability import class_probabilities
from maple.errors import ConfigError, UsageError
from maple.options import as_dict
from maple.stats.splitting import Clustering, split_clusters
from maple.training.hard_classes import find_hard_classes
from maple.training.loss import LossTerm, contrastive_loss, prototype_loss, triplet_loss
from maple.training.options import MapleOptions
from maple.training.recipe import RECIPES, EmbedRows, Recipe, Step, register_recipe
from maple.types import About, Outputs, Relabelling

AT_MARGIN = 0.02  # relative distance within which the triplet loss counts as equal to its margin
_PAPER = ("Venkataramanan et al. 2023", "https://openaccess.thecvf.com/ICCV2023_workshops/UnCV")
_PLAIN = ("Hendrycks & Gimpel 2017", "https://arxiv.org/abs/1610.02136")


@register_recipe("cross-entropy", About("deterministic network", *_PLAIN), triplet=False, clustering=False)
@register_recipe(
    "triplet", About("ablation of MAPLE: metric losses, no clusters", *_PAPER), triplet=True, clustering=False
)
@register_recipe(
    "clustering", About("ablation of MAPLE: clusters, no metric losses", *_PAPER), triplet=False, clustering=True
)
@register_recipe(
    "maple",
    About("cross-entropy, metric losses, clusters in hard classes", *_PAPER, adds="head rows of new clusters"),
    triplet=True,
    clustering=True,
)
@dataclass(frozen=True, kw_only=True)
class MapleRecipe(MapleOptions, Recipe):
    """Cross-entropy, with the triplet loss and with relabelling unless switched off.

    >>> MapleRecipe(margin=0.5, clustering=False).name
    'triplet'
    """

    section: ClassVar[str] = "recipe"

    def __post_init__(self) -> None:
        if self.clustering and self.head_growth == "keep" and self.cluster_scope == "class":
            raise ConfigError(
                "head_growth 'keep' needs cluster_scope 'cluster': a class clustered anew has no parents to keep; "
                "choose head_growth 'fresh' or cluster_scope 'cluster'"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name registered for the two switches."""
        switches = {"triplet": self.triplet, "clustering": self.clustering}
        return next(method.name for method in RECIPES.registered() if method.fixed == switches)

    @property
    def compares_images(self) -> bool:
        return self.triplet

    def loss(self, step: Step) -> dict[str, LossTerm]:
        terms = {"cross_entropy": LossTerm(F.cross_entropy(self._training_logits(step), step.targets))}
        if self.triplet:
            points = self._space(step.embeddings, self.triplet_space)
            if self.metric_loss == "contrastive":
                value = contrastive_loss(points, step.targets, self.margin)
            else:
                value = triplet_loss(points, step.targets, self.margin, self.triplet_softness)
            terms["triplet"] = LossTerm(value, self.triplet_weight * self._warmed_up(step.progress))
        if self.triplet and self.prototype_weight and isinstance(step.head, nn.Linear):
            value = prototype_loss(step.embeddings, step.head.weight, step.targets, self.prototype_scale)
            terms["prototype"] = LossTerm(value, self.prototype_weight)
        return terms

    def _training_logits(self, step: Step) -> Tensor:
        """What the cross-entropy sees (B, M): logits of embeddings that all have one length, or of those there are.

        A network cannot lower that loss by longer embeddings, so that their length is left to say how much of what it
        knows an image shows (Regmi et al. 2024, https://arxiv.org/abs/2305.17797).
        """
        if not (self.triplet and self.cross_entropy_norm):
            return step.logits
        return step.head(self.cross_entropy_norm * F.normalize(step.embeddings, dim=1)).float()

    def find_collapse(self, history: list[dict[str, Any]], epochs: int) -> str | None:
        found = super().find_collapse(history, epochs)
        if not self.triplet:
            return found
        if not found and self.metric_loss == "triplet" and self._sits_at_margin(history, epochs):
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
        settings = {key: value for key, value in as_dict(self).items() if key not in ("triplet", "clustering")}
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
        embed_rows: EmbedRows,
        seed: int,
    ) -> Relabelling | None:
        if not self.clustering or epoch % self.relabel_every:
            return None
        n_classes = probabilities.shape[1]
        hard = find_hard_classes(probabilities.argmax(1), labels, n_classes, self.hard_class_error)
        if len(hard) == 0 and self.cluster_scope == "cluster":
            return None
        rows = np.flatnonzero(np.isin(current.cluster_to_class[current.cluster_ids], hard))
        embeddings = embed_rows(rows) if len(rows) else np.empty((0, 1), np.float32)
        how = Clustering(
            method=self.cluster_method,
            scope=self.cluster_scope,
            space=self.cluster_space,
            n_components=self.cluster_components,
            max_clusters=self.max_clusters,
            min_cluster_size=self.min_cluster_size,
            seed=seed + epoch,
        )
        return split_clusters(embeddings, rows, current, hard, how)

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
