"""The cost model: its formulas against what the package really holds and sends, and the page against its results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from maple.stats.moments import Moments

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import scale_model as model  # noqa: E402

RESULTS = json.loads((ROOT / "results" / "scale.json").read_text())


@pytest.fixture
def constants() -> model.Constants:
    return model.Constants.from_json(RESULTS["constants"]["large"])


def test_moments_have_the_bytes_of_the_arrays():
    arrays = [Moments(7, 5, shift=np.zeros(5), norm_exponent=e).to_arrays() for e in (0.0, 0.5, 1.0)]
    sizes = sum(each["sums"].nbytes + each["second"].nbytes for each in arrays) + arrays[0]["counts"].nbytes
    assert model.moments_bytes(dim=5, clusters=7) == sizes


def test_parts_are_those_of_the_engine():
    ray = pytest.importorskip("maple.deploy.ray.predict")
    assert (model.PART_BYTES, model.PART_IMAGES) == (ray.PART_BYTES, ray.PART_IMAGES)
    assert model.part_images(224) * 224 * 224 * 3 <= ray.PART_BYTES < (model.part_images(224) + 1) * 224 * 224 * 3


@pytest.mark.parametrize("task", model.TASKS, ids=lambda task: task.__name__)
def test_cost_grows_with_images_and_divides_by_cores(constants, task):
    one, ten = task(constants, 1e6), task(constants, 1e7)
    assert ten.core_seconds == pytest.approx(10 * one.core_seconds)
    assert ten.flops == pytest.approx(10 * one.flops) and ten.read_bytes == pytest.approx(10 * one.read_bytes)
    assert one.hours(10) * 10 == pytest.approx(one.hours(1), rel=1e-9)
    assert one.dollars == pytest.approx(one.core_seconds / 3600 * model.PRICE)
    assert one.sent_bytes == 0 < task(constants, 1e6, workers=8).sent_bytes


def test_a_ring_sends_gradients_twice(constants):
    """Each of R processes sends 2 (R - 1) / R of the gradients in a step, all together 2 (R - 1) of them."""
    steps = model.training(constants, 128 * 4 * 10, workers=4)
    assert steps.sent_bytes == 10 * 2 * 3 * 4 * constants.parameters
    buckets = -(-4 * constants.parameters // model.BUCKET)
    assert steps.messages == 10 * 4 * 2 * 3 * (buckets + 2)


def test_limits_are_sorted_and_grow(constants):
    small = model.limits(constants, RESULTS["lists"], images=1e3, classes=10, workers=2)
    large = model.limits(constants, RESULTS["lists"])
    assert [each.share for each in large] == sorted((each.share for each in large), reverse=True)
    assert max(each.share for each in small) < 1 < large[0].share


def test_numbers_have_two_digits():
    assert [model.number(x) for x in (0, 9.96, 99.6, 1e3, 1.26e9, 5e-4)] == ["0", "10", "100", "1 k", "1.3 G", "0.0005"]


def test_the_page_holds_the_tables_of_the_results():
    import scale

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale.fill(page, scale.tables(RESULTS)) == page
    other = dataclasses.replace(model.Constants.from_json(RESULTS["constants"]["small"]), file_bytes=1.0)
    assert model.constants_table([other]) not in page
