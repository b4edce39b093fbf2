"""What is built is what is needed: the wheel alone, apart from the source tree, trains, predicts and reports."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = """
import sys
import maple
from maple.cli.app import main
print(maple.__file__)
for words in ("train digits --out run --epochs 1", "predict run digits --out p.csv"):
    sys.argv = ["maple", *words.split()]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
"""


def build(kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_source_distribution_holds_the_package_and_its_tests_alone(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    files = {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "constraints.txt", "pyproject.toml"}
    assert names - {".gitignore"} == {"src", "tests", "examples", "PKG-INFO", *files}


def test_wheel_holds_templates_and_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder, suffix in (
        ("reporting/templates", "j2"),
        ("deploy/serve/static", "js"),
        ("evaluation/paper", "toml"),
        ("runs/setup/presets", "toml"),
    ):
        assert any(name.startswith(f"maple/{folder}/") and name.endswith(suffix) for name in names), folder
    assert "maple/py.typed" in names
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_wheel_runs_by_itself(wheel, tmp_path):
    """A new environment with the wheel; only the dependencies are borrowed from the one that runs the tests."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))

    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def say(*arguments: str) -> str:
        environment = {**outside, "OMP_NUM_THREADS": "1"}
        command = [str(python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "predict" in say("-m", "maple", "--help")
    assert str(packages) in say("-c", COMMANDS)
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 1797
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
