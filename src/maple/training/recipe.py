"""Recipes: how a network learns. A recipe owns the head, the loss and what happens between epochs.

To add one, derive from :class:`Recipe` and register it::

    @register_recipe("label-smoothing")
    @dataclass(frozen=True, kw_only=True)
    class LabelSmoothingRecipe(Recipe):
        smoothing: float = 0.1

        def loss(self, step):
            value = F.cross_entropy(step.logits, step.targets, label_smoothing=self.smoothing)
            return {"cross_entropy": LossTerm(value)}

The recipes of MAPLE and its ablations come from two switches (those it is compared with are in ``maple.baselines``):

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
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.decisions.probability import class_probabilities
from maple.errors import ConfigError, UsageError, same_class, suggest
from maple.networks import Backbone
from maple.options import GROUPS, RECIPE_SECTIONS, SWITCHES, RecipeOptions, as_dict, build_options
from maple.stats.splitting import split_clusters
from maple.training.loss import LossTerm, contrastive_loss, prototype_loss, triplet_loss
from maple.training.relabel import changed_classes, hard_classes
from maple.types import About, Outputs, Relabelling

RECIPES: dict[str, dict[str, bool]] = {
    "cross-entropy": {"triplet": False, "clustering": False},
    "triplet": {"triplet": True, "clustering": False},
    "clustering": {"triplet": False, "clustering": True},
    "maple": {"triplet": True, "clustering": True},
}
_MAPLE = ("Venkataramanan et al. 2023", "https://openaccess.thecvf.com/ICCV2023_workshops/UnCV")
ABOUT: dict[str, About] = {
    "cross-entropy": About("deterministic network", "Hendrycks & Gimpel 2017", "https://arxiv.org/abs/1610.02136"),
    "triplet": About("ablation of MAPLE: metric losses, no clusters", *_MAPLE),
    "clustering": About("ablation of MAPLE: clusters, no metric losses", *_MAPLE),
    "maple": About("cross-entropy, metric losses, clusters in hard classes", *_MAPLE, adds="head rows of new clusters"),
}
# How options of the triplet switch begin
METRIC_OPTIONS = ("metric_loss", "cross_entropy_norm", "margin", "triplet_", "prototype_")
SHARED_OPTIONS = frozenset({"class_rule"})  # of all recipes with these switches; all others are of the clustering
COLLAPSED_SPREAD = 0.02  # relative spread of the embeddings below which they are almost one point
AT_MARGIN = 0.02  # relative distance within which the triplet loss counts as equal to its margin
EmbedRows = Callable[[np.ndarray], np.ndarray]  # indices of training images (n,) to their embeddings (n, D)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the training: a batch, and what the network made of it."""

    images: Tensor  # (B, 3, H, W) in [0, 1]; with gradients where the recipe asks for them
    embeddings: Tensor  # (B, D) float32
    logits: Tensor  # (B, M) float32
    targets: Tensor  # (B,) int64
    progress: float  # of the whole training, from 0 to 1
    backbone: Backbone

    @property
    def head(self) -> nn.Module:
        assert self.backbone.head is not None
        return self.backbone.head

    def detached(self) -> Step:
        """The same without the graph of gradients."""
        return replace(
            self, images=self.images.detach(), embeddings=self.embeddings.detach(), logits=self.logits.detach()
        )


class Recipe(ABC):
    """What the one training loop asks of a method. The order of calls is that of the methods here."""

    name: str = ""
    about: ClassVar[About]
    section: ClassVar[str] = "recipe"  # of config.toml, where its options are
    own_head: ClassVar[bool] = False  # whether its head replaces the linear one of the backbone
    needs_image_gradients: ClassVar[bool] = False
    one_process: ClassVar[bool] = False  # whether it keeps a running state that several processes would not share
    own_detector: ClassVar[str] = "softmax"  # whose score is the method's own
    remedy: ClassVar[str] = "lower --learning-rate"  # where the training diverges

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027
        """Change a fresh backbone in place before the optimiser sees it; most have nothing to change."""

    def start(self, backbone: Backbone, embed_rows: EmbedRows, labels: np.ndarray, seed: int) -> None:  # noqa: B027
        """Set up what depends on the images, before the first epoch; not called where a training is resumed."""

    def begin_epoch(self, backbone: Backbone, epoch: int, epochs: int) -> None:  # noqa: B027
        """Set up what depends on the epoch (counted from 1)."""

    def after_step(self, step: Step) -> None:  # noqa: B027
        """Update what is not learned by gradients; ``step`` is detached."""

    def finish(self, backbone: Backbone) -> Backbone:
        """The backbone for predictions, after the last epoch; parametrisations are folded away."""
        return backbone

    def rebuild(self, backbone: Backbone) -> Backbone:
        """What :meth:`finish` returned, from a new backbone with a head of this recipe: how a run is loaded."""
        return backbone

    @property
    def compares_images(self) -> bool:
        """Whether the loss compares images of a batch, so that small batches must hold several of a class."""
        return False

    def build_head(self, embedding_size: int, n_outputs: int) -> nn.Module:
        """A new head from embeddings (N, D) to logits (N, M), for a backbone that has none."""
        return nn.Linear(embedding_size, n_outputs)

    @abstractmethod
    def loss(self, step: Step) -> dict[str, LossTerm]:
        """The terms of the loss by name."""

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
        embed_rows: EmbedRows,
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
        return {"recipe": self.name, **(as_dict(self) if is_dataclass(self) else {})}


AnyRecipe = TypeVar("AnyRecipe", bound=type[Recipe])
_REGISTRY: dict[str, type[Recipe]] = {}


def register_recipe(name: str) -> Callable[[AnyRecipe], AnyRecipe]:
    """Class decorator that makes a recipe known by ``name``."""

    def register(recipe: AnyRecipe) -> AnyRecipe:
        if name in RECIPES or not same_class(_REGISTRY.get(name, recipe), recipe):
            raise UsageError(f"there is a recipe '{name}' already: choose another name")
        recipe.name = name
        _REGISTRY[name] = recipe
        return recipe

    return register


def list_recipes() -> list[str]:
    """The names that :func:`create_recipe` knows.

    >>> [name for name in list_recipes() if name in ("maple", "cross-entropy")]
    ['cross-entropy', 'maple']
    """
    return sorted({**RECIPES, **_REGISTRY})


def find_recipe(name: str) -> type[Recipe]:
    """The class of the recipe called ``name``."""
    if name in RECIPES:
        return MapleRecipe
    if name not in _REGISTRY:
        raise UsageError(f"unknown recipe '{name}': {suggest(name, list_recipes())}")
    return _REGISTRY[name]


def create_recipe(name: str, **options: Any) -> Recipe:
    """A recipe by name, with options.

    >>> create_recipe("cross-entropy").name
    'cross-entropy'
    """
    kind = find_recipe(name)
    return build_options(kind, {**options, **RECIPES.get(name, {})}, "recipe options")


def unused_options(name: str) -> set[str]:
    """The options of MAPLE and of recipes it is compared with that change nothing in the recipe called ``name``.

    >>> sorted(unused_options("triplet") & {"margin", "max_clusters", "dropout"})
    ['dropout', 'max_clusters']
    """
    everything = {f.name for section in RECIPE_SECTIONS for f in fields(GROUPS[section]) if f.name not in SWITCHES}
    if name not in RECIPES:
        kind = find_recipe(name)
        return everything - ({f.name for f in fields(kind)} if is_dataclass(kind) else set())
    own = {f.name for f in fields(RecipeOptions)} - SHARED_OPTIONS
    metric = {option for option in own if option.startswith(METRIC_OPTIONS)}
    used = set(SHARED_OPTIONS)
    used |= metric if RECIPES[name]["triplet"] else set()
    used |= own - metric if RECIPES[name]["clustering"] else set()
    return everything - used


def describe_recipe(name: str) -> About:
    """What ``maple methods`` says about a recipe."""
    return ABOUT[name] if name in ABOUT else About.of(find_recipe(name))


@dataclass(frozen=True, kw_only=True)
class MapleRecipe(RecipeOptions, Recipe):
    """Cross-entropy, with the triplet loss and with relabelling unless switched off.

    >>> MapleRecipe(margin=0.5, clustering=False).name
    'triplet'
    """

    def __post_init__(self) -> None:
        if self.clustering and self.head_growth == "keep" and self.cluster_scope == "class":
            raise ConfigError(
                "head_growth 'keep' needs cluster_scope 'cluster': a class clustered anew has no parents to keep; "
                "choose head_growth 'fresh' or cluster_scope 'cluster'"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """What the two switches make: a key of ``RECIPES``."""
        switches = {"triplet": self.triplet, "clustering": self.clustering}
        return next(name for name, these in RECIPES.items() if these == switches)

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
        embed_rows: EmbedRows,
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
