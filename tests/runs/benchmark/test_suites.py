"""``maple benchmark`` from the names of suites to their tables."""

from __future__ import annotations

import json
import os

import pytest

from commands import flat, run
from maple.evaluation.paper.suites import SUITES
from maple.runs.benchmark.suites import BenchmarkRequest, list_suites, run_suites


def test_a_second_call_does_nothing_again(everything, capsys):
    out, found = everything
    before = {path: path.stat().st_mtime_ns for path in (out / "trainings").rglob("*") if path.is_file()}
    (page, again), *_ = run_suites(BenchmarkRequest(("md",), "tiny", out=out))
    assert {path: path.stat().st_mtime_ns for path in (out / "trainings").rglob("*") if path.is_file()} == before
    assert [row.figures for row in again.rows] == [row.figures for row in found[page].rows]


def test_only_the_first_process_reads_what_was_trained(everything, monkeypatch):
    out, _ = everything
    monkeypatch.setattr("maple.runs.benchmark.suites.is_first_process", lambda: False)
    assert not list(run_suites(BenchmarkRequest(("md",), "tiny", out=out)))


def test_list(capsys):
    assert run("benchmark", "--list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == list_suites() and {row["benchmark"] for row in rows} == set(SUITES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar"], "did you mean 'cifar10'"),
        (["md", "--profile", "gpu"], "unknown profile 'gpu'"),
        (["md", "--seeds", "a"], "--seeds takes numbers"),
        (["cifar100", "--data-root", "nowhere"], "no data set"),
    ],
)
def test_wrong_use(capsys, tmp_path, arguments, message):
    assert run("benchmark", *arguments, "--out", tmp_path / "out") == 2
    assert message in flat(capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_json(everything, capsys):
    out, _ = everything
    assert run("benchmark", "md", "--profile", "tiny", "--out", out, "--json") == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["suite"] == "md" and len(said["rows"]) == 7 and os.fspath(out) not in json.dumps(said["rows"])
