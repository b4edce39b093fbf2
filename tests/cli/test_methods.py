"""Every method by its name: listed, trained, fitted, evaluated, saved and loaded by the same commands."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from commands import flat, run
from image_files import write_digits
from maple.detectors.registry import list_detectors
from maple.errors import UsageError
from maple.options import read_toml
from maple.prediction.store import load_predictor
from maple.runs.evaluate import evaluate_run
from maple.runs.requests import EvaluateRequest
from maple.training.recipe import find_recipe, list_recipes
from maple.types import About

BASELINES = ["due", "duq", "ensemble", "mc-dropout", "sngp", "vmdls-like"]
FEWER = {"ensemble": "members=2", "mc-dropout": "samples=3", "sngp": "features=64"}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working directory of these tests, with some digits."""
    folder = tmp_path_factory.mktemp("place")
    write_digits(folder / "digits.npz", n=500)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def train(folder, recipe, *more):
    return run("train", "digits.npz", "--recipe", recipe, "--epochs", 1, "--batch-size", 64, "--out", folder, *more)


@pytest.fixture(scope="module")
def plain(place, tmp_path_factory):
    """A deterministic network on digits."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    assert train(folder, "cross-entropy") == 0
    return folder


def test_the_section_of_a_recipe_has_its_name():
    for name in list_recipes():
        assert find_recipe(name).kind.section in (name.replace("-", "_"), "recipe")


@pytest.mark.parametrize("recipe", BASELINES)
def test_a_recipe_from_training_to_prediction(recipe, tmp_path, capsys):
    if recipe == "due":
        pytest.importorskip("gpytorch")
    folder = tmp_path / recipe
    assert (
        train(
            folder,
            recipe,
            "--ood",
            "far=simulated-diatoms/far?n=50",
            *(["--set", f"{recipe}.{FEWER[recipe]}"] if recipe in FEWER else []),
        )
        == 0
    )
    sections = read_toml(folder / "config.toml")
    assert recipe.replace("-", "_") in sections and "recipe" not in sections
    results = json.loads((folder / "results.json").read_text())
    own = results["methods"][recipe]
    assert 0 <= own["classification"]["accuracy"] <= 1 and np.isfinite(own["classification"]["nll"])
    assert 0 <= own["detection"]["far"]["auroc"] <= 1
    capsys.readouterr()
    assert run("evaluate", folder, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["methods"][recipe]["classification"]["nll"] == pytest.approx(own["classification"]["nll"], rel=1e-6)
    assert load_predictor(folder).backbone.made_by.recipe == recipe
    assert run("predict", folder, "digits.npz", "--out", tmp_path / "p.csv") == 0
    assert (folder / "report.html").is_file()


def test_all_detectors_in_one_evaluation(plain, capsys):
    names = [name for name in list_detectors() if name != "lee-md-ood"]
    assert (
        run("evaluate", plain, "--detector", ",".join(names), "--ood", "far=simulated-diatoms/far?n=60", "--json") == 0
    )
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert set(names) <= set(methods)
    assert all(np.isfinite(methods[name]["detection"]["far"]["auroc"]) for name in names)
    assert "lee-md-ood" not in methods
    scores = json.loads((plain / "results.json").read_text())["scores"]
    assert methods["pca-md"]["detection"]["far"]["auroc"] == pytest.approx(scores["distance"]["far"], abs=1e-6)


def test_unknown_images_tune_only_where_they_are_given(plain, capsys):
    assert run("evaluate", plain, "--detector", " , ") == 2
    assert "--detector" in flat(capsys.readouterr().err)
    assert run("evaluate", plain, "--detector", "rmd", "--ood-validation", "simulated-diatoms/near?n=60") == 2
    assert "--detector lee-md-ood" in flat(capsys.readouterr().err)
    assert run("evaluate", plain, "--detector", "lee-md-ood") == 2
    assert "--ood-validation" in flat(capsys.readouterr().err)
    tuning = ("--ood-validation", "simulated-diatoms/near?n=60")
    assert run("evaluate", plain, "--detector", "lee-md-ood", *tuning, "--ood", "far=simulated-diatoms/far?n=60") == 0
    assert "lee-md-ood" in capsys.readouterr().out


def test_wrong_names_and_foreign_options(plain, tmp_path, capsys):
    assert run("evaluate", plain, "--detector", "rdm") == 2
    assert "'rmd'" in flat(capsys.readouterr().err)
    assert train(tmp_path / "r", "sngpp") == 2
    assert "'sngp'" in flat(capsys.readouterr().err)
    assert train(tmp_path / "r", "sngp", "--set", "duq.length_scale=0.2") == 2
    assert "--set duq.length_scale" in flat(capsys.readouterr().err)
    assert train(tmp_path / "r", "sngp", "--margin", 0.2) == 2
    assert "--margin" in flat(capsys.readouterr().err)
    assert train(tmp_path / "r", "cross-entropy", "--max-clusters", 3) == 2
    assert train(tmp_path / "r", "triplet", "--max-clusters", 3) == 2
    assert train(tmp_path / "r", "clustering", "--triplet-weight", 3) == 2
    (tmp_path / "other.toml").write_text("[sngp]\nridge = 2.0\n")
    capsys.readouterr()
    assert train(tmp_path / "r", "maple", "--config", tmp_path / "other.toml") == 2
    assert "[sngp]" in flat(capsys.readouterr().err)
    assert not (tmp_path / "r").exists()


def test_what_a_recipe_cannot_do_is_known_before_anything_is_written(tmp_path, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise UsageError("cannot be bounded: use another network")

    monkeypatch.setattr("maple.baselines.sngp.SngpRecipe.prepare", refuse)
    assert train(tmp_path / "r", "sngp") == 2
    assert "cannot be bounded" in flat(capsys.readouterr().err) and not (tmp_path / "r").exists()


def test_gaussian_detectors_are_read_as_the_paper_does_and_are_no_baseline(plain):
    request = EvaluateRequest(
        run=plain, ood={"far": "simulated-diatoms/far?n=60"}, detectors=["md", "rmd"], report=False
    )
    results = evaluate_run(request)
    assert results.methods["md"].classification is not None and results.methods["md"].n_components > 0
    assert results.methods["rmd"].classification is None  # its score is no squared distance
    assert results.baseline == "softmax" and list(results.methods) == [
        "softmax", "energy", "md", "rmd", "softmax-scaled", "maple", "maple-paper"
    ]  # fmt: skip
    again = evaluate_run(replace(request, ood={}, detectors=["md", "softmax"]))
    assert list(again.methods) == ["energy", "md", "softmax", "softmax-scaled", "maple", "maple-paper"]


def test_methods_of_others_are_listed_with_their_docstring():
    class Guess:
        """A guess.

        And more.
        """

    assert About.of(Guess) == About("A guess.", "")


def test_detectors_of_a_linear_head_say_so(tmp_path, capsys):
    assert train(tmp_path / "duq", "duq", "--set", "duq.gradient_penalty=0") == 0
    capsys.readouterr()
    assert run("evaluate", tmp_path / "duq", "--detector", "react") == 2
    assert "need a linear one" in flat(capsys.readouterr().err)
