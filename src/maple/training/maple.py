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

from maple.data.augment import quarter_turns, shuffle_patches, turn_images
from maple.errors import ConfigError, UsageError
from maple.networks import Backbone
from maple.options import as_dict, flag_name
from maple.training.loss import (
    LossTerm,
    all_triplets_loss,
    boundary_distances,
    contrastive_loss,
    prototype_loss,
    triplet_loss,
    uniform_cross_entropy,
)
from maple.training.options import MapleOptions
from maple.training.recipe import RECIPES, EmbedRows, History, Recipe, Row, SharedRows, Step, register_recipe
from maple.types import About, Relabelling

GUESSING = 1.5  # times the accuracy of guessing: below this the network has not learned
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
    """Cross-entropy with triplet loss and relabelling, each of which can be switched off.

    >>> MapleRecipe(margin=0.5, clustering=False).name
    'triplet'
    """

    section: ClassVar[str] = "recipe"
    takes_branch: ClassVar[bool] = True
    finish_keeps_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clustering and self.head_growth == "keep" and self.cluster_scope == "class":
            raise ConfigError("head_growth 'keep' needs cluster_scope 'cluster': choose that, or head_growth 'fresh'")
        if self.clustering and self.cluster_method == "kmeans" and not self.max_clusters:
            raise ConfigError("cluster_method 'kmeans' makes max_clusters clusters, and that is 0: give a number")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name registered for the two switches."""
        switches = {"triplet": self.triplet, "clustering": self.clustering}
        return next(method.name for method in RECIPES.registered() if method.fixed == switches)

    @property
    def compares_images(self) -> bool:
        return self.triplet

    def prepare(self, backbone: Backbone) -> None:
        """Add the head of the rotations; refuse losses that read the head through the embedding if it does not.

        The clustering is imported before the first epoch, half a second that is not to be part of an event.
        """
        if self.clustering:
            import maple.stats.clustering.splitting  # noqa: F401
        if self.rotation_share:
            backbone.rotation_head = make_rotation_head(backbone)
        if not (backbone.branch and self.triplet):
            return
        for option in ("prototype_weight", "cross_entropy_norm"):
            if getattr(self, option):
                raise UsageError(
                    f"{flag_name(option)} needs a head that reads the embedding: leave out --embedding-branch"
                )

    def finish(self, backbone: Backbone) -> Backbone:
        if self.rotation_share:
            del backbone.rotation_head
        return backbone

    def extra_images(self, images: Tensor) -> Tensor | None:
        """Outliers, then rotated images."""
        n_outliers, n_rotated = (round(share * len(images)) for share in (self.outlier_share, self.rotation_share))
        extra = [shuffle_patches(images[:n_outliers])] if n_outliers else []
        if n_rotated:
            extra.append(turn_images(images[:n_rotated]))
        return torch.cat(extra) if extra else None

    def loss(self, step: Step) -> dict[str, LossTerm]:
        logits = self._divide_logits(self._training_logits(step), step.head)
        terms = {"cross_entropy": LossTerm(F.cross_entropy(logits, step.targets, label_smoothing=self.label_smoothing))}
        n_outliers = round(self.outlier_share * len(step.images))
        if n_outliers and step.extra_logits is not None:
            outliers = self._divide_logits(step.extra_logits[:n_outliers], step.head)
            terms["outlier"] = LossTerm(uniform_cross_entropy(outliers), self.outlier_weight)
        if self.rotation_share:
            terms["rotation"] = LossTerm(self._rotation_loss(step, n_outliers), self.rotation_weight)
        if self.triplet:
            value = self._metric_loss(step)
            terms["triplet"] = LossTerm(value, self.triplet_weight * self._warmed_up(step.progress))
        if self.triplet and self.prototype_weight and isinstance(step.head, nn.Linear):
            value = prototype_loss(step.embeddings, step.head.weight, step.targets, self.prototype_scale)
            terms["prototype"] = LossTerm(value, self.prototype_weight)
        return terms

    def _training_logits(self, step: Step) -> Tensor:
        """Logits (B, M) for the cross-entropy: of embeddings scaled to ``cross_entropy_norm``, or of plain embeddings.

        With equal norms longer embeddings do not lower the loss, so the norm is free to express familiarity (Regmi et
        al. 2024, https://arxiv.org/abs/2305.17797).
        """
        if not (self.triplet and self.cross_entropy_norm):
            return step.logits
        return step.head(self.cross_entropy_norm * F.normalize(step.embeddings, dim=1)).float()

    def _metric_loss(self, step: Step) -> Tensor:
        points = F.normalize(step.embeddings, dim=1) if self.triplet_space == "normalised" else step.embeddings
        own_positive = self.triplet_lone == "self"
        if self.metric_loss == "contrastive":
            return contrastive_loss(points, step.targets, self.margin)
        if self.triplet_mining == "all":
            return all_triplets_loss(points, step.targets, self.margin, own_positive)
        return triplet_loss(points, step.targets, self.margin, self.triplet_softness, own_positive)

    def _rotation_loss(self, step: Step, n_outliers: int) -> Tensor:
        """Cross-entropy of telling apart images as they are and images turned by one, two and three quarters."""
        rotated = step.embeddings[:0] if step.extra_embeddings is None else step.extra_embeddings[n_outliers:]
        quarters = torch.cat([torch.zeros(len(step.images), dtype=torch.int64), quarter_turns(len(rotated))])
        head = step.backbone.rotation_head
        assert isinstance(head, nn.Linear)
        logits = head(torch.cat([step.embeddings, rotated]))
        return F.cross_entropy(logits.float(), quarters.to(logits.device))

    def _divide_logits(self, logits: Tensor, head: nn.Module) -> Tensor:
        """Logits (B, M) over their length (LogitNorm, https://arxiv.org/abs/2205.09310), or as ``logit_norm`` says."""
        if self.logit_norm == "length":
            return logits / (self.logit_temperature * logits.norm(dim=1, keepdim=True)).clamp_min(1e-7)
        if self.logit_norm == "boundary":
            if not isinstance(head, nn.Linear):
                raise UsageError(f"logit_norm 'boundary' needs a linear head, not {type(head).__name__}")
            return logits / boundary_distances(logits, head.weight)[:, None].clamp_min(1e-7)
        return logits

    def find_collapse(self, history: History, epochs: int) -> str | None:
        found = super().find_collapse(history, epochs)
        if not self.triplet:
            return found
        checks_margin = not found and self.metric_loss == "triplet"
        if checks_margin and (self._sits_at_margin(history, epochs) or self._starts_at_margin(history)):
            found = f"the triplet loss sits at its margin ({history[-1]['triplet']:.3f}): lower --learning-rate"
        if found and self.triplet_mining == "hard" and self.triplet_softness == 0:
            found = f"{found}, use --triplet-mining all"
        last = "or use --triplet-space normalised" if self.triplet_space == "raw" else "or use --recipe cross-entropy"
        return found and f"{found}, raise --triplet-warmup, {last}"

    def _sits_at_margin(self, history: History, epochs: int) -> bool:
        """Whether the last two epochs, at full weight, had a triplet loss equal to the margin."""
        return len(history) > 1 and all(
            self._warmed_up((row["epoch"] - 1) / epochs) == 1 and self._is_at_margin(row) for row in history[-2:]
        )

    def _starts_at_margin(self, history: History) -> bool:
        """Whether the first epoch, at full weight, ended at the margin and no better than guessing."""
        first = history[0]
        return (
            len(history) == 1
            and self.triplet_warmup == 0
            and self.triplet_weight > 0
            and self._is_at_margin(first)
            and first.get("validation_accuracy", 1.0) < GUESSING / first["clusters"]
        )

    def _is_at_margin(self, row: Row) -> bool:
        return abs(row["triplet"] - self.margin) < AT_MARGIN * self.margin

    def options(self) -> dict[str, Any]:
        settings = {key: value for key, value in as_dict(self).items() if key not in ("triplet", "clustering")}
        return {"recipe": self.name, **settings}

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
        from maple.stats.clustering.splitting import Clustering, split_clusters, work_alone  # with scikit-learn

        how = Clustering(
            method=self.cluster_method,
            scope=self.cluster_scope,
            space=self.cluster_space,
            n_components=self.cluster_components,
            max_clusters=self.max_clusters or len(current.cluster_ids),
            min_cluster_size=self.min_cluster_size,
            seed=seed + epoch,
        )
        share = embed_rows.share if isinstance(embed_rows, SharedRows) else work_alone
        return split_clusters(embeddings, rows, current, hard, how, share)

    def grow_head(self, head: nn.Module, relabelling: Relabelling) -> tuple[nn.Module, bool]:
        if not isinstance(head, nn.Linear):
            raise UsageError(f"relabelling needs a linear head, not {type(head).__name__}: use recipe 'triplet'")
        if self.head_growth == "fresh":
            return self.build_head(head.in_features, relabelling.n_clusters).to(head.weight), False
        return grow_linear(head, relabelling), True

    def _warmed_up(self, progress: float) -> float:
        """Share of its weight that the triplet loss has at ``progress``."""
        return min(1.0, progress / self.triplet_warmup) if self.triplet_warmup else 1.0


def make_rotation_head(backbone: Backbone) -> nn.Linear:
    """A head from embeddings to the four rotations; it starts at zero, so that it draws no random numbers."""
    head: nn.Linear = nn.utils.skip_init(nn.Linear, backbone.embedding_size, 4, device=backbone.mean.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


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


def false_negative_ratios(class_ids: np.ndarray, labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Share of the images of each class that are assigned to another class (C,); NaN for a class without images.

    >>> false_negative_ratios(np.array([0, 1, 1]), np.array([0, 0, 1]), 3)
    array([0.5, 0. , nan])
    """
    counts = np.bincount(labels, minlength=n_classes).astype(float)
    wrong = np.bincount(labels[class_ids != labels], minlength=n_classes)
    return np.divide(wrong, counts, out=np.full(n_classes, np.nan), where=counts > 0)


def find_hard_classes(class_ids: np.ndarray, labels: np.ndarray, n_classes: int, threshold: float) -> np.ndarray:
    """Classes whose false-negative ratio exceeds ``threshold``; a class without validation images is never hard."""
    return np.flatnonzero(false_negative_ratios(class_ids, labels, n_classes) > threshold)
