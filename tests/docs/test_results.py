"""What the pages say is what the files with results hold, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")])


def test_the_tables_of_the_comparison_are_its_results():
    command = [sys.executable, "benchmarks/baselines.py", "--json", "results/baselines.json", "--only", "table"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    methods, detectors = printed.strip().split("\n\n")
    page = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
    assert methods in page and detectors in page


def test_the_claims_are_compared_with_the_results():
    printed = subprocess.run(
        [sys.executable, "benchmarks/reproduction.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert printed.strip() and all(table in page for table in printed.strip().split("\n\n"))


@pytest.mark.parametrize(
    "judged",
    [
        (0.2, 0.3, "yes"),
        (-0.2, -0.11, "yes"),
        (0.2, 0.05, "small"),
        (0.2, -0.015, "no difference"),
        (-0.2, 0.1, "the reverse"),
    ],
)
def test_claims_are_judged_by_sign_and_size(judged):
    spec = importlib.util.spec_from_file_location("reproduction", ROOT / "benchmarks" / "reproduction.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reproduction"] = module  # for its data classes
    spec.loader.exec_module(module)
    paper, ours, verdict = judged
    assert module.judge(paper, ours) == verdict


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert re.match("[a-z]+:", target) or (page.parent / target).exists(), target
