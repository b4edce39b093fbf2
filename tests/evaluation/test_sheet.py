"""Tables of results as text, with names that mean something in Markdown and LaTeX."""

from __future__ import annotations

import re
import shutil
import string
import subprocess

import pytest

from maple.evaluation.sheet import Sheet, to_tex

SHEET = Sheet("Digits", ["", "AUROC ↑", "ECE"], [["a|b_1", "0.97", "5 %"], ["c", "0.90", "–"]], frozenset({(1, 1)}))


def test_markdown_has_a_cell_for_each_figure():
    lines = SHEET.to_markdown().splitlines()
    assert lines[0] == "# Digits"
    assert [len(re.split(r"(?<!\\)\|", line)) for line in lines[2:]] == [5] * 4
    assert r"a\|b_1" in lines[4]


def test_only_the_best_figures_are_bold_in_latex():
    rows = re.search(r"\\midrule\n(.*)\n\\bottomrule", SHEET.to_latex(), re.DOTALL)[1].splitlines()
    assert rows == [r"a\textbar{}b\_1 & 0.97 & 5 \% \\", r"c & \textbf{0.90} & -- \\"]
    assert r"\begin{tabular}{lrr}" in SHEET.to_latex() and r"\label" not in SHEET.to_latex()


def test_title_subtitle_and_note_are_one_caption():
    sheet = Sheet("Table 1.", ["", "x"], [], subtitle="Small networks", note="One seed.")
    assert r"\caption{Table 1. Small networks. One seed}" in sheet.to_latex("tab:one")
    assert r"\label{tab:one}" in sheet.to_latex("tab:one")


def test_without_figures_there_is_no_table_in_markdown():
    assert Sheet("Nothing", [""], [["a"]], note="Why").to_markdown() == "# Nothing\n\nWhy\n"


@pytest.mark.parametrize("character", "&%$#_{}\\~^|")
def test_no_character_is_a_command_of_latex(character):
    said = to_tex(f"a{character}b")
    assert said != f"a{character}b" and said.startswith("a\\") and said.endswith("b")


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="no LaTeX here: Debian has it in texlive-latex-recommended"
)
def test_latex_compiles(tmp_path):
    """With every character of a keyboard, at the start of a row and in the caption, and signs of our own headings."""
    name = f"[{string.printable[:95]}] ± ↑ ↓ – − é µ"
    sheet = Sheet(name, ["", f"x {name}"], [[name, name], ["`a_b`", "0.9 (0.1)"]], frozenset({(0, 1)}), name, name)
    (tmp_path / "table.tex").write_text(sheet.to_latex("tab:all"), encoding="utf-8")
    page = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table.tex}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
