"""What is loaded and when: the package and its help are light, and work without torch as far as they can.

Time is not measured, since machines differ and are not idle; modules are counted instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from maple.errors import UsageError, naming_extras

ROOT = Path(__file__).parents[2]
NEEDS_TORCH = ("torch", "lightning_fabric")
HEAVY = (
    *NEEDS_TORCH, "numpy", "scipy", "sklearn", "matplotlib", "pyarrow", "pandas", "PIL", "jinja2", "safetensors",
    "pydantic", "rich.progress", "rich.markdown", "rich.traceback", "pygments", "typer.rich_utils",
    "annotated_types", "maple.options", "maple.training.options", "maple.runs",
)  # fmt: skip
BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NEEDS_TORCH}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Absent())
"""
RUN = """
import contextlib, io
from maple.cli.app import main

def run(*arguments):
    sys.argv, out, errors = ["maple", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0, out.getvalue(), errors.getvalue()
    return 0, out.getvalue(), errors.getvalue()
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_loads_nothing_but_itself():
    code = """
import sys
before = set(sys.modules)
import maple
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names))
"""
    assert run_python(code) == "maple"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_the_help_is_light(arguments):
    code = f"""
import sys
{RUN}
code, out, errors = run(*{arguments})
assert code == 0 and errors == "", errors
assert "maple" in out and ("predict" in out) == ("--help" in {arguments}), out
print(*[name for name in {HEAVY} if name in sys.modules])
"""
    assert run_python(code) == ""


def test_commands_that_do_not_train_import_neither_fabric_nor_what_clusters():
    """Lightning Fabric takes two seconds of start-up with what it imports, scikit-learn one."""
    code = """
import sys
import maple.runs.evaluate, maple.runs.fit, maple.runs.listings, maple.runs.predicting.predict, maple.runs.update
print(*[name for name in ("lightning_fabric", "torch._dynamo", "sklearn", "pandas") if name in sys.modules])
"""
    assert run_python(code) == ""


def test_the_help_lists_all_commands_with_a_sentence(capsys):
    from commands import flat, run
    from maple.cli.app import COMMANDS

    assert run("--help") == 0
    said = flat(capsys.readouterr().out.replace("│", ""))
    assert "Usage: maple [OPTIONS] COMMAND [ARGS]..." in said and "--version print the version" in said
    for name, command in COMMANDS.items():
        summary, *_ = command.function.__doc__.split("\n\n")
        assert f" {name} {flat(summary)}" in said
    assert "Thresholds become invalid" not in said  # from the second paragraph of a command


def test_paragraphs_of_the_help_fill_the_lines_of_the_terminal(capsys, monkeypatch):
    from commands import flat, run
    from maple.cli.commands import train

    monkeypatch.setenv("COLUMNS", "70")  # fewer than the lines of docstrings have
    paragraph = flat(train.function.__doc__.split("\n\n")[1])
    assert run("train", "--help") == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first, *others = textwrap.wrap(paragraph, 68, break_on_hyphens=False)  # there is a space on either side
    start = said.index(first)
    assert said[start + 1 : start + 1 + len(others)] == others and len(others) > 3


def test_without_torch_commands_say_what_to_install(tmp_path):
    for name in ("detector.safetensors", "weights.safetensors"):
        (tmp_path / name).touch()
    commands = [
        ("train", "digits"),
        ("fit", "resnet9", "--data", "digits"),
        ("predict", str(tmp_path), "images", "--out", "said.csv"),
        ("evaluate", "run"),
        ("monitor", str(tmp_path), "images"),
        ("update", "run"),
        ("tune", "digits"),
        ("benchmark", "--list"),
        ("demo",),
    ]
    code = f"""
{BLOCK}
{RUN}
for command in {commands}:
    code, out, errors = run(*command)
    assert code == 2, (command, code, errors)
    assert out == "" and len(errors.splitlines()) == 1, (command, out, errors)
    assert errors.startswith("error: this needs torch, which is not installed: "), errors
    assert errors.endswith("pip install 'maple-uncertainty[torch]'\\n"), errors
code, out, errors = run("report", "nowhere")  # which runs no network
assert code == 1 and "'nowhere' is not a folder" in errors, errors
"""
    run_python(code)


def test_a_package_that_no_extra_has_is_not_explained_away():
    with pytest.raises(ModuleNotFoundError, match="nowhere") as caught, naming_extras():
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
    assert not isinstance(caught.value, UsageError)


def test_without_torch_the_classifier_works():
    code = f"""
{BLOCK}
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
import maple
X, y = load_iris(return_X_y=True)
print(cross_val_score(maple.MahalanobisClassifier(explained_variance=0.999), X, y).mean() > 0.95)
detector = maple.MapleDetector().fit(maple.Outputs(X, labels=y))
known, unknown = detector.score(maple.Outputs(X[[0, 0]] * [[1, 1, 1, 1], [1, -1, 1, -1]]))
print(known < unknown)
"""
    assert run_python(code).split() == ["True", "True"]


def test_every_base_dependency_is_used_where_there_is_no_torch():
    """What only networks need belongs to an extra."""
    code = f"""
{BLOCK}
import importlib, pkgutil
import maple
for module in pkgutil.walk_packages(maple.__path__, "maple."):
    try:
        if not module.name.endswith("__main__"):
            print(importlib.import_module(module.name).__file__)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in {NEEDS_TORCH}, error
"""
    used = {name for file in run_python(code).splitlines() for name in imported_packages(Path(file))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imports_as = {"pillow": "PIL", "scikit-learn": "sklearn"}
    names = [re.split(r"[<>=~! ]", line)[0] for line in project["dependencies"]]
    assert [name for name in names if imports_as.get(name, name.replace("-", "_")) not in used] == []


def imported_packages(path: Path) -> set[str]:
    """The packages that a module imports anywhere in its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_missing_weights_are_reported_before_torch_is_loaded(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "detector.safetensors").touch()
    code = f"""
{BLOCK}{RUN}
for arguments, code, named in [
    (("fit", "timm/resnet18", "--weights", "lost.pth", "--data", "digits", "--calibrate", "digits"), 2, "lost.pth"),
    (("train", "digits", "--init", "timm/resnet18", "--weights", "lost.pth"), 2, "lost.pth"),
    (("serve", {str(tmp_path / "run")!r}, "--port", "0"), 1, "weights.safetensors"),
    (("predict", {str(tmp_path / "run")!r}, "digits"), 1, "weights.safetensors"),
]:
    found, _, errors = run(*arguments)
    assert found == code and named in errors and errors.count("\\n") == 1, (arguments, found, errors)
"""
    run_python(code)
