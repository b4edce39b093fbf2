"""Figures of networks, kept and put back: the same table without a training, or with one where they do not suffice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from maple.runs.benchmark.suites import run_suites
from maple.runs.requests import BenchmarkRequest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import suite_store  # noqa: E402


def tabulate(out: Path) -> list[dict]:
    ((_, found),) = run_suites(BenchmarkRequest(("md",), "tiny", out=out))
    return [row.figures for row in found.rows]


def test_tables_come_out_again_without_a_training(tmp_path, capsys):
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    figures = tabulate(tmp_path / "runs")
    suite_store.keep(["md"], "tiny", tmp_path / "runs", tmp_path, store)
    assert len(list(store.iterdir())) == 2
    suite_store.restore(elsewhere, store)
    capsys.readouterr()
    assert tabulate(elsewhere) == figures
    assert "training:" not in "".join(capsys.readouterr())

    for path in store.iterdir():  # a suite asks for figures that were not kept
        content = json.loads(path.read_text())
        _, evaluation = content["evaluations"].popitem()
        path.write_text(json.dumps(content | {"evaluations": {"0" * 20: evaluation}}))
    suite_store.restore(tmp_path / "anew", store)
    assert tabulate(tmp_path / "anew") == figures
    assert "".join(capsys.readouterr()).count("training:") == 2
