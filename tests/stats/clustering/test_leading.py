"""Leading components are those of the SVD, and centres found with their help are the nearest ones."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import subspace_angles
from sklearn.metrics import pairwise_distances_argmin

from maple.stats.clustering._leading import N_COMPONENTS, Leading


def test_leading_components_are_those_of_the_singular_values():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(700, 50)) * 2.0 ** -np.arange(50)
    centered = points - points.mean(axis=0)
    found = Leading.of(centered, np.random.RandomState(0))
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    assert found.basis.shape == (50, N_COMPONENTS)
    assert subspace_angles(axes[:8].T, found.basis).max() < 1e-3
    assert_allclose(found.inside, centered @ found.basis)
    outside = np.linalg.norm(centered - found.inside @ found.basis.T, axis=1)
    assert_allclose(found.outside, outside, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("dimension", "scale"), [(6, 1.0), (24, 1.0), (200, 0.0), (200, 0.3), (200, 3.0)])
def test_centres_found_with_the_components_are_the_nearest(dtype, dimension, scale, rng):
    """Between no structure and clear clusters: some points are decided by the components, some by all dimensions."""
    places = scale * rng.standard_normal((5, dimension))
    points = (places[rng.integers(5, size=3000)] + rng.standard_normal((3000, dimension))).astype(dtype)
    leading = Leading.of(points - points.mean(axis=0), np.random.RandomState(0))
    centers = leading.points[rng.integers(3000, size=7)]
    found, nearest = leading.nearest(centers), pairwise_distances_argmin(leading.points, centers)
    assert found.dtype == np.int64
    other = np.flatnonzero(found != nearest)  # equal up to rounding
    assert len(other) <= (3 if dtype == np.float32 else 0)
    ours, theirs = (((leading.points[other] - centers[each[other]]) ** 2).sum(axis=1) for each in (found, nearest))
    assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("n_open", [40, 160])  # of 200 points
def test_points_that_the_components_leave_open_are_decided_in_all_dimensions(n_open, rng):
    basis = np.eye(30)[:, :2]
    places = np.array([[9.0, 0.0], [-9.0, 0.0], [-9.0, 0.0]])
    centers = places @ basis.T
    centers[1:, 29] = [2.0, -2.0]  # the last two differ outside the components
    labels = np.r_[np.zeros(200 - n_open, np.int64), 1 + np.arange(n_open) % 2]
    order = rng.permutation(200)
    points, labels = (centers[labels] + 0.1 * rng.standard_normal((200, 30)))[order], labels[order]
    inside = points @ basis
    outside = np.linalg.norm(points - inside @ basis.T, axis=1)
    leading = Leading(points, (points**2).sum(axis=1), basis, inside, outside)
    assert_array_equal(leading.nearest(centers), labels)


def test_clear_clusters_are_told_apart_without_reading_the_points(rng):
    places = 5 * rng.standard_normal((4, 300))
    labels = np.arange(2000) % 4
    points = places[labels] + rng.standard_normal((2000, 300))
    leading = Leading.of(points - points.mean(axis=0), np.random.RandomState(0))
    centers = places - points.mean(axis=0)
    leading.points[:] = np.nan
    assert_array_equal(leading.nearest(centers), labels)


def test_parts_keep_their_points_and_get_components_of_their_own(rng):
    points = np.concatenate([rng.normal(9, 1, (100, 40)), rng.normal(-9, 1, (100, 40))])
    leading, rows = Leading.of(points, np.random.RandomState(0)), np.arange(100)
    for part in (leading.take(rows), leading.own(rows, np.random.RandomState(0))):
        assert_array_equal(part.points, points[:100])
        assert_allclose(part.squares, (points[:100] ** 2).sum(axis=1))
    own = leading.own(rows, np.random.RandomState(0))
    assert_allclose(own.inside.mean(axis=0), 0, atol=1e-9)  # around their own mean
