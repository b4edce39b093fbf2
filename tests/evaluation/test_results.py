"""Results as a file: strict JSON that comes back the same, damage that is refused, rows for tables."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blobs import NAMES
from maple.errors import RunError
from maple.evaluation.cases import evaluate
from maple.evaluation.results import Results
from maple.files.formats import FORMAT_VERSION


def strict(text: str):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_comes_back_the_same(results):
    text = results.to_json()
    again = Results.from_json(text)
    assert again.to_json() == text
    np.testing.assert_equal(again.rows(), results.rows())
    assert math.isnan(again.methods["energy"].detection["far"].flagged)
    assert again.class_names == list(NAMES)


def test_json_is_strict_and_readable(results):
    values = strict(results.to_json())
    assert values["methods"]["maple-paper"]["classification"]["brier"] is None
    assert values["methods"]["energy"]["classification"] is None
    assert len(results.to_json().splitlines()) < 600  # arrays of numbers stay on one line
    assert len(results.to_json()) < 300_000


def test_infinities_survive_the_file(results):
    odd = replace(results, gaussian_error=math.inf, class_names=["a [\n b", "c  d]", 'e "f"'])
    assert strict(odd.to_json())["gaussian_error"] == "inf"
    again = Results.from_json(odd.to_json())
    assert again.gaussian_error == math.inf
    assert again.class_names == odd.class_names


def test_provenance(results, predictor, ind):
    assert results.provenance["seed"] == 7
    assert results.provenance["command"] == "maple evaluate"
    assert {"python", "maple", "numpy", "torch"} <= set(results.provenance["versions"])
    given = {"config": {"folder": Path("runs/a"), "shares": (0.5, np.float32(0.5)), "n": np.int64(3), "x": np.nan}}
    kept = strict(evaluate(predictor, ind, provenance=given).to_json())["provenance"]["config"]
    assert kept == {"folder": "runs/a", "shares": [0.5, 0.5], "n": 3, "x": None}


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "JSON"), ("{", "JSON"), (b"\xff\xfe", "JSON"), ("[]", "file"), ("null", "file"), ('{"methods": {}}', "'")],
)
def test_damaged_results_are_refused(text, named):
    with pytest.raises(RunError, match=named):
        Results.from_json(text)


def test_the_damaged_part_is_named(results):
    with pytest.raises(RunError, match=r"methods\.softmax\.classification\.ece"):
        Results.from_json(re.sub(r'"ece": [^,]*', '"ece": "high"', results.to_json(), count=1))


def test_results_of_a_newer_format_are_refused(results):
    text = results.to_json().replace(f'"format_version": {FORMAT_VERSION}', f'"format_version": {FORMAT_VERSION + 1}')
    with pytest.raises(RunError, match=f"format {FORMAT_VERSION + 1}"):
        Results.from_json(text)


def test_rows_hold_every_scalar(results):
    rows = {row["method"]: row for row in results.rows()}
    assert rows["maple"]["auroc/far"] == results.methods["maple"].detection["far"].auroc
    assert rows["maple"]["accuracy_above/0.9"] == results.methods["maple"].classification.accuracy_above["0.9"]
    assert "accuracy" not in rows["energy"]
    assert not any(isinstance(value, list) for row in rows.values() for value in row.values())
