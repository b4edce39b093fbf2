"""One evaluation that the tests of this folder share."""

from __future__ import annotations

import pytest

from blobs import blobs, make_predictor, unknown
from maple.evaluation.cases import evaluate
from maple.evaluation.results import Results
from maple.prediction.predictor import Predictor
from maple.types import Outputs


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor()


@pytest.fixture(scope="module")
def ind() -> Outputs:
    return blobs(2)


@pytest.fixture(scope="module")
def ood() -> dict[str, Outputs]:
    return {"near": unknown(3, 1.5), "far": unknown(4, 8.0)}


@pytest.fixture(scope="module")
def results(predictor, ind, ood) -> Results:
    return evaluate(predictor, ind, ood, latency_ms=1.5, seed=7, provenance={"command": "maple evaluate"})
