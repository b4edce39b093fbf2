"""methods and data: what is listed, and what is said about one of them."""

from __future__ import annotations

import json

from commands import flat, run
from maple.detectors.registry import list_detectors
from maple.runs.listings import list_methods
from maple.training.recipe import list_recipes

BASELINES = ["due", "duq", "ensemble", "mc-dropout", "sngp", "vmdls-like"]


def test_the_list_is_that_of_the_registries(capsys):
    assert run("methods", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows if row["kind"] == "recipe"} == set(list_recipes()) >= set(BASELINES)
    assert {row["name"] for row in rows if row["kind"] == "detector"} == set(list_detectors())
    assert all(row["title"] and row["paper"] and row["passes"] for row in rows)
    assert rows == list_methods()


def test_the_list_as_people_read_it(capsys):
    assert run("methods") == 0
    shown = flat(capsys.readouterr().out)
    for name in (*list_recipes(), *list_detectors()):
        assert name in shown


def test_a_method_is_described_with_its_options(capsys):
    assert run("methods", "sngp") == 0
    shown = flat(capsys.readouterr().out)
    assert shown.startswith("recipe sngp: ") and "sngp.features" in shown and "default 1024" in shown
    assert run("methods", "sngp", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    options = {each["name"]: each for each in found["options"]}
    assert options["features"]["takes"] == "NUMBER" and options["features"]["default"] == 1024
    assert found["plugin"] is None and found["paper"] in shown
    assert run("methods", "softmax") == 0
    assert "no options" in capsys.readouterr().out


def test_a_name_of_recipe_and_detector_is_described_twice(capsys):
    assert run("methods", "maple", "--json") == 0
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)] == ["recipe", "detector"]
    assert run("methods", "mapel") == 2
    assert "'maple'" in flat(capsys.readouterr().err)


def test_data_lists_and_describes(capsys, root):
    assert run("data", "--json") == 0
    assert "digits" in [row["source"] for row in json.loads(capsys.readouterr().out)]
    assert run("data", "--data-root", root, "--json") == 0
    rows = {row["source"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["where"] == "built in"
    assert run("data", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1797


def test_data_as_people_read_it(capsys, root):
    assert run("data", "--data-root", root) == 0
    shown = flat(capsys.readouterr().out)
    assert "digits" in shown and str(root) in shown.replace(" ", "")
    assert run("data", "digits") == 0
    assert "1797" in capsys.readouterr().out
    assert run("data", "--get") == 2
    assert "--get" in flat(capsys.readouterr().err)
