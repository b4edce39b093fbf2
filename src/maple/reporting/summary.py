"""The summary at the top of a report: sentences, key figures, and links to what needs a person's judgement."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maple.decisions.labels import JudgedLabel
from maple.evaluation.results import Results
from maple.reporting.comparison import OURS, detection_rate, false_alarm_rate, method_name
from maple.reporting.gallery import Gallery
from maple.reporting.predictions import PredictionSummary
from maple.reporting.record import RunRecord
from maple.reporting.sections import list_confusions, list_recalls
from maple.reporting.verdicts import Comparison, compare_figures, describe_comparison
from maple.text import join_names, number, percent, plural
from maple.types import RunClasses

ENOUGH_IMAGES = 10  # of a class, to call it the least accurate one
MAX_SPLIT = 3  # split classes named


@dataclass(frozen=True)
class KeyFigure:
    """One number in large print."""

    value: str
    name: str
    note: str
    words: str = ""  # how it compares with the network's own probabilities
    verdict: str = ""  # the same as 'ahead', 'equal' or 'behind'


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
        *_point_at_labels(record.labels),
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
    yield from describe_comparison(compare_figures(results))
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
    for compared in compare_figures(results):
        figure = compared.figure
        yield KeyFigure(
            figure.write(compared.value), figure.name, _note(compared, results), compared.words, compared.verdict or ""
        )
    if results.n_ood:
        calibrated = not math.isnan(results.false_alarm)
        note = "of the known test images flagged" if calibrated else "assumed: the run has no threshold"
        if calibrated and (rate := results.provenance.get("false_alarm")) is not None:
            note += f"; the threshold allows {percent(rate, exact=True)} on average over calibration sets"
        yield KeyFigure(percent(false_alarm_rate(results)), "false alarms", note)


def _note(compared: Comparison, results: Results) -> str:
    """The figures of the rivals and, for ECE, what chance alone contributes to it."""
    judged = results.methods[OURS].classification
    floor = judged.ece_floor if judged and compared.figure.key == "ece" else math.nan
    chance = f"perfect calibration would give {number(floor)}" if not math.isnan(floor) else ""
    return "; ".join(part for part in (compared.others, chance) if part)


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
    yield from _point_at_defeats(results)


def _point_at_defeats(results: Results) -> Iterator[Pointer]:
    for compared in compare_figures(results):
        if compared.verdict == "behind":
            is_detection = compared.figure.key.startswith("auroc/")
            section = ("unknown", "Detection") if is_detection else ("results", "Results")
            name, value = compared.figure.name, compared.figure.write(compared.value)
            text = f"{name[0].upper()}{name[1:]} {value} is {compared.words} ({compared.others})."
            yield Pointer(text, *section)


def _point_at_labels(labels: Sequence[JudgedLabel] | None) -> Iterator[Pointer]:
    n = sum(each.is_label_issue for each in labels or ())
    if n:
        text = f"{plural(n, 'label')} of test images may be wrong."
        yield Pointer(text, "labels", "Labels")


def _point_at_gallery(gallery: Gallery) -> Iterator[Pointer]:
    split = [name for name, count in Counter(c.class_name for c in gallery.clusters).items() if count > 1]
    if split:
        more = [f"{len(split) - MAX_SPLIT} more"] if len(split) > MAX_SPLIT else []
        names = join_names([*split[:MAX_SPLIT], *more])
        yield Pointer(f"Split into clusters: {names}. Check whether they are meaningful.", "clusters", "Clusters")


def _point_at_skipped(classes: RunClasses | None) -> Iterator[Pointer]:
    if classes and classes.skipped:
        yield Pointer(f"{plural(len(classes.skipped), 'file')} could not be used.", "skipped", "Skipped files")
