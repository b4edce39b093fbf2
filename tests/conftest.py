"""Shared fixtures: where the real data lie, random numbers, a small data root, images, a run, and pytorch-ood."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from PIL import Image

from torture import Torture, share

# No test measures time: on a busy machine an example takes as long as it takes. Mutation testing wants the same
# examples, make torture many.
SAME = "MAPLE_SAME_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("MAPLE_EXAMPLES", 100 if SAME else 30))
hypothesis.settings.register_profile(
    "maple",
    deadline=None,
    derandomize=SAME,
    max_examples=EXAMPLES,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("maple")


class PackageDoctests:
    """Doctests are collected from the package alone, and not where names are imported on first use.

    pytest looks at all names of a module, which would import all that MAPLE can use, Lightning and torchvision too.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        if "src" in file_path.parts and not file_path.with_suffix(".pyi").exists():
            return found
        return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(PackageDoctests())


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with real data and weights: ``MAPLE_SHARED`` or ``../shared``; tests skip where it is absent."""
    folder = Path(os.environ.get("MAPLE_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data here (set MAPLE_SHARED)")
    return folder


@pytest.fixture
def torture(request: pytest.FixtureRequest, torture_start: float) -> Torture:
    """Time, random numbers and tally of a test marked ``torture``: see ``tests/torture.py``."""
    items = request.session.items
    return share(request.node.name, items.index(request.node), len(items), time.monotonic() - torture_start)


@pytest.fixture(scope="session")
def torture_start() -> float:
    return time.monotonic()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def root(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small data root; the environment names none."""
    from image_files import write_data_root

    monkeypatch.delenv("MAPLE_DATA", raising=False)
    return write_data_root(tmp_path / "root", rng)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on digits, to be read only."""
    from commands import run

    folder = tmp_path_factory.mktemp("runs") / "digits"
    code = run(
        "train", "digits", "--out", folder, "--epochs", 3, "--batch-size", 64, "--relabel-every", 1,
        "--hard-class-error", 0.05, "--min-cluster-size", 10,
    )  # fmt: skip
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def finished(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that run, for commands that change it."""
    return Path(shutil.copytree(digits_run, tmp_path_factory.mktemp("copy") / "digits"))


@pytest.fixture(scope="session")
def explained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that can be explained, to be read only."""
    from explained_runs import build_explained_run

    return build_explained_run(tmp_path_factory.mktemp("explained") / "digits")


@pytest.fixture
def new_images(tmp_path: Path) -> Path:
    """A folder of images for it, one of them with a hostile name."""
    from explained_runs import write_images

    return write_images(tmp_path / "new")


@pytest.fixture(scope="session")
def theirs() -> ModuleType:
    """The detectors of pytorch-ood; torchvision, which they import, is repaired first."""
    pytest.importorskip("torch")
    from maple.errors import UsageError
    from maple.networks._torchvision import import_torchvision

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import_torchvision()
        except UsageError:
            pytest.skip("torchvision is not installed")
        return pytest.importorskip("pytorch_ood.detector")


@pytest.fixture
def image_folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two classes of twelve noise images, dark and bright."""
    for name, level in (("dark", 40), ("bright", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(level - 30, level + 30, (16, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"
