"""One world for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.scenes import World
from faults.server import forging


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    with forging(folder / "printed") as forge:
        yield World(folder / "world", forge).build()
