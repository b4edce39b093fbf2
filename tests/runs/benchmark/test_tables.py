"""Tables of all suites, filled from networks that are trained on simulated images."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES
from maple.runs.benchmark.jobs import Job


def test_every_suite_runs(everything):
    _, found = everything
    assert [each.suite.name for each in found.values()] == list(SUITES)
    for page, each in found.items():
        ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", page.read_text(encoding="utf-8")))
        assert {"table.md", "table.csv", "results.json", "report.html"} <= {file.name for file in page.parent.iterdir()}
        for row in each.rows:
            assert set(row.figures) == set(each.suite.columns)
            for column, values in row.figures.items():
                kind = column.removeprefix("corrupted/").partition("/")[0]
                if kind in ("accuracy", "ece", "auroc", "aupr"):
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
    corrupted = by_name["cifar100"].rows[0].figures
    assert corrupted["corrupted/accuracy"][0] != corrupted["accuracy"][0]
