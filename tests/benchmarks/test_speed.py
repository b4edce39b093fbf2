"""``make bench``: ratios and their targets, slopes, the page, and what is measured again."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from maple.stats.clustering.xmeans import bic

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import bench  # noqa: E402
from speed import clustering, fitting, machine, measure, tables  # noqa: E402


@pytest.fixture
def part() -> dict:
    row = measure.compare("fit", "product", [2.0, 4.0, 2.0], [1.0, 3.0, 1.5], target=0.6, note="with a note")
    curve = {"work": "fit", "over": "N", "sizes": [10, 100], "seconds": {"MAPLE": [1.0, 10.0]}, "theory": 1.0}
    about = machine.describe_machine(threads=2) | {"commit": "abc"}
    return {"machine": about, "quick": False, "took": 3.0, "rows": [row.to_dict()], "growth": [curve]}


def test_ratios_are_paired_and_have_their_spread():
    faster = measure.compare("a", "b", [1.0, 2.0, 4.0], [2.0, 2.0, 12.0], "at least", target=2.0)
    assert (faster.lowest, faster.ratio, faster.highest) == (1.0, 2.0, 3.0)
    assert faster.is_met
    longer = measure.compare("a", "b", [1.0, 2.0, 4.0], [2.0, 2.0, 12.0], "at most", target=0.4)
    assert longer.ratio == 0.5
    assert not longer.is_met
    assert measure.compare("a", "b", [1.0], [1.0]).is_met is None


def test_sides_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = measure.take_turns(sides, repeats=3)
    assert "".join(calls) == "ab" + "abbaab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_the_page_has_every_ratio_machine_and_slope(part, tmp_path):
    results = {"parts": {"fit": part}}
    bench.write_results(results, tmp_path / "speed.json", tmp_path / "speed.md")
    page = (tmp_path / "speed.md").read_text()
    assert "| fit | product | 2 s | 1.5 s | 0.75 (0.5 to 0.75; 3) | at least 0.6 | met |" in page
    assert "with a note" in page
    assert (
        "**Not measured yet**" in page and ", Fit" not in page.partition("**Not measured yet**")[2].partition("\n")[0]
    )
    assert "commit `abc`" in page
    assert "| fit | N | 10, 100 | 1, 10 | 1.00 | 1 |" in page
    assert (tmp_path / bench.PICTURE).stat().st_size > 1000
    assert bench.read_results(tmp_path / "speed.json") == results


def test_a_missed_target_is_marked(part):
    missed = measure.compare("fit", "product", [2.0], [1.0], target=0.6)
    assert tables.rows_table([missed])[-1].endswith("| at least 0.6 | **missed** |")


def test_a_part_is_measured_again_for_another_commit_machine_or_effort(part):
    full, results = measure.Effort(), {"parts": {"fit": part}}
    assert bench.is_stored(results, "fit", part["machine"], full)
    assert not bench.is_stored(results, "score", part["machine"], full)
    for name, value in {"commit": "def", "threads": 1, "processor": "another"}.items():
        assert not bench.is_stored(results, "fit", part["machine"] | {name: value}, full)
    changed = part["machine"] | {"commit": "abc+"}  # files that are not committed
    assert not bench.is_stored({"parts": {"fit": part | {"machine": changed}}}, "fit", changed, full)
    assert not bench.is_stored({"parts": {"fit": part | {"quick": True}}}, "fit", part["machine"], full)


def test_the_bare_product_is_that_of_all_batches():
    stream = fitting.make_stream(1000, 6, n_clusters=3, batch=64)
    whole = np.concatenate([outputs.embeddings for outputs in stream()]).astype(np.float64)
    assert len(whole) == 1000
    np.testing.assert_allclose(fitting.bare_product(stream), whole.T @ whole)


def test_clusterings_are_judged_by_one_criterion():
    points = clustering.simulated_classes(300, 8)["five clusters"]
    labels = clustering.x_means(points, 5)
    centers = np.stack([points[labels == j].mean(axis=0) for j in range(labels.max() + 1)])
    expected = bic(points.astype(np.float64), labels, centers.astype(np.float64))
    assert clustering.criterion(points, labels) == pytest.approx(expected)
    assert clustering.criterion(points, labels + 7) == pytest.approx(expected)  # numbers without a gap are not needed
