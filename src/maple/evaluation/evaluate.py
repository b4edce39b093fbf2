"""MAPLE next to the baselines on the same outputs: one pass over saved arrays, one record of everything reported.

`evaluate` takes a fitted predictor and the ``Outputs`` of in-distribution (IND) and out-of-distribution (OOD) images;
no network runs here. The `Results` it returns hold numbers, thinned curves and provenance: all that a table or a report
needs, in a file that is strict JSON.
"""

from __future__ import annotations

import json
import math
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from rich.markup import escape
from rich.table import Table
from scipy.special import log_softmax

import maple
from maple import notebook
from maple.detectors.base import Detector
from maple.detectors.description import Description
from maple.detectors.logits import LogitDetector, probability_of_others
from maple.detectors.registry import create_detector
from maple.errors import DataError, RunError, UsageError
from maple.files import FORMAT_VERSION
from maple.stats import metrics
from maple.stats.chi_square import gaussian_test, qq_points
from maple.stats.gaussians import class_logsumexp
from maple.types import Outputs, Prediction

if TYPE_CHECKING:
    from maple.prediction.predictor import Predictor

CONFIDENCE_LEVELS = (0.5, 0.8, 0.9)
MAX_CURVE_POINTS = 200
HISTOGRAM_BINS = 50
BASELINES = ("softmax", "energy")

# A number that may be missing: NaN here, null in the file.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]

# ---------------------------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class Reliability:
    """Accuracy against confidence in B bins of equal width; NaN in empty bins."""

    edges: list[float]  # (B + 1,)
    count: list[int]  # (B,)
    accuracy: list[Number]  # (B,)
    confidence: list[Number]  # (B,)


@dataclass(frozen=True)
class Classification:
    """How good the classes and probabilities of one method are; NaN where the method has no such number."""

    accuracy: Number
    ece: Number
    nll: Number
    brier: Number
    aurc: Number
    accuracy_above: dict[str, Number]  # by confidence level, "0.5", "0.8", "0.9"
    share_above: dict[str, Number]  # share of images kept at that level
    reliability: Reliability = field(repr=False)
    ece_floor: Number = math.nan  # the ECE that these confidences would have if they were perfectly calibrated
    kept: list[float] = field(default_factory=list, repr=False)  # share of images kept, the most confident first
    accuracy_kept: list[float] = field(default_factory=list, repr=False)  # accuracy among them


@dataclass(frozen=True)
class Detection:
    """How well the score of one method separates one OOD set from the IND images."""

    auroc: Number
    aupr_out: Number  # OOD is the positive class
    aupr_in: Number  # IND is the positive class
    fpr95_ood_positive: Number  # share of IND flagged when 95 % of OOD is caught
    fpr95_ind_positive: Number  # share of OOD accepted when 95 % of IND is accepted
    flagged: Number  # share of the OOD set with ``is_ood``; NaN for methods without a threshold
    roc_ind: list[float] = field(repr=False)  # share of IND flagged along the ROC curve
    roc_ood: list[float] = field(repr=False)  # share of OOD flagged at the same thresholds


@dataclass(frozen=True)
class ClassFlagged:
    """The images of one class of unknown ones."""

    images: int
    flagged: Number  # share of them with ``is_ood``


@dataclass(frozen=True)
class Histogram:
    """Counts of scores in common bins; the few beyond the last edges are counted in the outer bins."""

    edges: list[float]  # (B + 1,)
    ind: list[int]  # (B,)
    ood: dict[str, list[int]]


@dataclass(frozen=True)
class Method:
    """One row of the table: what one way of reading the same outputs is worth."""

    classification: Classification | None  # None for methods that only score
    detection: dict[str, Detection]  # by OOD set
    histogram: Histogram = field(repr=False)
    n_components: Number = math.nan  # of the space in which distances are measured; NaN for other methods
    gaussian_error: Number = math.nan  # Gaussian test on the squared distances to the nearest cluster, IND


class Own(NamedTuple):
    """The method of the recipe that made the network."""

    recipe: str
    detector: str  # whose score is the method's


class Scored(NamedTuple):
    """The scores of a detector that reads images."""

    name: str
    ind: np.ndarray  # (N,)
    ood: dict[str, np.ndarray]


@dataclass(frozen=True)
class Results:
    """Everything `evaluate` found, by method: ``softmax``, ``energy``, ``maple``, ``maple-paper``, others as asked for.

    ``softmax-scaled`` is the softmax with a temperature from the validation images that taught ``maple`` its own.

    ``maple`` is the calibrated class posterior, the predictor's score and its threshold; ``maple-paper`` reads the same
    Gaussians as the paper does: nearest cluster, chi-square tail as probability and as uncertainty.
    """

    class_names: list[str]
    methods: dict[str, Method]
    n_ind: int
    n_ood: dict[str, int]
    n_components: int  # of the projection: degrees of freedom of the chi-square distribution
    n_clusters: int
    false_alarm: Number  # share of IND images with ``is_ood``; NaN without calibration
    gaussian_error: Number  # Gaussian test on the squared distances to the nearest cluster, IND
    qq_theoretical: list[float]
    qq_observed: list[float]
    confusion: list[list[int]]  # (C, C) rows: true classes; columns: ``maple`` classes
    per_class_accuracy: list[Number]  # (C,)
    scores: dict[str, dict[str, Number]] = field(default_factory=dict)  # AUROC of each one-pass score, by OOD set
    threshold: Number = math.nan  # score above which ``is_ood``; NaN without calibration
    latency_ms: Number = math.nan  # per image
    unknown_classes: dict[str, dict[str, ClassFlagged]] = field(default_factory=dict)  # by OOD set and class name
    provenance: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def ood_names(self) -> list[str]:
        return list(self.n_ood)

    @property
    def baseline(self) -> str | None:
        """What ``maple`` is compared with: the softmax of the network, or the method of the recipe that made it."""
        own = [
            name
            for name, method in self.methods.items()
            if method.classification and math.isnan(method.n_components) and not name.startswith("maple")
        ]
        return "softmax" if "softmax" in own else next(iter(own), None)

    @property
    def md_accuracy(self) -> float:
        """Accuracy of the nearest cluster's class, the paper's rule."""
        paper = self.methods["maple-paper"].classification
        return paper.accuracy if paper else math.nan

    def __repr__(self) -> str:
        return f"Results(methods={list(self.methods)}, n_ind={self.n_ind}, n_ood={self.n_ood})"

    def _repr_html_(self) -> str:
        shown = self.ood_names[: notebook.MAX_ROWS]
        columns = _COLUMNS | {f"auroc/{name}": f"AUROC ↑ {name}" for name in shown}
        figures = [[row.get(key, math.nan) for key in columns] for row in self.rows()]
        best = [
            (max if "↑" in heading else min)((value for value in column if not math.isnan(value)), default=math.nan)
            for heading, column in zip(columns.values(), zip(*figures))
        ]
        cells = [
            [name, *(notebook.bold(value) if value == top else value for value, top in zip(row, best))]
            for name, row in zip(self.methods, figures)
        ]
        hidden = len(self.n_ood) - len(shown)
        note = notebook.muted(f"AUROC of {hidden} more OOD sets: rows()") if hidden else notebook.Markup()
        table = notebook.table(["method", *columns.values()], cells)
        return notebook.card("Results", _caption([self]), table, note)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain rows, one per method, every scalar under its own name (``auroc/svhn``)."""
        return [_row(name, method) for name, method in self.methods.items()]

    def to_json(self) -> str:
        """Strict JSON: NaN is written as null, infinities as "inf" and "-inf"; arrays of numbers on one line each."""
        text = json.dumps(_plain(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False)
        # A raw line break is never inside a JSON string, so that only lists without lists in them are joined.
        return re.sub(r"\[\n[^\[\]{}]*?\n *\]", lambda match: re.sub(r"\n *", " ", match[0]), text)

    @staticmethod
    def from_json(text: str | bytes) -> Results:
        """The results written by `to_json`."""
        try:
            values = json.loads(text)
            written = values.get("format_version") if isinstance(values, dict) else None
            if isinstance(written, int) and written > FORMAT_VERSION:
                raise RunError(f"these results have format {written}, newer than {FORMAT_VERSION}: update maple")
            return TypeAdapter(Results).validate_python(values)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"these results are not valid JSON ({error}): evaluate the run again") from None
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the file"
            raise RunError(f"these results are incomplete or damaged at '{where}': evaluate the run again") from None


def _row(name: str, method: Method) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name}
    if method.classification is not None:
        values = asdict(method.classification)
        row |= {key: values[key] for key in ("accuracy", "ece", "ece_floor", "nll", "brier", "aurc")}
        for level in values["accuracy_above"]:
            row[f"accuracy_above/{level}"] = values["accuracy_above"][level]
            row[f"share_above/{level}"] = values["share_above"][level]
    row |= {"n_components": method.n_components, "gaussian_error": method.gaussian_error}
    for ood_name, detection in method.detection.items():
        row |= {f"{key}/{ood_name}": value for key, value in asdict(detection).items() if not key.startswith("roc_")}
    return row


def _plain(value: Any) -> Any:
    """Values that strict JSON can hold; what it cannot becomes text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate(
    predictor: Predictor,
    ind: Outputs,
    ood: Mapping[str, Outputs] | None = None,
    *,
    detectors: Sequence[str | Detector] | None = None,
    own: Own | None = None,
    scored: Sequence[Scored] = (),
    ood_classes: Mapping[str, Sequence[str]] | None = None,
    latency_ms: float | None = None,
    seed: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Results:
    """Judge a predictor and its baselines on labelled IND outputs and any number of named OOD outputs.

    ``detectors`` are names or fitted instances; each adds a row with the detection metrics, and ``softmax`` its class
    probabilities as well. The default is ``softmax`` and ``energy``, or none where the outputs have no logits. ``own``
    is the method of the recipe that made the network, where that is not MAPLE. ``scored`` are rows of detectors that
    read images, not outputs. ``ood_classes`` names the classes that the labels of an OOD set stand for.
    ``seed``, and whatever ``provenance`` holds (configuration, command), is kept next to the versions in use.
    """
    ood = dict(ood or {})
    if len(ind) == 0:
        raise DataError("there are no in-distribution images: check their source")
    if empty := [name for name, outputs in ood.items() if len(outputs) == 0]:
        raise DataError(f"the OOD set '{empty[0]}' has no images: check its source")
    ind = predictor.detector.complete(ind)  # the head may not know all classes, after maple update
    ood = {name: predictor.detector.complete(outputs) for name, outputs in ood.items()}
    n_classes = len(predictor.class_names)
    labels = _labels(ind, n_classes)
    found = predictor.detector.describe(ind)
    found_ood = {name: predictor.detector.describe(outputs) for name, outputs in ood.items()}
    said = predictor.predict_described(found)
    said_ood = {name: predictor.predict_described(unknown) for name, unknown in found_ood.items()}

    if detectors is None:
        detectors = () if ind.logits is None else [name for name in BASELINES if own is None or name != own.detector]
    methods = {} if own is None else _own_method(own, ind, ood, labels, n_classes)
    methods |= _baselines(detectors, ind, ood, labels, n_classes)
    methods |= {row.name: _method(None, row.ind, row.ood) for row in scored}
    if "softmax" in methods or own is not None:
        methods["softmax-scaled"] = _scaled_softmax(
            predictor.probability.softmax_temperature, ind, ood, labels, n_classes
        )
    methods["maple"] = _maple(predictor, found, labels, said, said_ood)
    ood_distances = {name: unknown.squared_distance for name, unknown in found_ood.items()}
    methods["maple-paper"] = _method(_paper_reading(found, labels), found.squared_distance, ood_distances, found=found)

    degrees = found.degrees_of_freedom
    theoretical, observed = qq_points(said.squared_distance, degrees, MAX_CURVE_POINTS)
    confusion = metrics.confusion_matrix(labels, said.class_id, n_classes)
    return Results(
        class_names=list(predictor.class_names),
        methods=methods,
        n_ind=len(ind),
        n_ood={name: len(outputs) for name, outputs in ood.items()},
        n_components=int(degrees),
        n_clusters=len(found.cluster_to_class),
        false_alarm=_share_flagged(said),
        gaussian_error=gaussian_test(said.squared_distance, degrees),
        qq_theoretical=theoretical.tolist(),
        qq_observed=observed.tolist(),
        confusion=confusion.tolist(),
        per_class_accuracy=metrics.per_class_accuracy(confusion).tolist(),
        scores=_score_table(found, found_ood),
        threshold=predictor.threshold if said.is_calibrated else math.nan,
        latency_ms=math.nan if latency_ms is None else float(latency_ms),
        unknown_classes={
            name: _count_flagged(said_ood[name], ood[name].labels, names)
            for name, names in (ood_classes or {}).items()
            if said.is_calibrated
        },
        provenance=_plain({**(provenance or {}), "seed": seed, "versions": _versions()}),
    )


def _labels(ind: Outputs, n_classes: int) -> np.ndarray:
    """The labels (N,), all of them known."""
    if ind.labels is None:
        raise DataError("the in-distribution images have no labels: give images sorted into class folders")
    unknown = int(((ind.labels < 0) | (ind.labels >= n_classes)).sum())
    if unknown:
        raise DataError(
            f"{unknown} of {len(ind)} in-distribution images have no label among the {n_classes} classes: "
            "leave them out or give them as an OOD set"
        )
    return ind.labels


def _own_method(
    own: Own, ind: Outputs, ood: dict[str, Outputs], labels: np.ndarray, n_classes: int
) -> dict[str, Method]:
    """The row of the recipe that made the network: its probabilities, and the score that its authors propose."""
    detector = create_detector(own.detector)
    assert isinstance(detector, LogitDetector)  # which learns only which columns belong to which class
    detector.fit(ind)
    scores = {name: detector.score(outputs) for name, outputs in ood.items()}
    judged = _judge_probabilities(_class_log_softmax(ind, n_classes), labels)
    return {own.recipe: _method(judged, detector.score(ind), scores)}


def _baselines(
    detectors: Sequence[str | Detector], ind: Outputs, ood: dict[str, Outputs], labels: np.ndarray, n_classes: int
) -> dict[str, Method]:
    """One method per detector; ``softmax`` has class probabilities, and so have Gaussians, as the paper reads them."""
    methods = {}
    for given in detectors:
        detector = create_detector(given)
        if isinstance(given, str) and isinstance(detector, LogitDetector):
            detector.fit(ind)  # learns only which columns belong to which class
        found, classification = detector.describe(ind), None
        if found is not None and found.score_is_distance:
            classification = _paper_reading(found, labels)
        elif detector.name == "softmax":
            classification = _judge_probabilities(_class_log_softmax(ind, n_classes), labels)
        ood_scores = {name: detector.score(outputs) for name, outputs in ood.items()}
        gaussians = found if classification is not None else None
        methods[detector.name] = _method(classification, detector.score(ind), ood_scores, found=gaussians)
    return methods


def _scaled_softmax(
    temperature: float, ind: Outputs, ood: dict[str, Outputs], labels: np.ndarray, n_classes: int
) -> Method:
    """Softmax with a temperature from the same validation images (Guo et al. 2017): what any network can have."""

    def scale(outputs: Outputs) -> np.ndarray:
        return log_softmax(_class_log_softmax(outputs, n_classes) / temperature, axis=1)

    scores = {name: probability_of_others(scale(outputs)) for name, outputs in ood.items()}
    logs = scale(ind)
    return _method(_judge_probabilities(logs, labels), probability_of_others(logs), scores)


def _class_log_softmax(outputs: Outputs, n_classes: int) -> np.ndarray:
    """Log-softmax summed over the clusters of a class, (N, C): clusters are never compared with class labels."""
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


def _maple(
    predictor: Predictor, found: Description, labels: np.ndarray, said: Prediction, said_ood: dict[str, Prediction]
) -> Method:
    """The calibrated posterior, the predictor's score and its decision."""
    return _method(
        _judge_probabilities(predictor.log_probabilities(found), labels),
        said.score,
        {name: prediction.score for name, prediction in said_ood.items()},
        {name: _share_flagged(prediction) for name, prediction in said_ood.items()},
    )


def _score_table(found: Description, found_ood: Mapping[str, Description]) -> dict[str, dict[str, float]]:
    """AUROC of every score that the detector can give, whichever it ranks by: no score wins everywhere."""
    return {
        score: {
            name: metrics.auroc(found.score_named(score), unknown.score_named(score))
            for name, unknown in found_ood.items()
        }
        for score in found.available_scores
    }


def _paper_reading(found: Description, labels: np.ndarray) -> Classification:
    """Gaussians as the paper reads them: P_MD is the probability, unnormalised, so that it has no Brier score.

    Images are ranked by squared distance, as uncertainty would if it did not round to 1 for every far image.
    """
    return _judge(
        np.exp(found.log_typicality),
        found.md_class_id == labels,
        ranking=-found.squared_distance,
        nll=metrics.negative_log_likelihood(found.log_typicality_per_class, labels, log=True),
    )


def _judge_probabilities(log_probabilities: np.ndarray, labels: np.ndarray) -> Classification:
    """The metrics of class probabilities (N, C) that sum to one, given as logarithms."""
    probabilities = np.exp(log_probabilities)
    confidence = probabilities.max(axis=1)
    return _judge(
        confidence,
        probabilities.argmax(axis=1) == labels,
        ranking=confidence,
        nll=metrics.negative_log_likelihood(log_probabilities, labels, log=True),
        brier=metrics.brier_score(probabilities, labels),
    )


def _judge(
    confidence: np.ndarray, correct: np.ndarray, *, ranking: np.ndarray, nll: float, brier: float = math.nan
) -> Classification:
    """The metrics of a confidence (N,) and of whether each class was right."""
    curve = metrics.reliability_curve(confidence, correct)
    kept, accuracy_kept = metrics.coverage_curve(ranking, correct)
    shown = metrics.spaced_rows(len(kept), MAX_CURVE_POINTS)
    above = {f"{level:g}": metrics.accuracy_above(confidence, correct, level) for level in CONFIDENCE_LEVELS}
    return Classification(
        accuracy=float(correct.mean()),
        ece=metrics.expected_calibration_error(confidence, correct),
        ece_floor=metrics.calibration_floor(confidence),
        nll=nll,
        brier=brier,
        aurc=metrics.aurc(ranking, correct),
        kept=kept[shown].tolist(),
        accuracy_kept=accuracy_kept[shown].tolist(),
        accuracy_above={level: accuracy for level, (accuracy, _) in above.items()},
        share_above={level: share for level, (_, share) in above.items()},
        reliability=Reliability(
            curve.edges.tolist(), curve.count.tolist(), curve.accuracy.tolist(), curve.confidence.tolist()
        ),
    )


def _method(
    classification: Classification | None,
    ind_scores: np.ndarray,
    ood_scores: dict[str, np.ndarray],
    flagged: dict[str, float] | None = None,
    found: Description | None = None,
) -> Method:
    """A row from its parts: detection on every OOD set, the histogram over all of them, and how Gaussian IND is."""
    shares = flagged or {}
    detection = {name: _detect(ind_scores, scores, shares.get(name, math.nan)) for name, scores in ood_scores.items()}
    row = Method(classification, detection, _histogram(ind_scores, ood_scores))
    if found is None:
        return row
    degrees = found.degrees_of_freedom
    error = gaussian_test(found.squared_distance, degrees)
    return replace(row, n_components=float(degrees), gaussian_error=error)


def _detect(ind_scores: np.ndarray, ood_scores: np.ndarray, flagged: float) -> Detection:
    roc_ind, roc_ood = _thin(*metrics.roc_curve(ind_scores, ood_scores)[:2])
    return Detection(
        auroc=metrics.auroc(ind_scores, ood_scores),
        aupr_out=metrics.aupr_out(ind_scores, ood_scores),
        aupr_in=metrics.aupr_in(ind_scores, ood_scores),
        fpr95_ood_positive=metrics.fpr95_ood_positive(ind_scores, ood_scores),
        fpr95_ind_positive=metrics.fpr95_ind_positive(ind_scores, ood_scores),
        flagged=flagged,
        roc_ind=roc_ind.tolist(),
        roc_ood=roc_ood.tolist(),
    )


def _thin(x: np.ndarray, y: np.ndarray, points: int = MAX_CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``points`` of a rising curve from (0, 0) to (1, 1), evenly along it, both ends kept."""
    along = x + y  # rises from 0 to 2
    if len(along) > points:
        kept = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)))
        x, y = x[kept], y[kept]
    return x, y


def _histogram(ind_scores: np.ndarray, ood_scores: dict[str, np.ndarray], bins: int = HISTOGRAM_BINS) -> Histogram:
    """Counts in common bins. A few extreme scores would squeeze all others into one bin, so that the range ends at
    the 0.5 % and 99.5 % quantiles of the sets and the rest joins the outer bins."""
    finite = [scores[np.isfinite(scores)] for scores in (ind_scores, *ood_scores.values())]
    limits = [np.quantile(scores, (0.005, 0.995)) for scores in finite if len(scores)] or [np.zeros(2)]
    low, high = min(pair[0] for pair in limits), max(pair[1] for pair in limits)
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)

    def count(scores: np.ndarray) -> list[int]:
        return np.histogram(np.clip(scores, edges[0], edges[-1]), edges)[0].tolist()

    return Histogram(edges.tolist(), count(ind_scores), {name: count(scores) for name, scores in ood_scores.items()})


def _share_flagged(prediction: Prediction) -> float:
    """Share of images with ``is_ood``; NaN where nothing was calibrated."""
    return float(prediction.is_ood.mean()) if prediction.is_calibrated else math.nan


def _count_flagged(
    prediction: Prediction, labels: np.ndarray | None, class_names: Sequence[str]
) -> dict[str, ClassFlagged]:
    """Images and share flagged of each class of unknown images that there is."""
    if labels is None:
        return {}
    flagged = {int(label): prediction.is_ood[labels == label] for label in np.unique(labels[labels >= 0])}
    return {class_names[label]: ClassFlagged(len(found), float(found.mean())) for label, found in flagged.items()}


def _versions() -> dict[str, str]:
    """What computed this: packages by their installed versions, without importing any."""
    versions = {"python": platform.python_version(), "maple": maple.__version__}
    for package in ("numpy", "scipy", "scikit-learn", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


# ---------------------------------------------------------------------------------------------------------------------
# Table

_COLUMNS = {"accuracy": "accuracy ↑", "ece": "ECE ↓", "nll": "NLL ↓"}


def format_table(results: Results, *more: Results) -> Table:
    """The summary as people read it; with several runs each cell is mean ± deviation over them."""
    runs = [results, *more]
    if any(list(run.methods) != list(results.methods) or run.ood_names != results.ood_names for run in more):
        raise UsageError("these results have different methods or OOD sets: compare runs of the same evaluation")
    columns = _COLUMNS | {f"auroc/{name}": f"AUROC ↑\n{escape(name)}" for name in results.ood_names}
    table = Table(caption=escape(_caption(runs)), caption_justify="left")
    table.add_column("method")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for rows in zip(*(run.rows() for run in runs), strict=True):
        table.add_row(escape(rows[0]["method"]), *(_cell([row.get(key, math.nan) for row in rows]) for key in columns))
    return table


def _cell(values: Sequence[float]) -> str:
    """A number, a spread, or a dash where there is none."""
    return "–" if any(math.isnan(value) for value in values) else metrics.format_spread(values)


def _caption(runs: Sequence[Results]) -> str:
    """What the threshold does, in words."""
    first = runs[0]
    parts = [f"Mean ± deviation over {len(runs)} runs."] if len(runs) > 1 else []
    parts += [f"{first.n_ind} in-distribution images, {first.n_clusters} clusters, {first.n_components} components."]
    if not any(math.isnan(run.false_alarm) for run in runs):
        shares = {"in-distribution images (false alarms)": [run.false_alarm for run in runs]}
        for name in first.ood_names:
            shares[name] = [run.methods["maple"].detection[name].flagged for run in runs]
        parts.append(
            "maple flags " + ", ".join(f"{_percent(values)} of {name}" for name, values in shares.items()) + "."
        )
    latencies = [run.latency_ms for run in runs]
    if not any(math.isnan(value) for value in latencies):
        parts.append(f"{metrics.format_spread(latencies)} ms per image.")
    return " ".join(parts)


def _percent(shares: Sequence[float]) -> str:
    return metrics.format_spread([100 * share for share in shares], digits=1) + " %"


# ---------------------------------------------------------------------------------------------------------------------
# Latency


class Latency(NamedTuple):
    """Milliseconds per image over repeated batches."""

    median_ms: float
    spread_ms: float  # interquartile range


def measure_latency(predict: Callable[[Any], Any], batch: Any, repeats: int = 10) -> Latency:
    """Time ``predict(batch)`` after one call to warm up: median and interquartile range, per image.

    >>> measure_latency(sum, [1.0, 2.0, 3.0], repeats=5).median_ms >= 0
    True
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}: give at least 1")
    if len(batch) == 0:
        raise DataError("the batch is empty: give at least one image")
    predict(batch)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        predict(batch)
        seconds.append(time.perf_counter() - started)
    low, median, high = np.quantile(np.array(seconds) * 1000 / len(batch), (0.25, 0.5, 0.75))
    return Latency(float(median), float(high - low))
