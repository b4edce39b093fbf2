"""Evaluate MAPLE and its baselines on the same outputs: one pass over saved arrays, one record of all figures.

`evaluate` takes a fitted predictor, and in-distribution (IND) and out-of-distribution (OOD) images or their
``Outputs``; from there on no network runs.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

import maple
from maple.detectors.base import Detector
from maple.detectors.description import Description
from maple.detectors.logits import LogitDetector, probability_of_others
from maple.detectors.registry import create_detector
from maple.errors import DataError, UsageError
from maple.evaluation._judge import MAX_CURVE_POINTS, judge_as_paper, judge_probabilities, make_method
from maple.evaluation.gains import Reading, measure_gains
from maple.evaluation.results import ClassFlagged, Gain, Method, Results, to_plain
from maple.stats import metrics
from maple.stats.chi_square import gaussian_test, qq_points
from maple.stats.gaussians import class_logsumexp
from maple.types import Outputs, Prediction

if TYPE_CHECKING:
    from maple.data.splits import Images
    from maple.prediction.predictor import Predictor

BASELINES = ("softmax", "energy")


class Own(NamedTuple):
    """The method of the recipe that trained the network, where that is not MAPLE."""

    recipe: str
    detector: str  # its score


class Scored(NamedTuple):
    """The scores of a detector that reads images."""

    name: str
    ind: np.ndarray  # (N,)
    ood: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What goes into the results besides the figures of the predictor itself."""

    detectors: Sequence[str | Detector] | None = None  # names, or fitted instances; the default ones if None
    further: Sequence[Detector] = ()  # fitted instances beside those
    own: Own | None = None
    scored: Sequence[Scored] = ()
    ood_classes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # class names by OOD set
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # OOD sets by group: near, far
    latency_ms: float = math.nan  # per image
    network_latency_ms: float = math.nan
    seed: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def evaluate(
    predictor: Predictor,
    ind: Outputs | Images,
    ood: Mapping[str, Outputs | Images] | None = None,
    *,
    detectors: Sequence[str | Detector] | None = None,
    own: Own | None = None,
    scored: Sequence[Scored] = (),
    ood_classes: Mapping[str, Sequence[str]] | None = None,
    latency_ms: float | None = None,
    seed: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Results:
    """Evaluate a predictor and its baselines on labelled IND images and any number of named OOD sets.

    Both are ``Outputs`` of its backbone, or images: an ``ImageSet``, a path, a torch ``Dataset`` or ``DataLoader``.
    ``detectors`` are names or fitted instances; each adds a row with the detection metrics, and ``softmax`` its class
    probabilities as well. The default is ``softmax`` and ``energy``, or none where the outputs have no logits. ``own``
    is the method of the recipe that trained the network, where that is not MAPLE. ``scored`` are rows of detectors that
    read images, not outputs. ``ood_classes`` names the classes behind the labels of an OOD set. ``seed`` and
    ``provenance`` (configuration, command) are kept next to the package versions.
    """
    context = Context(
        detectors=detectors,
        own=own,
        scored=scored,
        ood_classes=ood_classes or {},
        latency_ms=math.nan if latency_ms is None else latency_ms,
        seed=seed,
        provenance=provenance or {},
    )
    unknown = {name: predictor.outputs(images) for name, images in (ood or {}).items()}
    return evaluate_case(Case.check(predictor, predictor.labelled_outputs(ind), unknown), context)


def evaluate_case(case: Case, context: Context) -> Results:
    """As :func:`evaluate`, for outputs that are described already; the case keeps its predictions."""
    predictor, predicted, degrees = case.predictor, case.prediction, case.description.degrees_of_freedom
    theoretical, observed = qq_points(predicted.squared_distance, degrees, MAX_CURVE_POINTS)
    confusion = metrics.confusion_matrix(case.labels, predicted.class_id, case.n_classes)
    compared = _compare(case, context)
    return Results(
        class_names=list(predictor.class_names),
        methods=compared.methods,
        n_ind=len(case.ind),
        n_ood={name: len(outputs) for name, outputs in case.ood.items()},
        n_components=int(degrees),
        n_clusters=len(case.description.cluster_to_class),
        false_alarm=_share_flagged(predicted),
        gaussian_error=gaussian_test(predicted.squared_distance, degrees),
        qq_theoretical=theoretical.tolist(),
        qq_observed=observed.tolist(),
        confusion=confusion.tolist(),
        per_class_accuracy=metrics.per_class_accuracy(confusion).tolist(),
        scores=_score_table(case),
        threshold=predictor.threshold if predicted.is_calibrated else math.nan,
        latency_ms=float(context.latency_ms),
        network_latency_ms=float(context.network_latency_ms),
        unknown_classes={
            name: _count_flagged(case.ood_predictions[name], case.ood[name].labels, names)
            for name, names in context.ood_classes.items()
            if predicted.is_calibrated
        },
        groups={name: list(sets) for name, sets in context.groups.items() if sets},
        gains=compared.gains,
        provenance=to_plain({**context.provenance, "seed": context.seed, "versions": _versions()}),
    )


@dataclass(frozen=True, eq=False)
class Case:
    """A predictor, the outputs to evaluate it on, and its predictions for them."""

    predictor: Predictor
    ind: Outputs
    ood: dict[str, Outputs]
    labels: np.ndarray  # (N,) of IND, all known

    @staticmethod
    def check(predictor: Predictor, ind: Outputs, ood: Mapping[str, Outputs]) -> Case:
        """Check outputs, and add the logits of classes that the head does not know, after ``maple update``."""
        if len(ind) == 0:
            raise DataError("there are no in-distribution images: check their source")
        if empty := [name for name, outputs in ood.items() if len(outputs) == 0]:
            raise DataError(f"the OOD set '{empty[0]}' has no images: check its source")
        complete = predictor.detector.complete
        labels = _check_labels(ind, len(predictor.class_names))
        return Case(predictor, complete(ind), {name: complete(outputs) for name, outputs in ood.items()}, labels)

    @property
    def n_classes(self) -> int:
        return len(self.predictor.class_names)

    @cached_property
    def description(self) -> Description:
        return self.predictor.detector.describe(self.ind)

    @cached_property
    def ood_descriptions(self) -> dict[str, Description]:
        return {name: self.predictor.detector.describe(outputs) for name, outputs in self.ood.items()}

    @cached_property
    def prediction(self) -> Prediction:
        return self.predictor.predict_described(self.description)

    @cached_property
    def ood_predictions(self) -> dict[str, Prediction]:
        return {name: self.predictor.predict_described(found) for name, found in self.ood_descriptions.items()}


def _check_labels(ind: Outputs, n_classes: int) -> np.ndarray:
    if ind.labels is None:
        raise DataError("the in-distribution images have no labels: give images sorted into class folders")
    unknown = int(((ind.labels < 0) | (ind.labels >= n_classes)).sum())
    if unknown:
        raise DataError(
            f"{unknown} of {len(ind)} in-distribution images have no label among the {n_classes} classes: "
            "leave them out or give them as an OOD set"
        )
    return ind.labels


# --- methods ---------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """All methods by name, and the gains of MAPLE over those that read class probabilities off the network."""

    methods: dict[str, Method]
    gains: dict[str, dict[str, Gain]]


def _compare(case: Case, context: Context) -> Compared:
    """The recipe's own method, the detectors, then the readings of MAPLE."""
    own, detectors = context.own, context.detectors
    if detectors is None:
        taken = {each.name for each in context.further} | ({own.detector} if own else set())
        detectors = [name for name in BASELINES if case.ind.logits is not None and name not in taken]
    fitted = [_fit_to_logits(each, case) for each in (*detectors, *context.further)]
    networks = {} if own is None else {own.recipe: _read_network(case, _fit_to_logits(own.detector, case))}
    networks |= {found.name: _read_network(case, found) for found in fitted if found.name == "softmax"}
    if networks:
        networks["softmax-scaled"] = _read_scaled(case)
    judged = {name: _judge_reading(reading, case.labels) for name, reading in networks.items()}
    ours = _read_maple(case)
    methods = {
        **({} if own is None else {own.recipe: judged[own.recipe]}),
        **{found.name: judged.get(found.name) or _baseline(case, found) for found in fitted},
        **{row.name: make_method(None, row.ind, row.ood) for row in context.scored},
        **judged,
        "maple": _judge_maple(case, ours),
        "maple-paper": _maple_as_paper(case),
    }
    gains = {name: measure_gains(ours, reading, case.labels) for name, reading in networks.items()}
    return Compared(methods, gains)


def _fit_to_logits(given: str | Detector, case: Case) -> Detector:
    """A detector; one of logits that is given by name learns which columns belong to which class, and nothing else."""
    detector = create_detector(given)
    if isinstance(given, str) and isinstance(detector, LogitDetector):
        detector.fit(case.ind)
    return detector


def _baseline(case: Case, detector: Detector) -> Method:
    """The row of a detector; Gaussians have class probabilities too, as the paper reads them."""
    found = detector.describe(case.ind)
    scores = detector.score(case.ind), {name: detector.score(outputs) for name, outputs in case.ood.items()}
    if found is not None and found.score_is_distance:
        return make_method(judge_as_paper(found, case.labels), *scores, found=found)
    return make_method(None, *scores)


def _read_network(case: Case, detector: Detector) -> Reading:
    """The network's own class probabilities, with the score of a detector."""
    scores = {name: detector.score(outputs) for name, outputs in case.ood.items()}
    return Reading(_class_log_softmax(case.ind, case.n_classes), detector.score(case.ind), scores)


def _read_scaled(case: Case) -> Reading:
    """Softmax with a temperature fitted on the same validation images (Guo et al. 2017)."""
    temperature = case.predictor.probability.softmax_temperature

    def scale(outputs: Outputs) -> np.ndarray:
        return log_softmax(_class_log_softmax(outputs, case.n_classes) / temperature, axis=1)

    logs = scale(case.ind)
    scores = {name: probability_of_others(scale(outputs)) for name, outputs in case.ood.items()}
    return Reading(logs, probability_of_others(logs), scores)


def _judge_reading(reading: Reading, labels: np.ndarray) -> Method:
    return make_method(judge_probabilities(reading.log_probabilities, labels), reading.ind, reading.ood)


def _class_log_softmax(outputs: Outputs, n_classes: int) -> np.ndarray:
    """Log-softmax summed over the clusters of a class (N, C); labels are classes, never clusters."""
    assert outputs.logits is not None
    logs = log_softmax(outputs.logits.astype(np.float64), axis=1)  # (N, M)
    if outputs.cluster_to_class is not None:
        logs = class_logsumexp(logs, outputs.cluster_to_class)
    if logs.shape[1] != n_classes:
        raise UsageError(
            f"the logits are about {logs.shape[1]} classes, the predictor about {n_classes}: set "
            "cluster_to_class on the outputs"
        )
    return logs


def _read_maple(case: Case) -> Reading:
    """The calibrated posterior and the predictor's score."""
    logs = case.predictor.log_probabilities(case.description)
    scores = {name: prediction.score for name, prediction in case.ood_predictions.items()}
    return Reading(logs, case.prediction.score, scores)


def _judge_maple(case: Case, reading: Reading) -> Method:
    """The row of MAPLE, with the shares of images that it flags."""
    judged = judge_probabilities(reading.log_probabilities, case.labels)
    flagged = {name: _share_flagged(prediction) for name, prediction in case.ood_predictions.items()}
    return make_method(judged, reading.ind, reading.ood, flagged)


def _maple_as_paper(case: Case) -> Method:
    distances = {name: found.squared_distance for name, found in case.ood_descriptions.items()}
    judged = judge_as_paper(case.description, case.labels)
    return make_method(judged, case.description.squared_distance, distances, found=case.description)


def _score_table(case: Case) -> dict[str, dict[str, float]]:
    """AUROC of every score that the detector offers, by OOD set."""
    return {
        score: {
            name: metrics.auroc(case.description.score_named(score), found.score_named(score))
            for name, found in case.ood_descriptions.items()
        }
        for score in case.description.available_scores
    }


# --- decisions and versions ------------------------------------------------------------------------------------------


def _share_flagged(prediction: Prediction) -> float:
    """Share of images with ``is_ood``; NaN where nothing was calibrated."""
    return float(prediction.is_ood.mean()) if prediction.is_calibrated else math.nan


def _count_flagged(
    prediction: Prediction, labels: np.ndarray | None, class_names: Sequence[str]
) -> dict[str, ClassFlagged]:
    """Number of images and share flagged, for each class of an OOD set."""
    if labels is None:
        return {}
    flagged = {int(label): prediction.is_ood[labels == label] for label in np.unique(labels[labels >= 0])}
    return {class_names[label]: ClassFlagged(len(found), float(found.mean())) for label, found in flagged.items()}


def _versions() -> dict[str, str]:
    """Installed versions of the packages that compute, without importing them."""
    versions = {"python": platform.python_version(), "maple": maple.__version__}
    for package in ("numpy", "scipy", "scikit-learn", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
