"""One service for the tests that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import ServeOptions
from serving import THUMBNAILS, Colours


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Colours(), ServeOptions(), THUMBNAILS)) as client:
        yield client
