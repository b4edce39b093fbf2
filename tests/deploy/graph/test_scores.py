"""The fused score as a sum of ramps, against its definition."""

from __future__ import annotations

import numpy as np
import torch

from maple.deploy.graph.scores import Surprises
from maple.detectors.scores import FUSED, Surprise, fit_surprise


def test_surprises_are_interpolated(rng):
    scores = rng.gamma(2, size=(300, 4)) * [1, 10, 0.1, 1]
    scores[:40, 1] = 3.0  # ties
    surprises = {name: fit_surprise(column) for name, column in zip(FUSED, scores.T)}
    surprises["shallow"] = Surprise(np.array([0.5]), np.array([0.7]), 0.3)  # a single knot
    new = np.concatenate([scores[:50], rng.gamma(2, size=(50, 4)) * 30 - 5])
    expected = sum(FUSED[name].add(surprises[name](column)) for name, column in zip(surprises, new.T))
    got = Surprises(surprises, FUSED)(torch.from_numpy(new)).numpy()[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
