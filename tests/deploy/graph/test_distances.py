"""Products, squared distances and the chi-square tail of the graph, against NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import nn

from maple.deploy.graph._constants import Affine, constant
from maple.deploy.graph.distances import Distances, Residual, Tail, background_distance, on_map, projection
from maple.stats.background import fit_background
from maple.stats.gaussians import fit_gaussians, with_full_covariances
from maple.stats.moments import Moments

N, DIM, CLUSTERS = 200, 6, 3


def read(module: nn.Module, embeddings: np.ndarray) -> np.ndarray:
    return module(torch.from_numpy(embeddings)).numpy()


@pytest.fixture(params=[0.0, 0.5, 1.0], ids="exponent {}".format)
def moments(request, rng) -> Moments:
    found = Moments(CLUSTERS, DIM, norm_exponent=request.param)
    return found.update(embeddings(rng), np.arange(N) % CLUSTERS)


def embeddings(rng: np.random.Generator) -> np.ndarray:
    centres = np.random.default_rng(1).normal(size=(CLUSTERS, DIM)) * 3
    return centres[np.arange(N) % CLUSTERS] + rng.normal(size=(N, DIM)) + 2


def test_squared_distances_to_clusters(moments, rng):
    gaussians = fit_gaussians(moments, explained_variance=1.0)
    new = embeddings(rng)
    z = projection(gaussians)(torch.from_numpy(new))
    np.testing.assert_allclose(z[:, -1], 1, atol=1e-6)
    np.testing.assert_allclose(Distances(gaussians)(z).numpy(), gaussians.squared_distances(new), rtol=1e-3, atol=1e-3)
    on = gaussians.on_map(gaussians.project(new))
    np.testing.assert_allclose(z.numpy() @ on_map(gaussians), on, rtol=1e-3, atol=1e-3)


def test_squared_distances_with_one_covariance_per_cluster(moments, rng):
    gaussians = fit_gaussians(moments, explained_variance=1.0)
    scales = np.array([1.0, 2.0, 0.5])
    covariances = scales[:, None, None] * np.eye(gaussians.n_components)
    full = with_full_covariances(gaussians, covariances, np.full(CLUSTERS, 10**6))
    new = embeddings(rng)
    got = Distances(full)(projection(full)(torch.from_numpy(new))).numpy()
    np.testing.assert_allclose(got, full.squared_distances(new), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got, gaussians.squared_distances(new) / scales, rtol=1e-2, atol=1e-2)


def test_background_and_residual(moments, rng):
    background, new = fit_background(moments, explained_variance=0.7), embeddings(rng)
    squared = read(background_distance(background), new)[:, 0]
    np.testing.assert_allclose(squared, background.squared_distances(new), rtol=1e-9)
    np.testing.assert_allclose(read(Residual(background), new)[:, 0], background.residuals(new), rtol=1e-6, atol=1e-9)


@given(st.integers(1, 300), st.floats(1e-6, 2000))
def test_the_tail_is_that_of_chi_square(degrees, squared):
    """Far beyond the distances of images: tests/theory/test_graph_tail.py."""
    tail = read(Tail(degrees), np.array([[squared]]))
    np.testing.assert_allclose(tail, chi2.sf(squared, degrees), rtol=0, atol=1e-9)


def test_constants_are_copies_in_float64(rng):
    weight, bias, x = rng.normal(size=(3, 2)), rng.normal(size=2), rng.normal(size=(4, 3))
    part, expected = Affine(weight, bias), x @ weight + bias
    weight[:] = 0
    np.testing.assert_allclose(read(part, x), expected, rtol=1e-12)
    assert constant([1, 2]).dtype == torch.float64 and constant([1], torch.int64).dtype == torch.int64
