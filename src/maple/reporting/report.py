"""One self-contained HTML file about a run: what was measured, what the clustering found, what to look at first.

The report draws what the run folder holds and runs no model. It needs neither network nor scripts: styles and SVG
plots are inline, thumbnails are data URIs, and a content security policy in the file forbids everything else. Names
of classes and files are data, never markup. Equal run folders give equal reports, byte for byte.
"""

from __future__ import annotations

import base64
import csv
import heapq
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, features

from maple import __version__
from maple.data.decode import decode_image
from maple.errors import DataError, MapleError, RunError
from maple.evaluation.results import Method, Results
from maple.files import RunFile, load_json, write_atomic
from maple.options import read_toml
from maple.reporting.gallery import ClusterExemplars, Example, Examples, Gallery, read_gallery
from maple.reporting.page import render_page
from maple.reporting.plots import (
    BLUE,
    CLASS_COLOURS,
    GREEN,
    MUTED,
    ORANGE,
    PINK,
    Line,
    Plot,
    plot_accuracy,
    plot_clusters,
    plot_coverage,
    plot_losses,
    plot_projection,
    plot_quantiles,
    plot_reliability,
    plot_roc,
    plot_scores,
)
from maple.stats.metrics import coverage_at
from maple.text import join_names, number, percent, plural, shorten, shorten_list
from maple.types import MAX_CELL, PREDICTION_COLUMNS, SET_SEPARATOR

MAX_MATRIX = 20  # classes; with more, the confusion matrix is a picture without names
MAX_ROWS = 200  # predictions listed
UNFOLDED_ROWS = 25  # of them seen at once
MAX_PREVIEWS = 60  # of them with a thumbnail
MAX_SKIPPED = 200
SHOWN_SET = 5  # classes of a prediction set
ENOUGH_IMAGES = 10  # of a class, to call it hard
UNFOLDED_CLASSES = 24
UNFOLDED_EXAMPLES = 12
CRISP = 16  # images of so few pixels a side are shown as pixels, not blurred
MAX_THUMBNAILS = 1_500  # of clusters, in all
DEFAULT_FALSE_ALARM = 0.05  # compares methods where nothing was calibrated
ERROR_LEVELS = (0.01, 0.02, 0.05, 0.1)  # at which it is said how many images need no expert
BAR_WIDTH = 120  # pixels of a share of 1
OURS = "maple"

_LINES = {
    "maple": Line("MAPLE", BLUE, "-"),
    "softmax": Line("softmax", ORANGE, "--"),
    "softmax-scaled": Line("softmax, scaled", MUTED, "--"),
    "energy": Line("energy", GREEN, ":"),
    "maple-paper": Line("MAPLE, chi-square tail", PINK, "-."),
}

# Attribute of Classification or Detection, name, better direction, what it says.
_QUALITY = (
    ("accuracy", "accuracy", "higher", "share of images given the right class"),
    ("ece", "calibration error (ECE)", "lower", "mean gap between probability and share that is right"),
    ("nll", "negative log-likelihood", "lower", "punishes confident mistakes"),
    ("brier", "Brier score", "lower", "squared error of the probabilities"),
    ("aurc", "risk-coverage area (AURC)", "lower", "errors left when the least certain images go to an expert first"),
)
_SCORE_MEANINGS = {
    "distance": "squared distance to the nearest cluster, as in the paper",
    "relative": "that, less the distance to all images as one Gaussian",
    "normalised": "squared distance of embeddings divided by a power of their norm",
    "residual": "what lies outside the principal components",
    "spread": "nearest over mean squared distance",
    "energy": "negative log-sum-exp of the logits",
    "shallow": "distance of a shallow layer's responses to those of all images",
    "fused": "surprise of energy, of spread and half that of shallow; far out, of distance",
}
_DETECTION = (
    ("auroc", "AUROC", "higher", "chance that an unknown image scores above a known one; 0.5 is guessing"),
    ("aupr_out", "AUPR, unknown", "higher", "precision averaged over recall, unknown images as positives"),
    ("aupr_in", "AUPR, known", "higher", "the same with known images as positives"),
    ("fpr95_ood_positive", "FPR95, unknown", "lower", "known images flagged when 95 % of the unknown ones are caught"),
    ("fpr95_ind_positive", "FPR95, known", "lower", "unknown images accepted when 95 % of the known ones are"),
)

_EXAMPLE_KINDS = {
    "uncertain": ("Most uncertain known images", "{source}; unusual views, poor images, or not what their label says"),
    "mistakes": ("Most confident mistakes", "{source}; a wrong class with a high probability: is the label right?"),
    "missed": ("Unknown images that look most familiar: {source}", "the lowest scores of the set"),
    "caught": ("Unknown images that look most unusual: {source}", "the highest scores of the set"),
}


def write_report(run_folder: str | Path, out: str | Path | None = None, predictions: str | Path | None = None) -> Path:
    """Write the report of a run, ``report.html`` in its folder unless ``out`` says otherwise, and return its path.

    ``predictions`` is a file written by ``maple predict`` (CSV or JSON lines); it adds a section of its own.
    """
    record = read_run(Path(run_folder))
    foretold = None if predictions is None else read_predictions(Path(predictions))
    path = record.folder / RunFile.REPORT if out is None else Path(out)
    write_atomic(path, render_report(record, foretold))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run folder says; parts that it does not hold are ``None`` or empty."""

    folder: Path
    config_text: str | None
    config: dict[str, Any]
    classes: dict[str, Any] | None
    history: list[dict[str, str]]
    results: Results | None
    gallery: Gallery

    @property
    def class_names(self) -> list[str]:
        if self.classes is not None:
            return list(self.classes["classes"])
        return self.results.class_names if self.results else []

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def origin(self) -> dict[str, Any]:
        return self.config.get("origin", {})


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run that the report draws."""
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a folder: give the run folder that maple train wrote")
    known = [folder / name for name in (RunFile.CONFIG, RunFile.CLASSES, RunFile.HISTORY, RunFile.RESULTS)]
    if not any(path.is_file() for path in known):
        raise RunError(f"'{folder}' is not a run folder: it holds none of {', '.join(path.name for path in known)}")
    config_path, classes_path, history_path, results_path = known
    return RunRecord(
        folder=folder,
        config_text=config_path.read_text(encoding="utf-8") if config_path.is_file() else None,
        config=read_toml(config_path) if config_path.is_file() else {},
        classes=load_json(classes_path) if classes_path.is_file() else None,
        history=_read_history(history_path) if history_path.is_file() else [],
        results=_read_results(results_path) if results_path.is_file() else None,
        gallery=read_gallery(folder / RunFile.GALLERY),
    )


def _read_results(path: Path) -> Results:
    try:
        return Results.from_json(path.read_bytes())
    except RunError as error:
        raise RunError(f"'{path}': {error}") from None


def _read_history(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]


@dataclass
class Predictions:
    """A prediction file, summed up: rows may be many, so that only the most uncertain are kept."""

    path: Path
    n_images: int = 0
    n_decided: int = 0  # those with a p-value: without calibration images, nothing is known or unknown
    counts: Counter[str] = field(default_factory=Counter)  # images per class
    flagged: Counter[str] = field(default_factory=Counter)
    set_sizes: Counter[int] = field(default_factory=Counter)  # images per number of classes in their prediction set
    rows: list[dict[str, Any]] = field(default_factory=list)  # most uncertain first


def read_predictions(path: Path, keep: int = MAX_ROWS) -> Predictions:
    """Count the predictions per class and keep the most uncertain; memory does not grow with the file."""
    found = Predictions(path)

    def counted() -> Iterator[dict[str, Any]]:
        for number_of_row, row in enumerate(_prediction_rows(path), start=1):
            parsed = _parse_prediction(row, path, number_of_row)
            found.n_images += 1
            found.n_decided += not math.isnan(parsed["p_value"])
            found.counts[parsed["class"]] += 1
            found.flagged[parsed["class"]] += parsed["is_ood"]
            if parsed["prediction_set"] is not None:
                found.set_sizes[len(parsed["prediction_set"])] += 1
            yield parsed

    found.rows = heapq.nlargest(keep, counted(), key=_most_uncertain)
    return found


def _most_uncertain(row: dict[str, Any]) -> tuple[float, float]:
    return tuple(-math.inf if math.isnan(row[key]) else row[key] for key in ("uncertainty", "score"))  # type: ignore


def _prediction_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as table:
                sets = [name for name in table.schema_arrow.names if name == "prediction_set"]
                for batch in table.iter_batches(columns=[*PREDICTION_COLUMNS, *sets]):
                    yield from batch.to_pylist()
            return
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                csv.field_size_limit(MAX_CELL)
                yield from csv.DictReader(file)
            else:
                yield from (json.loads(line) for line in file if line.strip())
    except OSError as error:
        raise DataError(f"cannot read the predictions '{path}': {error.strerror or error}") from None
    except (ValueError, csv.Error, pa.ArrowException) as error:
        raise DataError(
            f"'{path}' is neither CSV nor JSON lines nor Parquet ({error}): write it with maple predict"
        ) from None


def _parse_prediction(row: Any, path: Path, number_of_row: int) -> dict[str, Any]:
    missing = [name for name in PREDICTION_COLUMNS if not isinstance(row, dict) or name not in row]
    if missing:
        raise DataError(
            f"'{path}' row {number_of_row} lacks {', '.join(missing[:3])}: give a file written by maple predict"
        )
    values = {name: _float(row[name]) for name in ("probability", "uncertainty", "score", "p_value")}
    is_ood = str(row["is_ood"]).strip().lower() in ("true", "1")
    return {
        "file": str(row["file"]),
        "class": str(row["class"]),
        "is_ood": is_ood,
        "prediction_set": _parse_set(row.get("prediction_set")),
        **values,
    }


def _parse_set(value: Any) -> list[str] | None:
    """The classes of a prediction set; None where there is none."""
    if isinstance(value, str):
        value = value.split(SET_SEPARATOR)
    return [str(name) for name in value] if isinstance(value, list) else None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def render_report(record: RunRecord, predictions: Predictions | None = None) -> str:
    """The report as HTML text."""
    return render_page("report.html.j2", _context(record, predictions))


def _context(record: RunRecord, predictions: Predictions | None) -> dict[str, Any]:
    results, gallery = record.results, record.gallery
    ood = _ood_sections(results) if results else []
    contents = [
        ("summary", "In short"),
        *([("predictions", "Predictions")] if predictions else []),
        ("results", _results_heading(results)),
        ("unknown", "Telling unknown images apart"),
        ("calibration", "Are the probabilities honest?"),
        ("coverage", "How much can be left to the machine?"),
        ("confusion", "Which classes are confused?"),
        ("clusters", "What did the clustering find?"),
        ("images", "Images worth a look"),
        ("latent", "Latent space"),
        ("gaussian", "Are the clusters Gaussian?"),
        ("history", "Training"),
        ("skipped", "Left out"),
        ("words", "Words used here"),
        ("reproduce", "How to reproduce"),
        ("cite", "How to cite"),
    ]
    return {
        "version": __version__,
        "title": f"MAPLE report: {record.name}",
        "subtitle": _subtitle(record),
        "contents": contents,
        "heading": _results_heading(results),
        "baseline": method_name(results.baseline) if results and results.baseline else None,
        "summary": summary_sentences(record),
        "tiles": _tiles(record),
        "first": _look_first(record, predictions),
        "predictions": _prediction_section(predictions) if predictions else None,
        "quality": _quality_table(results) if results else None,
        "detection": _detection_table(results) if results and results.n_ood else None,
        "ood": ood,
        "promise": _promise(results) if results else "",
        "scores": _score_table(results) if results and results.n_ood and results.scores else None,
        "reliability": _reliability_plot(results) if results else None,
        "calibration_words": _calibration_words(results) if results else [],
        "coverage": _coverage_section(results) if results else None,
        "confusion": _confusion_section(results) if results else None,
        "clusters": _cluster_section(gallery.clusters),
        "examples": _example_sections(gallery.examples),
        "projections": draw_projections(record),
        "projection_note": _projection_note(record),
        "quantiles": _quantile_plot(results) if results and results.qq_observed else None,
        "quantile_note": _quantile_note(results) if results else "",
        "history": _history_section(record.history),
        "skipped": _skipped_section(record.classes),
        "commands": _commands(record, predictions),
        "facts": _facts(record),
        "config": record.config_text,
        "evaluate_command": f"{shlex.join(['maple', 'evaluate', str(record.folder)])} --ood NAME=SOURCE",
    }


def _subtitle(record: RunRecord) -> str:
    model = record.config.get("model", {})
    parts = [
        record.origin.get("source"),
        model.get("backbone"),
        model.get("recipe"),
        f"seed {seed}" if (seed := _seed(record)) is not None else None,
    ]
    return " · ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------------


def method_name(method: str) -> str:
    """How a method is called on the page."""
    return _line(method).label


def _line(method: str) -> Line:
    return _LINES.get(method, Line(method, PINK, ":"))


def summary_sentences(record: RunRecord) -> list[str]:
    """What a reader who stops here should know."""
    results = record.results
    sentences = [_training_sentence(record), *_update_sentences(record)]
    if results is None:
        return [*sentences, "How good it is has not been measured yet."]
    ours = _ours(results)
    baseline = results.baseline
    if ours.classification:
        right, tested = percent(ours.classification.accuracy), plural(results.n_ind, "test image")
        sentences.append(f"It names the right class for {right} of {tested} that it had not seen before.")
    if results.n_ood:
        rate = _false_alarm(results)
        caught = [f"{percent(_caught(results, OURS, name))} of {name}" for name in results.n_ood]
        sentence = f"With {percent(rate)} of the known images flagged by mistake, it catches {join_names(caught)}"
        if baseline:
            others = [percent(_caught(results, baseline, name)) for name in results.n_ood]
            name = method_name(baseline)
            sentence += f"; {name} of the same network, at the same rate of false alarms, {join_names(others)}"
        sentences.append(sentence + ".")
    return [*sentences, *_never_flagged(results)]


def _never_flagged(results: Results) -> Iterator[str]:
    """What to do where the threshold is out of reach of any score."""
    if results.threshold != math.inf:
        return
    rate, n = (results.provenance.get(key) for key in ("false_alarm", "calibration_images"))
    few = f"{plural(n, 'calibration image')} are" if n is not None else "the calibration images are"
    for_rate = f" for a false-alarm rate of {percent(rate, exact=True)}" if rate is not None else ""
    if confidence := results.provenance.get("decision", {}).get("confidence"):
        for_rate += f" with {percent(confidence, exact=True)} confidence"
    yield (
        f"No image is ever flagged: {few} too few{for_rate}. Train with more of them, "
        "or evaluate and predict with a larger --false-alarm."
    )


def _training_sentence(record: RunRecord) -> str:
    n_classes = len(record.class_names)
    if not n_classes:
        return "This run is not finished: it does not name its classes yet."
    what = f"This network tells {plural(n_classes, 'class')} apart"
    sizes = record.classes.get("cluster_sizes", []) if record.classes else []
    if not sizes:
        return what + "."
    split = len(sizes) - n_classes
    how = f", which were split into {len(sizes):,} clusters" if split > 0 else ""
    return f"{what}{how}; it learnt them from {plural(int(sum(sizes)), 'image')}."


def _update_sentences(record: RunRecord) -> Iterator[str]:
    """What ``maple update`` added, and what is void since."""
    updates = record.classes.get("updates", []) if record.classes else []
    learned = sum(sum(update["images"].values()) for update in updates)
    new = [name for update in updates for name in update["new_classes"]]
    if learned:
        classes = f"; the network itself does not know {join_names(new)}" if new else ""
        yield f"{plural(learned, 'image')} of these came with maple update, after its training{classes}."
    if updates and not updates[-1]["calibration_images"]:
        command = shlex.join(["maple", "update", str(record.folder), "--calibrate"])
        yield f"Its thresholds are void since then: nothing is flagged until {command} IMAGES."


@dataclass(frozen=True)
class Tile:
    """One figure in large print."""

    value: str
    name: str
    note: str


def _tiles(record: RunRecord) -> list[Tile]:
    results = record.results
    if results is None:
        return []
    tiles = []
    ours, baseline = _ours(results).classification, results.baseline
    theirs = results.methods[baseline].classification if baseline else None

    def note_of(value: str | None) -> str:
        return f"{method_name(baseline)} {value}" if baseline and value else ""

    if ours:
        accuracy, ece = (percent(theirs.accuracy), number(theirs.ece)) if theirs else (None, None)
        tiles.append(Tile(percent(ours.accuracy), "accuracy", note_of(accuracy)))
        tiles.append(Tile(number(ours.ece), "calibration error", note_of(ece)))
    for name in list(results.n_ood)[:4]:
        other = percent(_caught(results, baseline, name)) if baseline else None
        tiles.append(Tile(percent(_caught(results, OURS, name)), f"of {name} caught", note_of(other)))
    if results.n_ood:
        calibrated = not math.isnan(results.false_alarm)
        note = "of the known test images flagged" if calibrated else "assumed: the run has no threshold"
        tiles.append(Tile(percent(_false_alarm(results)), "false alarms", note))
    return tiles


@dataclass(frozen=True)
class Pointer:
    """Something to look at, and where it is."""

    text: str
    anchor: str
    link: str


def _look_first(record: RunRecord, predictions: Predictions | None) -> list[Pointer]:
    """The few things on the page that ask for a person's judgement."""
    return [
        *_point_at_predictions(predictions),
        *_point_at_results(record.results),
        *_point_at_gallery(record.gallery),
        *_point_at_skipped(record.classes),
    ]


def _point_at_predictions(predictions: Predictions | None) -> Iterator[Pointer]:
    if predictions and (flagged := predictions.flagged.total()):
        share = percent(flagged / predictions.n_images)
        text = f"{flagged:,} of {plural(predictions.n_images, 'predicted image')} ({share}) are flagged as unknown."
        yield Pointer(text, "predictions", "See them")


def _point_at_results(results: Results | None) -> Iterator[Pointer]:
    if results is None:
        return
    hardest = [recall for recall in _hardest_classes(results) if recall.count >= ENOUGH_IMAGES]
    if hardest and hardest[0].right < 0.95:
        name, pairs = hardest[0].name, [pair for pair in _confusions(results) if pair.label == hardest[0].name]
        most = f", most often taken for {pairs[0].called}" if pairs else ""
        text = f"The hardest class is {name}: {percent(hardest[0].right)} of its images are recognised{most}."
        yield Pointer(text, "confusion", "Which classes are confused?")
    worse = [name for name in results.n_ood if _is_worse(results, name)]
    if worse and results.baseline:
        other = method_name(results.baseline)
        text = f"{other[0].upper()}{other[1:]} ranks the images of {join_names(worse)} better than MAPLE does."
        yield Pointer(text, "unknown", "Compare")


def _point_at_gallery(gallery: Gallery) -> Iterator[Pointer]:
    split = [name for name, count in Counter(c.class_name for c in gallery.clusters).items() if count > 1]
    if split:
        shown = join_names([*split[:3], *([f"{len(split) - 3} more"] if len(split) > 3 else [])])
        text = f"Split into clusters: {shown}. Do the clusters mean anything to you?"
        yield Pointer(text, "clusters", "See them")
    if any(group.kind == "mistakes" and group.images for group in gallery.examples):
        yield Pointer("The most confident mistakes may be wrong labels.", "images", "Check them")


def _point_at_skipped(classes: Mapping[str, Any] | None) -> Iterator[Pointer]:
    if classes and classes.get("skipped"):
        yield Pointer(f"{plural(len(classes['skipped']), 'file')} could not be used.", "skipped", "Why?")


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def _ours(results: Results) -> Method:
    return results.methods[OURS]


def _ordered(results: Results) -> list[str]:
    """MAPLE first, what it is compared with next, then the others as they came."""
    return sorted(results.methods, key=lambda name: (name != OURS, name != results.baseline))


def _results_heading(results: Results | None) -> str:
    if results and not results.baseline:  # as where a network has no head
        return "Results"
    return f"Results next to {method_name(results.baseline) if results and results.baseline else 'softmax'}"


def _false_alarm(results: Results) -> float:
    """The share of known test images that is flagged; where nothing was calibrated, a usual one."""
    return DEFAULT_FALSE_ALARM if math.isnan(results.false_alarm) else results.false_alarm


def _caught(results: Results, method: str, ood_name: str) -> float:
    """Share of the unknown images that is flagged when the false alarms are as many as MAPLE's."""
    detection = results.methods[method].detection[ood_name]
    if not math.isnan(detection.flagged):
        return detection.flagged
    return caught_at(detection.roc_ind, detection.roc_ood, _false_alarm(results))


def caught_at(roc_ind: Sequence[float], roc_ood: Sequence[float], false_alarm: float) -> float:
    """Height of a ROC curve at one false-alarm rate: straight between points, the middle where the curve is vertical.

    >>> caught_at([0, 0, 0.1, 1], [0, 0.5, 0.7, 1], 0.05)
    0.6
    >>> caught_at([0, 0, 0.1, 1], [0, 0.5, 0.7, 1], 0.0)
    0.25
    """
    rates, starts = np.unique(roc_ind, return_index=True)
    lowest = np.asarray(roc_ood)[starts]
    highest = np.asarray(roc_ood)[np.append(starts[1:], len(roc_ood)) - 1]
    right = int(np.searchsorted(rates, false_alarm))
    if right == len(rates) or rates[right] == false_alarm or right == 0:
        here = min(right, len(rates) - 1)
        return float(lowest[here] + highest[here]) / 2
    left = right - 1
    share = (false_alarm - rates[left]) / (rates[right] - rates[left])
    return round(float(highest[left] + share * (lowest[right] - highest[left])), 12)


def _is_worse(results: Results, ood_name: str) -> bool:
    if results.baseline is None:
        return False
    ours, theirs = (results.methods[name].detection[ood_name].auroc for name in (OURS, results.baseline))
    return round(ours, 3) < round(theirs, 3)


@dataclass(frozen=True)
class Cell:
    """A number in a table: its text, whether it is the best of its kind, and how it compares with the baseline."""

    text: str
    best: bool = False
    verdict: str = ""  # "better", "worse" or "same", for MAPLE only


def compare(
    values: Mapping[str, float], higher: bool, write: Callable[..., str] = number, baseline: str | None = "softmax"
) -> dict[str, Cell]:
    """The values of all methods as cells. What looks equal on the page counts as equal.

    >>> cells = compare({"maple": 0.91, "softmax": 0.89}, higher=True)
    >>> cells["maple"], cells["softmax"]
    (Cell(text='0.910', best=True, verdict='better'), Cell(text='0.890', best=False, verdict=''))
    """
    seen = {name: round(value, 3) * (1 if higher else -1) for name, value in values.items() if not math.isnan(value)}
    best = max(seen.values(), default=math.nan)
    cells = {name: Cell(write(value), seen.get(name) == best) for name, value in values.items()}
    if OURS in seen and baseline in seen:
        gain = seen[OURS] - seen[baseline] if seen[OURS] != seen[baseline] else 0.0
        verdict = "better" if gain > 0 else "worse" if gain < 0 else "same"
        cells[OURS] = Cell(cells[OURS].text, cells[OURS].best, verdict)
    return cells


def _quality_table(results: Results) -> dict[str, Any]:
    judged = {name: c for name in _ordered(results) if (c := results.methods[name].classification) is not None}
    rows = []
    for key, name, direction, meaning in _QUALITY:
        values = {method: getattr(judged[method], key) for method in judged}
        cells = compare(values, direction == "higher", percent if key == "accuracy" else number, results.baseline)
        rows.append({"name": name, "direction": direction, "meaning": meaning, "cells": list(cells.values())})
    for level in judged[OURS].accuracy_above if OURS in judged else ():
        values = {method: judged[method].accuracy_above[level] for method in judged}
        kept = {method: judged[method].share_above[level] for method in judged}
        cells = compare(values, True, percent, results.baseline)
        rows.append(
            {
                "name": f"accuracy above {level}",
                "direction": "higher",
                "meaning": "of the images with that probability (their share)",
                "cells": [Cell(f"{cells[m].text} ({percent(kept[m])})", cells[m].best) for m in judged],
            }
        )
    note = f"{plural(results.n_ind, 'test image')}, {plural(len(results.class_names), 'class')}"
    return {"columns": [method_name(name) for name in judged], "rows": rows, "note": note}


def _detection_table(results: Results) -> dict[str, Any]:
    names, methods = list(results.n_ood), _ordered(results)
    rate = percent(_false_alarm(results))
    groups: list[tuple[str, str, str, dict[str, dict[str, float]], Callable[..., str]]] = [
        (
            f"caught at {rate} false alarms",
            "higher",
            "share of the unknown images that is flagged",
            {name: {method: _caught(results, method, name) for method in methods} for name in names},
            percent,
        )
    ]
    for key, title, direction, meaning in _DETECTION:
        values = {name: {m: getattr(results.methods[m].detection[name], key) for m in methods} for name in names}
        groups.append((title, direction, meaning, values, number))
    written = [_detection_group(*group, methods, results.baseline) for group in groups]
    return {"columns": _ood_columns(results), "groups": written}


def _score_table(results: Results) -> dict[str, Any]:
    """AUROC of every score, whichever the run ranks by."""
    used, scores = results.provenance.get("score"), list(results.scores)
    values = {name: {score: results.scores[score][name] for score in scores} for name in results.n_ood}
    meaning = "probability that an unknown image scores higher than a known one"
    group = _detection_group("AUROC", "higher", meaning, values, number, scores)
    for row, score in zip(group["rows"], scores):
        row |= {"name": f"{score}: {_SCORE_MEANINGS[score]}", "ours": score == used}
    note = f"this run ranks by {used}, fixed before any unknown image was seen" if used else ""
    return {"columns": _ood_columns(results), "groups": [group], "note": note}


def _ood_columns(results: Results) -> list[str]:
    names = [f"{name} ({count:,})" for name, count in results.n_ood.items()]
    return names + (["mean"] if len(names) > 1 else [])


def _promise(results: Results) -> str:
    """What the threshold promises, for known images."""
    promise = results.provenance.get("promise")
    return f"The threshold of this run {promise}." if promise else ""


def _detection_group(
    title: str,
    direction: str,
    meaning: str,
    values: Mapping[str, Mapping[str, float]],  # by OOD set, then by method
    write: Callable[..., str],
    methods: Sequence[str],
    baseline: str | None = None,
) -> dict[str, Any]:
    columns = list(values.values())
    if len(columns) > 1:
        columns.append({method: float(np.mean([column[method] for column in columns])) for method in methods})
    compared = [compare(column, direction == "higher", write, baseline) for column in columns]
    rows = [
        {"name": method_name(method), "ours": method == OURS, "cells": [cells[method] for cells in compared]}
        for method in methods
    ]
    return {"name": title, "direction": direction, "meaning": meaning, "rows": rows}


def _ood_sections(results: Results) -> list[dict[str, Any]]:
    rate = _false_alarm(results)
    histogram = _ours(results).histogram
    threshold = results.threshold if math.isfinite(results.threshold) else None
    sections = []
    for name, count in results.n_ood.items():
        caught = f"{percent(_caught(results, OURS, name))} caught at {percent(rate)} false alarms"
        sections.append(
            {
                "name": name,
                "note": f"{plural(count, 'image')}; {caught}",
                "roc": _roc_plot(results, name, rate),
                "scores": plot_scores(name, histogram.edges, histogram.ind, histogram.ood[name], threshold),
                "classes": _unknown_classes(results, name),
            }
        )
    return sections


def _unknown_classes(results: Results, ood_name: str) -> list[dict[str, Any]]:
    """The classes of an OOD set, those that are caught best first; none where there is only one."""
    classes = results.unknown_classes.get(ood_name, {})
    if len(classes) < 2:
        return []
    ranked = sorted(classes.items(), key=lambda item: (-item[1].flagged, -item[1].images, item[0]))
    return [
        {
            "name": name,
            "count": found.images,
            "share": percent(found.flagged),
            "width": round(BAR_WIDTH * found.flagged),
        }
        for name, found in ranked
    ]


def _roc_plot(results: Results, ood_name: str, false_alarm: float) -> Plot:
    curves = []
    for method in _ordered(results):
        if method == "softmax-scaled":  # nearly the curve of softmax
            continue
        found = results.methods[method].detection[ood_name]
        line = replace(_line(method), label=f"{method_name(method)}, AUROC {number(found.auroc)}")
        curves.append((line, found.roc_ind, found.roc_ood))
    return plot_roc(ood_name, curves, false_alarm)


def _reliability_plot(results: Results) -> Plot:
    judged = [(method, results.methods[method].classification) for method in _ordered(results)]
    return plot_reliability([(_line(method), c.reliability) for method, c in judged if c is not None])


def _calibration_words(results: Results) -> list[str]:
    words = []
    for method in _ordered(results):
        judged = results.methods[method].classification
        if judged is None:
            continue
        curve = judged.reliability
        said = sum(n * c for n, c in zip(curve.count, curve.confidence) if n) / max(sum(curve.count), 1)
        gap = said - judged.accuracy
        verdict = "too sure" if gap > 0.005 else "too cautious" if gap < -0.005 else "neither too sure nor too cautious"
        words.append(
            f"{method_name(method)}: mean probability {percent(said)}, right {percent(judged.accuracy)}; "
            f"on average {verdict}. Calibration error {number(judged.ece)}."
        )
    return words


def _coverage_section(results: Results) -> dict[str, Any] | None:
    """Errors against images kept, and how many can be kept at a few levels of error."""
    judged = {name: found for name in _ordered(results) if (found := results.methods[name].classification)}
    judged = {name: found for name, found in judged.items() if found.kept and name != "softmax-scaled"}
    if not judged:
        return None
    rows = [
        {
            "name": method_name(name),
            "ours": name == OURS,
            "cells": [percent(coverage_at(found.kept, found.accuracy_kept, error)) for error in ERROR_LEVELS],
        }
        for name, found in judged.items()
    ]
    curves = [(_line(name), found.kept, found.accuracy_kept) for name, found in judged.items()]
    return {"plot": plot_coverage(curves), "levels": [percent(error) for error in ERROR_LEVELS], "rows": rows}


def _quantile_plot(results: Results) -> Plot:
    return plot_quantiles(results.qq_theoretical, results.qq_observed, results.n_components)


def _quantile_note(results: Results) -> str:
    return f"Mean difference to the dotted line: {number(results.gaussian_error, 2)}."


# ---------------------------------------------------------------------------------------------------------------------
# Confusion
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassRecall:
    """How many images of a class were recognised."""

    name: str
    count: int
    right: float

    @property
    def share(self) -> str:
        return percent(self.right)


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were taken for another."""

    label: str
    called: str
    count: int
    share: str


def _hardest_classes(results: Results) -> list[ClassRecall]:
    """Classes with test images, the least recognised first."""
    rows = zip(results.class_names, results.confusion, results.per_class_accuracy)
    recalls = [ClassRecall(name, sum(row), right) for name, row, right in rows if sum(row)]
    return sorted(recalls, key=lambda recall: (recall.right, -recall.count))


def _confusions(results: Results) -> list[Confusion]:
    """Pairs of classes, the most frequent confusion first."""
    counts = np.array(results.confusion)
    totals = counts.sum(axis=1)
    errors = counts - np.diag(np.diag(counts))
    order = np.argsort(-errors, axis=None, kind="stable")[: np.count_nonzero(errors)]
    names = results.class_names
    return [
        Confusion(names[i], names[j], int(errors[i, j]), percent(errors[i, j] / totals[i]))
        for i, j in zip(*np.unravel_index(order, errors.shape))
    ]


def _confusion_section(results: Results) -> dict[str, Any]:
    counts, names = np.array(results.confusion), results.class_names
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # (C, C)
    small = len(names) <= MAX_MATRIX
    hardest, shown = _hardest_classes(results), 10 if small else 15
    return {
        "intro": f"MAPLE's classes for {plural(int(counts.sum()), 'test image')}. Blue is right, orange is wrong; the "
        "darker, the larger the share of the true class.",
        "names": [shorten(name, 24) for name in names],
        "matrix": [_matrix_row(i, counts, shares, names) for i in range(len(names))] if small else None,
        "heat": None if small else data_uri(_heat(shares), lossless=True),
        "pairs": _confusions(results)[:shown],
        "hardest": hardest[:shown],
        "hardest_note": f"{min(len(hardest), shown)} of {len(hardest)}",
    }


def _matrix_row(i: int, counts: np.ndarray, shares: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    total = int(counts[i].sum())
    cells = []
    for j, (count, share) in enumerate(zip(counts[i].tolist(), shares[i].tolist())):
        tint = "--tint" if i == j else "--tint-wrong"
        alpha = share if i == j else min(1.0, 0.15 + 1.6 * share)
        cells.append(
            {
                "text": count or "",
                "style": f"background:rgba(var({tint}),{alpha:.2f})" if count else "",
                "strong": bool(count) and alpha > 0.6,
                "title": f"{count} of {total} {names[i]} called {names[j]} ({percent(share)})",
            }
        )
    return {"name": names[i], "cells": cells}


def _heat(shares: np.ndarray) -> np.ndarray:
    """Shares (C, C) as an RGBA picture: right in blue, wrong in orange, weak shares made visible."""
    right = np.eye(len(shares), dtype=bool)
    picture = np.zeros((*shares.shape, 4), dtype=np.uint8)
    picture[..., :3] = np.where(right[..., None], (36, 128, 190), (222, 104, 12))
    picture[..., 3] = np.round(255 * np.where(right, shares, np.sqrt(shares)).clip(0, 1))
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------------------------------


def data_uri(image: np.ndarray, lossless: bool = False) -> str:
    """A picture as text, to stand inside the page."""
    as_png = lossless or image.shape[0] <= CRISP or not features.check("webp")
    buffer = io.BytesIO()
    if as_png:
        Image.fromarray(image).save(buffer, "PNG", optimize=True)
    else:
        Image.fromarray(image).save(buffer, "WEBP", quality=88, use_sharp_yuv=True)
    kind = "png" if as_png else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _cluster_section(clusters: Sequence[ClusterExemplars]) -> dict[str, Any] | None:
    per_class: dict[str, list[ClusterExemplars]] = {}
    for cluster in clusters:
        if cluster.count:
            per_class.setdefault(cluster.class_name, []).append(cluster)
    if not per_class:
        return None
    shown = max(2, MAX_THUMBNAILS // len(clusters))
    split = {name: own for name, own in per_class.items() if len(own) > 1}
    whole = {name: own for name, own in per_class.items() if len(own) == 1}
    intro = f"None of the {plural(len(per_class), 'class')} was split: each is one cluster."
    if split:
        n_clusters = plural(sum(map(len, split.values())), "cluster")
        verb = "was" if len(split) == 1 else "were"
        intro = f"Of {plural(len(per_class), 'class')} {len(split)} {verb} split, into {n_clusters} in all."
    return {
        "intro": intro,
        "split": [_class_gallery(name, own, shown) for name, own in split.items()],
        "whole": [_class_gallery(name, own, min(shown, 6)) for name, own in whole.items()],
        "unfolded": UNFOLDED_CLASSES,
        "narrow": shown <= 6,
        "crisp": any(0 < c.thumbnails.shape[1] <= CRISP for c in clusters),
    }


def _class_gallery(name: str, parts: Sequence[ClusterExemplars], shown: int) -> dict[str, Any]:
    total = sum(part.count for part in parts)
    note = plural(total, "image") + (f", {len(parts)} clusters" if len(parts) > 1 else "")
    largest_first = sorted(parts, key=lambda part: -part.count)
    return {"name": name, "note": note, "clusters": [_cluster_strip(part, shown) for part in largest_first]}


def _cluster_strip(part: ClusterExemplars, shown: int) -> dict[str, Any]:
    return {
        "number": part.cluster,
        "count": f"{part.count:,}",
        "share": percent(part.share),
        "width": max(2, round(BAR_WIDTH * part.share)),
        "images": [
            {"uri": data_uri(image), "file": file, "alt": f"{part.class_name}, cluster {part.cluster}: {file}"}
            for image, file in zip(part.thumbnails[:shown], part.files)
        ],
    }


def _example_sections(groups: Sequence[Examples]) -> list[dict[str, Any]]:
    """Known images first; then the unknown ones set by set, what was missed before what was caught."""
    kinds = list(_EXAMPLE_KINDS)

    def place(group: Examples) -> tuple[bool, str, int]:
        is_unknown = group.kind in ("missed", "caught")
        return is_unknown, group.source if is_unknown else "", kinds.index(group.kind)

    return [_example_section(group) for group in sorted((g for g in groups if g.kind in kinds), key=place)]


def _example_section(group: Examples) -> dict[str, Any]:
    title, note = (text.format(source=group.source) for text in _EXAMPLE_KINDS[group.kind])
    images = [_example(image, group.kind) for image in group.images]
    return {"title": title, "note": note, "images": images[:UNFOLDED_EXAMPLES], "more": images[UNFOLDED_EXAMPLES:]}


def _example(image: Example, kind: str) -> dict[str, Any]:
    is_known = kind in ("uncertain", "mistakes")
    return {
        "uri": data_uri(image.thumbnail),
        "crisp": image.thumbnail.shape[0] <= CRISP,
        "alt": f"{image.file}: taken for {image.class_name}",
        "file": image.file,
        "file_name": shorten(Path(image.file).name, 40),
        "class_name": image.class_name,
        "probability": percent(image.probability),
        "uncertainty": number(image.uncertainty),
        "label": image.label,
        "is_wrong": is_known and image.label != image.class_name,
        "is_ood": image.is_ood,
    }


def _prediction_section(predictions: Predictions) -> dict[str, Any]:
    total, flagged = predictions.n_images, predictions.flagged.total()
    rows = [_prediction_row(row, predictions.path.parent, i < MAX_PREVIEWS) for i, row in enumerate(predictions.rows)]
    share_flagged = percent(flagged / total) if total else "–"
    verdict = f"of which {flagged:,} ({share_flagged}) are flagged as out-of-distribution"
    is_decided = bool(predictions.n_decided) or not total
    if not is_decided:
        verdict = "not decided about: the run had no calibration images"
    return {
        "intro": f"{predictions.path.name}: {plural(total, 'image')}, {verdict}.",
        "classes": [
            {
                "name": name,
                "count": f"{count:,}",
                "share": percent(count / total),
                "width": round(BAR_WIDTH * count / total),
                "flagged": f"{predictions.flagged[name]:,}" if is_decided else "–",
                "flagged_share": percent(predictions.flagged[name] / count) if is_decided else "–",
                "flagged_width": round(BAR_WIDTH * predictions.flagged[name] / count),
            }
            for name, count in sorted(predictions.counts.items(), key=lambda item: (-item[1], item[0]))
        ],
        "rows": rows[:UNFOLDED_ROWS],
        "more": rows[UNFOLDED_ROWS:],
        "has_images": any(row["uri"] for row in rows),
        "sets": _describe_sets(predictions.set_sizes),
        "shown": f"{len(rows):,} of {total:,}",
    }


def _describe_sets(sizes: Counter[int]) -> str:
    """How many classes prediction sets hold; nothing where there are none.

    >>> print(_describe_sets(Counter({1: 8, 2: 1, 4: 1})))
    Prediction sets hold 1.4 classes on average: 80 % of them one class alone, the largest 4 classes.
    """
    n = sizes.total()
    if not n:
        return ""
    mean = sum(size * count for size, count in sizes.items()) / n
    average = "1 class" if mean == 1 else f"{number(mean, 1)} classes"
    return (
        f"Prediction sets hold {average} on average: {percent(sizes[1] / n)} of them one class alone, "
        f"the largest {plural(max(sizes), 'class')}."
    )


def _prediction_row(row: Mapping[str, Any], folder: Path, with_image: bool) -> dict[str, Any]:
    return {
        "file": row["file"],
        "class_name": row["class"],
        "probability": percent(row["probability"]),
        "uncertainty": number(row["uncertainty"]),
        "score": number(row["score"]),
        "p_value": number(row["p_value"]),
        "is_ood": row["is_ood"],
        "is_decided": not math.isnan(row["p_value"]),
        "prediction_set": shorten_list(row["prediction_set"] or [], SHOWN_SET),
        "uri": _preview(row["file"], folder) if with_image else None,
    }


def _preview(file: str, folder: Path) -> str | None:
    """A thumbnail of a predicted image, where the file still lies where it was."""
    for path in (Path(file), folder / file):
        try:
            if path.is_file():
                return data_uri(decode_image(path, 96, "pad"))
        except (MapleError, OSError, ValueError):  # moved, changed or not a path at all: the row does without
            continue
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Latent space, history, provenance
# ---------------------------------------------------------------------------------------------------------------------


def _projection_title(record: RunRecord, name: str) -> str:
    """When the embeddings were taken."""
    epoch = (record.classes or {}).get("snapshot_epochs", {}).get(name)
    when = f", epoch {epoch}" if epoch is not None else ""
    if name == "before":
        split = any(row.get("relabelled") for row in record.history)
        return f"Before the first relabelling{when}" if split else f"During training{when}"
    return f"After training{when}" if name == "after" else name


def draw_projections(record: RunRecord) -> list[Plot]:
    """The embeddings at each snapshot of a training, on two axes."""
    projections = record.gallery.projections
    colours = dict(zip(_highlighted(record), CLASS_COLOURS))
    plots = []
    for name in sorted(projections, key=lambda name: (name != "before", name != "after", name)):
        found = projections[name]
        names = dict(enumerate(found.class_names or record.class_names))
        title = _projection_title(record, name)
        plots.append(plot_projection(title, found, names, colours))
    return plots


def _highlighted(record: RunRecord) -> list[int]:
    """Class ids that get a colour: all, or with many classes those that were split, then the largest."""
    found = list(record.gallery.projections.values())
    counts = Counter(class_id for p in found for class_id in p.class_ids.tolist() if class_id >= 0)
    names = next((p.class_names for p in found), ())
    parts = Counter(cluster.class_name for cluster in record.gallery.clusters)
    split = {i for i, name in enumerate(names) if parts[name] > 1}
    return sorted(sorted(counts, key=lambda i: (i not in split, -counts[i], i))[: len(CLASS_COLOURS)])


def _projection_note(record: RunRecord) -> str:
    n_classes = max((len(p.class_names) for p in record.gallery.projections.values()), default=0)
    n_colours = len(CLASS_COLOURS)
    if n_classes <= n_colours:
        return ""
    return f"{n_colours} of {n_classes} classes are coloured, first those that were split; the others are grey."


def _history_section(rows: Sequence[Mapping[str, str]]) -> dict[str, Any] | None:
    if not rows:
        return None
    columns = ("epoch", "cross_entropy", "triplet", "validation_loss", "validation_accuracy", "clusters", "seconds")
    history = {name: np.array([_float(row.get(name)) for row in rows]) for name in columns}
    events: list[dict[str, Any]] = [
        {
            "epoch": int(_float(row["epoch"])),
            "classes": join_names(row["relabelled"].split(";")),
            "clusters": row.get("clusters", ""),
            "shift": f"{shift:.0e}" if not math.isnan(shift := _float(row.get("relabel_shift"))) else "",
        }
        for row in rows
        if row.get("relabelled")
    ]
    epochs = [event["epoch"] for event in events]
    minutes = np.nansum(history["seconds"]) / 60
    happened = plural(len(events), "relabelling event") if events else "no class was split"
    return {
        "intro": f"{plural(len(rows), 'epoch')} in {minutes:.1f} minutes; {happened}. "
        f"Validation accuracy at the end: {percent(float(history['validation_accuracy'][-1]))}.",
        "losses": plot_losses(history, epochs),
        "accuracy": plot_accuracy(history, epochs),
        "clusters": plot_clusters(history, epochs),
        "events": events,
    }


def _skipped_section(classes: Mapping[str, Any] | None) -> dict[str, Any]:
    files = list(classes.get("skipped", [])) if classes else []
    shown = f", the first {MAX_SKIPPED} are listed" if len(files) > MAX_SKIPPED else ""
    return {
        "known": classes is not None,
        "classes": list(classes.get("left_out", [])) if classes else [],
        "files": files[:MAX_SKIPPED],
        "note": f"{plural(len(files), 'file')} could not be used{shown}.",
    }


def _seed(record: RunRecord) -> Any:
    seed = record.config.get("train", {}).get("seed")
    return record.results.provenance.get("seed") if seed is None and record.results else seed


def _commands(record: RunRecord, predictions: Predictions | None) -> str:
    said = [record.origin.get("command"), record.results.provenance.get("command") if record.results else None]
    report = ["maple", "report", str(record.folder), *([str(predictions.path)] if predictions else [])]
    return "\n".join([*dict.fromkeys(command for command in said if command), shlex.join(report)])


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [("seed", str(seed))] if (seed := _seed(record)) is not None else []
    results = record.results
    if results is None:
        return [*facts, ("version", f"maple {__version__}")]
    size = f"{plural(results.n_clusters, 'cluster')}, {plural(results.n_components, 'component')}"
    facts.append(("Gaussian model", size))
    if not math.isnan(results.latency_ms):
        facts.append(("time per image", f"{number(results.latency_ms, 2)} ms"))
    if hardware := results.provenance.get("hardware"):
        facts.append(("hardware", str(hardware)))
    versions = results.provenance.get("versions", {})
    facts.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    return facts
