"""Relabelling: pseudo-labels, and the one place where they change.

After an epoch both kinds of loop (:func:`~maple.training.loop.train_backbone` and own loops) do the same, in one line:
:meth:`PseudoLabels.propose` asks the recipe for new clusters, :meth:`PseudoLabels.adopt` takes them over and grows the
head of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from maple.networks import Backbone
from maple.training.head import NamedState, grow_backbone
from maple.training.recipe import EmbedRows, Recipe
from maple.types import Outputs, Relabelling


@dataclass(frozen=True, eq=False)
class Adopted:
    """Consequences of a relabelling."""

    classes: tuple[int, ...]  # whose clusters changed
    state: NamedState  # of the optimiser, for the new head
    shift: float  # largest change of any class probability of the validation images


class PseudoLabels:
    """The clusters of the training images, changed by ``recipe`` between epochs."""

    def __init__(self, recipe: Recipe, current: Relabelling, seed: int) -> None:
        self.recipe, self.current, self.seed = recipe, current, seed

    def propose(
        self, epoch: int, probabilities: np.ndarray, labels: np.ndarray, embed_rows: EmbedRows
    ) -> Relabelling | None:
        """New clusters after ``epoch``, or ``None`` to keep the current ones.

        ``probabilities`` (N, C) and ``labels`` (N,) are those of the validation images.
        """
        after = self.recipe.relabel(epoch, probabilities, labels, self.current, embed_rows, self.seed)
        return after if after is not None and len(changed_classes(self.current, after)) else None

    def adopt(
        self, after: Relabelling, backbone: Backbone, state: NamedState, validation: Outputs, probabilities: np.ndarray
    ) -> Adopted:
        """Make ``after`` the current clusters and grow the head; ``state`` is that of the optimiser before."""
        classes = tuple(int(c) for c in changed_classes(self.current, after))
        state = grow_backbone(backbone, self.recipe, after, state)
        self.current = after
        return Adopted(classes, state, self._shift(backbone, validation, probabilities))

    def _shift(self, backbone: Backbone, validation: Outputs, probabilities: np.ndarray) -> float:
        """The largest change of any class probability (N, C), with the embeddings of before.

        NaN if the head does not read the embedding: its logits would need another pass over the images.
        """
        assert backbone.head is not None
        if backbone.branch:
            return float("nan")
        with torch.no_grad():
            embeddings = torch.from_numpy(validation.embeddings).to(backbone.mean.device)
            logits = backbone.head(embeddings).float().cpu().numpy()
        moved = Outputs(validation.embeddings, logits, cluster_to_class=self.current.cluster_to_class)
        return float(np.abs(self.recipe.class_probabilities(moved) - probabilities).max())


def changed_classes(before: Relabelling, after: Relabelling) -> np.ndarray:
    """Classes whose images are grouped differently, however the clusters are numbered.

    >>> before = Relabelling(np.array([0, 0, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.ones(3))
    >>> after = Relabelling(np.array([0, 1, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.ones(3))
    >>> changed_classes(before, after), changed_classes(before, before)
    (array([0]), array([], dtype=int64))
    """
    # Two groupings are equal exactly if each cluster of one meets only one cluster of the other.
    pairs = np.unique(before.cluster_ids * after.n_clusters + after.cluster_ids)
    n_pairs = np.bincount(after.cluster_to_class[pairs % after.n_clusters])  # (C,)
    n_before, n_after = np.bincount(before.cluster_to_class), np.bincount(after.cluster_to_class)  # (C,)
    return np.flatnonzero((n_pairs != n_before) | (n_pairs != n_after))
