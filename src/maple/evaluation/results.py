"""Everything an evaluation reports, as records that are read and written as strict JSON.

:func:`maple.evaluation.cases.evaluate` fills :class:`Results`; tables, reports and suites read it. It holds numbers,
thinned curves and provenance, and no images.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from maple import notebook
from maple.errors import RunError
from maple.files.formats import FORMAT_VERSION
from maple.stats.metrics import format_spread

GROUPED = ("auroc", "aupr_out", "aupr_in", "fpr95_ood_positive", "fpr95_ind_positive")  # of which means are taken
COLUMNS = {"accuracy": "accuracy ↑", "ece": "ECE ↓", "nll": "NLL ↓"}  # of the summary, before the AUROC of OOD sets

# A number that may be missing: NaN here, null in the file.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class Reliability:
    """Accuracy against confidence in B bins of equal width; NaN in empty bins."""

    edges: list[float]  # (B + 1,)
    count: list[int]  # (B,)
    accuracy: list[Number]  # (B,)
    confidence: list[Number]  # (B,)


@dataclass(frozen=True)
class Classification:
    """Quality of the classes and probabilities of one method; NaN where the method has no such number."""

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
    """The images of one class of an OOD set."""

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
    """One row of the table: the figures of one method."""

    classification: Classification | None  # None for methods that only score
    detection: dict[str, Detection]  # by OOD set
    histogram: Histogram = field(repr=False)
    n_components: Number = math.nan  # of the space in which distances are measured; NaN for other methods
    gaussian_error: Number = math.nan  # Gaussian test on the squared distances to the nearest cluster, IND


@dataclass(frozen=True)
class Gain:
    """By how much ``maple`` is better than another method in one figure on the same images; negative if worse."""

    value: Number
    error: Number  # its standard error, over the images


@dataclass(frozen=True)
class Results:
    """Everything `evaluate` found, by method: ``softmax``, ``energy``, ``maple``, ``maple-paper``, others on request.

    ``softmax-scaled`` is the softmax at a temperature fitted on the validation images, as that of ``maple`` is.

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
    latency_ms: Number = math.nan  # per image, from the image to the decision
    network_latency_ms: Number = math.nan  # per image, of the network alone
    unknown_classes: dict[str, dict[str, ClassFlagged]] = field(default_factory=dict)  # by OOD set and class name
    groups: dict[str, list[str]] = field(default_factory=dict)  # OOD sets whose means are shown: near, far
    gains: dict[str, dict[str, Gain]] = field(default_factory=dict)  # by other method and figure, as in ``rows``
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
        columns = COLUMNS | {f"auroc/{name}": f"AUROC ↑ {name}" for name in shown}
        figures = [[row.get(key, math.nan) for key in columns] for row in self.rows()]
        best = [
            (max if "↑" in heading else min)((value for value in column if not math.isnan(value)), default=math.nan)
            for heading, column in zip(columns.values(), zip(*figures))
        ]
        floors = [[row.get(f"{key}_floor", math.nan) for key in columns] for row in self.rows()]  # of the ECE alone
        cells = [[name, *map(_to_html, row, best, own)] for name, row, own in zip(self.methods, figures, floors)]
        hidden = len(self.n_ood) - len(shown)
        notes = [notebook.muted(f"AUROC of {hidden} more OOD sets: rows()")] if hidden else []
        table = notebook.table(["method", *columns.values()], cells)
        return notebook.card("Results", describe_results([self]), table, *notes)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain rows, one per method, every scalar under its own name (``auroc/svhn``).

        Means over a group of OOD sets are called ``near_ood/auroc``.
        """
        return [_flatten(name, method) | self._group_means(method) for name, method in self.methods.items()]

    def _group_means(self, method: Method) -> dict[str, float]:
        return {f"{group}_ood/{key}": self.group_mean(method, group, key) for group in self.groups for key in GROUPED}

    def group_mean(self, method: Method, group: str, key: str) -> float:
        """The mean of a figure of detection over a group of OOD sets; NaN without such a group."""
        names = self.groups.get(group, ())
        return sum(getattr(method.detection[name], key) for name in names) / len(names) if names else math.nan

    def to_json(self) -> str:
        """Strict JSON: NaN is written as null, infinities as "inf" and "-inf"; arrays of numbers on one line each."""
        text = json.dumps(to_plain(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False)
        # A raw line break is never inside a JSON string, so that only lists without lists in them are joined.
        return re.sub(r"\[\n[^\[\]{}]*?\n *\]", lambda match: re.sub(r"\n *", " ", match[0]), text)

    @classmethod
    def load(cls, path: Path) -> Results:
        """The results in a file of `to_json`; an error names it."""
        try:
            return cls.from_json(path.read_bytes())
        except RunError as error:
            raise RunError(f"'{path}': {error}") from None

    @staticmethod
    def from_json(text: str | bytes) -> Results:
        """The results written by `to_json`."""
        try:
            values = json.loads(text)
            written = values.get("format_version") if isinstance(values, dict) else None
            if isinstance(written, int) and written > FORMAT_VERSION:
                raise RunError(f"these results have format {written}, newer than {FORMAT_VERSION}: update maple")
            return TypeAdapter(Results).validate_python(values)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(f"these results are not valid JSON ({error}): evaluate the run again") from None
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the file"
            raise RunError(f"these results are incomplete or damaged at '{where}': evaluate the run again") from None


def _flatten(name: str, method: Method) -> dict[str, Any]:
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


def _to_html(value: float, best: float, floor: float) -> Any:
    """A figure, in bold if it is the best, with its floor in brackets."""
    shown = notebook.bold(value) if value == best else value
    return shown if math.isnan(floor) else notebook.escape(shown) + notebook.muted(f" ({floor:.3f})")


def to_plain(value: Any) -> Any:
    """Values of strict JSON: NaN as null, infinities and unknown types as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def describe_results(runs: Sequence[Results]) -> str:
    """Number of images, clusters and components, shares flagged and latency, in one line of text."""
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
    floors = [judged.ece_floor for run in runs if (judged := run.methods["maple"].classification) is not None]
    if floors and not any(map(math.isnan, floors)):
        parts.append("ECE in brackets: of perfect probabilities, by chance.")
    latencies = [run.latency_ms for run in runs]
    if not any(math.isnan(value) for value in latencies):
        parts.append(f"{format_spread(latencies, digits=1)} ms per image.")
    return " ".join(parts)


def _percent(shares: Sequence[float]) -> str:
    return format_spread([100 * share for share in shares], digits=1) + " %"
