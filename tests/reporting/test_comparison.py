"""Tables of results: verdicts, detection rates, and rows in order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maple.evaluation.results import Gain, Results
from maple.files import RunFile
from maple.reporting.comparison import (
    compare,
    detection_rate,
    detection_table,
    interpolate_roc,
    quality_table,
    score_table,
)
from maple.stats import metrics
from maple.text import number
from run_folders import change_results


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return Results.from_json((run / RunFile.RESULTS).read_bytes())


def test_verdicts() -> None:
    lower = compare({"softmax": 0.05, "maple": 0.01, "energy": math.nan}, higher=False)
    assert (lower["maple"].verdict, lower["maple"].best) == ("better", True)
    assert (lower["softmax"].verdict, lower["softmax"].best) == ("", False)
    assert (lower["energy"].text, lower["energy"].best) == ("–", False)
    assert compare({"maple": 0.8, "softmax": 0.9}, higher=True)["maple"].verdict == "worse"
    tie = compare({"maple": 0.90004, "softmax": 0.90001}, higher=True)
    assert tie["maple"].verdict == "same" and tie["maple"].best and tie["softmax"].best
    assert compare({"maple": math.inf, "softmax": math.inf}, higher=False)["maple"].verdict == "same"
    assert compare({"maple": math.nan, "softmax": 0.1}, higher=False)["maple"].verdict == ""


def test_interpolation_follows_the_curve(rng: np.random.Generator) -> None:
    ind, ood = rng.normal(size=200).round(1), rng.normal(1, size=150).round(1)
    roc_ind, roc_ood, thresholds = metrics.roc_curve(ind, ood)
    for threshold in thresholds:
        false_alarm = float((ind >= threshold).mean())
        detected = [float((ood >= t).mean()) for t in thresholds if (ind >= t).mean() == false_alarm]
        assert interpolate_roc(roc_ind, roc_ood, false_alarm) == pytest.approx((min(detected) + max(detected)) / 2)
    between = [interpolate_roc(roc_ind, roc_ood, rate) for rate in np.linspace(0, 1, 333)]
    assert between == sorted(between)


def test_detection_rates_are_measured_for_maple_and_read_off_the_curve_for_others(results: Results) -> None:
    softmax = results.methods["softmax"].detection["near"]
    assert detection_rate(results, "maple", "near") == results.methods["maple"].detection["near"].flagged
    expected = np.interp(results.false_alarm, softmax.roc_ind, softmax.roc_ood)
    assert detection_rate(results, "softmax", "near") == pytest.approx(expected, abs=0.02)


def test_columns_of_methods_and_rows_of_measures(results: Results) -> None:
    table = quality_table(results)
    assert list(table.columns) == ["MAPLE", "softmax", "MAPLE, chi-square tail"]
    names = [group.measure.name for group in table.groups]
    assert names[0] == "accuracy" and names[-3:] == ["accuracy above 0.5", "accuracy above 0.8", "accuracy above 0.9"]
    assert all(len(group.rows[0].cells) == 3 for group in table.groups)


def test_calibration_errors_are_shown_with_those_of_chance(results: Results) -> None:
    """In results of earlier versions, which do not know them, alone."""
    maple = results.methods["maple"]
    assert maple.classification is not None
    for floor, ending in ((0.0123, " (0.012)"), (math.nan, number(maple.classification.ece))):
        judged = replace(maple, classification=replace(maple.classification, ece_floor=floor))
        table = quality_table(replace(results, methods={**results.methods, "maple": judged}))
        (row,) = next(group.rows for group in table.groups if group.measure.key == "ece")
        assert row.cells[0].text.startswith(number(maple.classification.ece)) and row.cells[0].text.endswith(ending)


def test_groups_of_unknown_images_have_a_column(results: Results) -> None:
    table = detection_table(replace(results, groups={"near": ["near"], "far": ["near", "far"]}))
    assert list(table.columns) == ["near (300)", "far (200)", "mean of near", "mean of far", "mean"]
    for group in table.groups:
        for row in group.rows:
            texts = [cell.text for cell in row.cells]
            assert texts[2] == texts[0] and texts[3] == texts[4]


def test_only_figures_whose_noise_is_known_are_judged(results: Results) -> None:
    """As the figures of MAPLE and softmax differ in all of them, marks would say that softmax is worse by chance."""
    gains = {"softmax": {"nll": Gain(0.1, 0.01), "brier": Gain(0.1, 0.2), "auroc/near": Gain(0.1, 0.01)}}
    quality, detection = (make(replace(results, gains=gains)) for make in (quality_table, detection_table))
    marks = {group.measure.key: group.rows[0].cells[0].verdict for group in quality.groups}
    assert marks["nll"] and marks["brier"] == "same" and marks["aurc"] == ""
    for group in detection.groups:
        near, far, mean = (cell.verdict for cell in group.rows[0].cells)
        assert bool(near) == (group.measure.key == "auroc") and far == mean == ""
    earlier = detection_table(replace(results, gains={}))
    assert all(cell.verdict for group in earlier.groups for cell in group.rows[0].cells)


def test_sets_of_unknown_images_and_their_mean(results: Results) -> None:
    table = detection_table(results)
    assert list(table.columns) == ["near (300)", "far (200)", "mean"]
    names = [group.measure.name for group in table.groups]
    assert {"AUROC", "FPR95, unknown", "FPR95, known"} < set(names)  # both conventions of FPR95
    auroc = table.groups[names.index("AUROC")]
    assert auroc.rows[0].ours and not auroc.rows[1].ours
    near, far, mean = (float(cell.text) for cell in auroc.rows[1].cells)
    assert mean == pytest.approx((near + far) / 2, abs=1e-3)


def test_the_score_of_the_run_is_marked(copied: Path) -> None:
    scores = {"energy": {"near": 0.9, "far": 0.8}, "spread": {"near": 0.7, "far": 0.6}}
    results = change_results(copied)
    change_results(copied, scores=scores, provenance={**results.provenance, "score": "spread"})
    rows = score_table(Results.from_json((copied / RunFile.RESULTS).read_bytes())).groups[0].rows
    assert [row.ours for row in rows] == [False, True]
    assert [row.name.split(":")[0] for row in rows] == ["energy", "spread"]
