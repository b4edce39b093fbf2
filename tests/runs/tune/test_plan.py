"""Requests and plans: the paper's grid, ranges, and requests that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from commands import flat, run
from maple.errors import DataError, UsageError
from maple.evaluation.trials import Choices, Span
from maple.runs.requests import TuneRequest
from maple.runs.setup.config import resolve_config
from maple.runs.tune.plan import current_value, list_parameters, make_plan, with_settings
from maple.runs.tune.search import tune_recipe
from maple.training.recipe import list_recipes
from tuning import request_for


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


def test_every_parameter_is_an_option_and_its_range_is_allowed():
    for recipe in list_recipes():
        config = resolve_config({"recipe": recipe})
        for name, parameter in list_parameters(recipe).items():
            for value in (*parameter.grid, *(parameter.bounds or ())):
                assert current_value(with_settings(config, {name: value}), name) == value
    assert {"dropout"} < set(list_parameters("mc-dropout"))
    assert "margin" not in list_parameters("clustering")


def test_a_search_begins_as_near_to_the_settings_as_it_may():
    assert Span(1, 3).nearest(10) == 3 and Span(0.1, 1.0).nearest(0.01) == 0.1 and Span(0.1, 1.0).nearest(0.5) == 0.5
    assert Choices((3, 5, 7)).nearest(7) == 7 and Choices((3, 5, 7)).nearest(4) == 5


def test_learning_rates_are_those_around_the_optimisers_own(tmp_path):
    space = make_plan(request_for(tmp_path, search="bayes", preset="paper-diatoms", flags={})).space
    rate = space["learning_rate"]
    assert (rate.low, rate.high, rate.log) == (pytest.approx(2e-5), pytest.approx(6e-4), True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"parameters": ["max_cluster"]}, "'max_clusters'"),
        ({"parameters": ["margin"], "flags": {"recipe": "clustering"}}, "'margin'"),
        ({"parameters": ["dropout"]}, "'dropout'"),
        ({"flags": {"recipe": "cross-entropy"}}, "learning_rate, weight_decay"),
        ({"flags": {"recipe": "ensemble"}}, "--recipe cross-entropy"),
        ({"flags": {"dropout": 0.2}}, "--dropout"),
        ({"flags": {"epochs": 3}}, "relabel_every 5, 10, 15, 20"),
        ({"values": {"margin": [-1]}}, "--margin -1"),
        ({"values": {"margin": []}}, "--values margin"),
        ({"values": {"margin": [0.3]}, "flags": {"margin": 0.5}}, "--margin"),
        ({"values": {"margin": [0.3]}, "flags": {"epochs": 30, "maple.margin": "0.5"}}, "--margin"),
        ({"values": {"margin": [0.3]}, "trials": 5}, "--trials"),
        ({"values": {"margin": range(101)}}, "--values margin"),
        (
            {"values": dict.fromkeys(("margin", "max_clusters", "min_cluster_size"), range(1, 23))},
            "10648",
        ),
        ({"search": "bayes", "trials": 0}, "--trials"),
        ({"search": "random"}, "'random'"),
        ({"criterion": "auroc"}, "'auroc'"),
        ({"flags": {"epochs": 30, "devices": 2}}, "--devices"),
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
    with pytest.raises(DataError, match=r"\b6 .*--false-alarm 0.05.*\b38\b.*--splits"):
        tune_recipe(wrong)
    assert not (tmp_path / "out").exists()


def test_values_on_the_command_line(tmp_path, capsys):
    assert run("tune", "digits", "--out", tmp_path, "--search", "grid", "--values", "margin") == 2
    assert "--values takes NAME=VALUE" in flat(capsys.readouterr().err)
