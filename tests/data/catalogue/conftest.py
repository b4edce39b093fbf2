"""Data sets of the catalogue with tiny originals."""

from __future__ import annotations

from pathlib import Path

import pytest

from published import Shop


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.delenv("MAPLE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return Shop(tmp_path, monkeypatch)
