"""The search: which images it sees, what is trained, and what survives an interruption.

Where only the order of things matters, trainings are replaced by a formula; the rest is trained on few digits.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch

import maple.runs.tune.criteria as criteria
import maple.runs.tune.search as tune
import maple.runs.tune.study as study
from commands import flat, read_rows, run
from maple.data.image_set import ImageSet
from maple.errors import RunError, TrainError
from maple.networks import create_backbone
from maple.options import read_toml
from maple.runs.tune.search import tune_recipe
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe
from processes import Forked, fork_maple
from tuning import FLAGS, MARGINS, TINY, attempts_of, request_for, rows_of


def test_no_other_images_than_train_and_validation_are_seen(splits, tmp_path, monkeypatch):
    seen: list[ImageSet] = []

    def note(function):
        def noted(*arguments, **keywords):
            seen.extend(each for each in (*arguments, *keywords.values()) if isinstance(each, ImageSet))
            return function(*arguments, **keywords)

        return noted

    for name in ("train_backbone", "channel_statistics"):
        monkeypatch.setattr(tune, name, note(getattr(tune, name)))
    for name in ("fit_as", "embed"):
        monkeypatch.setattr(criteria, name, note(getattr(criteria, name)))
    tune_recipe(request_for(tmp_path / "out", values={"margin": [0.3]}))
    touched = {key for images in seen for key in images.keys}
    assert touched == {*splits.train.keys, *splits.validation.keys}


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
    trained = read_rows(tmp_path / "run" / "history.csv")
    judged = read_rows(out / "trials" / best["folder"] / "history.csv")
    for column in ("loss", "validation_loss", "validation_accuracy", "clusters"):
        assert [row[column] for row in trained] == [row[column] for row in judged]


def test_finished_trials_are_never_repeated(tmp_path, formula, capsys):
    first = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.7, 0.9]
    assert first.best.settings == {"margin": 0.7}
    again = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert len(formula) == 4 and again == first


def test_bayes_begins_with_the_settings_as_they_are_and_learns(tmp_path, formula):
    names, flags = ["margin", "weight_decay"], {**FLAGS, "seed": 2, "backbone": "resnet9"}
    tuning = tune_recipe(request_for(tmp_path, search="bayes", parameters=names, trials=20, prune=False, flags=flags))
    assert formula[0] == {"margin": 0.5, "weight_decay": 5e-4}
    assert len(tuning.trials) == 20 == len({tuple(call.values()) for call in formula})
    values = [trial.criteria["nll"] for trial in tuning.trials]
    assert np.mean(values[-8:]) < 0.8 * np.mean(values[1:9]), "later proposals are better than random ones"
    assert tuning.best.criteria["nll"] == min(values) < 0.3
    assert "present settings: trial 1" in tuning.describe()


def test_bayes_is_seeded_and_goes_on_as_if_it_had_not_been_interrupted(tmp_path, formula, monkeypatch):
    def search(out, trials, seed=0):
        flags = {**FLAGS, "seed": seed}
        names = ["margin", "weight_decay"]
        return tune_recipe(request_for(out, search="bayes", parameters=names, trials=trials, flags=flags)).trials

    monkeypatch.setattr(study, "_RANDOM_TRIALS", 2)  # the others follow from what was seen
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
    monkeypatch.setattr(study, "_PRUNE_AFTER", 1)
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
    for _ in range(study._MAX_ATTEMPTS):
        with pytest.raises(RunError, match="disk is full"):
            tune_recipe(request_for(tmp_path, values=MARGINS))
    tuning = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert [trial.state for trial in tuning.trials] == ["finished", "failed", "finished", "finished"]
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.5, 0.5, 0.7, 0.9]


# --- interruptions


def _interrupt(*_):
    raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_there_and_says_how_to_go_on(tmp_path, formula, monkeypatch, capsys):
    judge = tune.judge_run

    def interrupt(*arguments):
        if len(formula) == 3:
            raise KeyboardInterrupt
        return judge(*arguments)

    monkeypatch.setattr(tune, "judge_run", interrupt)
    command = ("tune", "digits", "--out", tmp_path, "--search", "grid", *TINY, "--values", "margin=0.3,0.5,0.7,0.9")
    assert run(*command) == 130
    assert "2 of 4 trials" in flat(capsys.readouterr().err)
    assert [row["state"] for row in rows_of(tmp_path)] == ["finished", "finished", "interrupted"]
    assert (tmp_path / "best.toml").exists() and (tmp_path / "trials.svg").exists()
    monkeypatch.setattr(tune, "judge_run", judge)
    assert run(*command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in found["trials"]] == ["finished"] * 4
    assert found["best"]["margin"] == 0.7 and found["command"].startswith("maple train digits")
    assert [call["margin"] for call in formula] == [0.3, 0.5, 0.7, 0.7, 0.9]


def start_tuning(out: Path, *options: object) -> Forked:
    return fork_maple("tune", "digits", "--out", out, "--search", "grid", *TINY, *options)


def wait_for(process: Forked, folder: Path, pattern: str) -> Path:
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

    flags = {**FLAGS, "epochs": 8, "learning_rate": 0.24}
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
            shared = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
            shared.tell(0, state=optuna.trial.TrialState.FAIL)
        return train(*arguments, **options)

    monkeypatch.setattr(tune, "train_backbone", lose)
    tuning = tune_recipe(request_for(tmp_path, values=MARGINS))
    assert "another process took over" in flat(capsys.readouterr().err)
    assert [trial.state for trial in tuning.trials] == ["finished"] * 4


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
