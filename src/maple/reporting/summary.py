"""The summary at the top of a report: sentences, key figures, and links to what needs a person's judgement."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from maple.evaluation.results import Results
from maple.reporting.comparison import OURS, detection_rate, false_alarm_rate, is_worse, method_name
from maple.reporting.gallery import Gallery
from maple.reporting.predictions import PredictionSummary
from maple.reporting.record import RunRecord
from maple.reporting.sections import list_confusions, list_recalls
from maple.text import join_names, number, percent, plural
from maple.types import RunClasses

ENOUGH_IMAGES = 10  # of a class, to call it the least accurate one
MAX_SETS = 4  # OOD sets with a key figure
MAX_SPLIT = 3  # split classes named


@dataclass(frozen=True)
class KeyFigure:
    """One number in large print."""

    value: str
    name: str
    note: str


@dataclass(frozen=True)
class Pointer:
    """Something to check, and the section that shows it."""

    text: str
    anchor: str
    link: str


@dataclass(frozen=True)
class Summary:
    sentences: list[str]
    figures: list[KeyFigure]
    pointers: list[Pointer]


def summarise(record: RunRecord, predictions: PredictionSummary | None = None) -> Summary:
    """The summary of a run and, if given, of its predictions."""
    pointers = [
        *_point_at_predictions(predictions),
        *_point_at_results(record.results),
        *_point_at_gallery(record.gallery),
        *_point_at_skipped(record.classes),
    ]
    figures = list(_key_figures(record.results)) if record.results else []
    return Summary(list(_sentences(record)), figures, pointers)


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------


def _sentences(record: RunRecord) -> Iterator[str]:
    yield _describe_training(record)
    if record.classes:
        yield from _describe_updates(record.classes, record)
    if record.results:
        yield from _describe_results(record.results)
    else:
        yield "This run has not been evaluated."


def _describe_training(record: RunRecord) -> str:
    n_classes = len(record.class_names)
    if not n_classes:
        return "This run is unfinished: its classes are not known yet."
    sizes = record.classes.cluster_sizes if record.classes else None
    if sizes is None:
        return f"The network distinguishes {plural(n_classes, 'class')}."
    clusters = f" in {len(sizes):,} clusters" if len(sizes) > n_classes else ""
    return f"The network was trained on {plural(int(sizes.sum()), 'image')} of {plural(n_classes, 'class')}{clusters}."


def _describe_updates(classes: RunClasses, record: RunRecord) -> Iterator[str]:
    """What ``maple update`` added, and whether the run needs calibration again."""
    updates = classes.updates
    learned = sum(sum(update["images"].values()) for update in updates)
    new = [name for update in updates for name in update["new_classes"]]
    if learned:
        untrained = f"; the network was not trained on {join_names(new)}" if new else ""
        yield f"{plural(learned, 'image')} of them were added by maple update after the training{untrained}."
    if updates and not updates[-1]["calibration_images"]:
        command = shlex.join(["maple", "update", str(record.folder), "--calibrate"])
        yield f"The last update made the thresholds void, so no image is flagged: run {command} IMAGES."


def _describe_results(results: Results) -> Iterator[str]:
    judged = results.methods[OURS].classification
    if judged:
        yield f"Its accuracy on {plural(results.n_ind, 'test image')} is {percent(judged.accuracy)}."
    if results.n_ood:
        yield _describe_detection(results)
    if results.threshold == math.inf:
        yield _describe_unreachable_threshold(results)


def _describe_detection(results: Results) -> str:
    detected = [f"{percent(detection_rate(results, OURS, name))} of {name}" for name in results.n_ood]
    sentence = f"At {percent(false_alarm_rate(results))} false alarms, MAPLE detects {join_names(detected)}"
    if results.baseline:
        others = [percent(detection_rate(results, results.baseline, name)) for name in results.n_ood]
        sentence += f"; {method_name(results.baseline)} of the same network detects {join_names(others)}"
    return f"{sentence}."


def _describe_unreachable_threshold(results: Results) -> str:
    rate, n = (results.provenance.get(key) for key in ("false_alarm", "calibration_images"))
    few = f"{plural(n, 'calibration image')} are" if n is not None else "the calibration images are"
    for_rate = f" for a false-alarm rate of {percent(rate, exact=True)}" if rate is not None else ""
    if confidence := results.provenance.get("decision", {}).get("confidence"):
        for_rate += f" with {percent(confidence, exact=True)} confidence"
    return (
        f"No image is ever flagged: {few} too few{for_rate}. Train with more calibration images, or evaluate and "
        "predict with a larger --false-alarm."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Key figures
# ---------------------------------------------------------------------------------------------------------------------


def _key_figures(results: Results) -> Iterator[KeyFigure]:
    baseline = results.baseline
    ours, theirs = (results.methods[name].classification if name else None for name in (OURS, baseline))

    def beside(value: str | None) -> str:
        return f"{method_name(baseline)} {value}" if baseline and value else ""

    if ours:
        yield KeyFigure(percent(ours.accuracy), "accuracy", beside(percent(theirs.accuracy) if theirs else None))
        yield KeyFigure(number(ours.ece), "calibration error", beside(number(theirs.ece) if theirs else None))
    for name in list(results.n_ood)[:MAX_SETS]:
        other = percent(detection_rate(results, baseline, name)) if baseline else None
        yield KeyFigure(percent(detection_rate(results, OURS, name)), f"of {name} detected", beside(other))
    if results.n_ood:
        calibrated = not math.isnan(results.false_alarm)
        note = "of the known test images flagged" if calibrated else "assumed: the run has no threshold"
        yield KeyFigure(percent(false_alarm_rate(results)), "false alarms", note)


# ---------------------------------------------------------------------------------------------------------------------
# What to check
# ---------------------------------------------------------------------------------------------------------------------


def _point_at_predictions(predictions: PredictionSummary | None) -> Iterator[Pointer]:
    if predictions and (flagged := predictions.n_flagged):
        total, share = plural(predictions.n_images, "predicted image"), percent(flagged / predictions.n_images)
        yield Pointer(f"{flagged:,} of {total} ({share}) are flagged as unknown.", "predictions", "Predictions")


def _point_at_results(results: Results | None) -> Iterator[Pointer]:
    if results is None:
        return
    recalls = [recall for recall in list_recalls(results) if recall.count >= ENOUGH_IMAGES]
    if recalls and recalls[0].recall < 0.95:
        lowest = recalls[0]
        pairs = [pair for pair in list_confusions(results) if pair.label == lowest.name]
        most = f", most often confused with {pairs[0].predicted}" if pairs else ""
        text = f"The class with the lowest accuracy is {lowest.name}: {percent(lowest.recall)}{most}."
        yield Pointer(text, "confusion", "Confusion")
    worse = [name for name in results.n_ood if is_worse(results, name)]
    if worse and results.baseline:
        other = method_name(results.baseline)
        text = f"{other[0].upper()}{other[1:]} ranks the images of {join_names(worse)} better than MAPLE does."
        yield Pointer(text, "unknown", "Detection")


def _point_at_gallery(gallery: Gallery) -> Iterator[Pointer]:
    split = [name for name, count in Counter(c.class_name for c in gallery.clusters).items() if count > 1]
    if split:
        more = [f"{len(split) - MAX_SPLIT} more"] if len(split) > MAX_SPLIT else []
        names = join_names([*split[:MAX_SPLIT], *more])
        yield Pointer(f"Split into clusters: {names}. Check whether they are meaningful.", "clusters", "Clusters")
    if any(group.kind == "mistakes" and group.images for group in gallery.examples):
        yield Pointer("The most confident mistakes may be labelling errors.", "images", "Examples")


def _point_at_skipped(classes: RunClasses | None) -> Iterator[Pointer]:
    if classes and classes.skipped:
        yield Pointer(f"{plural(len(classes.skipped), 'file')} could not be used.", "skipped", "Skipped files")
