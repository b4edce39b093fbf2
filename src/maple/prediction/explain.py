"""Why an image was called what it was: its nearest cluster, the runner-up, what its distance and score are made of.

A squared distance is a sum of K squares, one per whitened coordinate. The coordinates of ``Gaussians.project`` come out
of a triangular factor and mean nothing by themselves, but any rotation of them leaves every distance as it is.
:func:`find_components` picks a rotation that means something:

- *Separating* components come first: the principal axes of the centroids. Clusters are spheres in the whitened space,
  so that these are the canonical variates of discriminant analysis: the first tells clusters apart best, at most M - 1
  tell all there is to tell, and those along which no two clusters lie two standard deviations apart tell nothing.
- *Shared* components are the rest: how images of one cluster differ from each other, whatever the cluster. They are
  ordered by how far one standard deviation moves the embedding.

Hence separating components decide between two clusters, and what shared components add to a squared distance says how
unusual an image is in ways that have little to do with its class. Each component adds 1 to the squared distance of a
cluster's own images, on average.

Where each cluster has its own covariance, its whitening W is followed by the rotation Q that makes W Q symmetric:
of all whitened coordinates these agree best with the axes (Kessy, Lewin and Strimmer 2018), so that a component keeps
its meaning from cluster to cluster.

Whether an image is out-of-distribution is decided by its score, which by default is no distance but ``fused``: a
weighted sum of surprises, which :func:`score_parts` takes apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import chdtri

from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import FUSED, Score
from maple.errors import UsageError
from maple.stats.arrays import as_embeddings
from maple.stats.covariance import count_components
from maple.stats.gaussians import Gaussians
from maple.text import percent
from maple.types import Outputs, Prediction

USUAL_SHARE = 0.95  # of the known images lie within the usual squared distance
LEADING_SHARE = 0.5  # of a squared distance, which its leading components make together
MAX_LEADING = 3
FAR_APART = 2.0  # standard deviations: clusters that near along a component are not told apart by it
STANDS_OUT = 3.0  # standard deviations from the centroid along one component
PART_MEANINGS: dict[Score, str] = {  # what an image is like where a part of the fused score is high
    "energy": "little evidence for any class",
    "spread": "lies between the classes",
    "shallow": "looks different from all training images, whatever it shows",
    "distance": "lies far outside of all classes, embeddings as they are",
}


# ------------------------------------------------------------------------------------------------------ components


@dataclass(frozen=True, eq=False)
class Components:
    """K orthogonal axes of the whitened space: those that separate clusters first, then those that all share."""

    axes: np.ndarray  # (K, K) one component per column
    n_separating: int
    centroids: np.ndarray  # (M, K) their coordinates on the components

    @property
    def spreads(self) -> np.ndarray:
        """The standard deviation of the centroids along each component (K,)."""
        return self.centroids.std(axis=0)

    def ends(self, component: int) -> tuple[int, int]:
        """The clusters that lie furthest down and furthest up a component."""
        along = self.centroids[:, component]
        return int(along.argmin()), int(along.argmax())


def find_components(gaussians: Gaussians) -> Components:
    """The components along which squared distances are taken apart.

    >>> plane = Gaussians(np.eye(2), np.zeros(2), np.array([[3.0, 4.0], [-3.0, -4.0]]), np.log([0.5, 0.5]))
    >>> found = find_components(plane)
    >>> found.axes.round(3)  # the first from one centroid to the other
    array([[ 0.6,  0.8],
           [ 0.8, -0.6]])
    >>> found.n_separating, found.ends(0)
    (1, (1, 0))
    """
    centroids = gaussians.centroids - gaussians.centroids.mean(axis=0)
    axes = _principal_axes(centroids.T @ centroids)
    is_far = np.ptp(centroids @ axes, axis=0) > FAR_APART
    separating, shared = axes[:, is_far], axes[:, ~is_far]
    steps = shared.T @ np.linalg.pinv(gaussians.matrix)  # (K - r, D) what one standard deviation does to the embedding
    axes = np.hstack([separating, shared @ _principal_axes(steps @ steps.T)])
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(len(axes))]
    axes = axes * np.sign(largest)  # an axis has no direction of its own: equal Gaussians should give equal signs
    return Components(axes, int(is_far.sum()), gaussians.centroids @ axes)


def _principal_axes(covariance: np.ndarray) -> np.ndarray:
    """All eigenvectors as columns, that of the largest eigenvalue first; null directions included."""
    return np.linalg.eigh(covariance)[1][:, ::-1]


def component_coordinates(gaussians: Gaussians, embeddings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Where images lie along each component (N, K), and the spreads (K,) by which the components are known again."""
    components = find_components(gaussians)
    return gaussians.project(embeddings) @ components.axes, components.spreads


def deviations(
    gaussians: Gaussians, components: Components, projection: np.ndarray, clusters: np.ndarray
) -> np.ndarray:
    """How far each image lies from one cluster along each component, in standard deviations (N, K).

    ``projection`` (N, K) is that of the embeddings, ``clusters`` (N,) names a cluster for each image. The squares sum
    to the squared distance.
    """
    centred = projection - gaussians.centroids[clusters]
    if gaussians.whitenings is not None:
        for cluster in np.unique(clusters):
            whitening = gaussians.whitenings[cluster]
            left, _, right = np.linalg.svd(whitening)
            own = clusters == cluster
            centred[own] = centred[own] @ whitening @ (left @ right).T  # the last factor makes the product symmetric
    return centred @ components.axes


# ---------------------------------------------------------------------------------------------------- explanations


@dataclass(frozen=True, eq=False)
class Match:
    """An image next to one cluster."""

    cluster: int
    class_id: int
    class_name: str
    name: str  # of the cluster: that of its class, with a number where the class has several
    probability: float  # of the class
    deviations: np.ndarray  # (K,) in standard deviations, positive up the component

    @cached_property
    def contributions(self) -> np.ndarray:
        """What each component adds to the squared distance (K,)."""
        return self.deviations**2

    @cached_property
    def squared_distance(self) -> float:
        return float(self.contributions.sum())


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why one image was called what it was. Components count from 0 in arrays and from 1 in words."""

    class_name: str  # of the most probable class
    probability: float
    nearest: Match
    runner_up: Match | None  # the nearest cluster of another class than the nearest; None where there is one class
    coordinates: np.ndarray  # (K,) of the image on the components
    components: Components
    cluster_names: tuple[str, ...]
    usual_distance: float  # squared; USUAL_SHARE of the known images lie within
    is_measured: bool  # whether on images the network has not learned from, or by the Gaussian model
    p_value: float = math.nan
    is_ood: bool = False
    false_alarm: float = math.nan
    known_images: str = "known images"  # of which the p-value speaks
    can_be_flagged: bool = True  # False where calibration images are too few for the false-alarm rate
    by_distance: bool = True  # whether the score that decides is the squared distance itself
    score: float = math.nan  # that decides; NaN where the outputs do not allow it
    score_by: str = ""  # its name
    parts: Mapping[Score, float] = field(default_factory=dict)  # of the fused score, which is their sum; else empty

    @property
    def degrees_of_freedom(self) -> int:
        """K: the mean squared distance of a cluster's own images under the model."""
        return len(self.coordinates)

    @property
    def separation(self) -> np.ndarray:
        """What each component adds to the squared distance of the runner-up less that of the nearest cluster (K,)."""
        if self.runner_up is None:
            return np.zeros(self.degrees_of_freedom)
        return self.runner_up.contributions - self.nearest.contributions

    @property
    def leading(self) -> np.ndarray:
        """The components with the largest contributions: as many as make half of the squared distance, at most 3."""
        contributions = self.nearest.contributions
        order = np.argsort(-contributions, kind="stable")
        return order[: min(count_components(contributions[order], LEADING_SHARE), MAX_LEADING)]

    @property
    def is_unusual(self) -> bool:
        """Whether the image lies further out than the usual squared distance."""
        return self.nearest.squared_distance > self.usual_distance

    @property
    def most_unusual_part(self) -> Score | None:
        """The part of the score with the highest surprise; None where all are usual, as for most known images."""
        surprises = {name: FUSED[name].surprise_of(part) for name, part in self.parts.items()}
        highest = max(surprises, key=surprises.__getitem__, default=None)
        return highest if highest and surprises[highest] > -math.log(1 - USUAL_SHARE) else None

    def sentences(self) -> list[str]:
        """The explanation in plain words."""
        found = [
            self._say_class(),
            self._say_components(),
            self._say_kind(),
            self._say_runner_up(),
            self._say_score(),
            self._say_known(),
        ]
        return [sentence for sentence in found if sentence]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "class": self.class_name,
            "probability": self.probability,
            "is_ood": self.is_ood,
            "p_value": _or_none(self.p_value),
            "false_alarm": _or_none(self.false_alarm),
            "score": _or_none(self.score),
            "score_by": self.score_by,
            "parts": dict(self.parts),
            "nearest": _match_dict(self.nearest),
            "runner_up": self.runner_up and _match_dict(self.runner_up),
            "usual_squared_distance": self.usual_distance,
            "degrees_of_freedom": self.degrees_of_freedom,
            "components": [self._component_dict(component) for component in range(self.degrees_of_freedom)],
            "sentences": self.sentences(),
        }

    def _component_dict(self, component: int) -> dict[str, Any]:
        return {
            "component": component + 1,
            "between": list(self.end_names(component) or []),
            "coordinate": float(self.coordinates[component]),
            "deviation": float(self.nearest.deviations[component]),
            "contribution": float(self.nearest.contributions[component]),
            "separation": float(self.separation[component]),
        }

    def end_names(self, component: int) -> tuple[str, str] | None:
        """The names of the clusters at both ends of a separating component; None for a shared one."""
        if component >= self.components.n_separating:
            return None
        low, high = self.components.ends(component)
        return self.cluster_names[low], self.cluster_names[high]

    # -- in words

    def _say_class(self) -> str:
        called = f"Called {self.class_name} (probability {_probability(self.probability)})"
        where = f"squared distance {_number(self.nearest.squared_distance)}, {self._say_usual()}."
        if self.nearest.class_name == self.class_name:
            return f"{called}: nearest to {self.nearest.name}, {where}"
        return (
            f"{called}, although {self.nearest.name} ({_probability(self.nearest.probability)}) has the nearest mean, "
            f"{where}"
        )

    def _say_usual(self) -> str:
        if self.is_measured:
            return f"where {percent(USUAL_SHARE)} of known images stay below {_number(self.usual_distance)}"
        return (
            f"where the Gaussian model expects about {self.degrees_of_freedom} "
            f"({percent(USUAL_SHARE)} below {_number(self.usual_distance)})"
        )

    def _say_components(self) -> str:
        total = self.nearest.squared_distance
        if total == 0:
            return ""
        leading = self.leading
        share = self.nearest.contributions[leading].sum() / total
        parts = [f"{c + 1} ({self.say_deviation(c, unit=i == 0)})" for i, c in enumerate(leading)]
        which = f"component{'s' if len(leading) > 1 else ''} {', '.join(parts)}"
        if share >= LEADING_SHARE:
            return f"{percent(share)} of that distance comes from {which}."
        if np.abs(self.nearest.deviations).max() < STANDS_OUT:
            first = self.nearest.contributions[leading[0]] / total
            return f"None of the {self.degrees_of_freedom} components stands out: the largest makes {percent(first)}."
        return f"The largest parts of that distance, together {percent(share)}, come from {which}."

    def say_deviation(self, component: int, unit: bool = True) -> str:
        """How far an image lies from its nearest cluster along one component; towards which, where there is one."""
        deviation = self.nearest.deviations[component]
        size = f"{abs(deviation):.1f}{' standard deviations' if unit else ''}"
        end = self.components.ends(component)[int(deviation > 0)]
        along = self.components.centroids[:, component]
        is_far = abs(along[end] - along[self.nearest.cluster]) > FAR_APART
        return f"{size} towards {self.cluster_names[end]}" if is_far else size

    def _say_kind(self) -> str:
        """Of an unusual image: whether it is so in what tells clusters apart, or in what they share.

        Compared is what the components of either kind add beyond the 1 that each adds on average.
        """
        n_separating, n = self.components.n_separating, self.degrees_of_freedom
        is_certain = self.is_unusual and (self.is_measured or self.is_ood)  # real clusters are wider than the model's
        if not is_certain or n_separating in (0, n):
            return ""
        excess = np.split(self.nearest.contributions - 1, [n_separating])
        separating, shared = (max(float(part.sum()), 0.0) for part in excess)
        if shared > separating:
            kind, verdict = f"no clusters apart ({n_separating + 1} to {n})", "it would be unusual in any of them"
        else:
            kind, verdict = f"clusters apart (1 to {n_separating})", "it lies between or beyond them"
        share = max(separating, shared) / (separating + shared or 1.0)
        return f"{percent(share)} of what is unusual about it lies in components that tell {kind}: {verdict}."

    def _say_runner_up(self) -> str:
        rival, separation = self.runner_up, self.separation
        if rival is None:
            return ""
        place = "Second nearest is" if rival.class_name == self.class_name else "Runner-up"
        said = (
            f"{place} {rival.name} ({_probability(rival.probability)}), "
            f"squared distance {_number(rival.squared_distance)}: "
        )
        against, favourable = int(separation.argmax()), int(separation.argmin())
        said += f"component {against + 1} speaks most against it ({_number(separation[against])})"
        if separation[favourable] < -1:
            said += f", component {favourable + 1} most for it ({_number(-separation[favourable])})"
        return said + "."

    def _say_score(self) -> str:
        if math.isnan(self.score):
            return ""
        if not self.parts:
            return f"Its score, {self.score_by}, is {self.score:,.{3 if abs(self.score) < 1 else 1}f}."
        adding = {name: part for name, part in self.parts.items() if part > 0} or self.parts
        *others, last = (f"{name} {_number(part)}" for name, part in adding.items())
        made_of = f"{', '.join(others)} and {last}" if others else last
        highest = self.most_unusual_part
        verdict = (
            f"most unusual is {highest} ({PART_MEANINGS[highest]})" if highest else "none of them is unusual alone"
        )
        return f"Its score {_number(self.score)} is made of {made_of}: {verdict}."

    def _say_known(self) -> str:
        if math.isnan(self.false_alarm):
            return ""
        if math.isnan(self.p_value):
            return "Whether it is out-of-distribution was not decided: the run has no calibration images."
        # The image itself counts as one of n + 1: where no calibration image is as unusual, that is "at most" indeed.
        share = f"at most {percent(max(self.p_value, 0.001))} of {self.known_images} look as unusual"
        p_value = f"p-value {_probability(self.p_value, digits=3)}"
        if not self.can_be_flagged:
            return (
                "Whether it is out-of-distribution was not decided: the run has too few calibration images for the "
                f"false-alarm rate {self.false_alarm:g}; {share} ({p_value})."
            )
        verdict = "Out-of-distribution" if self.is_ood else "In-distribution"
        rate = ""
        if self.is_ood == (self.p_value <= self.false_alarm):  # where nothing else had a say
            rate = f", {'at most' if self.is_ood else 'above'} the false-alarm rate {self.false_alarm:g}"
        other = ""
        if self.is_ood and not self.is_unusual and not self.by_distance:
            other = "; its squared distance is usual, but the score goes by more than that"
        return f"{verdict}: {share} ({p_value}{rate}){other}."


def explain_outputs(
    detector: MapleDetector,
    outputs: Outputs | np.ndarray,
    temperature: float = 1.0,
    *,
    class_names: Sequence[str] = (),
    prediction: Prediction | None = None,
    false_alarm: float = math.nan,
    can_be_flagged: bool = True,
    known_images: Sequence[str] = (),
    usual_distance: float | None = None,
) -> list[Explanation]:
    """One explanation per image.

    Class and probabilities are those of ``prediction``, or else the class posterior at ``temperature``; decision and
    p-value are those of ``prediction``, at the rate ``false_alarm``, for which calibration images may be too few to
    flag any (``can_be_flagged``). ``known_images`` (C,) says in words of which ones the p-values of each class speak.
    ``usual_distance`` is the squared distance to the nearest cluster below which
    ``USUAL_SHARE`` of known images stay; without it the Gaussian model says what is usual.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> embeddings = rng.normal(size=(300, 8)) + 6 * np.eye(3, 8)[labels]
    >>> detector = MapleDetector(norm_exponent=0).fit(Outputs(embeddings, labels=labels))
    >>> strange = np.array([[6.0, 0, 0, 0, 0, 0, 0, 9]])
    >>> (found,) = explain_outputs(detector, strange, class_names=("a", "b", "c"), usual_distance=14.0)
    >>> found.nearest.name, found.components.n_separating, found.degrees_of_freedom  # three clusters span a plane
    ('a', 2, 7)
    >>> print(found.sentences()[2])
    100 % of what is unusual about it lies in components that tell no clusters apart (3 to 7): it would be unusual in
    any of them.
    """
    outputs = _in_float64(outputs)
    embeddings = outputs.embeddings
    found = detector.describe(outputs)
    gaussians, cluster_to_class = detector.gaussians_, detector.cluster_to_class_
    probabilities = found.posterior(temperature) if prediction is None else prediction.probabilities  # (N, C)
    if len(probabilities) != len(embeddings):
        raise UsageError(f"{len(embeddings)} outputs but {len(probabilities)} predictions: they must match row by row")
    known_names = class_names or (prediction.class_names if prediction else ())
    names = tuple(known_names) or tuple(map(str, range(probabilities.shape[1])))
    cluster_names = name_clusters(cluster_to_class, names)

    components = find_components(gaussians)
    projection = gaussians.project(embeddings)  # (N, K)
    nearest = found.cluster  # (N,)
    same_class = cluster_to_class == cluster_to_class[nearest, None]  # (N, M)
    runner_up = np.where(same_class, np.inf, found.squared_distances).argmin(axis=1)  # (N,)
    expected_distance = float(chdtri(gaussians.n_components, 1 - USUAL_SHARE))
    has_score = detector.score_ in found.available_scores  # plain embeddings have no logits
    parts = score_parts(found) if has_score else {}

    def matches(clusters: np.ndarray) -> list[Match]:
        away = deviations(gaussians, components, projection, clusters)  # (N, K)
        ids = cluster_to_class[clusters]
        return [
            Match(int(c), int(k), names[k], cluster_names[c], float(probabilities[i, k]), away[i])
            for i, (c, k) in enumerate(zip(clusters, ids))
        ]

    return [
        Explanation(
            class_name=names[probabilities[i].argmax()],
            probability=float(probabilities[i].max()),
            nearest=first,
            runner_up=None if same_class[i].all() else second,
            coordinates=projection[i] @ components.axes,
            components=components,
            cluster_names=cluster_names,
            usual_distance=expected_distance if usual_distance is None else usual_distance,
            is_measured=usual_distance is not None,
            p_value=float(prediction.p_value[i]) if prediction else math.nan,
            is_ood=bool(prediction.is_ood[i]) if prediction else False,
            false_alarm=false_alarm,
            known_images=known_images[int(probabilities[i].argmax())] if known_images else "known images",
            can_be_flagged=can_be_flagged,
            by_distance=prediction is None or np.array_equal(prediction.score, prediction.squared_distance),
            score=float(found.score[i]) if has_score else math.nan,
            score_by=detector.score_,
            parts={name: float(part[i]) for name, part in parts.items()},
        )
        for i, (first, second) in enumerate(zip(matches(nearest), matches(runner_up)))
    ]


def score_parts(found: Description) -> dict[Score, np.ndarray]:
    """What each part adds to the fused score of described images (N,), in all the score; empty for other scores.

    A part is its weight times its surprise, -log of the share of known images that are as unusual in it; ``distance``
    adds only what is beyond the surprise of nearly all of them.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> outputs = Outputs(rng.normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels], 9 * np.eye(3)[labels], labels)
    >>> found = MapleDetector().fit(outputs, outputs).describe(outputs)
    >>> parts = score_parts(found)
    >>> list(parts), bool(np.allclose(sum(parts.values()), found.score))
    (['energy', 'spread', 'distance'], True)
    """
    if found.learned.score != "fused":
        return {}
    return found.fused_parts()


def name_clusters(cluster_to_class: np.ndarray, class_names: Sequence[str]) -> tuple[str, ...]:
    """What each cluster is called: as its class where that is not split, else by its number.

    >>> name_clusters(np.array([0, 1, 0]), ["Navicula", "Nitzschia"])
    ('cluster 0 of Navicula', 'Nitzschia', 'cluster 2 of Navicula')
    """
    parts = np.bincount(cluster_to_class)
    return tuple(
        class_names[k] if parts[k] == 1 else f"cluster {cluster} of {class_names[k]}"
        for cluster, k in enumerate(cluster_to_class)
    )


def _in_float64(outputs: Outputs | np.ndarray) -> Outputs:
    """Embeddings in float64, since the parts of a distance should sum to it whatever the batch."""
    if not isinstance(outputs, Outputs):
        outputs = Outputs(as_embeddings(outputs))
    return replace(outputs, embeddings=as_embeddings(outputs.embeddings).astype(np.float64))


# ----------------------------------------------------------------------------------------------------------- words


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _probability(value: float, digits: int = 2) -> str:
    """A probability with few digits, never rounded to 0 or 1.

    >>> [_probability(value) for value in (0.934, 1e-9, 0.9999, 1.0)]
    ['0.93', 'below 0.01', 'above 0.99', '1.00']
    """
    least = 10.0**-digits
    if 0 < value < least / 2:
        return f"below {least:.{digits}f}"
    if 1 - least / 2 < value < 1:
        return f"above {1 - least:.{digits}f}"
    return f"{value:.{digits}f}"


# ---------------------------------------------------------------------------------------------------------- values


def _match_dict(match: Match) -> dict[str, Any]:
    return {
        "cluster": match.cluster,
        "class": match.class_name,
        "probability": match.probability,
        "squared_distance": match.squared_distance,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value  # JSON has no NaN
