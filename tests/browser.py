"""Headless Chromium for the tests of the page: the system's, or the one that Playwright installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")  # of containers, where tests often run


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser of Playwright; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: install maple-uncertainty[dev]")
    with playwright.sync_playwright() as engine:
        path = find_chromium(engine.chromium.executable_path)
        if path is None:
            pytest.skip("no Chromium here: run make setup-browser, or set MAPLE_CHROMIUM")
        browser = engine.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def find_chromium(installed: str) -> str | None:
    """Where Chromium is: ``MAPLE_CHROMIUM``, the system's, or what Playwright ``installed``."""
    candidates = (os.environ.get("MAPLE_CHROMIUM"), *map(shutil.which, NAMES), installed)
    return next((path for path in candidates if path and Path(path).is_file()), None)
