"""Fixtures of the reports: one run folder for all, copies to change, and plots that cost nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from markupsafe import Markup

from maple.reporting import plots
from maple.reporting.plots import Plot
from run_folders import DIGITS, build_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("runs") / "digits", DIGITS)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty drawings in tests of text and tables, because Matplotlib is slow."""
    blank = Plot(Markup('<svg role="img" aria-label="blank"></svg>'), "blank")
    for name in vars(plots).copy():
        if name.startswith("plot_"):
            monkeypatch.setattr(plots, name, lambda *args: blank)
