"""Suites: the paper's figures are the paper's, networks are shared, and every suite runs to its end."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from filelock import FileLock

from commands import flat, run
from maple.detectors.registry import list_detectors
from maple.errors import UsageError
from maple.evaluation.paper import figures as paper
from maple.evaluation.paper.suites import (
    PROFILES,
    PROTOCOLS,
    STANDARD_DETECTORS,
    SUITES,
    UNKNOWN_PLANKTON,
    Training,
    columns_of,
    find_suite,
    read_figure,
)
from maple.evaluation.results import Classification, Detection, Histogram, Method, Reliability, Results
from maple.options import read_names
from maple.runs.benchmark.suites import BenchmarkRequest, list_suites, plan_suites, run_suites
from maple.runs.benchmark.tables import SuiteResults, TableRow, table_cells, to_csv, to_markdown
from maple.runs.benchmark.trainings import Job, digest_source, list_jobs, locked, time_step, train_all
from maple.training.recipe import list_recipes

TEX = Path(__file__).parents[4] / "shared" / "paper" / "maple_paper.tex"
TIMES = ("minutes", "latency_ms")  # differ from run to run


# --- the paper's figures ---------------------------------------------------------------------------------------------


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


def test_tables_name_their_rows():
    for suite in SUITES.values():
        rows = suite.rows(PROFILES["cpu"])
        assert len({row.title for row in rows}) == len(rows), suite.name
        compared = {row.paper for row in rows if row.paper and suite.paper}
        assert set(suite.paper) <= compared, suite.name  # no row of the paper is left out
        for figures in suite.paper.values():
            assert set(figures) - {"latency_ms"} <= set(suite.columns) | {"components"}, suite.name


# --- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_every_row_can_be_trained_and_read(suite, profile):
    known = {*list_detectors(), *list_recipes(), "maple-paper"}
    for row in suite.rows(profile):
        job = Job(row.training, profile, 3, Path("nowhere"))
        config = job.config
        assert config.recipe.name == config.model.recipe
        assert config.train.seed == 3 and row.method in known
        assert row.method in (*STANDARD_DETECTORS, *suite.detectors, config.model.recipe, "maple", "maple-paper")
    assert all(column.title for column in columns_of(suite).values())


@pytest.mark.parametrize(
    ("suite", "epochs", "optimizer", "batch_size", "relabel_every"),
    [("cifar10", 200, "sgd", 64, 10), ("imagenet", 300, "adam", 64, 20), ("microorganisms", 100, "adam", 4, 10)],
)
def test_the_paper_profile_trains_as_the_paper_does_on_such_images(suite, epochs, optimizer, batch_size, relabel_every):
    row = find_suite(suite).rows(PROFILES["paper"])[-1]
    config = Job(row.training, PROFILES["paper"], 0, Path("nowhere")).config
    assert (config.train.epochs, config.train.optimizer, config.train.batch_size) == (epochs, optimizer, batch_size)
    assert config.recipe.relabel_every == relabel_every


@pytest.mark.parametrize("recipe", list_recipes())
def test_the_time_of_every_recipe_can_be_estimated(recipe):
    config = Job(Training.of("cifar10", recipe=recipe), PROFILES["cpu"], 0, Path("nowhere")).config
    assert 0 < time_step(config) < 60


def test_only_networks_trained_as_in_the_paper_have_a_single_reading():
    titles = {name: [row.title for row in SUITES["ablation"].rows(PROFILES[name])] for name in ("cpu", "paper")}
    assert [title for title in titles["cpu"] if not title.endswith(", normalised")] == titles["paper"]
    assert sum(title.endswith(", normalised") for title in titles["cpu"]) == 4


def test_suites_share_networks():
    """The paper's own setting, t = 0.3, p = 10, at most 5 clusters, is one training, whoever asks."""
    profile = PROFILES["cpu"]
    asked = {
        "fnr": "t = 0.3",
        "max-clusters": "at most 5, t = 0.3",
        "frequency": "p = 10",
        "clustering": "X-Means",
        "ablation": "MAPLE, X-Means",
        "gaussian": "MAPLE, X-Means",
    }
    found = {
        row.training for name, title in asked.items() for row in find_suite(name).rows(profile) if row.title == title
    }
    assert len(found) == 1
    suites = [find_suite(name) for name in ("cifar10", "confidence", "calibration", "md")]
    assert len(list_jobs(suites, profile, (0, 1), Path("x"))) == 2 * 8
    assert len(PROFILES["paper"].seeds) == 10
    ensembles = {
        name: dict(find_suite(name).rows(PROFILES["paper"])[2].training.flags)["members"]
        for name in ("cifar10", "imagenet")
    }
    assert ensembles == {"cifar10": 10, "imagenet": 3}


def test_keys_follow_what_is_learned(tmp_path):
    profile = PROFILES["tiny"]

    def key(seed=0, changes=None, **flags):
        return Job(Training.of("cifar10", **flags), profile, seed, tmp_path, changes=changes or {}).key

    assert key(recipe="maple") == key(recipe="maple") == key(recipe="maple", relabel_every=10)  # the default
    assert key(recipe="maple", changes={"workers": 7}) == key(recipe="maple")
    others = [key(recipe="triplet"), key(1, recipe="maple"), key(recipe="maple", max_clusters=3)]
    assert len({key(recipe="maple"), *others, key(recipe="maple", changes={"epochs": 1})}) == 5


def test_keys_follow_the_files(tmp_path):
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "train.parquet"
    file.write_bytes(b"first")
    before = digest_source("set", tmp_path)
    assert list(before) == ["train.parquet"]
    file.write_bytes(b"other")
    assert digest_source("set", tmp_path) != before
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(b"1234")
    before = digest_source(str(tmp_path / "folder"))
    (tmp_path / "folder" / "b" / "2.png").write_bytes(b"12345")
    assert digest_source(str(tmp_path / "folder")) != before
    with pytest.raises(UsageError, match="no data set"):
        digest_source("nowhere", tmp_path)


def test_unknown_taxa():
    names = read_names(f"@{UNKNOWN_PLANKTON}")
    assert len(set(names)) == 26 and PROTOCOLS["microorganisms"].flags["leave_out"] == names
    shares = PROTOCOLS["microorganisms"].flags["splits"]
    assert sum(shares) == 1 and shares[0] / (shares[1] + shares[2]) == 7


# --- tables ----------------------------------------------------------------------------------------------------------


def test_every_figure_is_read_from_its_own_place():
    detection = Detection(0.11, 0.12, 0.13, 0.14, 0.15, 0.16, [], [])
    classes = Classification(0.21, 0.22, 0.23, 0.24, 0.25, {"0.5": 0.26}, {"0.5": 0.27}, Reliability([], [], [], []))
    histogram = Histogram([], [], {})
    methods = {
        "softmax": Method(replace(classes, accuracy=0.31), {}, histogram),
        "md": Method(classes, {"svhn": detection}, histogram, n_components=41.0, gaussian_error=0.42),
        "energy": Method(None, {"svhn": detection}, histogram),
    }
    results = Results([], methods, 1, {"svhn": 1}, 7, 12, 0.05, 0.6, [], [], [], [], latency_ms=0.51)
    expected = {
        "accuracy": 0.21, "ece": 0.22, "nll": 0.23, "accuracy@0.5": 0.26, "share@0.5": 0.27, "softmax_accuracy": 0.31,
        "auroc/svhn": 0.11, "aupr/svhn": 0.12, "components": 41.0, "gaussian_error": 0.42, "clusters": 12.0,
        "gaussian_error_per_component": 0.42 / 41, "latency_ms": 0.51, "minutes": 9.0,
    }  # fmt: skip
    assert {column: read_figure(results, "md", column, {"minutes": 9.0}) for column in expected} == expected
    assert math.isnan(read_figure(results, "energy", "ece"))
    with pytest.raises(UsageError, match="--detector knn"):
        read_figure(results, "knn", "ece")


@pytest.fixture
def filled() -> SuiteResults:
    rows = [
        TableRow(
            "K-Means", {name: [0.5, 0.7] for name in find_suite("clustering").columns}, {"clusters": 30, "ece": 0.154}
        ),
        TableRow("T-Means", {name: [0.25, math.nan] for name in find_suite("clustering").columns}, {}),
    ]
    provenance = {
        "command": "maple benchmark clustering", "commit": "abc1234", "maple": "0", "python": "3",
        "hardware": "two cores", "trainings": {},
    }  # fmt: skip
    return SuiteResults(find_suite("clustering"), PROFILES["cpu"], (4, 9), rows, [], provenance)


def test_cells_have_means_and_the_papers_figures(filled):
    headings, lines = table_cells(filled)
    assert headings[:6] == ["", "clusters", "paper", "accuracy ↑", "ECE ↓", "paper"]
    assert lines[0][3] == "0.6000 ± 0.1414" and lines[0][5] == "0.154"
    assert lines[1][1:6] == ["–"] * 5  # a seed is missing; the paper has none
    text = to_markdown(filled)
    assert text.startswith("# How to cluster\n\nTable 11 of the paper") and "| --- | ---: |" in text
    assert "over 2 seeds" in text and "`maple benchmark clustering`" in text and "abc1234" in text


def test_csv_is_unrounded(filled):
    rows = list(csv.DictReader(to_csv(filled).splitlines()))
    assert len(rows) == 2 * 2 * len(filled.suite.columns)
    assert rows[0] == {"row": "K-Means", "column": "clusters", "seed": "4", "value": "0.5", "paper": "30"}
    assert [row["value"] for row in rows if row["row"] == "T-Means"][:2] == ["0.25", ""]


# --- from end to end -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All suites in the tiny profile, into one folder that the processes of a test session share."""
    root = tmp_path_factory.getbasetemp()
    out = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "benchmark"
    with FileLock(f"{out}.lock"):  # the second process finds everything done
        return out, dict(run_suites(BenchmarkRequest(("all",), "tiny", out=out)))


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
        assert bool(each.plots) == any(page.parent.glob("*.svg"))
        if each.suite.figure:
            assert each.plots


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


def test_a_second_call_does_nothing_again(everything, capsys):
    out, found = everything
    before = {path: path.stat().st_mtime_ns for path in (out / "trainings").rglob("*") if path.is_file()}
    (page, again), *_ = run_suites(BenchmarkRequest(("md",), "tiny", out=out))
    assert {path: path.stat().st_mtime_ns for path in (out / "trainings").rglob("*") if path.is_file()} == before
    assert [row.figures for row in again.rows] == [row.figures for row in found[page].rows]


def test_plan(everything, tmp_path):
    out, _ = everything
    rows = plan_suites(BenchmarkRequest(("md",), "tiny", out=out))
    assert [row["state"] for row in rows[:-1]] == ["finished", "finished"] and rows[-1]["hours"] == 0
    rows = plan_suites(BenchmarkRequest(("md",), "tiny", out=tmp_path))
    assert [row["state"] for row in rows[:-1]] == ["new", "new"] and rows[0]["images"] == 168
    rows = plan_suites(BenchmarkRequest(("imagenet",), "cpu", out=tmp_path, data_root=tmp_path))
    assert rows[0]["state"] == "no imagenet/train" and rows[0]["images"] == round(0.8 * 1_281_167)


def test_a_killed_benchmark_goes_on(everything, tmp_path):
    """SIGKILL as soon as the first network is saved; the next call ends with the table of an uninterrupted one."""
    _, found = everything
    expected = next(each for each in found.values() if each.suite.name == "md")
    command = [sys.executable, "-m", "maple", "benchmark", "md", "--profile", "tiny", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not any(tmp_path.rglob("resume.safetensors")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ((_, again),) = run_suites(BenchmarkRequest(("md",), "tiny", out=tmp_path))
    for before, after in zip(expected.rows, again.rows, strict=True):
        for column in before.figures:
            np.testing.assert_allclose(after.figures[column], before.figures[column], rtol=1e-6, err_msg=column)


def test_processes_share_the_work(tmp_path):
    """Two benchmarks at once: every network is trained by one of them, and both end with the table."""
    command = [sys.executable, "-m", "maple", "benchmark", "md", "--profile", "tiny", "--out", str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate(timeout=500) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    trained = [line for _, said in ends for line in said.splitlines() if line.startswith(("training:", "continuing:"))]
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path)
    assert sorted(trained) == sorted(f"training: {job.title}" for job in jobs)


def test_what_another_process_trains_is_left_to_it(tmp_path, monkeypatch):
    """And taken over should that process end without having finished it."""
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path)
    trained = []

    def train(job):
        trained.append(job)
        job.folder.mkdir()
        (job.folder / "results.json").touch()
        other.release()

    monkeypatch.setattr("maple.runs.benchmark.trainings._train", train)
    for folder in ("trainings", "locks"):
        (tmp_path / folder).mkdir()
    other = FileLock(jobs[0].lock)
    other.acquire()
    train_all(jobs)
    assert trained == [*jobs[1:], jobs[0]]


def test_processes_of_one_training_see_the_same_networks(tmp_path, monkeypatch):
    """With several devices, all networks are locked before the first is trained, until the last is."""
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path, changes={"devices": 2})
    trained = []

    def train(job):
        assert all(is_taken(other) for other in jobs)
        trained.append(job)

    def is_taken(job):
        with locked(job, wait=False) as mine:
            return not mine

    monkeypatch.setattr("maple.runs.benchmark.trainings._train", train)
    train_all(jobs)
    assert trained == jobs
    assert not any(is_taken(job) for job in jobs)


def test_only_the_first_process_reads_what_was_trained(everything, monkeypatch):
    out, _ = everything
    monkeypatch.setattr("maple.runs.benchmark.suites.is_first_process", lambda: False)
    assert not list(run_suites(BenchmarkRequest(("md",), "tiny", out=out)))


# --- command line ----------------------------------------------------------------------------------------------------


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
