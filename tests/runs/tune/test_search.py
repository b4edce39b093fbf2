"""The search: what it minimises, which images it sees, what survives an interruption, what it says when asked wrong.

Where only the order of things matters, trainings are replaced by a formula; all else is really trained, on few digits.
"""

from __future__ import annotations

import csv
import json
import math
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
import torch
from markupsafe import Markup
from PIL import Image
from scipy.stats import chi2

import maple.runs.tune.criteria as criteria
import maple.runs.tune.search as tune
import maple.runs.tune.space as search_space
from commands import flat, run
from maple.data.image_set import ImageSet
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import DataError, RunError, TrainError, UsageError
from maple.evaluation.trials import Choices, Span, Trial
from maple.networks import create_backbone, embed
from maple.options import read_toml
from maple.prediction.fit import fit_predictor
from maple.reporting.plots import Plot
from maple.reporting.plots.trials import plot_trials
from maple.runs.config import resolve_config
from maple.runs.tune.search import TuneRequest, make_plan, tune_recipe
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe
from maple.training.recipe import list_recipes

SPLITS = (0.15, 0.1, 0.05, 0.7)
FLAGS = {"epochs": 2, "batch_size": 64, "splits": SPLITS, "learning_rate": 0.01}
TINY = ("--epochs", 2, "--batch-size", 64, "--splits", ",".join(map(str, SPLITS)))


def request_for(out: Path, **given) -> TuneRequest:
    return TuneRequest("digits", out, **{"search": "grid", "flags": FLAGS, **given})


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def attempts_of(out: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=None, storage=f"sqlite:///{out / 'study.db'}").get_trials()


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits", DataOptions(splits=SPLITS))


@pytest.fixture
def formula(monkeypatch, splits):
    """Trainings and criteria by formula: the best margin is 0.7, the best weight decay 1e-3. The calls are listed."""
    calls: list[dict[str, float]] = []

    def train(backbone, recipe, train, validation, *, options, on_epoch, **_):
        calls.append({"margin": recipe.margin, "weight_decay": options.weight_decay})
        history = []
        for epoch in range(1, options.epochs + 1):
            history.append({"epoch": epoch, "validation_loss": loss(recipe.margin, options) / epoch})
            history[-1] |= {"seconds": 1.0, "clusters": 10}
            on_epoch(history)
        return SimpleNamespace(history=history, loss=loss(recipe.margin, options))

    def loss(margin, options):
        return abs(margin - 0.7) + abs(math.log10(options.weight_decay) + 3)

    def judge(run, *_):
        return {"nll": run.loss, "gaussian": 1 + run.loss, "errors": 0.5, "accuracy": 1 - 0.1 * run.loss}

    monkeypatch.setattr(tune, "train_backbone", train)
    monkeypatch.setattr(tune, "judge_run", judge)
    monkeypatch.setattr(tune, "create_backbone", lambda *_, **__: None)
    monkeypatch.setattr(tune, "plot_trials", lambda *_: Plot(Markup("<svg></svg>"), "plot"))
    load = tune.load_splits  # once for all
    monkeypatch.setattr(
        tune, "load_splits", lambda source, *a, **k: splits if source == "digits" else load(source, *a, **k)
    )
    return calls


MARGINS = {"margin": [0.3, 0.5, 0.7, 0.9]}


# --- criteria


def test_criteria_are_what_loops_say(rng):
    logits = rng.normal(size=(60, 3)) * 2
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    labels = rng.integers(0, 3, size=60)
    scores, distances = rng.normal(size=60), rng.chisquare(5, size=60)
    found = criteria.judge(logs, scores, distances, 5, labels, false_alarm=0.1)

    wrong = [int(np.argmax(row)) != label for row, label in zip(logs, labels)]
    right_scores = sorted((s for s, w in zip(scores, wrong) if not w), reverse=True)
    allowed = math.floor(0.1 * (len(right_scores) + 1)) - 1  # right images above the threshold
    silent = sum(w and s <= right_scores[allowed] for s, w in zip(scores, wrong))
    quantiles = [chi2.ppf((i + 0.5) / 60, 5) for i in range(60)]
    assert found["nll"] == pytest.approx(-sum(row[label] for row, label in zip(logs, labels)) / 60)
    assert found["errors"] == pytest.approx(silent / 60)
    assert found["gaussian"] == pytest.approx(np.mean(np.abs(np.sort(distances) - quantiles)) / 5)
    assert found["accuracy"] == pytest.approx(1 - sum(wrong) / 60)
    assert sum(s > right_scores[allowed] for s in right_scores) <= 0.1 * len(right_scores)


def test_silent_errors_fall_with_fewer_errors_and_with_better_scores():
    ranks = np.arange(100.0)
    few, many = ranks >= 98, ranks >= 80  # wrong images score highest
    assert criteria.silent_errors(ranks, many, 0.05) == 0
    assert criteria.silent_errors(-ranks, many, 0.05) == 0.2 > criteria.silent_errors(-ranks, few, 0.05) == 0.02
    assert criteria.silent_errors(ranks, np.ones(100, dtype=bool), 0.05) == 1, (
        "nothing right, so that nothing is flagged"
    )
    assert criteria.silent_errors(ranks[:10], many[90:], 0.05) == 1, "too few right images to flag any at that rate"


def test_halves_are_balanced_and_keep_copies_together(rng):
    pixels = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    pixels[31:34] = pixels[30]
    labels = np.repeat([0, 1, 2, 3], [20, 9, 10, 1])
    images = ImageSet.from_arrays(pixels, labels)
    one, other = tune.halve(images)
    assert sorted([*one, *other]) == list(range(40))
    assert len({30, 31, 32, 33} & set(one)) in (0, 4)
    for c in (0, 1):
        assert abs(np.sum(labels[one] == c) - np.sum(labels[other] == c)) <= 1
    shuffled = rng.permutation(40)
    again = tune.halve(images.subset(shuffled))[0]
    assert set(shuffled[again]) == set(one), "the order of the images does not matter"


@pytest.fixture(scope="module")
def trained(splits):
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    options = {"epochs": 3, "batch_size": 64, "learning_rate": 0.03, "show_progress": False}
    return train_backbone(backbone, MapleRecipe(), splits.train, splits.validation, **options)


def test_each_half_is_judged_by_what_the_other_taught(splits, trained):
    config = resolve_config()
    found = tune.judge_run(trained, splits.train, splits.validation, config)
    halves = tune.halve(splits.validation)
    parts = []
    for taught, judged in ((0, 1), (1, 0)):
        predictor = fit_predictor(trained.backbone, splits.train, splits.validation.subset(halves[taught]))
        unseen = splits.validation.subset(halves[judged])
        prediction = predictor.predict_outputs(embed(trained.backbone, unseen))
        truth = prediction.log_probabilities[np.arange(len(unseen)), unseen.labels]
        parts += [(-value, hit) for value, hit in zip(truth, prediction.class_id == unseen.labels)]
    assert found["nll"] == pytest.approx(np.mean([value for value, _ in parts]))
    assert found["accuracy"] == pytest.approx(np.mean([hit for _, hit in parts]))


def test_no_other_images_than_train_and_validation_are_seen(splits, tmp_path, monkeypatch):
    seen: list[ImageSet] = []

    def note(function):
        def noted(*arguments, **keywords):
            seen.extend(each for each in (*arguments, *keywords.values()) if isinstance(each, ImageSet))
            return function(*arguments, **keywords)

        return noted

    for name in ("train_backbone", "channel_statistics"):
        monkeypatch.setattr(tune, name, note(getattr(tune, name)))
    for name in ("fit_predictor", "embed"):
        monkeypatch.setattr(criteria, name, note(getattr(criteria, name)))
    tune_recipe(request_for(tmp_path / "out", values={"margin": [0.3]}))
    touched = {key for images in seen for key in images.keys}
    assert touched == {*splits.train.keys, *splits.validation.keys}


# --- what is searched


def test_the_papers_grid(tmp_path):
    plan = make_plan(request_for(tmp_path, flags={"epochs": 21}))
    assert plan.n_trials == 48 == len(plan.grid())
    assert {tuple(point.values()) for point in plan.grid()} == {
        (t, p, m) for t in (0.1, 0.3, 0.5) for p in (5, 10, 15, 20) for m in (3, 5, 7, 10)
    }


def test_intervals_at_which_nothing_is_split_are_left_out(tmp_path, capsys):
    assert make_plan(request_for(tmp_path, flags={"epochs": 16})).space["relabel_every"] == Choices((5, 10, 15))
    assert "relabel_every is searched only through 5, 10, 15" in flat(capsys.readouterr().err)
    bayes = make_plan(request_for(tmp_path, search="bayes", flags={"epochs": 16}))
    assert bayes.space["relabel_every"] == Span(1, 15)


def test_learning_rates_are_those_around_the_optimisers_own(tmp_path):
    space = make_plan(request_for(tmp_path, search="bayes", preset="paper-diatoms", flags={})).space
    rate = space["learning_rate"]
    assert (rate.low, rate.high, rate.log) == (pytest.approx(2e-5), pytest.approx(6e-4), True)


def test_every_parameter_is_an_option_and_its_range_is_allowed():
    for recipe in list_recipes():
        config = resolve_config({"recipe": recipe})
        for name, parameter in search_space.list_parameters(recipe).items():
            for value in (*parameter.grid, *(parameter.bounds or ())):
                assert tune.current_value(tune.with_settings(config, {name: value}), name) == value
    assert {"dropout"} < set(search_space.list_parameters("mc-dropout"))
    assert "margin" not in search_space.list_parameters("clustering")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"parameters": ["max_cluster"]}, "'max_clusters'"),
        ({"parameters": ["margin"], "flags": {"recipe": "clustering"}}, "'margin'"),
        ({"parameters": ["dropout"]}, "'dropout'"),
        ({"flags": {"recipe": "cross-entropy"}}, "name some with --parameters, known: learning_rate, weight_decay"),
        ({"flags": {"recipe": "ensemble"}}, "tune its members with --recipe cross-entropy"),
        ({"flags": {"dropout": 0.2}}, "--dropout belongs to --recipe mc-dropout"),
        ({"flags": {"epochs": 3}}, "no class is ever split at relabel_every 5, 10, 15, 20"),
        ({"values": {"margin": [-1]}}, "--margin -1"),
        ({"values": {"margin": []}}, "names 0 values"),
        ({"values": {"margin": [0.3]}, "flags": {"margin": 0.5}}, "--margin is what is searched"),
        ({"values": {"margin": [0.3]}, "trials": 5}, "this grid has 1 trials"),
        ({"values": {"margin": range(101)}}, "names 101 values: give 1 to 100"),
        (
            {"values": dict.fromkeys(("margin", "max_clusters", "min_cluster_size"), range(1, 23))},
            "this grid has 10648",
        ),
        ({"search": "bayes", "trials": 0}, "--trials is 0"),
        ({"search": "random"}, "unknown search 'random'"),
        ({"criterion": "auroc"}, "unknown criterion 'auroc'"),
        ({"flags": {"epochs": 30, "devices": 2}}, "start the same maple tune several times"),
    ],
)
def test_wrong_requests(given, says, tmp_path):
    with pytest.raises(UsageError) as caught:
        make_plan(request_for(tmp_path / "out", **{"flags": {"epochs": 30}, **given}))
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_too_few_validation_images_for_the_false_alarm_rate(tmp_path, rng):
    for name, level in (("dark", 40), ("bright", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(30):
            pixels = rng.integers(level - 30, level + 30, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    wrong = TuneRequest(str(tmp_path / "images"), tmp_path / "out", criterion="errors", flags={"epochs": 30})
    with pytest.raises(DataError, match=r"6 validation images are too few .* at --false-alarm 0.05, which needs 38"):
        tune_recipe(wrong)
    assert not (tmp_path / "out").exists()


def test_a_search_begins_as_near_to_the_settings_as_it_may():
    assert Span(1, 3).nearest(10) == 3 and Span(0.1, 1.0).nearest(0.01) == 0.1 and Span(0.1, 1.0).nearest(0.5) == 0.5
    assert Choices((3, 5, 7)).nearest(7) == 7 and Choices((3, 5, 7)).nearest(4) == 5


# --- trials


def test_grid_is_trained_judged_and_written(tmp_path, capsys):
    out = tmp_path / "out"
    values = ("--values", "learning_rate=0.01,0.03", "--values", "hard_class_error=0", "--values", "relabel_every=1")
    arguments = ("digits", "--out", out, "--search", "grid", *TINY, *values)
    assert run("tune", *arguments, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trials"] == 2 and plan["epochs"] == 2 and plan["parameters"]["learning_rate"] == "0.01, 0.03"
    assert not out.exists()
    assert run("tune", *arguments) == 0
    printed = capsys.readouterr()
    rows = rows_of(out)
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert [float(row["learning_rate"]) for row in rows] == [0.01, 0.03]
    best = min(rows, key=lambda row: float(row["nll"]))
    assert read_toml(out / "best.toml")["train"]["learning_rate"] == float(best["learning_rate"])
    assert f"trial {best['trial']} of 2" in (out / "best.toml").read_text()
    assert f"maple train digits --config {out / 'best.toml'}" in flat(printed.out)
    assert "trial 1 of 2  learning_rate 0.01" in printed.err
    assert (out / "trials.svg").read_text().startswith("<svg xmlns")
    assert not list(out.rglob("resume.safetensors")), "checkpoints of finished trials are of no use"

    # The network that is trained with the best settings is the one that was judged.
    assert run("train", "digits", "--config", out / "best.toml", "--out", tmp_path / "run") == 0
    with (tmp_path / "run" / "history.csv").open() as file:
        trained = list(csv.DictReader(file))
    with (out / "trials" / best["folder"] / "history.csv").open() as file:
        judged = list(csv.DictReader(file))
    for column in ("loss", "validation_loss", "validation_accuracy", "clusters"):
        assert [row[column] for row in trained] == [row[column] for row in judged]


def test_finished_trials_are_never_repeated(tmp_path, formula, capsys):
    first = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.7, 0.9]
    assert first.best.settings == {"margin": 0.7}
    again = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert len(formula) == 4 and again == first


def test_bayes_begins_with_the_settings_as_they_are_and_learns(tmp_path, formula):
    names, flags = ["margin", "weight_decay"], {**FLAGS, "seed": 2}
    tuning = tune_recipe(request_for(tmp_path, search="bayes", parameters=names, trials=20, prune=False, flags=flags))
    assert formula[0] == {"margin": 0.5, "weight_decay": 5e-4}
    assert len(tuning.trials) == 20 == len({tuple(call.values()) for call in formula})
    values = [trial.criteria["nll"] for trial in tuning.trials]
    assert np.mean(values[-8:]) < 0.8 * np.mean(values[1:9]), "later proposals are better than random ones"
    assert tuning.best.criteria["nll"] == min(values) < 0.3
    assert "settings as they are: trial 1" in tuning.describe()


def test_bayes_is_seeded_and_goes_on_as_if_it_had_not_been_interrupted(tmp_path, formula, monkeypatch):
    def search(out, trials, seed=0):
        flags = {**FLAGS, "seed": seed}
        names = ["margin", "weight_decay"]
        return tune_recipe(request_for(out, search="bayes", parameters=names, trials=trials, flags=flags)).trials

    monkeypatch.setattr(tune, "RANDOM_TRIALS", 2)  # the others follow from what was seen
    whole = search(tmp_path / "whole", 6)
    search(tmp_path / "parts", 2)
    judge, calls = tune.judge_run, []

    def die(*arguments):  # in the middle of two trials
        calls.append(1)
        if len(calls) in (2, 4):
            raise KeyboardInterrupt
        return judge(*arguments)

    monkeypatch.setattr(tune, "judge_run", die)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "parts", 6)
    assert search(tmp_path / "parts", 6) == whole
    monkeypatch.setattr(tune, "judge_run", judge)
    assert [trial.settings for trial in search(tmp_path / "other", 2, seed=1)] != [t.settings for t in whole[:2]]


def test_a_bayesian_search_ends_where_there_is_nothing_new(tmp_path, formula):
    tuning = tune_recipe(request_for(tmp_path, search="bayes", values=MARGINS, trials=50))
    assert tuning.plan.n_trials == 4 == len(tuning.trials) == len(formula)


def test_a_real_bayesian_search(tmp_path):
    out = tmp_path / "out"
    tuning = tune_recipe(
        request_for(
            out, search="bayes", parameters=["learning_rate", "margin"], trials=2, criterion="gaussian", prune=False
        )
    )
    assert [trial.state for trial in tuning.trials] == ["finished"] * 2
    assert tuning.best.criteria["gaussian"] == min(trial.criteria["gaussian"] for trial in tuning.trials)
    assert len(list((out / "trials").iterdir())) == 2
    assert all(trial.epochs == 2 and trial.clusters == 10 and trial.seconds > 0 for trial in tuning.trials)


def test_a_trial_that_falls_behind_is_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "PRUNE_AFTER", 1)
    values = {"learning_rate": [0.01, 1.0]}  # the second one throws the weights far off at once
    flags = {**FLAGS, "epochs": 3}
    del flags["learning_rate"]
    kept, pruned = tune_recipe(request_for(tmp_path, values=values, flags=flags)).trials
    assert (kept.state, kept.epochs) == ("finished", 3)
    assert (pruned.state, pruned.epochs, pruned.criteria) == ("pruned", 1, {})
    assert rows_of(tmp_path)[1]["nll"] == ""
    assert not list(tmp_path.rglob("resume.safetensors"))


def test_a_training_that_diverges_is_no_failure_of_the_search(tmp_path, formula, monkeypatch):
    train = tune.train_backbone

    def diverge(backbone, recipe, *images, **options):
        if recipe.margin == 0.5:
            raise TrainError("the loss is no longer finite")
        return train(backbone, recipe, *images, **options)

    monkeypatch.setattr(tune, "train_backbone", diverge)
    tuning = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert [trial.state for trial in tuning.trials] == ["finished", "diverged", "finished", "finished"]
    assert "trial 2 diverged: the loss is no longer finite" in tuning.describe()
    assert len(tune_recipe(request_for(tmp_path, values=MARGINS)).trials) == 4


def test_a_trial_that_always_fails_is_given_up(tmp_path, formula, monkeypatch):
    judge = tune.judge_run

    def fail(run, *arguments):
        if formula[-1]["margin"] == 0.5:
            raise RunError("the disk is full")
        return judge(run, *arguments)

    monkeypatch.setattr(tune, "judge_run", fail)
    for _ in range(tune.MAX_ATTEMPTS):
        with pytest.raises(RunError, match="disk is full"):
            tune_recipe(request_for(tmp_path, values=MARGINS))
    tuning = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert [trial.state for trial in tuning.trials] == ["finished", "failed", "finished", "finished"]
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.5, 0.5, 0.7, 0.9]


def test_notes_on_what_was_found(tmp_path, formula, monkeypatch):
    monkeypatch.setattr(tune, "judge_run", lambda *_: {"nll": 1.0, "gaussian": 1.0, "errors": 0.1, "accuracy": 0.5})
    same = tune_recipe(request_for(tmp_path / "same", values={"max_clusters": [3, 5]}))
    assert "none split a class" in same.describe()
    accuracies = iter([0.9, 0.5])
    monkeypatch.setattr(
        tune, "judge_run", lambda *_: {"nll": 1.0, "gaussian": (a := next(accuracies)), "errors": 0.1, "accuracy": a}
    )
    worse = tune_recipe(request_for(tmp_path / "worse", values={"max_clusters": [3, 5]}, criterion="gaussian"))
    assert worse.best.number == 2 and "trial 1 classifies better" in worse.describe()


# --- interruptions


def test_ctrl_c_keeps_what_is_there_and_says_how_to_go_on(tmp_path, formula, monkeypatch, capsys):
    judge = tune.judge_run

    def interrupt(*arguments):
        if len(formula) == 3:
            raise KeyboardInterrupt
        return judge(*arguments)

    monkeypatch.setattr(tune, "judge_run", interrupt)
    command = ("tune", "digits", "--out", tmp_path, "--search", "grid", *TINY, "--values", "margin=0.3,0.5,0.7,0.9")
    assert run(*command) == 130
    assert "2 of 4 trials are done and kept" in flat(capsys.readouterr().err)
    assert [row["state"] for row in rows_of(tmp_path)] == ["finished", "finished", "interrupted"]
    assert (tmp_path / "best.toml").exists() and (tmp_path / "trials.svg").exists()
    monkeypatch.setattr(tune, "judge_run", judge)
    assert run(*command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in found["trials"]] == ["finished"] * 4
    assert found["best"]["margin"] == 0.7 and found["command"].startswith("maple train digits")
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.7, 0.7, 0.9]


def start_tuning(out: Path, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "maple", "tune", "digits", "--out", out, "--search", "grid", *TINY, *options]
    return subprocess.Popen(
        [str(word) for word in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> Path:
    """The first file that a process writes; one that ends before it fails the test."""
    deadline = time.monotonic() + 120
    while not (found := list(folder.glob(pattern))):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.02)
    return found[0]


@pytest.mark.slow
def test_a_killed_study_goes_on_from_the_checkpoint_of_its_trial(tmp_path):
    process = start_tuning(tmp_path, "--epochs", 8, "--no-prune", "--values", "margin=0.3,0.7")
    history = wait_for(process, tmp_path, "trials/*/resume.safetensors").with_name("history.csv")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    rows = history.read_text().splitlines()
    assert 1 < len(rows) < 9, "killed in the middle of the first training"
    assert [attempt.state.name for attempt in attempts_of(tmp_path)] == ["RUNNING"]

    flags = {**FLAGS, "epochs": 8, "learning_rate": 0.1}
    tuning = tune_recipe(request_for(tmp_path, values={"margin": [0.3, 0.7]}, prune=False, flags=flags))
    assert [attempt.state.name for attempt in attempts_of(tmp_path)] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert [trial.state for trial in tuning.trials] == ["finished", "finished"]
    assert history.read_text().splitlines()[: len(rows)] == rows, "epochs that were there were not trained again"
    assert list(attempts_of(tmp_path)[1].intermediate_values) == list(range(1, 9)), "all epochs are reported"
    whole = tune_recipe(request_for(tmp_path / "whole", values={"margin": [0.3]}, prune=False, flags=flags))
    assert whole.trials[0].criteria == tuning.trials[0].criteria


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path, capsys):
    margins = {"margin": [0.2, 0.3, 0.4, 0.5, 0.6]}
    other = start_tuning(tmp_path, "--no-prune", "--learning-rate", 0.01, "--values", "margin=0.2,0.3,0.4,0.5,0.6")
    wait_for(other, tmp_path, "trials/*")  # at work on its first trial
    tune_recipe(request_for(tmp_path, values=margins, prune=False))
    said = [capsys.readouterr().err, other.communicate(timeout=300)[1]]
    assert other.returncode == 0, said
    attempts = attempts_of(tmp_path)
    assert [attempt.state.name for attempt in attempts] == ["COMPLETE"] * 5
    assert [attempt.params["margin"] for attempt in attempts] == margins["margin"]
    done = [sum(line.startswith("trial ") for line in text.splitlines()) for text in said]
    assert sum(done) == 5 and min(done) > 0, "both had their share"
    assert [row["state"] for row in rows_of(tmp_path)] == ["finished"] * 5, "the last to end has seen all trials"


def test_a_trial_of_a_lost_machine_is_started_again(tmp_path, formula):
    """A machine with a folder of its own shows signs of life in the database only."""
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    options = {"values": MARGINS, "storage": storage, "study": "s"}
    request = request_for(tmp_path / "here", **options)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "judge_run", _interrupt)
        tune_recipe(request_for(tmp_path / "there", **options))
    with sqlite3.connect(tmp_path / "shared.db") as database:  # as if it had lost its power
        database.execute("UPDATE trials SET state = 'RUNNING', datetime_complete = NULL")
        database.execute("DELETE FROM trial_user_attributes WHERE key = 'interrupted'")
    database.close()
    found = tune_recipe(request)
    assert [trial.state for trial in found.trials] == ["running", "finished", "finished", "finished"]
    assert len(formula) == 4, "what may still be at work elsewhere is left alone"
    with sqlite3.connect(tmp_path / "shared.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
    database.close()
    assert [trial.state for trial in tune_recipe(request).trials] == ["finished"] * 4
    assert len(formula) == 5


def test_a_trial_that_another_process_took_over_does_no_harm(tmp_path, formula, monkeypatch, capsys):
    train = tune.train_backbone

    def lose(*arguments, **options):
        if not formula:
            study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
            study.tell(0, state=optuna.trial.TrialState.FAIL)
        return train(*arguments, **options)

    monkeypatch.setattr(tune, "train_backbone", lose)
    tuning = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert "another process has taken over" in flat(capsys.readouterr().err)
    assert [trial.state for trial in tuning.trials] == ["finished"] * 4


def _interrupt(*_):
    raise KeyboardInterrupt


# --- storage


def test_any_optuna_url_and_several_studies(tmp_path, formula):
    storage = f"sqlite:///{tmp_path / 'all.db'}"
    for name, margin in (("one", 0.3), ("two", 0.5)):
        tune_recipe(request_for(tmp_path / name, values={"margin": [margin]}, storage=storage))
    assert optuna.get_all_study_names(storage) == ["one", "two"]
    assert not (tmp_path / "one" / "study.db").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [("study.db", "takes an Optuna URL"), ("nothing://x", "cannot open the storage nothing://")],
)
def test_storages_that_cannot_be_opened(url, says, tmp_path, capsys):
    code = run(
        "tune", "digits", "--out", tmp_path, "--search", "grid", *TINY, "--values", "margin=0.3", "--storage", url
    )
    assert code == (2 if "URL" in says else 1)
    assert says in flat(capsys.readouterr().err)


def test_a_password_is_never_shown(tmp_path):
    with pytest.raises(RunError) as caught:
        tune_recipe(request_for(tmp_path, values={"margin": [0.3]}, storage="postgresql+none://me:secret@host/db"))
    assert "secret" not in str(caught.value)


def test_a_study_goes_on_only_as_it_was_started(tmp_path, formula):
    first = {"search": "grid", "flags": FLAGS, "values": {"margin": [0.3]}}
    tune_recipe(TuneRequest("digits", tmp_path, **first))
    for changed, says in (
        ({"flags": {**FLAGS, "epochs": 3}}, "with --epochs 2, not 3"),
        ({"criterion": "errors"}, "with --criterion nll, not errors"),
        ({"prune": False}, "with --prune True, not False"),
        ({"values": {"margin": [0.3, 0.6]}}, "other --parameters or --values"),
        ({"source": "simulated-diatoms?n=600&size=16"}, "with other images"),
    ):
        with pytest.raises(UsageError, match=says):
            tune_recipe(TuneRequest(**{"source": "digits", "out": tmp_path, **first, **changed}))
    assert len(formula) == 1
    assert len(tune_recipe(TuneRequest("digits", tmp_path, **{**first, "flags": {**FLAGS, "workers": 0}})).trials) == 1


def test_a_study_of_others_is_left_alone(tmp_path, formula):
    storage = f"sqlite:///{tmp_path / 'all.db'}"
    study = optuna.create_study(storage=storage, study_name="theirs")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UsageError, match="is not one of maple tune"):
        tune_recipe(request_for(tmp_path / "out", values={"margin": [0.3]}, storage=storage, study="theirs"))


def test_out_is_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        tune_recipe(request_for(tmp_path / "file", values={"margin": [0.3]}))


def test_optuna_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"maple-uncertainty\[tune\]"):
        tune_recipe(request_for(tmp_path, values={"margin": [0.3]}))


def test_values_on_the_command_line(tmp_path, capsys):
    assert run("tune", "digits", "--out", tmp_path, "--search", "grid", "--values", "margin") == 2
    assert "--values takes NAME=VALUE" in flat(capsys.readouterr().err)


# --- the picture


def test_the_picture_shows_all_there_is(tmp_path):
    plan = make_plan(request_for(tmp_path, search="bayes", parameters=["margin", "weight_decay", "cluster_method"]))
    settings = {"margin": 0.5, "weight_decay": 1e-3, "cluster_method": "tmeans"}
    trials = [Trial(i, "finished", settings, {"nll": value}) for i, value in ((1, 0.5), (2, 0.4), (3, 0.45), (5, 99.0))]
    plot = plot_trials(plan.criterion, plan.space, [*trials, Trial(4, "pruned", settings)], best=2)
    assert "trial 2 is the best" in plot.alt
    for text in ("margin", "weight_decay", "cluster_method", "tmeans", "stopped early", "best so far"):
        assert f">{text}<" in plot.svg
    assert "mathdefault" not in plot.svg
    alone = plot_trials(plan.criterion, plan.space, trials[:1], best=1)
    assert "stopped early" not in alone.svg


# --- the hook of the training


def test_on_epoch_sees_every_epoch_after_its_checkpoint(splits, tmp_path):
    seen: list[tuple[int, bool]] = []

    def on_epoch(history):
        seen.append((len(history), (tmp_path / "resume.safetensors").exists()))
        if len(history) == 2:
            raise StopIteration

    def start(**options):
        torch.manual_seed(0)
        backbone = create_backbone("resnet9", 10)
        settings = {"epochs": 3, "batch_size": 64, "show_progress": False, "folder": tmp_path, "resume": True}
        return train_backbone(backbone, MapleRecipe(), splits.train, splits.validation, **settings, **options)

    with pytest.raises(StopIteration):
        start(on_epoch=on_epoch)
    assert seen == [(1, True), (2, True)]
    later: list[int] = []
    run = start(on_epoch=lambda history: later.append(len(history)))
    assert later == [3] and len(run.history) == 3
