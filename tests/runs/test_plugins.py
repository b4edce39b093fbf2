"""Plug-in files: methods, data sets and suites from one TOML file, as docs/howto/extend.md has it."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from PIL import Image

from commands import flat, run
from maple.data.catalogue.table import CATALOGUE
from maple.data.sources import open_images
from maple.errors import MapleError
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES, find_suite
from maple.runs import flag_values, plugins
from maple.runs.benchmark.suites import list_suites
from maple.runs.plugins import load_plugin_file
from maple.runs.setup.request import absolute_source
from plugins import forgetting_plugins, write_plugins

PLUGIN = ("--plugin", "lab/lab.toml")


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """A folder beside that of the plug-in file, its modules and 200 images."""
    here = tmp_path_factory.mktemp("lab")
    (here / "lab").mkdir()
    write_plugins(here / "lab")
    digits = open_images("digits")
    for i in range(200):
        place = here / "lab" / "pond" / digits.class_names[digits.labels[i]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.read(i)).save(place / f"{i}.png")
    return here


@pytest.fixture(autouse=True)
def inside(lab, monkeypatch):
    monkeypatch.chdir(lab)
    with forgetting_plugins():
        yield


def test_the_page_runs_as_a_user_would(capsys):
    assert run("data", "pond", *PLUGIN, "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 200
    assert run("methods", "l1", *PLUGIN, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["plugin"] == "my_detector"
    assert run("benchmark", "pond", *PLUGIN, "--out", "made") == 0
    folder = Path("made/tables/pond-cpu")
    table = (folder / "table.md").read_text()
    assert "| cosines, L1 distance |" in table and "near-OOD AUROC" in table and "| 0.9500 |" in table
    assert r"\toprule" in (folder / "table.tex").read_text() and "published" in (folder / "table.csv").read_text()
    (trained,) = (
        path.parent for path in Path("made/trainings").glob("*/config.toml") if "my_recipe" in path.read_text()
    )
    assert str(Path("lab/pond").resolve()) in (trained / "config.toml").read_text()
    capsys.readouterr()
    assert run("predict", trained, "pond", *PLUGIN, "--out", "p.csv") == 0
    assert len(Path("p.csv").read_text().splitlines()) == 201
    assert run("evaluate", trained, *PLUGIN, "--detector", "l1", "--json") == 0
    assert "l1" in json.loads(capsys.readouterr().out)["methods"]


def test_without_the_file_nothing_of_it_is_known(capsys):
    assert "pond" not in CATALOGUE and "pond" not in SUITES
    assert run("data", "pond") == 2 and run("benchmark", "pond", "--dry-run") == 2


def test_a_suite_has_every_profile_and_is_listed():
    load_plugin_file(Path("lab/lab.toml"))
    load_plugin_file(Path("lab/lab.toml"))  # twice is once
    suite = find_suite("pond")
    assert suite.reference == "published" and suite.paper["Doe et al."]["far/auroc"] == 0.9
    assert all("pond" in profile.protocols for profile in PROFILES.values())
    assert PROFILES["tiny"].protocols["pond"].source.startswith("simulated")
    assert any(row["benchmark"] == "pond" and "pond" in row["needs"] for row in list_suites())
    assert absolute_source("pond") == str(Path("lab/pond").resolve())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[dat.pond]\npath = 'pond'", "'data'"),
        ("[data.pond]\ntitle = 'no place'", "path"),
        ("[data.pond]\npth = 'pond'", "path"),
        ("[data.cifar10]\npath = 'pond'", "cifar10"),
        ("[suites.pond]\ncolumns = 'accuracy'", "source"),
        ("[suites.pond]\nsource = 'digits'", "columns"),
        ("[suites.pond]\nsource = 'digits'\ncolumns = 'acuracy'\nrows = [{ title = 'a' }]", "acuracy"),
        ("[suites.pond]\nsource = 'digits'\nnear = ['sand']\ncolumns = 'accuracy'", "sand"),
        ("[suites.cifar10]\nsource = 'digits'\ncolumns = 'accuracy'\nrows = [{ title = 'a' }]", "cifar10"),
        ("[suites.pond]\nsource = 'digits'\ncolumns = 'accuracy'\nrows = [{ titel = 'a' }]", "titel"),
        ("plugin = 'my_recipe'", "list"),
        ("plugin = ['nowhere_to_be_found']", "nowhere_to_be_found"),
    ],
)
def test_faults_are_named_and_leave_nothing(text, named, tmp_path):
    suites, data = set(SUITES), set(CATALOGUE)
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(MapleError, match=named):
        load_plugin_file(tmp_path / "bad.toml")
    assert set(SUITES) == suites and set(CATALOGUE) == data


def test_a_misspelt_file_is_a_wrong_use(capsys):
    assert run("data", "--plugin", "lab/labb.toml") == 2
    assert "lab.toml" in flat(capsys.readouterr().err)


def test_an_installed_package_brings_its_file(tmp_path, monkeypatch, capsys):
    """The entry point names a module; a broken one is reported and left out."""
    package = tmp_path / "pond_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.toml").write_text("[data.pool]\npath = '.'\ntitle = 'A pool'")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint(name, name, "maple.plugins") for name in ("no_such_package", "pond_package")]
    for module in (plugins, flag_values):
        monkeypatch.setattr(module, "entry_points", lambda group: points if group == "maple.plugins" else [])
    assert run("data", "--json") == 0
    said = capsys.readouterr()
    assert "pool" in {row["source"] for row in json.loads(said.out)} and "no_such_package" in flat(said.err)
