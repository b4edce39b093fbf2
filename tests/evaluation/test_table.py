"""The summary on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from blobs import blobs, make_predictor
from maple.errors import UsageError
from maple.evaluation.cases import evaluate
from maple.evaluation.table import format_table
from maple.stats import metrics


def shown(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_table_shows_methods_sets_and_false_alarms(results):
    text = shown(format_table(results))
    for part in ("softmax", "energy", "maple-paper", "AUROC", "near", "far", "accuracy", "ECE", "NLL", "false alarms"):
        assert part in text
    assert f"{results.methods['maple'].detection['near'].auroc:.3f}" in text
    assert f"{100 * results.false_alarm:.1f} %" in text
    assert "1.500 ms" in text
    assert "nan" not in text


def test_table_of_several_runs_shows_the_spread(results, predictor, ood):
    other = evaluate(predictor, blobs(9), ood)
    text = shown(format_table(results, other))
    pair = [run.methods["softmax"].classification.accuracy for run in (results, other)]
    assert metrics.format_spread(pair) in text
    assert "over 2 runs" in text
    with pytest.raises(UsageError, match="OOD"):
        format_table(results, evaluate(predictor, blobs(9)))


def test_names_are_not_markup(predictor, ind, ood):
    assert "[red]moss[/]" in shown(format_table(evaluate(predictor, ind, {"[red]moss[/]": ood["near"]})))


def test_without_ood_sets_there_is_no_auroc(predictor, ind):
    assert "AUROC" not in shown(format_table(evaluate(predictor, ind)))


def test_without_calibration_nothing_is_flagged(ind, ood):
    assert "flags" not in shown(format_table(evaluate(make_predictor(calibrated=False), ind, ood)))
