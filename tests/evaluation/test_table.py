"""The summary on a terminal."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from blobs import blobs, make_predictor
from maple.errors import UsageError
from maple.evaluation.cases import evaluate
from maple.evaluation.results import Results
from maple.evaluation.table import format_table, to_long_csv, to_sheet, write_table
from maple.stats import metrics


def shown(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_a_narrow_terminal_shows_whole_methods_and_numbers(predictor, ind, ood):
    results = evaluate(predictor, ind, {f"a set with a long name, no. {i}": ood["near"] for i in range(4)})
    console = Console(width=80, file=io.StringIO())
    console.print(format_table(results))
    lines = [line.split("│") for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [name for cells in lines if (name := cells[1].strip())] == list(results.methods)
    assert all(re.fullmatch(r"–|[\d.]+|\([\d.]+\)|", cell.strip()) for cells in lines for cell in cells[2:-1])


def test_table_shows_methods_sets_and_false_alarms(results):
    text = shown(format_table(results))
    for part in ("softmax", "energy", "maple-paper", "AUROC", "near", "far", "accuracy", "ECE", "NLL", "false alarms"):
        assert part in text
    assert f"{results.methods['maple'].detection['near'].auroc:.3f}" in text
    assert f"{100 * results.false_alarm:.1f} %" in text
    assert "1.5 ms" in text
    assert "nan" not in text


def test_each_ece_has_its_own_floor(results):
    """That of another method's probabilities says nothing: sure ones have a lower floor."""
    sheet = to_sheet([results, results])
    place = sheet.headings.index("ECE ↓")
    judged = {name: each.classification for name, each in results.methods.items() if each.classification}
    assert len({each.ece_floor for each in judged.values()}) > 1
    assert {line[0]: line[place] for line in sheet.lines if line[0] in judged} == {
        name: f"{each.ece:.3f} ± 0.000 ({each.ece_floor:.3f})" for name, each in judged.items()
    }
    assert f"({judged['softmax'].ece_floor:.3f})" in shown(format_table(results))


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


# --- groups and written tables


@pytest.fixture
def grouped(results):
    """Both sets are far."""
    return replace(results, groups={"far": list(results.n_ood)})


def test_groups_have_their_mean(results, grouped):
    assert "far-OOD mean" in shown(format_table(grouped)) and "OOD mean" not in shown(format_table(results))
    for name, row in zip(grouped.methods, grouped.rows()):
        for figure in ("auroc", "fpr95_ood_positive", "fpr95_ind_positive"):
            sets = [getattr(each, figure) for each in grouped.methods[name].detection.values()]
            assert row[f"far_ood/{figure}"] == pytest.approx(sum(sets) / len(sets))
    assert Results.from_json(grouped.to_json()).groups == grouped.groups


def test_sheet_names_both_conventions_and_marks_the_best(grouped):
    sheet = to_sheet([grouped, grouped])
    assert "FPR95 at 95 % of unknown flagged far-OOD mean ↓" in sheet.headings
    assert "FPR95 at 95 % of known accepted far-OOD mean ↓" in sheet.headings
    place = sheet.headings.index("AUROC far-OOD mean ↑")
    best = max(row["far_ood/auroc"] for row in grouped.rows())
    assert {float(sheet.lines[i][k].split()[0]) for i, k in sheet.best if k == place} == {round(best, 3)}
    assert "over 2 runs" in sheet.note


def test_csv_holds_every_run_unrounded(results, grouped):
    rows = list(csv.DictReader(to_long_csv([results, grouped]).splitlines()))
    found = {(row["run"], row["method"], row["figure"]): float(row["value"]) for row in rows}
    assert found["1", "maple", "auroc/near"] == results.methods["maple"].detection["near"].auroc
    assert ("0", "maple", "far_ood/auroc") not in found and ("1", "maple", "far_ood/auroc") in found


def test_tables_are_written_by_the_ending_of_their_name(results, tmp_path):
    for name, start in (("t.tex", r"\begin{table}"), ("t.md", "# Evaluation"), ("t.csv", "run,seed,method")):
        write_table(tmp_path / name, [results])
        assert (tmp_path / name).read_text().startswith(start)
    with pytest.raises(UsageError, match="--table"):
        write_table(tmp_path / "t.xls", [results])
