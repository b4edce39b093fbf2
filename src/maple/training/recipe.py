"""Recipes: how a network learns. A recipe owns the head, the loss and the changes between epochs.

To add one, derive from :class:`Recipe` and register it::

    @register_recipe("label-smoothing")
    @dataclass(frozen=True, kw_only=True)
    class LabelSmoothingRecipe(Recipe):
        smoothing: float = option(0.1, "share of the target spread over all classes")

        def loss(self, step):
            value = F.cross_entropy(step.logits, step.targets, label_smoothing=self.smoothing)
            return {"cross_entropy": LossTerm(value)}

MAPLE and its ablations are in :mod:`maple.training.maple`, methods of other papers in :mod:`maple.baselines`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from maple.decisions.pool import class_probabilities
from maple.networks import Backbone
from maple.options import as_dict
from maple.registry import Method, Registry
from maple.training.loss import LossTerm
from maple.types import About, Outputs, Relabelling

if TYPE_CHECKING:  # scikit-learn takes a second to import, which listings of recipes can do without
    from maple.stats.clustering.splitting import ShareWork

COLLAPSED_SPREAD = 0.02  # relative spread of the embeddings below which they are almost one point
Row = dict[str, Any]  # of the history: an epoch, by the columns of history.csv and the loss terms of the recipe
History = list[Row]
EmbedRows = Callable[[np.ndarray], np.ndarray]  # indices of training images (n,) to their embeddings (n, D)


@dataclass(frozen=True)
class SharedRows:
    """:data:`EmbedRows` of a training in several processes, which can divide other work too."""

    embed: EmbedRows
    share: ShareWork

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return self.embed(rows)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the training: a batch and the outputs of the network."""

    images: Tensor  # (B, 3, H, W) in [0, 1]; with gradients if the recipe needs them
    embeddings: Tensor  # (B, D) float32
    logits: Tensor  # (B, M) float32
    targets: Tensor  # (B,) int64
    progress: float  # of the whole training, from 0 to 1
    backbone: Backbone
    extra_embeddings: Tensor | None = None  # (B', D) float32, of the images of ``Recipe.extra_images``
    extra_logits: Tensor | None = None  # (B', M) float32

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
    """A training method, as the training loop calls it; the methods are in the order of the calls."""

    name: str = ""
    about: ClassVar[About]
    section: ClassVar[str]  # section of config.toml with its options; named after the recipe
    former_prefix: ClassVar[str] = ""  # that its options once had, still read
    class_rule: Literal["sum", "max"] = "sum"  # class probability from its clusters
    takes_branch: ClassVar[bool] = False  # whether the head may read the output of the body, beside the embedding
    finish_keeps_outputs: ClassVar[bool] = False  # whether its own ``finish`` leaves embeddings and logits as they are
    own_head: ClassVar[bool] = False  # whether its head replaces the linear one of the backbone
    needs_image_gradients: ClassVar[bool] = False
    one_process: ClassVar[bool] = False  # whether it has a running state that processes do not share
    own_detector: ClassVar[str] = "softmax"  # detector with the score of the method
    remedy: ClassVar[str] = "lower --learning-rate"  # advice if the training diverges

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027
        """Change a new backbone in place, before the optimiser is made; by default nothing."""

    def start(self, backbone: Backbone, embed_rows: EmbedRows, labels: np.ndarray, seed: int) -> None:  # noqa: B027
        """Initialise from the training images, before the first epoch; not called when a training is resumed."""

    def begin_epoch(self, backbone: Backbone, epoch: int, epochs: int) -> None:  # noqa: B027
        """Prepare for the epoch (counted from 1)."""

    def after_step(self, step: Step) -> None:  # noqa: B027
        """Update state that is not learned by gradients; ``step`` is detached."""

    def finish(self, backbone: Backbone) -> Backbone:
        """The backbone for predictions, after the last epoch; parametrisations are folded away."""
        return backbone

    def rebuild(self, backbone: Backbone) -> Backbone:
        """The result of :meth:`finish`, from a new backbone with a head of this recipe; called when a run is loaded."""
        return backbone

    @property
    def compares_images(self) -> bool:
        """Whether the loss compares images of a batch, so that small batches must hold several of a class."""
        return False

    def build_head(self, embedding_size: int, n_outputs: int) -> nn.Module:
        """A new head from embeddings (N, D) to logits (N, M), for a backbone that has none."""
        return nn.Linear(embedding_size, n_outputs)

    def extra_images(self, images: Tensor) -> Tensor | None:
        """Images (B', 3, H, W) made from a batch, to run with it; the loss gets their outputs. By default none."""
        return None

    @abstractmethod
    def loss(self, step: Step) -> dict[str, LossTerm]:
        """The terms of the loss by name."""

    def class_probabilities(self, outputs: Outputs) -> np.ndarray:
        """Class probabilities (N, C) for validation."""
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
        """New pseudo-labels after ``epoch`` (counted from 1), or ``None`` to keep the current ones.

        ``probabilities`` (N, C) and ``labels`` (N,) are those of the validation images; ``embed_rows`` gives the
        embeddings of training images by index. In several processes each calls it, with the same arguments, and
        ``embed_rows`` is a :class:`SharedRows`.
        """
        return None

    def grow_head(self, head: nn.Module, relabelling: Relabelling) -> tuple[nn.Module, bool]:
        """The head for the new clusters, and whether its rows are their parents' (so that momentum is carried over)."""
        raise NotImplementedError(f"{type(self).__name__} relabels without a way to grow its head: define grow_head")

    def find_collapse(self, history: History, epochs: int) -> str | None:
        """A warning if the embeddings no longer separate the classes, else ``None``.

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
        """The options that a resumed run must share with the run it continues."""
        return {"recipe": self.name, **(as_dict(self) if is_dataclass(self) else {})}


AnyRecipe = TypeVar("AnyRecipe", bound=type[Recipe])
SECTIONS = ("data", "model", "train", "recipe", "detector", "decision")  # of config.toml, which name no recipe
RECIPES: Registry[Recipe] = Registry("recipe", ("maple.training", "maple.baselines"), reserved=SECTIONS)


def register_recipe(
    name: str, about: About | None = None, was: str = "", **fixed: Any
) -> Callable[[AnyRecipe], AnyRecipe]:
    """Class decorator that registers a recipe as ``name``, formerly ``was``, with ``fixed`` values of some options."""

    def decorate(recipe: AnyRecipe) -> AnyRecipe:
        if "section" not in vars(recipe):
            recipe.section = name.replace("-", "_")
        return RECIPES.register(name, about, was, **fixed)(recipe)

    return decorate


def list_recipes() -> list[str]:
    """Names for :func:`create_recipe`.

    >>> [name for name in list_recipes() if name in ("maple", "cross-entropy", "sngp")]
    ['cross-entropy', 'maple', 'sngp']
    """
    return RECIPES.names()


def find_recipe(name: str, plugin: str | None = None) -> Method[Recipe]:
    """The recipe called ``name``: its class, what it is and its options.

    ``plugin`` is the one that a run was made with; the error names it if the recipe is unknown.

    >>> find_recipe("sngp").kind.__name__, find_recipe("sngp").about.paper
    ('SngpRecipe', 'Liu et al. 2020')
    """
    return RECIPES.find(name, plugin)


def create_recipe(name: str, **options: Any) -> Recipe:
    """A recipe by name, with options.

    >>> create_recipe("cross-entropy").name
    'cross-entropy'
    """
    return find_recipe(name).create(options, f"options of recipe '{name}'")
