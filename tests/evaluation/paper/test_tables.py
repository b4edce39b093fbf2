"""Filled tables as cells, Markdown and CSV."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest

from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import find_suite
from maple.evaluation.paper.tables import (
    Provenance,
    SuiteResults,
    TableRow,
    best_cells,
    table_cells,
    to_csv,
    to_dict,
    to_rows,
    to_sheet,
)


@pytest.fixture
def filled() -> SuiteResults:
    rows = [
        TableRow(
            "K-Means",
            {name: [0.5, 0.7] for name in find_suite("clustering").columns},
            {"clusters": 30, "ece": 0.154},
            {"ece": [0.010, 0.014]},
        ),
        TableRow("T-Means", {name: [0.25, math.nan] for name in find_suite("clustering").columns}, {}),
    ]
    provenance = Provenance("maple benchmark clustering", "abc1234", "0", "3", "two cores", {})
    return SuiteResults(find_suite("clustering"), PROFILES["cpu"], (4, 9), rows, provenance)


def test_flags_that_change_the_profile_are_named(filled):
    assert "here with" not in to_sheet(filled).note
    changed = replace(filled, changes={"epochs": "4", "batch_size": "64"})
    assert "8 epochs" in to_sheet(changed).note and "here with epochs 4, batch-size 64" in to_sheet(changed).note


def test_cells_have_means_and_the_papers_figures(filled):
    headings, lines = table_cells(filled)
    assert headings[:6] == ["", "clusters", "paper", "accuracy ↑", "ECE ↓ (by chance)", "paper"]
    assert lines[0][4] == "0.600 ± 0.141 (0.012)"
    assert lines[0][3] == "0.6000 ± 0.1414" and lines[0][5] == "0.154"
    assert lines[1][1:6] == ["–"] * 5  # a seed is missing; the paper has none
    text = to_sheet(filled).to_markdown()
    assert text.startswith("# How to cluster\n\nTable 11 of the paper") and "| --- | ---: |" in text
    assert "over 2 seeds" in text and "`maple benchmark clustering`" in text and "abc1234" in text


def test_csv_is_unrounded(filled):
    rows = list(csv.DictReader(to_csv(filled).splitlines()))
    assert len(rows) == 2 * 2 * len(filled.suite.columns)
    assert rows[0] == {
        "row": "K-Means",
        "column": "clusters",
        "seed": "4",
        "value": "0.5",
        "paper": "30",
        "images": "as named",
    }
    assert [row["value"] for row in rows if row["row"] == "T-Means"][:2] == ["0.25", ""]


def test_the_best_figures_are_marked(filled):
    headings, _ = table_cells(filled)
    best = best_cells(filled)
    accuracy, ece = headings.index("accuracy ↑"), headings.index("ECE ↓ (by chance)")
    assert (0, accuracy) in best and (0, ece) in best  # the other row lacks a seed
    assert not any(column == headings.index("clusters") for _, column in best)  # neither way is better


def test_rows_of_the_terminal_and_plain_values(filled):
    first = to_rows(filled)[0]
    assert (
        list(first)[:4] == ["", "clusters", "paper clusters", "accuracy ↑"]
        and first["paper ECE ↓ (by chance)"] == "0.154"
    )
    plain = to_dict(filled)
    assert json.loads(json.dumps(plain))["provenance"]["commit"] == "abc1234"
    assert (plain["suite"], plain["profile"], plain["seeds"]) == ("clustering", "cpu", [4, 9])


def test_latex_has_booktabs_and_the_best_in_bold(filled):
    text = to_sheet(filled).to_latex("tab:clustering")
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({row.count("&") for row in rows}) == 1 and len(rows) == 3
    assert (
        r"\textbf{0.6000 $\pm$ 0.1414}" in text and r"accuracy $\uparrow$" in text and r"\label{tab:clustering}" in text
    )
    assert not set("±↑↓–") & set(text)


def test_tables_on_simulated_images_say_so_themselves(filled):
    simulated = replace(filled, profile=PROFILES["tiny"])
    headings, _ = table_cells(simulated)
    assert headings[0] == "on simulated images" and next(iter(to_rows(simulated)[0])) == headings[0]
    sheet = to_sheet(simulated)
    assert (
        "| on simulated images | clusters" in sheet.to_markdown()
        and "on simulated images & clusters" in sheet.to_latex()
    )
    assert {row["images"] for row in csv.DictReader(to_csv(simulated).splitlines())} == {"simulated"}
    assert to_dict(simulated)["simulated"] and not to_dict(filled)["simulated"]
    assert table_cells(filled)[0][0] == ""
