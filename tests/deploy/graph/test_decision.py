"""P-values by comparison with sorted tables, against the conformal definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maple.decisions.conformal import conformal_p_values
from maple.deploy.graph.decision import PValues


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
