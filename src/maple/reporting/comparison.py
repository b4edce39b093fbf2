"""Tables of a run's results: MAPLE beside the other methods, on the same outputs of the same network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from maple.evaluation.results import Classification, Gain, Method, Results
from maple.reporting.plots import BLUE, GREEN, MUTED, ORANGE, PINK, Line
from maple.text import number, percent, plural

OURS = "maple"
DEFAULT_FALSE_ALARM = 0.05  # to compare methods if the run has no threshold
NOISE = 2.0  # standard errors within which figures count as equal
SCALED = "softmax-scaled"  # its curves nearly coincide with those of softmax

_LINES = {
    OURS: Line("MAPLE", BLUE, "-"),
    "softmax": Line("softmax", ORANGE, "--"),
    SCALED: Line("scaled softmax", MUTED, "--"),
    "energy": Line("energy", GREEN, ":"),
    "maple-paper": Line("MAPLE, chi-square tail", PINK, "-."),
}

# ---------------------------------------------------------------------------------------------------------------------
# Methods
# ---------------------------------------------------------------------------------------------------------------------


def line_of(method: str) -> Line:
    """How a method is drawn."""
    return _LINES.get(method, Line(method, PINK, ":"))


def method_name(method: str) -> str:
    """The name of a method on the page."""
    return line_of(method).label


def list_methods(results: Results, scaled: bool = True) -> dict[str, Method]:
    """MAPLE, then the baseline, then the other methods; without ``scaled``, softmax at its fitted temperature is left
    out."""
    names = sorted(results.methods, key=lambda name: (name != OURS, name != results.baseline))
    return {name: results.methods[name] for name in names if scaled or name != SCALED}


def list_classifiers(results: Results, scaled: bool = True) -> dict[str, Classification]:
    """The methods that give probabilities, in the order of `list_methods`."""
    methods = list_methods(results, scaled)
    return {name: found for name, method in methods.items() if (found := method.classification) is not None}


def false_alarm_rate(results: Results) -> float:
    """The share of known test images that are flagged; a default if the run has no threshold."""
    return DEFAULT_FALSE_ALARM if math.isnan(results.false_alarm) else results.false_alarm


def detection_rate(results: Results, method: str, ood_name: str) -> float:
    """The share of unknown images that ``method`` flags at MAPLE's false-alarm rate."""
    detection = results.methods[method].detection[ood_name]
    if not math.isnan(detection.flagged):
        return detection.flagged
    return interpolate_roc(detection.roc_ind, detection.roc_ood, false_alarm_rate(results))


def interpolate_roc(roc_ind: Sequence[float], roc_ood: Sequence[float], false_alarm: float) -> float:
    """Height of a ROC curve at one false-alarm rate: linear between points, the middle of vertical parts.

    >>> interpolate_roc([0, 0, 0.1, 1], [0, 0.5, 0.7, 1], 0.05)
    0.6
    >>> interpolate_roc([0, 0, 0.1, 1], [0, 0.5, 0.7, 1], 0.0)
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


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Cell:
    """A number in a table: its text, whether it is the best of its kind, and how it compares with the baseline."""

    text: str
    best: bool = False
    verdict: str = ""  # "better", "worse" or "same", for MAPLE only


@dataclass(frozen=True)
class Measure:
    """What a row or group of rows measures."""

    name: str
    direction: str  # that is better: "higher" or "lower"
    meaning: str
    key: str = ""  # attribute of Classification or Detection


@dataclass(frozen=True)
class Row:
    name: str
    cells: Sequence[Cell]
    ours: bool = False


@dataclass(frozen=True)
class Group:
    """The rows of one measure."""

    measure: Measure
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    groups: Sequence[Group]
    note: str = ""


_QUALITY = (
    Measure("accuracy", "higher", "share of images with the right class", "accuracy"),
    Measure(
        "calibration error (ECE)", "lower", "mean gap between probability and accuracy; in brackets by chance", "ece"
    ),
    Measure("negative log-likelihood", "lower", "penalises confident mistakes", "nll"),
    Measure("Brier score", "lower", "squared error of the probabilities", "brier"),
    Measure("risk-coverage area (AURC)", "lower", "mean error rate over all coverages", "aurc"),
)
_DETECTION = (
    Measure("AUROC", "higher", "probability that an unknown image scores above a known one; 0.5 is chance", "auroc"),
    Measure("AUPR, unknown", "higher", "average precision with unknown images as positives", "aupr_out"),
    Measure("AUPR, known", "higher", "average precision with known images as positives", "aupr_in"),
    Measure("FPR95, unknown", "lower", "known images flagged when 95 % of unknown ones are", "fpr95_ood_positive"),
    Measure("FPR95, known", "lower", "unknown images accepted when 95 % of known ones are", "fpr95_ind_positive"),
)
_SCORES = {
    "distance": "squared distance to the nearest cluster, as in the paper",
    "relative": "squared distance minus that to a single Gaussian of all images",
    "normalised": "squared distance of embeddings divided by a power of their norm",
    "residual": "part of the embedding outside the principal components",
    "spread": "nearest over mean squared distance",
    "energy": "negative log-sum-exp of the logits",
    "shallow": "distance of an intermediate layer's responses to those of all images",
    "fused": "sum of −log tail probabilities of energy and half of spread; far out, of shallow and distance",
}


def compare(
    values: Mapping[str, float], higher: bool, write: Formatter = number, baseline: str | None = "softmax"
) -> dict[str, Cell]:
    """The values of all methods as cells; values that look equal on the page count as equal.

    >>> cells = compare({"maple": 0.91, "softmax": 0.89}, higher=True)
    >>> cells["maple"], cells["softmax"]
    (Cell(text='0.910', best=True, verdict='better'), Cell(text='0.890', best=False, verdict=''))
    """
    seen = {name: round(value, 3) * (1 if higher else -1) for name, value in values.items() if not math.isnan(value)}
    best = max(seen.values(), default=math.nan)
    cells = {name: Cell(write(value), seen.get(name) == best) for name, value in values.items()}
    if OURS in seen and baseline in seen:
        gain = seen[OURS] - seen[baseline] if seen[OURS] != seen[baseline] else 0.0
        cells[OURS] = replace(cells[OURS], verdict="better" if gain > 0 else "worse" if gain < 0 else "same")
    return cells


def is_noise(gain: Gain) -> bool:
    """Whether chance explains a gain; it explains any finite one whose error is unknown, as with a single image.

    >>> is_noise(Gain(0.02, 0.01)), is_noise(Gain(0.03, 0.01)), is_noise(Gain(0.5, math.nan))
    (True, False, True)
    """
    if math.isnan(gain.error):
        return math.isfinite(gain.value)
    return abs(gain.value) <= NOISE * gain.error


def _judge_by_noise(cells: Mapping[str, Cell], results: Results, key: str) -> dict[str, Cell]:
    """The cells with MAPLE called equal to the baseline where the difference may be chance, and not judged where the
    noise is not known. Results of earlier versions, which know of none, are judged by the digits shown."""
    gains = results.gains.get(results.baseline or "")
    if not gains or not cells[OURS].verdict:
        return dict(cells)
    verdict = "" if key not in gains else "same" if is_noise(gains[key]) else cells[OURS].verdict
    return {**cells, OURS: replace(cells[OURS], verdict=verdict)}


def _add_floor(cell: Cell, floor: float) -> Cell:
    """The cell of an ECE with what perfectly calibrated probabilities would have by chance."""
    return cell if math.isnan(floor) else replace(cell, text=f"{cell.text} ({number(floor)})")


def _fixed(share: float) -> str:
    return percent(share, fixed=True)


def quality_table(results: Results) -> Table:
    """Classification of known images: one row per measure, one column per method."""
    judged = list_classifiers(results)
    groups = []
    for measure in _QUALITY:
        values = {method: getattr(found, measure.key) for method, found in judged.items()}
        write = _fixed if measure.key == "accuracy" else number
        cells = compare(values, measure.direction == "higher", write, results.baseline)
        cells = _judge_by_noise(cells, results, measure.key)
        if measure.key == "ece":
            cells = {method: _add_floor(cell, judged[method].ece_floor) for method, cell in cells.items()}
        groups.append(Group(measure, [Row("", list(cells.values()))]))
    for level in judged[OURS].accuracy_above if OURS in judged else ():
        measure = Measure(f"accuracy above {level}", "higher", "of the images with that probability (their share)")
        cells = compare({name: found.accuracy_above[level] for name, found in judged.items()}, True, _fixed)
        shares = [_fixed(found.share_above[level]) for found in judged.values()]
        row = [Cell(f"{cell.text} ({share})", cell.best) for cell, share in zip(cells.values(), shares)]
        groups.append(Group(measure, [Row("", row)]))
    note = f"{plural(results.n_ind, 'test image')}, {plural(len(results.class_names), 'class')}"
    return Table([method_name(name) for name in judged], groups, note)


def detection_table(results: Results) -> Table:
    """Detection of unknown images: one group per measure, one row per method, one column per OOD set."""
    methods, names = list_methods(results), list(results.n_ood)
    rate = percent(false_alarm_rate(results))
    measure = Measure(f"detected at {rate} false alarms", "higher", "share of unknown images that are flagged")
    rates = {name: {method: detection_rate(results, method, name) for method in methods} for name in names}
    groups = [_judge_group(_group(measure, rates, _fixed, results.baseline, results.groups), results)]
    for measure in _DETECTION:
        values = {
            name: {method: getattr(found.detection[name], measure.key) for method, found in methods.items()}
            for name in names
        }
        groups.append(_judge_group(_group(measure, values, number, results.baseline, results.groups), results))
    return Table(_ood_columns(results), groups)


def _judge_group(group: Group, results: Results) -> Group:
    """The group with MAPLE's row compared with the baseline within noise, where that is known."""
    rows = []
    for row in group.rows:
        keys = (f"{group.measure.key}/{name}" for name in results.n_ood)
        judged = [_judge_by_noise({OURS: cell}, results, next(keys, "mean"))[OURS] for cell in row.cells]
        rows.append(replace(row, cells=judged) if row.ours else row)
    return replace(group, rows=rows)


def score_table(results: Results) -> Table:
    """AUROC of every score that the forward pass gives; the run's own is marked."""
    used = results.provenance.get("score")
    values = {name: {score: found[name] for score, found in results.scores.items()} for name in results.n_ood}
    group = _group(_DETECTION[0], values, number, None, results.groups)
    rows = [
        replace(row, name=f"{score}: {_SCORES[score]}", ours=score == used)
        for row, score in zip(group.rows, results.scores)
    ]
    note = f"this run ranks by {used}, chosen without unknown images" if used else ""
    return Table(_ood_columns(results), [replace(group, rows=rows)], note)


def _ood_columns(results: Results) -> list[str]:
    names = [f"{name} ({count:,})" for name, count in results.n_ood.items()]
    return [*names, *(f"mean of {group}" for group in results.groups), *(["mean"] if len(names) > 1 else [])]


def _group(
    measure: Measure,
    values: Mapping[str, Mapping[str, float]],
    write: Formatter,
    baseline: str | None,
    groups: Mapping[str, Sequence[str]],
) -> Group:
    """One row per method from values by OOD set and method, with means of groups, and of all if there are several."""
    columns = list(values.values())
    methods = list(columns[0])
    together = [*groups.values(), *([list(values)] if len(values) > 1 else [])]
    columns += [
        {method: float(np.mean([values[name][method] for name in names])) for method in methods} for names in together
    ]
    compared = [compare(column, measure.direction == "higher", write, baseline) for column in columns]
    rows = [Row(method_name(method), [cells[method] for cells in compared], method == OURS) for method in methods]
    return Group(measure, rows)
