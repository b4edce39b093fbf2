"""The figures of one method from bare arrays: confidences, scores, thinned curves and histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.evaluation._judge import _histogram, _thin, judge_probabilities, make_method


def test_perfect_and_worthless_probabilities() -> None:
    labels = np.array([0, 1, 2, 1])
    sure = judge_probabilities(np.log(np.eye(3)[labels] * (1 - 3e-9) + 1e-9), labels)
    assert sure.accuracy == 1 and sure.nll == pytest.approx(0, abs=1e-6) and sure.brier == pytest.approx(0, abs=1e-6)
    blind = judge_probabilities(np.full((4, 3), -math.log(3)), labels)
    assert blind.nll == pytest.approx(math.log(3)) and blind.brier == pytest.approx(2 / 3)
    assert blind.share_above == {"0.5": 0.0, "0.8": 0.0, "0.9": 0.0}
    assert all(math.isnan(accuracy) for accuracy in blind.accuracy_above.values())


def test_a_method_without_classes_only_detects() -> None:
    method = make_method(None, np.arange(10.0), {"far": np.arange(10.0) + 20, "same": np.arange(10.0)}, {"far": 0.75})
    assert method.classification is None and math.isnan(method.gaussian_error) and math.isnan(method.n_components)
    assert method.detection["far"].auroc == 1 and method.detection["same"].auroc == 0.5
    assert method.detection["far"].flagged == 0.75 and math.isnan(method.detection["same"].flagged)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=400))
def test_thinned_curves_keep_their_ends_and_rise(steps: list[tuple[float, float]]) -> None:
    x, y = (np.sort([0.0, *column, 1.0]) for column in zip(*steps))
    thin_x, thin_y = _thin(x, y, points=20)
    assert len(thin_x) == len(thin_y) <= 20
    assert (thin_x[0], thin_y[0], thin_x[-1], thin_y[-1]) == (0, 0, 1, 1)
    assert (np.diff(thin_x) >= 0).all() and (np.diff(thin_y) >= 0).all()


def test_a_long_curve_is_thinned_evenly_along_its_length() -> None:
    x = np.concatenate([np.linspace(0, 0.1, 400), np.linspace(0.1, 1, 1001)[1:]])  # crowded at its start
    for thin in _thin(x, x, points=20):
        np.testing.assert_allclose(thin, np.linspace(0, 1, 20), atol=0.001)


def test_a_thinned_curve_ends_at_its_end_if_sums_are_rounded() -> None:
    x, y = np.array([0.0] * 20 + [np.nextafter(1, 0), 1.0]), np.array([0.0] * 20 + [1.0, 1.0])
    thin_x, _ = _thin(x, y, points=20)
    assert thin_x[-1] == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_histograms_count_every_score(ind: list[float], ood: list[float]) -> None:
    found = _histogram(np.array(ind), {"far": np.array(ood)}, bins=7)
    assert len(found.edges) == 8 and (np.diff(found.edges) > 0).all()
    assert sum(found.ind) == len(ind) and sum(found.ood["far"]) == len(ood)


def test_a_far_set_leaves_known_images_a_fifth_of_the_histogram() -> None:
    ind = np.linspace(0, 10, 200)
    near, far = (_histogram(ind, {"set": ind + shift}) for shift in (5, 1000))
    assert np.count_nonzero(near.ind) > 30 and np.count_nonzero(far.ind) > 15
    assert sum(far.ood["set"]) == far.ood["set"][-1] == 200


def test_infinite_scores_join_the_outer_bins() -> None:
    found = _histogram(np.array([0.0, 1.0, 2.0, math.inf]), {"none": np.array([-math.inf])}, bins=4)
    assert np.isfinite(found.edges).all() and found.ind[-1] == 2 and found.ood["none"] == [1, 0, 0, 0]
