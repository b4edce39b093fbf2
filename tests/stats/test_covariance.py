"""Principal axes, shrinkage and whitening against scikit-learn and their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import EmpiricalCovariance, oas
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from clusters import moments_of
from maple.stats.covariance import (
    count_components,
    is_shrunk,
    oas_covariance,
    principal_axes,
    shrink_if_few,
    whitening,
)
from maple.stats.gaussians import fit_gaussians


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.95, 0.99, 1.0])
def test_components_equal_scikit_learn(blobs, share):
    embeddings, labels = blobs
    standardised = StandardScaler().fit_transform(embeddings)
    pca = PCA(n_components=share if share < 1 else 6).fit(standardised)
    eigenvalues, axes = principal_axes(np.corrcoef(embeddings.T), share)
    assert len(eigenvalues) == pca.n_components_
    np.testing.assert_allclose(eigenvalues * 800 / 799, pca.explained_variance_)
    np.testing.assert_allclose(np.abs(np.sum(axes.T * pca.components_, axis=1)), 1)
    fitted = fit_gaussians(moments_of(embeddings, labels), explained_variance=share, distance="euclidean")
    projection = fitted.project(embeddings)
    np.testing.assert_allclose(np.abs(projection), np.abs(pca.transform(standardised)), atol=1e-9)


@pytest.mark.parametrize(
    ("eigenvalues", "share", "expected"),
    [
        ([99, 1], 0.95, 1),  # the published code: 0 components
        ([0.6, 0.3, 0.1], 0.9, 2),  # 0.6 + 0.3 rounds below 0.9
        ([0.6, 0.3, 0.1], 0.9001, 3),
        ([1, 1, 1, 1], 1.0, 4),
        ([1, 0, 0], 1.0, 1),
        ([5], 0.01, 1),
        ([0.5, 0.5], 1e-9, 1),
    ],
)
def test_component_count_is_exact(eigenvalues, share, expected):
    assert count_components(np.array(eigenvalues, dtype=float), share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.001, 1))
def test_component_count_reaches_the_share_and_no_more(values, share):
    eigenvalues = np.sort(np.array(values) + 1e-3)[::-1]
    count = count_components(eigenvalues, share)
    assert 1 <= count <= len(eigenvalues)
    assert eigenvalues[:count].sum() >= share * eigenvalues.sum() * (1 - 1e-9)
    assert count == 1 or eigenvalues[: count - 1].sum() < share * eigenvalues.sum() * (1 + 1e-9)


@pytest.mark.parametrize("n", [5, 30, 1000])
def test_oas_equals_scikit_learn(rng, n):
    samples = rng.normal(size=(n, 8)) @ rng.normal(size=(8, 8))
    expected, _ = oas(samples)
    np.testing.assert_allclose(oas_covariance(EmpiricalCovariance().fit(samples).covariance_, n), expected)


def test_oas_of_a_sphere_and_of_one_dimension():
    np.testing.assert_allclose(oas_covariance(np.eye(3) * 2, 10), np.eye(3) * 2)
    np.testing.assert_allclose(oas_covariance(np.array([[4.0]]), 10), [[4.0]])


def test_whitening_whitens_and_floors():
    covariance = np.array([[2.0, 1.0], [1.0, 3.0]])
    matrix, log_determinant = whitening(covariance, 1e-10)
    np.testing.assert_allclose(matrix.T @ covariance @ matrix, np.eye(2), atol=1e-12)
    assert log_determinant == pytest.approx(np.log(5))
    rotated = np.array([[0.8, -0.6], [0.6, 0.8]])
    singular = rotated @ np.diag([4.0, 0.0]) @ rotated.T
    matrix, log_determinant = whitening(singular, 0.01)
    np.testing.assert_allclose(matrix @ matrix.T, rotated @ np.diag([0.25, 100]) @ rotated.T)
    assert log_determinant == pytest.approx(np.log(4 * 0.01))
    matrix, _ = whitening(singular - 1e-17 * np.eye(2), 0.01)  # a tiny negative eigenvalue by rounding
    assert np.isfinite(matrix).all()


@pytest.mark.parametrize(
    ("variances", "rank"),
    [
        ([1, 1.5e-10, 5e-11], 2),  # the floor is 1e-10 of the largest variance
        ([100, 1, 5e-9], 2),
        ([1e-3, 1e-8, 5e-14], 2),
        ([1, 1e-5, 5e-11], 2),
        ([2, 2, 2], 3),
    ],
)
def test_directions_below_the_floor_are_null(rng, variances, rank):
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    found, axes = principal_axes(np.diag(np.array(variances, dtype=float)))
    np.testing.assert_allclose(found, variances[:rank])
    assert axes.shape == (3, rank)
    assert len(principal_axes(rotation @ np.diag([5.0, 1.0, 0.0]) @ rotation.T)[0]) == 2


def test_small_variances_are_raised_to_the_floor():
    matrix, log_determinant = whitening(np.diag([4.0, 1e-3]), 0.01)
    np.testing.assert_allclose(np.sort(np.diag(matrix @ matrix.T)), [0.25, 100])
    assert log_determinant == pytest.approx(np.log(4 * 0.01))
    exact, _ = whitening(np.diag([4.0, 0.015]), 0.01)
    np.testing.assert_allclose(np.sort(np.diag(exact @ exact.T)), [0.25, 1 / 0.015])


def test_few_images_shrink_to_a_sphere_at_most():
    nearly = np.diag([1.1, 0.9])
    np.testing.assert_allclose(oas_covariance(nearly, 10), np.eye(2))
    samples = np.random.default_rng(0).normal(size=(50, 3)) * [1, 2, 4] * 1e-3
    expected, _ = oas(samples)
    np.testing.assert_allclose(oas_covariance(EmpiricalCovariance().fit(samples).covariance_, 50), expected)


def test_shrinkage_ends_at_ten_images_per_component():
    assert is_shrunk(29, 3) and not is_shrunk(30, 3)
    covariance = np.diag([1.0, 2.0, 5.0])
    np.testing.assert_array_equal(shrink_if_few(covariance, 29), oas_covariance(covariance, 29))
    np.testing.assert_array_equal(shrink_if_few(covariance, 30), covariance)
