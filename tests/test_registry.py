"""Registries are complete wherever they are used from, light, and protected against clashes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from maple.errors import UsageError
from maple.options import option
from maple.registry import Registry, load_plugin


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Thing:
    """What a registry holds."""

    name = ""

    def work(self) -> None: ...


@pytest.fixture
def things() -> Registry:
    return Registry("thing", (), reserved=("train",))


def test_a_detector_without_torch_is_created_without_torch():
    code = """
import sys
from maple.detectors.registry import create_detector
assert create_detector("knn", k=7).k == 7
print(*[name for name in ("torch", "matplotlib") if name in sys.modules])
"""
    assert run_python(code) == ""


EACH_ALONE = """
import importlib, os
for name in {heavy}:  # what all of them import
    importlib.import_module(name)
for each in {all}:
    if not os.fork():
        {work}
        os._exit(0)
    assert os.wait()[1] == 0, each
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize(
    ("module", "heavy", "calls", "listed", "names"),
    [
        (
            "maple.detectors.registry",
            ["torch", "sklearn.neighbors"],
            ["create_detector('knn')", "create_detector('odin')", "list_detectors()"],
            "list_detectors()",
            {"maple", "energy", "knn", "vim", "odin", "lee-md"},
        ),
        (
            "maple.training.recipe",
            ["torch"],
            ["create_recipe('sngp')", "list_recipes()"],
            "list_recipes()",
            {"maple", "triplet", "sngp", "mc-dropout", "ensemble", "due", "duq", "vmdls-like"},
        ),
    ],
    ids=["detectors", "recipes"],
)
def test_any_first_call_finds_all_methods(module, heavy, calls, listed, names):
    """Each call is the first of a process that has imported nothing of the package."""
    work = f"from {module} import *; eval(each); print(*{listed}, flush=True)"
    lines = run_python(EACH_ALONE.format(heavy=heavy, all=calls, work=work)).splitlines()
    assert len(lines) == len(calls) and all(names <= set(line.split()) for line in lines)


def test_methods_that_need_torch_are_absent_without_it_and_named():
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
from maple.detectors.registry import create_detector, list_detectors
assert "knn" in list_detectors() and "odin" not in list_detectors()
try:
    create_detector("odin")
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run_python(code)
    assert said.startswith("UsageError") and "'odin'" in said and "maple-uncertainty[torch]" in said


def test_unknown_names_suggest_the_nearest(things):
    things.register("knn")(Thing)
    with pytest.raises(UsageError, match=r"'kn'.*'knn'"):
        things.find("kn")


def test_a_name_fixes_options(things):
    @things.register("plain", switch=False)
    @things.register("full", switch=True)
    @dataclass(frozen=True)
    class Switched(Thing):
        switch: bool = option(True, "use it", flag=False)
        size: int = option(3, "size", needs="switch")

    assert things.names() == ["full", "plain"]
    assert list(things.find("full").options) == ["size"] and not things.find("plain").options
    assert things.find("plain").create({"size": "4"}, "here") == Switched(switch=False, size=4)


def test_taken_names_are_refused(things):
    things.register("knn")(Thing)
    things.register("knn")(Thing)  # a module that is loaded again

    class Other(Thing):
        pass

    for name in ("knn", "train"):
        with pytest.raises(UsageError, match=f"'{name}'.*Other"):
            things.register(name)(Other)


def test_a_name_of_the_package_is_taken_before_its_module_is_imported():
    code = """
from maple.detectors.base import Detector
from maple.detectors.registry import register_detector
try:
    @register_detector("knn")
    class Mine(Detector):
        def _score(self, outputs): ...
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run_python(code)
    assert said.startswith("UsageError") and "'knn'" in said and "Mine" in said


def test_options_that_clash_with_a_method_or_have_no_default_are_refused(things):
    @dataclass
    class Clash(Thing):
        work: int = 3

    @dataclass
    class NoDefault(Thing):
        size: int

    with pytest.raises(UsageError, match="'work'"):
        things.register("clash")(Clash)
    with pytest.raises(UsageError, match="'size'"):
        things.register("bare")(NoDefault)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import nosuch", "nosuch"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_error(text, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if text is not None:
        (tmp_path / "broken_plugin.py").write_text(text)
    with pytest.raises(UsageError, match=rf"'broken_plugin'.*{named}"):
        load_plugin("broken_plugin")


@pytest.mark.parametrize("path", ["./zero.py", "zero.py", "plugins/zero", ".zero"])
def test_a_path_is_no_plugin(path):
    with pytest.raises(UsageError, match=r"--plugin zero\b"):
        load_plugin(path)


def test_a_plugin_that_registers_nothing_is_named_with_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = "import maple.detectors.base\nimport maple.networks.architectures\n"  # whose networks are not its own
    (tmp_path / "idle_plugin.py").write_text(code)
    load_plugin("idle_plugin")
    assert "idle_plugin.py" in "".join(capsys.readouterr().err.split())


DETECTOR = """
from maple.detectors.base import Detector
from maple.detectors.registry import register_detector

@register_detector('busy')
class Busy(Detector):
    def _score(self, outputs): ...
"""
NETWORK = """
from functools import partial
from maple.networks.architectures.base import Network, register_network

class Busy(Network):
    pass

register_network('busy')(partial(Busy))
"""
FAMILY = """
from maple.networks.architectures.base import Network, register_family

@register_family('busy-(a|b)', examples=())
class Busy(Network):
    pass
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_plugin_that_registers_something_is_not_warned_about(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugins = {"detector_plugin": DETECTOR, "network_plugin": NETWORK, "family_plugin": FAMILY}
    for name, code in plugins.items():
        (tmp_path / f"{name}.py").write_text(code)
    work = "from maple.registry import load_plugin; load_plugin(each); load_plugin(each)"
    code = EACH_ALONE.format(heavy=["torch"], all=[*plugins], work=work)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not told.stderr


def test_a_former_name_is_accepted_but_not_listed(things):
    things.register("new", was="old")(Thing)
    assert things.find("old") is things.find("new") and "old" in things
    assert things.names() == ["new"] and things.present_name("old") == "new" and things.present_name("x") == "x"
