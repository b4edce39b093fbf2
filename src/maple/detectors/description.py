"""Description of images by a fitted MAPLE detector: distances, typicality, posterior and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from scipy.special import log_softmax, logsumexp

from maple.detectors.learned import Learned
from maple.detectors.scores import NEEDS_PLAIN, SCORES, Score, energy_score, spread_score
from maple.errors import NotFittedError, UsageError
from maple.stats.arrays import as_array, as_embeddings
from maple.stats.chi_square import log_chi_square_tail
from maple.stats.gaussians import class_logsumexp, class_maximum, log_posterior
from maple.stats.nearest import Nearest
from maple.types import Outputs


@dataclass(frozen=True, eq=False)
class Description:
    """Results of a fitted detector for N images; everything is computed once, on first use."""

    learned: Learned
    embeddings: np.ndarray  # (N, D)
    logits: np.ndarray | None  # (N, M)
    shallow_responses: np.ndarray | None  # (N, F)

    @classmethod
    def of(cls, learned: Learned, outputs: Outputs | np.ndarray) -> Self:
        """Describe outputs or embeddings (N, D)."""
        if not isinstance(outputs, Outputs):
            outputs = Outputs(as_embeddings(outputs))
        outputs = learned.complete(outputs)
        embeddings = as_embeddings(outputs.embeddings, learned.densities.gaussians.dim)
        return cls(learned, embeddings, outputs.logits, outputs.shallow)

    @property
    def cluster_to_class(self) -> np.ndarray:
        """The class of each cluster (M,)."""
        return self.learned.cluster_to_class

    @property
    def log_weights(self) -> np.ndarray:
        """Log prior of each cluster (M,), minus half its log determinant if covariances differ."""
        return self.learned.densities.gaussians.log_weights

    @cached_property
    def class_log_priors(self) -> np.ndarray:
        """Log share of each class in the training images (C,); -inf for a class without clusters."""
        return class_logsumexp(self.learned.densities.gaussians.log_priors[None], self.cluster_to_class)[0]

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom K of the chi-square tail."""
        return self.learned.densities.gaussians.n_components

    def __len__(self) -> int:
        return len(self.embeddings)

    @cached_property
    def squared_distances(self) -> np.ndarray:
        """Squared distance to each cluster (N, M)."""
        return self.learned.densities.gaussians.squared_distances(self.embeddings)

    @cached_property
    def _nearest(self) -> Nearest:
        """Of all distances if they are there, else in bounded memory, which is enough for all scores."""
        if "squared_distances" in self.__dict__:
            return Nearest.of(self.squared_distances)
        return self.learned.densities.gaussians.nearest(self.embeddings)

    @property
    def cluster(self) -> np.ndarray:
        """The nearest cluster (N,)."""
        return self._nearest.cluster

    @property
    def squared_distance(self) -> np.ndarray:
        """Squared distance to the nearest cluster (N,)."""
        return self._nearest.squared_distance

    @cached_property
    def md_class_id(self) -> np.ndarray:
        """The class of the nearest cluster (N,): the paper's rule."""
        return self.cluster_to_class[self.cluster]

    @cached_property
    def log_typicality(self) -> np.ndarray:
        """Log chi-square tail of the nearest cluster (N,): log of the paper's P_MD, finite at any distance."""
        return log_chi_square_tail(self.squared_distance, self.degrees_of_freedom)

    @cached_property
    def typicality(self) -> np.ndarray:
        """Chi-square tail of the nearest cluster (N,), in [0, 1]."""
        return np.exp(self.log_typicality)

    @cached_property
    def uncertainty(self) -> np.ndarray:
        """1 - typicality (N,): the paper's u, accurate for small values."""
        return -np.expm1(self.log_typicality)

    @cached_property
    def log_typicality_per_class(self) -> np.ndarray:
        """Log chi-square tail of the nearest cluster of each class (N, C): log of the paper's P_MD^c."""
        nearest = -class_maximum(-self.squared_distances, self.cluster_to_class)  # (N, C)
        return log_chi_square_tail(nearest, self.degrees_of_freedom)

    @cached_property
    def position(self) -> np.ndarray:
        """Coordinates on the map of the clusters (N, 2): see :attr:`maple.stats.gaussians.Gaussians.map_axes`."""
        gaussians = self.learned.densities.gaussians
        return gaussians.on_map(gaussians.project(self.embeddings))

    def log_posterior(self, temperature: float = 1.0) -> np.ndarray:
        """Log class probabilities (N, C): see :func:`maple.stats.gaussians.log_posterior`."""
        return log_posterior(self.squared_distances, self.log_weights, self.cluster_to_class, temperature)

    def posterior(self, temperature: float = 1.0) -> np.ndarray:
        """Class probabilities (N, C); rows sum to 1."""
        return np.exp(self.log_posterior(temperature))

    @cached_property
    def log_softmax(self) -> np.ndarray:
        """Log softmax of the network (N, C), summed over the clusters of a class.

        -inf for classes without a column in the head: see :meth:`MapleDetector.extend`.
        """
        if self.logits is None:
            raise UsageError("network probabilities need logits: use a backbone with a head")
        logits = as_array(self.logits).astype(np.float64)
        return class_logsumexp(log_softmax(logits, axis=1), self.cluster_to_class)

    # -- scores: see maple.detectors.scores

    @cached_property
    def score(self) -> np.ndarray:
        """The detector's own score (N,)."""
        return self.score_named(self.learned.score)

    @property
    def score_is_distance(self) -> bool:
        """Whether the score is the squared distance of the chi-square tail."""
        return self.learned.score in ("distance", "normalised")

    @property
    def available_scores(self) -> list[Score]:
        """The scores that these outputs and this fit allow."""
        missing: set[str] = set()
        if self.logits is None:
            missing.add("energy")
        if self.shallow_responses is None or self.learned.densities.moments.shallow is None:
            missing.add("shallow")
        if 0.0 not in self.learned.densities.moments.by_exponent:
            missing |= set(NEEDS_PLAIN)
        if not self.learned.surprises or missing & set(self.learned.surprises):
            missing.add("fused")
        return [name for name in SCORES if name not in missing]

    def score_named(self, name: Score) -> np.ndarray:
        """A score by name (N,)."""
        return _BY_NAME[name](self)

    @cached_property
    def distance(self) -> np.ndarray:
        """Squared distance to the nearest cluster, embeddings not normalised (N,): the paper's."""
        if self.learned.densities.exponent == 0:
            return self.squared_distance
        return self.learned.densities.plain_gaussians.nearest(self.embeddings).squared_distance

    @cached_property
    def relative(self) -> np.ndarray:
        """``distance`` minus the squared distance to the background (N,)."""
        return self.distance - self.learned.densities.plain_background.squared_distances(self.embeddings)

    @property
    def normalised(self) -> np.ndarray:
        """Squared distance to the nearest cluster of normalised embeddings (N,)."""
        return self.squared_distance

    @cached_property
    def residual(self) -> np.ndarray:
        """Squared length outside the principal components (N,)."""
        return self.learned.densities.background.residuals(self.embeddings)

    @cached_property
    def spread(self) -> np.ndarray:
        """Smallest over mean squared distance (N,)."""
        return spread_score(self.squared_distance, self._nearest.mean)

    @cached_property
    def energy(self) -> np.ndarray:
        """Negative log-sum-exp of the logits (N,).

        If the head has columns only for a subset O of the classes, the missing logits are set such that its softmax
        agrees with the Gaussians on p(O). Their exponentials sum to exp(-energy) (1 - p(O)) / p(O), with p from the
        Gaussians, and the total energy is that of the head plus log p(O): unchanged close to a class of the head, low
        close to a class that the head lacks.
        """
        if self.logits is None:
            raise UsageError("score 'energy' needs logits: use a backbone with a head, or score_by 'normalised'")
        energy = energy_score(self.logits)
        if self.learned.appended:
            energy += logsumexp(self.log_posterior()[:, self.learned.head_classes], axis=1)
        return energy

    @cached_property
    def shallow(self) -> np.ndarray:
        """Squared distance of the responses of the shallow layer to their background (N,)."""
        if self.shallow_responses is None:
            raise UsageError("score 'shallow' needs a backbone with a shallow layer: name one in wrap_backbone")
        return self.learned.densities.shallow_background.squared_distances(self.shallow_responses)

    @cached_property
    def fused(self) -> np.ndarray:
        """Weighted sum of the surprises of ``energy``, ``spread``, ``shallow``, and the far tail of ``distance`` (N,).

        With equal weights and independent scores this would be Fisher's combination of p-values. The scores are
        dependent, so it is a score without a p-value.
        """
        return np.sum(list(self.fused_parts().values()), axis=0)

    def fused_parts(self) -> dict[Score, np.ndarray]:
        """Contribution of each score to the fused one (N,)."""
        if not self.learned.surprises:
            raise NotFittedError("score 'fused' is fitted on validation images: call fit(outputs, validation)")
        parts = self.learned.parts
        return {
            name: parts[name].add(surprise(self.score_named(name))) for name, surprise in self.learned.surprises.items()
        }


_BY_NAME: dict[Score, Callable[[Description], np.ndarray]] = {
    "distance": lambda found: found.distance,
    "relative": lambda found: found.relative,
    "normalised": lambda found: found.normalised,
    "residual": lambda found: found.residual,
    "spread": lambda found: found.spread,
    "energy": lambda found: found.energy,
    "shallow": lambda found: found.shallow,
    "fused": lambda found: found.fused,
}
