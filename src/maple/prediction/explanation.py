"""The explanation of one prediction: its record, plain sentences, and values for files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from maple.decisions.attention import is_doubtful
from maple.detectors.scores import FUSED, Part, Score
from maple.prediction.components import FAR_APART, Components
from maple.stats.covariance import count_components
from maple.text import join_names, percent

USUAL_SHARE = 0.95  # share of known images within the usual squared distance
LEADING_SHARE = 0.5  # of the squared distance, by the leading components together
MAX_LEADING = 3
STANDS_OUT = 3.0  # standard deviations from the centroid along one component
PART_MEANINGS: dict[Score, str] = {  # meaning of a high value of a part of the fused score
    "energy": "little evidence for any class",
    "spread": "lies between the classes",
    "shallow": "looks different from all training images, regardless of content",
    "distance": "lies far outside of all classes, embeddings as they are",
}


@dataclass(frozen=True, eq=False)
class Match:
    """An image compared with one cluster."""

    cluster: int
    class_id: int
    class_name: str
    name: str  # of the cluster: its class, with a number if the class has several clusters
    probability: float  # of the class
    deviations: np.ndarray  # (K,) in standard deviations, positive up the component

    @cached_property
    def contributions(self) -> np.ndarray:
        """The contribution of each component to the squared distance (K,)."""
        return self.deviations**2

    @cached_property
    def squared_distance(self) -> float:
        return float(self.contributions.sum())

    def to_dict(self) -> dict[str, Any]:
        """Cluster, class and distance as plain values."""
        named = {"cluster": self.cluster, "class": self.class_name, "probability": self.probability}
        return {**named, "squared_distance": self.squared_distance}


@dataclass(frozen=True, eq=False)
class Explanation:
    """The explanation of one prediction. Components count from 0 in arrays and from 1 in sentences."""

    class_name: str  # of the most probable class
    probability: float
    nearest: Match
    runner_up: Match | None  # the nearest cluster of another class; None if there is only one class
    coordinates: np.ndarray  # (K,) on the components
    components: Components
    cluster_names: tuple[str, ...]
    usual_distance: float  # squared; USUAL_SHARE of known images lie within it
    is_measured: bool  # whether usual_distance was measured on held-out images; else the Gaussian model gives it
    p_value: float = math.nan
    is_ood: bool = False
    false_alarm: float = math.nan
    known_images: str = "known images"  # the population of the p-value
    can_be_flagged: bool = True  # False if there are too few calibration images for the false-alarm rate
    by_distance: bool = True  # whether the score is the squared distance itself
    score: float = math.nan  # NaN if the outputs do not allow it
    score_by: str = ""  # name of the score
    parts: Mapping[Score, float] = field(default_factory=dict)  # of the fused score, their sum
    counted: Mapping[Score, Part] = field(default_factory=lambda: FUSED)  # how that score counts them

    @property
    def degrees_of_freedom(self) -> int:
        """K: the mean squared distance of a cluster's own images under the model."""
        return len(self.coordinates)

    @property
    def separation(self) -> np.ndarray:
        """The contributions to the runner-up's squared distance minus those to the nearest cluster's (K,)."""
        if self.runner_up is None:
            return np.zeros(self.degrees_of_freedom)
        return self.runner_up.contributions - self.nearest.contributions

    @property
    def leading(self) -> np.ndarray:
        """The components with the largest contributions, up to half of the squared distance, at most three."""
        order = np.argsort(-self.nearest.contributions, kind="stable")
        return order[: min(count_components(self.nearest.contributions[order], LEADING_SHARE), MAX_LEADING)]

    @property
    def is_unusual(self) -> bool:
        """Whether the squared distance exceeds the usual one."""
        return self.nearest.squared_distance > self.usual_distance

    @property
    def most_unusual_part(self) -> Score | None:
        """The largest part of the score; None if it is usual."""
        largest = max(self.parts, key=self.parts.__getitem__, default=None)
        if largest is None or self.counted[largest].surprise_of(self.parts[largest]) <= -math.log(1 - USUAL_SHARE):
            return None
        return largest

    def sentences(self) -> list[str]:
        """The explanation in plain words: what to make of the image, then the reasons."""
        distance = [self._say_class(), self._say_components(), self._say_kind(), self._say_runner_up()]
        said = (self._say_verdict(), *distance, self._say_score(), self._say_known())
        return [sentence for sentence in said if sentence]

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
            "nearest": self.nearest.to_dict(),
            "runner_up": self.runner_up and self.runner_up.to_dict(),
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

    def _say_verdict(self) -> str:
        """One sentence that needs no other: unknown, doubtful, or known."""
        called = f"{self.class_name} ({percent(self.probability)})"
        if self.is_ood:
            # A conformal p-value counts the image itself among n + 1, so the share is a lower bound.
            compared = f"at least {percent(min(1 - self.p_value, 0.999))} of {self.known_images}"
            than = f"it is further from every class than {compared}"
            if not self.by_distance:
                than = f"it looks more unusual than {compared}"
            return f"Probably not one of your classes: {than}; nearest is {self.nearest.class_name}."
        is_decided = self.can_be_flagged and not math.isnan(self.p_value)
        kind = ": it looks like known images" if is_decided else "; whether it is one of your classes was not decided"
        if not is_doubtful(self.probability):
            return f"Probably {called}{kind}."
        rival = self.nearest if self.nearest.class_name != self.class_name else self.runner_up
        other = f" or {rival.class_name} ({percent(rival.probability)})" if rival else ""
        return f"Doubtful, {called}{other}{kind}."

    def _say_class(self) -> str:
        called = f"Called {self.class_name} (probability {_probability(self.probability)})"
        where = f"squared distance {_number(self.nearest.squared_distance)}, {self._say_usual()}."
        if self.nearest.class_name == self.class_name:
            return f"{called}: nearest to {self.nearest.name}, {where}"
        near = f"{self.nearest.name} ({_probability(self.nearest.probability)})"
        return f"{called}, although {near} has the nearest mean, {where}"

    def _say_usual(self) -> str:
        share, usual = percent(USUAL_SHARE), _number(self.usual_distance)
        if self.is_measured:
            return f"where {share} of known images stay below {usual}"
        return f"where the Gaussian model expects about {self.degrees_of_freedom} ({share} below {usual})"

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
        """The deviation from the nearest cluster along one component, and the cluster in that direction, if any."""
        deviation = self.nearest.deviations[component]
        size = f"{abs(deviation):.1f}{' standard deviations' if unit else ''}"
        end = self.components.ends(component)[int(deviation > 0)]
        along = self.components.centroids[:, component]
        is_far = abs(along[end] - along[self.nearest.cluster]) > FAR_APART
        return f"{size} towards {self.cluster_names[end]}" if is_far else size

    def _say_kind(self) -> str:
        """For an unusual image: whether separating or shared components make it unusual.

        Compares the contributions of both kinds of components beyond the average of 1 each.
        """
        n_separating, n = self.components.n_separating, self.degrees_of_freedom
        is_certain = self.is_unusual and (self.is_measured or self.is_ood)  # real clusters are wider than the model
        if not is_certain or n_separating in (0, n):
            return ""
        excess = np.split(self.nearest.contributions - 1, [n_separating])
        separating, shared = (max(float(part.sum()), 0.0) for part in excess)
        if shared > separating:
            kind, verdict = (
                f"do not separate clusters ({n_separating + 1} to {n})",
                "it would be unusual in any of them",
            )
        else:
            kind, verdict = f"separate clusters (1 to {n_separating})", "it lies between or beyond them"
        share = max(separating, shared) / (separating + shared or 1.0)
        return f"{percent(share)} of the unusual distance lies in components that {kind}: {verdict}."

    def _say_runner_up(self) -> str:
        rival, separation = self.runner_up, self.separation
        if rival is None:
            return ""
        place = "Second nearest is" if rival.class_name == self.class_name else "Runner-up"
        where = f"({_probability(rival.probability)}), squared distance {_number(rival.squared_distance)}"
        against, favourable = int(separation.argmax()), int(separation.argmin())
        said = f"component {against + 1} is the strongest evidence against it ({_number(separation[against])})"
        if separation[favourable] < -1:
            said += f", component {favourable + 1} for it ({_number(-separation[favourable])})"
        return f"{place} {rival.name} {where}: {said}."

    def _say_score(self) -> str:
        if math.isnan(self.score):
            return ""
        if not self.parts:
            return f"Its score, {self.score_by}, is {self.score:,.{3 if abs(self.score) < 1 else 1}f}."
        adding = {name: part for name, part in self.parts.items() if part > 0} or self.parts
        made_of = join_names([f"{name} {_number(part)}" for name, part in adding.items()])
        verdict = "none of them stands out"
        if highest := self.most_unusual_part:
            verdict = f"most unusual is {highest} ({PART_MEANINGS[highest]})"
        return f"Its score {_number(self.score)} is made of {made_of}: {verdict}."

    def _say_known(self) -> str:
        if math.isnan(self.false_alarm):
            return ""
        undecided, rate = "Whether it is out-of-distribution was not decided: the run has", f"{self.false_alarm:g}"
        if math.isnan(self.p_value):
            return f"{undecided} no calibration images."
        # A conformal p-value counts the image itself among n + 1, so it is an upper bound.
        share = f"at most {percent(max(self.p_value, 0.001))} of {self.known_images} look as unusual"
        p_value = f"p-value {_probability(self.p_value, digits=3)}"
        if not self.can_be_flagged:
            return f"{undecided} too few calibration images for the false-alarm rate {rate}; {share} ({p_value})."
        verdict, relation = ("Out-of-distribution", "at most") if self.is_ood else ("In-distribution", "above")
        if self.is_ood == (self.p_value <= self.false_alarm):  # not if the decision used another rule
            p_value += f", {relation} the false-alarm rate {rate}"
        other = ""
        if self.is_ood and not self.is_unusual and not self.by_distance:
            other = "; its squared distance is usual, but the score also uses other evidence"
        return f"{verdict}: {share} ({p_value}){other}."


# --- numbers ----------------------------------------------------------------------------------------------------------


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


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value  # JSON has no NaN
