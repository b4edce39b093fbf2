"""The sections of a report: one function per section.

A section is a record of numbers and plots; the template ``report.html.j2`` formats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maple.evaluation.results import ClassFlagged, Results
from maple.reporting import comparison, plots
from maple.reporting.comparison import NOISE, OURS, Cell, Row, list_classifiers, method_name
from maple.reporting.gallery.store import ClusterExemplars, Example, Examples
from maple.reporting.page import any_crisp
from maple.reporting.plots import CLASS_COLOURS, Plot
from maple.reporting.record import History, RunRecord
from maple.stats.metrics import coverage_at
from maple.text import number, percent

MAX_MATRIX = 20  # classes; with more, the confusion matrix is a picture without names
ERROR_RATES = (0.01, 0.02, 0.05, 0.1)  # at which the coverage is given
MAX_THUMBNAILS = 1_500  # of clusters, in all
UNSPLIT_THUMBNAILS = 6  # of a class that is one cluster

_KNOWN = ("uncertain", "mistakes")  # kinds of examples, in the order of the report; of test images
_UNKNOWN = ("missed", "caught")  # of OOD sets
_TITLES = {  # title and note by kind
    "uncertain": ("Known images to look at first", "{source}; unusual views, poor images or wrong labels"),
    "mistakes": ("Most confident mistakes", "{source}; check the labels"),
    "missed": ("Unknown images with the lowest scores: {source}", "most similar to known images"),
    "caught": ("Unknown images with the highest scores: {source}", "least similar to known images"),
}

# ---------------------------------------------------------------------------------------------------------------------
# Detection of unknown images
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnknownSet:
    """One set of unknown images."""

    name: str
    count: int
    detected: float
    scores: Plot
    roc: Plot
    classes: list[tuple[str, ClassFlagged]]  # best detected first; empty if the set has a single class


def unknown_sets(results: Results) -> list[UnknownSet]:
    """Scores and ROC curve of each OOD set."""
    histogram = results.methods[OURS].histogram
    threshold = results.threshold if math.isfinite(results.threshold) else None
    return [
        UnknownSet(
            name=name,
            count=count,
            detected=comparison.detection_rate(results, OURS, name),
            scores=plots.plot_scores(name, histogram.edges, histogram.ind, histogram.ood[name], threshold),
            roc=_plot_roc(results, name),
            classes=_unknown_classes(results, name),
        )
        for name, count in results.n_ood.items()
    ]


def _unknown_classes(results: Results, ood_name: str) -> list[tuple[str, ClassFlagged]]:
    classes = results.unknown_classes.get(ood_name, {})
    if len(classes) < 2:
        return []
    return sorted(classes.items(), key=lambda item: (-item[1].flagged, -item[1].images, item[0]))


def _plot_roc(results: Results, ood_name: str) -> Plot:
    curves = []
    for name, method in comparison.list_methods(results, scaled=False).items():
        found = method.detection[ood_name]
        line = replace(comparison.line_of(name), label=f"{method_name(name)}, AUROC {number(found.auroc)}")
        curves.append((line, found.roc_ind, found.roc_ood))
    return plots.plot_roc(ood_name, curves, comparison.false_alarm_rate(results))


# ---------------------------------------------------------------------------------------------------------------------
# Calibration, coverage, Gaussian fit
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A plot and the rows of the table beside it."""

    plot: Plot
    rows: Sequence[Any]


@dataclass(frozen=True)
class MethodCalibration:
    name: str
    mean_probability: float
    accuracy: float
    accuracy_error: float  # standard error of the accuracy if the probabilities are right
    ece: float
    ece_floor: float  # ECE of perfectly calibrated probabilities, by chance; NaN in results of earlier versions

    @property
    def verdict(self) -> str:
        """Whether probabilities are too high or too low on average, by more than chance explains."""
        gap, noise = self.mean_probability - self.accuracy, max(NOISE * self.accuracy_error, 0.005)
        return "overconfident" if gap > noise else "underconfident" if gap < -noise else "no bias beyond chance"


def calibration_section(results: Results) -> Chart:
    """The reliability diagram and the mean probability of each method."""
    judged = list_classifiers(results)
    methods = []
    for name, found in judged.items():
        curve, n_images = found.reliability, max(sum(found.reliability.count), 1)
        bins = [(n, p) for n, p in zip(curve.count, curve.confidence) if n]
        mean = sum(n * p for n, p in bins) / n_images
        error = math.sqrt(sum(n * p * (1 - p) for n, p in bins)) / n_images
        methods.append(MethodCalibration(method_name(name), mean, found.accuracy, error, found.ece, found.ece_floor))
    curves = [(comparison.line_of(name), found.reliability) for name, found in judged.items()]
    return Chart(plots.plot_reliability(curves), methods)


def coverage_section(results: Results) -> Chart | None:
    """Error rate against coverage, and the coverage at `ERROR_RATES`; None if the run holds no such curves."""
    judged = {name: found for name, found in list_classifiers(results, scaled=False).items() if found.kept}
    if not judged:
        return None
    rows, curves = [], []
    for name, found in judged.items():
        coverages = [coverage_at(found.kept, found.accuracy_kept, error) for error in ERROR_RATES]
        rows.append(
            Row(method_name(name), [Cell(percent(coverage, fixed=True)) for coverage in coverages], name == OURS)
        )
        curves.append((comparison.line_of(name), found.kept, found.accuracy_kept))
    return Chart(plots.plot_coverage(curves), rows)


def gaussian_plot(results: Results) -> Plot | None:
    """The chi-square Q-Q plot of the squared distances; None if the run holds none."""
    if not results.qq_observed:
        return None
    return plots.plot_quantiles(results.qq_theoretical, results.qq_observed, results.n_components)


# ---------------------------------------------------------------------------------------------------------------------
# Confusion
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassRecall:
    """The share of the test images of a class that are given this class."""

    name: str
    count: int
    recall: float


@dataclass(frozen=True)
class ConfusedPair:
    """Test images of one class that are given another."""

    label: str
    predicted: str
    count: int
    share: float  # of the class


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix: as a table of few classes, as a picture of many."""

    names: Sequence[str]
    n_images: int
    matrix: list[list[int]] | None  # (C, C)
    picture: np.ndarray | None  # (C, C, 4) uint8
    pairs: list[ConfusedPair]  # most frequent first
    recalls: list[ClassRecall]  # lowest first
    n_classes: int  # with test images


def list_recalls(results: Results) -> list[ClassRecall]:
    """Classes with test images, lowest recall first."""
    rows = zip(results.class_names, results.confusion, results.per_class_accuracy)
    recalls = [ClassRecall(name, sum(row), right) for name, row, right in rows if sum(row)]
    return sorted(recalls, key=lambda each: (each.recall, -each.count))


def list_confusions(results: Results) -> list[ConfusedPair]:
    """Pairs of classes, most frequent confusion first."""
    counts = np.array(results.confusion)
    totals = counts.sum(axis=1)
    errors = counts - np.diag(np.diag(counts))
    order = np.argsort(-errors, axis=None, kind="stable")[: np.count_nonzero(errors)]
    names = results.class_names
    return [
        ConfusedPair(names[i], names[j], int(errors[i, j]), float(errors[i, j] / totals[i]))
        for i, j in zip(*np.unravel_index(order, errors.shape))
    ]


def confusion_section(results: Results) -> Confusion:
    """The confusion matrix of MAPLE's classes, the most frequent confusions and the classes with the lowest recall."""
    counts, names = np.array(results.confusion), results.class_names
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # (C, C)
    small = len(names) <= MAX_MATRIX
    recalls, shown = list_recalls(results), 10 if small else 15
    return Confusion(
        names=names,
        n_images=int(counts.sum()),
        matrix=results.confusion if small else None,
        picture=None if small else _matrix_picture(shares),
        pairs=list_confusions(results)[:shown],
        recalls=recalls[:shown],
        n_classes=len(recalls),
    )


def _matrix_picture(shares: np.ndarray) -> np.ndarray:
    """Shares (C, C) as an RGBA picture: correct in blue, errors in orange, small shares amplified."""
    right = np.eye(len(shares), dtype=bool)
    picture = np.zeros((*shares.shape, 4), dtype=np.uint8)
    picture[..., :3] = np.where(right[..., None], (36, 128, 190), (222, 104, 12))
    picture[..., 3] = np.round(255 * np.where(right, shares, np.sqrt(shares)).clip(0, 1))
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings and training
# ---------------------------------------------------------------------------------------------------------------------


def draw_projections(record: RunRecord) -> list[Plot]:
    """The embeddings at each snapshot of the training, on two axes of the same length in all."""
    projections = record.gallery.projections
    if not projections:
        return []
    colours = dict(zip(_coloured_classes(record), CLASS_COLOURS))
    limits = plots.shared_limits(projections.values())
    drawn = []
    for name in sorted(projections, key=lambda name: (name != "before", name != "after", name)):
        found = projections[name]
        names = dict(enumerate(found.class_names or record.class_names))
        drawn.append(plots.plot_projection(projection_title(record, name), found, names, colours, limits))
    return drawn


def projection_title(record: RunRecord, name: str) -> str:
    """When the embeddings of a projection were taken."""
    epochs = record.classes and record.classes.snapshot_epochs
    epoch = epochs.get(name) if epochs else None
    when = f", epoch {epoch}" if epoch is not None else ""
    if name == "before":
        relabelled = record.history is not None and record.history.events
        return f"Before the first relabelling{when}" if relabelled else f"During training{when}"
    return f"After training{when}" if name == "after" else name


def _coloured_classes(record: RunRecord) -> list[int]:
    """Class ids that get a colour: all, or with many classes the split ones, then the largest."""
    found = list(record.gallery.projections.values())
    counts = Counter(class_id for each in found for class_id in each.class_ids.tolist() if class_id >= 0)
    names = next((each.class_names for each in found), ())
    parts = Counter(cluster.class_name for cluster in record.gallery.clusters)
    split = {i for i, name in enumerate(names) if parts[name] > 1}
    return sorted(sorted(counts, key=lambda i: (i not in split, -counts[i], i))[: len(CLASS_COLOURS)])


def projection_note(record: RunRecord) -> str:
    """A note on classes without a colour; empty if every class has one."""
    n_classes = max((len(each.class_names) for each in record.gallery.projections.values()), default=0)
    n_colours = len(CLASS_COLOURS)
    if n_classes <= n_colours:
        return ""
    return f"{n_colours} of {n_classes} classes are coloured, split classes first; the others are grey."


def draw_training(history: History) -> list[tuple[str, Plot]]:
    """The curves of the training by title, with its relabelling events."""
    epochs = [event.epoch for event in history.events]
    return [
        ("Losses.", plots.plot_losses(history.columns, epochs)),
        ("Validation accuracy.", plots.plot_accuracy(history.columns, epochs)),
        ("Clusters.", plots.plot_clusters(history.columns, epochs)),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Exemplars of clusters, examples of an evaluation
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassGallery:
    """The clusters of one class, largest first."""

    name: str
    clusters: Sequence[ClusterExemplars]

    @property
    def count(self) -> int:
        """Training images of the class."""
        return sum(each.count for each in self.clusters)


@dataclass(frozen=True)
class ClusterSection:
    """Exemplars of all clusters, by class."""

    split: list[ClassGallery]
    whole: list[ClassGallery]
    shown: int  # thumbnails of each cluster of a split class
    shown_whole: int
    crisp: bool


def cluster_section(clusters: Sequence[ClusterExemplars]) -> ClusterSection | None:
    """Exemplars by class, split classes first; None if the run holds none."""
    per_class: dict[str, list[ClusterExemplars]] = {}
    for cluster in clusters:
        if cluster.count:
            per_class.setdefault(cluster.class_name, []).append(cluster)
    if not per_class:
        return None
    classes = [ClassGallery(name, sorted(own, key=lambda each: -each.count)) for name, own in per_class.items()]
    shown = max(2, MAX_THUMBNAILS // len(clusters))
    return ClusterSection(
        split=[each for each in classes if len(each.clusters) > 1],
        whole=[each for each in classes if len(each.clusters) == 1],
        shown=shown,
        shown_whole=min(shown, UNSPLIT_THUMBNAILS),
        crisp=any_crisp(each.thumbnails for each in clusters),
    )


@dataclass(frozen=True)
class ExampleSection:
    title: str
    note: str
    known: bool  # labels can be compared with predicted classes
    images: Sequence[Example]


def example_sections(groups: Sequence[Examples]) -> list[ExampleSection]:
    """Known images first; then each OOD set, missed images before detected ones."""

    def place(group: Examples) -> tuple[bool, str, int]:
        is_unknown = group.kind in _UNKNOWN
        return is_unknown, group.source if is_unknown else "", [*_KNOWN, *_UNKNOWN].index(group.kind)

    sections = []
    for group in sorted((group for group in groups if group.kind in _TITLES), key=place):
        title, note = (text.format(source=group.source) for text in _TITLES[group.kind])
        sections.append(ExampleSection(title, note, group.kind in _KNOWN, group.images))
    return sections
