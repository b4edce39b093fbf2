"""The paper's figures are the paper's."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from maple.evaluation.paper import figures as paper

TEX = Path(__file__).parents[4] / "shared" / "paper" / "maple_paper.tex"


def tex_rows(label: str) -> list[str]:
    """The lines of a table that hold its figures, commands and spreads taken away."""
    text = TEX.read_text(encoding="utf-8")
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", text, flags=re.DOTALL)
    (table,) = [each for each in tables if f"\\label{{{label}}}" in each]
    body = table[table.index("\\hline") : table.index("\\end{tabular}")]
    lines = [re.sub(r"~?\\cite\{[^}]*\}|\$\\pm\$\s*[0-9.]+|\\\w+|[{}$]", " ", line) for line in body.split("\\\\")]
    return [line for line in lines if re.search(r"\d\.\d", line)]


@pytest.mark.skipif(not TEX.exists(), reason="the paper is not here")
@pytest.mark.parametrize(
    ("label", "table"),
    [
        ("tab:cifar10_results", paper.CIFAR10),
        ("tab:cifar100_results", paper.CIFAR100),
        ("tab:imagenet_results", paper.IMAGENET),
        ("tab:ablation", paper.ABLATION),
        ("tab:ablation_fnr_cifar10", paper.FNR),
        ("tab:diatoms", paper.MICROORGANISMS),
        ("tab:cifar_acc", paper.CONFIDENCE),
        ("tab:gaussian_test", paper.GAUSSIAN),
        ("tab:ablation_arch", paper.BACKBONES),
        ("tab:ablation_cluster", paper.CLUSTERING),
        ("tab:ablation_max_clusters", paper.MAX_CLUSTERS),
        ("tab:ablation_epochs", paper.FREQUENCY),
    ],
)
def test_figures_are_those_of_the_paper(label, table):
    """Every figure of a row stands in the line of the same place, accuracies perhaps in per cent."""
    lines = tex_rows(label)
    assert len(lines) == len(table)
    for line, figures in zip(lines, table.values()):
        said = [float(number) for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?", line)]
        for value in figures.values():
            assert any(math.isclose(value, n) or math.isclose(100 * value, n) for n in said), (line, value)
