"""``maple benchmark`` from the names of suites to their tables."""

from __future__ import annotations

import json
import math
import os
import re
from xml.etree import ElementTree

import pytest

from commands import flat, run
from maple.evaluation.paper.columns import figure_kind
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.suites import list_suites, run_suites
from maple.runs.requests import BenchmarkRequest


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


# --- tables -----------------------------------------------------------------------------------------------------------


def test_every_suite_runs(everything):
    _, found = everything
    assert [each.suite.name for each in found.values()] == [name for name in SUITES if not name.startswith("openood")]
    for page, each in found.items():
        ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", page.read_text(encoding="utf-8")))
        assert {"table.md", "table.csv", "results.json", "report.html"} <= {file.name for file in page.parent.iterdir()}
        for row in each.rows:
            assert set(row.figures) == set(each.suite.columns)
            for column, values in row.figures.items():
                kind = figure_kind(column)[0]
                if kind in ("accuracy", "softmax_accuracy", "ece", "auroc", "aupr", "mean_auroc", "fused_auroc"):
                    assert all(0 <= value <= 1 for value in values if not math.isnan(value)), (each.suite.name, column)
        assert not each.suite.figure or any(page.parent.glob("*.svg"))


def test_networks_are_trained_once(everything):
    out, _ = everything
    trainings = {training for suite in SUITES.values() for training in suite.trainings(PROFILES["tiny"])}
    jobs = [Job(training, PROFILES["tiny"], 0, out) for training in trainings]
    assert len(list((out / "trainings").iterdir())) == len({job.key for job in jobs}) < len(jobs)


def test_figures_are_read_from_the_right_place(everything):
    _, found = everything
    by_name = {each.suite.name: each for each in found.values()}
    ablation = {row.title: row for row in by_name["ablation"].rows}
    plain = [ablation[name] for name in ("DNN+MD", "DNN+PCA+MD", "DNN+PCA+ED")]
    assert len({row.figures["softmax_accuracy"][0] for row in plain}) == 1  # one network
    assert plain[0].figures["components"] != plain[1].figures["components"] == plain[2].figures["components"]
    read_as_paper, normalised = (ablation[f"MAPLE, X-Means, P_MD{way}"].figures for way in ("", ", normalised"))
    assert read_as_paper["softmax_accuracy"] == normalised["softmax_accuracy"]  # one network, two readings
    assert read_as_paper["auroc/svhn"] != normalised["auroc/svhn"]
    confidence = by_name["confidence"].rows[0].figures
    assert confidence["share@0.5"][0] >= confidence["share@0.8"][0] >= confidence["share@0.9"][0]
    comparison = {row.title: row.figures for row in by_name["cifar10"].rows}
    assert comparison["Deep Ensemble"]["parameters"][0] == 2 * comparison["Deterministic"]["parameters"][0]
    plain, ours = comparison["Deterministic"], comparison["MAPLE"]
    assert plain["accuracy"] == plain["softmax_accuracy"] and plain["latency_ms"][0] > 0 and ours["latency_ms"][0] > 0
    assert ours["fused_auroc"] == ours["mean_auroc"] and len({row["fused_auroc"][0] for row in comparison.values()}) > 4
    gaussian = by_name["gaussian"].rows[0].figures
    assert gaussian["training/gaussian_error"][0] != gaussian["gaussian_error"][0]
    corrupted = by_name["cifar100"].rows[0].figures
    assert corrupted["corrupted/accuracy"][0] != corrupted["accuracy"][0]
