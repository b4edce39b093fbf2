"""P-values by comparison with sorted tables, against the conformal definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maple.decisions.calibration import Calibration
from maple.decisions.conformal import conformal_p_values, conformal_threshold
from maple.deploy.graph.decision import Decide, PValues


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(sorted), min_size=1, max_size=4),
    st.data(),
)
def test_p_values_are_looked_up(groups, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maple.deploy.graph.decision.ONE_STEP", data.draw(st.sampled_from([0, 1024])))
        check_p_values([np.array(group) for group in groups], data)


def check_p_values(groups, data):
    known = st.sampled_from([value for group in groups for value in group])
    scores = np.array([data.draw(known | st.floats(-2e6, 2e6)) for _ in range(5)])
    which = np.arange(5) % len(groups)
    got = PValues(groups)(torch.from_numpy(scores)[:, None], torch.from_numpy(which)).numpy()
    expected = [conformal_p_values([score], groups[i]).item() for i, score in zip(which, scores)]
    np.testing.assert_array_equal(got, expected)
    alone = PValues(groups[:1])(torch.from_numpy(scores)[:, None]).numpy()
    np.testing.assert_array_equal(alone, conformal_p_values(scores, groups[0]))


@pytest.mark.parametrize("confidence", [None, 0.9])
@pytest.mark.parametrize("per_class", [False, True])
def test_any_level_decides_as_its_threshold(confidence, per_class):
    """Also exactly at a p-value, and with one level for each image."""
    rng = np.random.default_rng(0)
    scores, class_ids = rng.normal(size=700), rng.choice(3, 700, p=[0.6, 0.3, 0.1])
    calibration = Calibration(scores, class_ids, 3)
    decision = calibration.decide(0.05, confidence, per_class)
    decide = Decide(decision)
    new, classes = np.r_[scores[:50], rng.normal(size=200) * 2], rng.integers(0, 3, 250)
    given = torch.from_numpy(new)[:, None], torch.from_numpy(classes)
    levels = [1 / 701, 0.01, 7 / 701, 0.1, 0.5, 0.999]
    np.testing.assert_array_equal(decide(*given)[1].numpy(), decision.is_ood(new, classes))
    for level in levels:
        limits = np.array([conformal_threshold(group, level, confidence) for group in decision.group_scores])
        expected = new > limits[decision.group_of_class[classes]]
        np.testing.assert_array_equal(decide(*given, torch.tensor([level]).double())[1].numpy(), expected)
    assert not decide(*given, torch.zeros(1).double())[1].any()
    each = torch.from_numpy(np.resize(levels, 250))
    together = torch.stack([decide(*given, torch.tensor([level]).double())[1] for level in levels])
    np.testing.assert_array_equal(decide(*given, each)[1], together[np.arange(250) % 6, np.arange(250)])


def test_without_calibration_no_level_flags_anything():
    given = torch.tensor([[1e9]]).double(), torch.tensor([0])
    p_value, is_ood = Decide(Calibration.empty(2).decide())(*given, torch.ones(1).double())
    assert torch.isnan(p_value).all() and not is_ood.any()
