"""The choice of the parts of the fused score: sums of surprises, ranks over folds, pictures that are far."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from maple.data.image_set import ImageSet
from maple.detectors.scores import FUSED, Part

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import score_parts  # noqa: E402


def test_present_and_former_score_are_candidates_and_all_differ():
    names = [score_parts.describe(parts) for parts in score_parts.candidates()]
    assert len(set(names)) == len(names)
    assert score_parts.describe(FUSED) in names and score_parts.describe(score_parts.FORMER) in names


def test_a_sum_counts_surprises_beyond_their_level():
    parts = {"energy": Part(1.0), "spread": Part(0.0), "shallow": Part(0.5, beyond=2.0)}
    assert score_parts.describe(parts) == "energy + 0.5 shallow beyond 2"
    of = {"energy": np.array([1.0, 2.0]), "spread": np.array([9.0, 9.0]), "shallow": np.array([1.0, 6.0])}
    np.testing.assert_allclose(score_parts.total(parts, of), [1.0, 4.0])
    scores = {"test": of, "left-out": {name: values + 1.0 for name, values in of.items()}}
    assert score_parts.measure(parts, scores) == {"left-out": 0.75}  # sums 2 and 5.5 against 1 and 4
    assert score_parts.measure({"spread": Part(1.0)}, scores) == {"left-out": 1.0}


def test_the_best_mean_over_folds_comes_first():
    def row(fold: str, **near: float) -> dict:
        found = [{"parts": name, "left-out": value, "shuffled": 0.9, "fractals": 0.7} for name, value in near.items()]
        return {"mode": "choose", "fold": fold, "candidates": found}

    ranked = score_parts.rank([row("a", one=0.9, two=0.8), row("b", one=0.5, two=0.8), {"mode": "cost"}])
    assert [found["parts"] for found in ranked] == ["two", "one"]
    assert ranked[0]["near"] == pytest.approx(0.8) and ranked[0]["far"] == pytest.approx(0.8)


def test_a_sum_that_is_behind_the_former_one_near_is_last():
    former = score_parts.describe(score_parts.FORMER)

    def row(**near: float) -> dict:
        found = [{"parts": name, "left-out": value, "fractals": far} for name, (value, far) in near.items()]
        return {"mode": "choose", "candidates": found}

    rows = [
        row(**{former: (0.80, 0.9), "behind": (0.82, 1.0), "equal": (0.78, 0.95)}),
        row(**{former: (0.80, 0.9), "behind": (0.77, 1.0), "equal": (0.82, 0.95)}),
    ]
    assert [found["parts"] for found in score_parts.rank(rows)] == ["equal", former, "behind"]


def test_the_best_sum_without_distances_of_raw_embeddings_is_chosen():
    def row(parts: str, mean: float) -> dict:
        return {"parts": f"{parts} + distance beyond 7", "near": mean, "far": mean, "loses": False}

    ranked = [row("energy + 0.5 relative", 0.9), row("energy + shallow beyond 2", 0.89), row("energy", 0.8)]
    assert score_parts.choose_sum(ranked)["shallow"] == Part(1.0, beyond=2.0)


def test_the_default_score_is_the_choice_that_is_stored():
    rows = json.loads((ROOT / "results" / "score_parts.json").read_text())["rows"]
    assert score_parts.choose_sum(score_parts.rank(rows)) == {"relative": Part(0.0), **FUSED}


def test_far_pictures_have_the_size_and_the_pixels_of_known_ones(monkeypatch):
    monkeypatch.setattr(score_parts, "N_FAR", 5)
    known = ImageSet.from_arrays(np.arange(8 * 16 * 16 * 3, dtype=np.uint8).reshape(8, 16, 16, 3))
    far = score_parts.make_far(known)
    assert {name: (len(images), images.size) for name, images in far.items()} == {
        "shuffled": (5, 16),
        "fractals": (5, 16),
    }
    originals = {tuple(sorted(known.read(i).ravel())) for i in range(8)}
    assert all(tuple(sorted(far["shuffled"].read(i).ravel())) in originals for i in range(5))
