"""Printing: tables that fit, facts on lines of their own, names that are not markup."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from maple.cli import _output
from maple.cli._output import fitting_columns, print_facts, print_line, print_rows


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(_output, "output", Console(width=30, color_system=None))


def test_lines_are_neither_broken_nor_markup(capsys):
    print_line("[bold]x[/] " * 20)
    assert capsys.readouterr().out == "[bold]x[/] " * 20 + "\n"


def test_facts_are_aligned(capsys):
    print_facts({"a": True, "long name": ["one", "two"], "n": 3})
    assert capsys.readouterr().out.splitlines() == [
        "a          yes",
        "long name  one",
        "           two",
        "n          3",
    ]


def test_rows_as_table_and_json(capsys):
    rows = [{"name": "[red]a[/]", "x": None}, {"name": "b", "x": 0.5}]
    print_rows(rows, as_json=False)
    shown = capsys.readouterr().out
    assert "[red]a[/]" in shown and "–" in shown and "0.5" in shown
    print_rows(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    print_rows([], as_json=False)
    assert capsys.readouterr().out == ""


names = st.text("abcdefgh", min_size=1, max_size=12)


@given(st.lists(names, min_size=1, max_size=8, unique=True), st.integers(1, 80))
def test_every_column_is_shown_once_behind_the_first(columns, width):
    blocks = fitting_columns([dict.fromkeys(columns, "value")], width)
    first, *others = columns
    assert all(block[0] == first for block in blocks)
    assert [name for block in blocks for name in block[1:]] == others
    for block in blocks:
        needed = 1 + sum(3 + max(len(name), len("value")) for name in block)
        assert needed <= width or len(block) <= 2
