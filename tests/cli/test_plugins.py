"""Methods from outside the package: ``--plugin``, a configuration file, entry points; and runs made with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from commands import flat, run
from maple.cli.commands import DRIFT
from maple.options import read_toml
from plugins import forgetting_plugins, write_plugins
from serving import as_json, png

TRAIN = ("train", "digits", "--recipe", "cosine", "--epochs", 1, "--splits", "0.1,0.1,0.1,0.7")
PLUGIN = ("--plugin", "my_recipe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the plug-ins and a run made with one of them."""
    found = tmp_path_factory.mktemp("plugins")
    write_plugins(found)
    before = Path.cwd()
    os.chdir(found)
    try:
        with forgetting_plugins():
            assert run(*TRAIN, *PLUGIN, "--set", "cosine.scale=15", "--out", "made") == 0
    finally:
        os.chdir(before)
    return found


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with forgetting_plugins():
        yield


def test_a_run_records_its_plugin_and_options():
    sections = read_toml(Path("made/config.toml"))
    assert sections["origin"]["plugin"] == "my_recipe" and sections["cosine"]["scale"] == 15.0


def test_commands_know_methods_of_a_plugin(capsys):
    assert run("predict", "made", "digits", *PLUGIN, "--out", "p.csv") == 0
    assert run("report", "made", *PLUGIN) == 0
    assert run("export", "made", "graph.onnx", *PLUGIN) == 0
    detector = ("--plugin", "my_detector", "--detector", "l1", "--set", "l1.floor=0.01")
    capsys.readouterr()
    assert run("evaluate", "made", *PLUGIN, *detector, "--ood", "far=simulated-diatoms/far?n=40", "--json") == 0
    assert {"l1", "cosine"} <= set(json.loads(capsys.readouterr().out)["methods"])
    assert run("tune", "digits", *PLUGIN, "--recipe", "cosine", "--dry-run", "--json") == 0
    assert "scale" in json.loads(capsys.readouterr().out)["parameters"]
    assert run("methods", "cosine", *PLUGIN, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["plugin"] == "my_recipe" and [each["name"] for each in found["options"]] == ["scale", "smoothing"]


def test_a_run_of_a_plugin_is_explained_and_monitored(capsys):
    assert run("explain", "made", "digits", *PLUGIN, "--limit", 3, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert run("monitor", "made", "simulated-diatoms/far?n=60", *PLUGIN, "--json") in (0, DRIFT)
    assert json.loads(capsys.readouterr().out)["images"] == 60


def test_a_run_of_a_plugin_is_updated(capsys):
    """The updated run records the plug-in too."""
    assert run("update", "made", "--data", "digits", "--only", "3", *PLUGIN, "--out", "updated", "--json") == 0
    assert json.loads(capsys.readouterr().out)["new_classes"] == []
    assert read_toml(Path("updated/config.toml"))["origin"]["plugin"] == "my_recipe"
    assert run("predict", "updated", "digits", *PLUGIN, "--out", "u.csv") == 0


def test_a_run_of_a_plugin_is_served(monkeypatch):
    answers: list[Any] = []

    def ask(app: FastAPI, *_: object) -> None:  # instead of waiting for requests from elsewhere
        with TestClient(app) as client:
            answers.append(client.get("/v1/model").json())
            answers.append(client.post("/v1/predict", json=as_json(png((9, 9, 9)))).json())

    monkeypatch.setattr("maple.deploy.serve.server.run_app", ask)
    assert run("serve", "made", *PLUGIN, "--port", 0, "--false-alarm", 0.1) == 0
    described, said = answers
    assert described["classes"] == [str(i) for i in range(10)] and described["decision"]["false_alarm"] == 0.1
    assert [row["file"] for row in said["predictions"]] == ["0.png"]


def test_benchmarks_have_rows_of_plugins(capsys):
    """Over a second: a small network is trained and all detectors are fitted, as the user's command does."""
    tiny = ("benchmark", "--profile", "tiny", "--out", "tables", "--json")
    assert run(*tiny, "detectors", "--plugin", "my_detector") == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert {"l1", "knn", "MAPLE"} <= {row["title"] for row in table["rows"]}
    assert run(*tiny, "cifar10", *PLUGIN, "--dry-run") == 0
    assert any(row["training"].startswith("cosine on ") for row in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "made", "digits"),
        ("evaluate", "made"),
        ("export", "made", "g.onnx"),
        ("explain", "made", "digits"),
        ("monitor", "made", "digits"),
        ("update", "made", "--data", "digits"),
        ("serve", "made", "--port", 0),
        (*TRAIN, "--init", "made"),
    ],
    ids=lambda command: command[0],
)
def test_a_run_without_its_plugin_names_it_and_imports_nothing(command, capsys):
    assert run(*command) == 2
    errors = flat(capsys.readouterr().err)
    assert "'cosine'" in errors and (command[0] == "train" or "--plugin my_recipe" in errors)
    assert "my_recipe" not in sys.modules


def test_the_users_own_file_may_name_plugins(capsys):
    Path("mine.toml").write_text('plugin = ["my_recipe"]\n[cosine]\nscale = 5\n')
    assert run(*TRAIN, "--config", "mine.toml", "--out", "other") == 0
    assert read_toml(Path("other/config.toml"))["cosine"]["scale"] == 5.0
    Path("run.toml").write_text('plugin = ["wrong_plugin"]\n' + Path("made/config.toml").read_text())
    assert run(*TRAIN, "--config", "run.toml", "--out", "third") == 2
    assert "run.toml" in flat(capsys.readouterr().err) and "wrong_plugin" not in sys.modules
    Path("wrong.toml").write_text("plugin = 3\n")
    assert run(*TRAIN, "--config", "wrong.toml", "--out", "third") == 2
    assert "wrong.toml" in flat(capsys.readouterr().err)


BASE = """
from dataclasses import dataclass
from maple.options import option
from maple.training.recipe import Recipe, register_recipe

@register_recipe("{name}")
@dataclass(frozen=True, kw_only=True)
class Mine(Recipe):
    {option}: int = option(3, "a number")
    def loss(self, step): ...
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BASE.format(name="sngp", option="size_of_it"), "'sngp'"),
        (BASE.format(name="train", option="size_of_it"), "'train'"),
        (BASE.format(name="mine", option="epochs"), "'epochs'"),
        (BASE.format(name="mine", option="loss"), "'loss'"),
        (BASE.format(name="knn", option="k"), "'k'"),
        ("def (", "SyntaxError"),
        ("import nosuchmodule", "nosuchmodule"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_wrong_plugins_are_one_error(text, named, capsys):
    Path("wrong_plugin.py").write_text(text)
    assert run("train", "digits", "--plugin", "wrong_plugin", "--recipe", "mine", "--out", "none") == 2
    errors = capsys.readouterr().err
    assert named in errors and "Traceback" not in errors and not Path("none").exists()


def test_plugins_are_checked_and_recorded_in_a_fresh_process(tmp_path):
    """Nothing is imported yet: the plug-in is the first to load the methods of the package."""
    write_plugins(tmp_path)
    (tmp_path / "clash.py").write_text(BASE.format(name="knn", option="k"))
    command = [sys.executable, "-m", "maple", "methods"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    both = ("--plugin", "my_detector", "--plugin", "my_recipe", "--json")
    listed = subprocess.run([*command, "maple", *both], **options)
    assert listed.returncode == 0, listed.stderr
    assert {each["plugin"] for each in json.loads(listed.stdout)} == {None}
    clash = subprocess.run([*command, "--plugin", "clash"], **options)
    assert clash.returncode == 2 and "'k'" in clash.stderr


def test_entry_points_need_no_flag(tmp_path):
    write_plugins(tmp_path)
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[maple.detectors]\nl1 = my_detector\nbad = broken_plugin\n[maple.recipes]\ncosine = my_recipe:CosineRecipe\n"
    )
    code = """
from maple.detectors.registry import create_detector, list_detectors
from maple.training.recipe import find_recipe
print(create_detector("l1").floor, find_recipe("cosine").plugin, "bad" in list_detectors(), "knn" in list_detectors())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1e-06", "my_recipe", "False", "True"], done.stderr
    assert "broken_plugin" in done.stderr and "Traceback" not in done.stderr
