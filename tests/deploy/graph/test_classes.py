"""Class probabilities of the graph against NumPy, for any clusters and any logarithms."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax

from maple.decisions.pool import raise_odds
from maple.decisions.probability import Probability
from maple.deploy.graph.classes import ByClass, ClassProbabilities, NetworkClass, RaiseOdds
from maple.stats.gaussians import class_logsumexp

CLUSTERS = st.sampled_from([[0, 1, 2], [0, 0, 1, 2], [2, 0, 1, 1, 0], [0, 0, 0]]).map(np.array)


def draw_logs(data: st.DataObject, n_columns: int) -> np.ndarray:
    return data.draw(arrays(np.float64, (4, n_columns), elements=st.floats(-50, 50)))


@given(CLUSTERS, st.data())
def test_sums_over_the_clusters_of_a_class(clusters, data):
    values, weights = (
        draw_logs(data, len(clusters)),
        data.draw(arrays(np.float64, len(clusters), elements=st.floats(-5, 5))),
    )
    got = ByClass(clusters, weights, -0.5)(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(got, class_logsumexp(-0.5 * values + weights, clusters), rtol=1e-12, atol=1e-12)


@given(st.integers(1, 5), st.floats(0.1, 3), st.data())
def test_odds_are_raised(n_classes, exponent, data):
    logs = draw_logs(data, n_classes)
    said, class_id = RaiseOdds(n_classes, exponent)(torch.from_numpy(logs))
    expected = raise_odds(log_softmax(logs, axis=1), exponent, logs.argmax(1))
    np.testing.assert_allclose(np.exp(said.numpy()), np.exp(expected), atol=1e-9)
    np.testing.assert_allclose(np.exp(said.numpy()).sum(1), 1)
    np.testing.assert_allclose(expected.max(1), expected[np.arange(4), class_id.numpy()], atol=1e-9)


def test_a_network_without_all_classes_shares_what_they_have_together(rng):
    """Classes 1 and 3 were added after training: the network moves probability only among the others."""
    clusters, n_columns = np.array([0, 2, 1, 3]), 2
    probability = Probability(temperature=2.0, network_weight=0.5)
    squared, logits = rng.gamma(4, size=(6, 4)), rng.normal(size=(6, n_columns))
    part = ClassProbabilities(np.log(np.full(4, 0.25)), np.log(np.full(4, 0.25)), clusters, n_columns, probability)
    with_network, _ = part(torch.from_numpy(squared), torch.from_numpy(logits))
    alone, class_id = part(torch.from_numpy(squared), None)
    np.testing.assert_allclose(with_network[:, [1, 3]].numpy(), alone[:, [1, 3]].numpy(), atol=1e-12)
    assert (with_network[:, 0] != alone[:, 0]).all()
    nearest = clusters[squared.argmin(1)]
    np.testing.assert_array_equal(class_id.numpy(), nearest)


@given(
    st.sampled_from([3, 5]),
    st.floats(0, 1),
    st.floats(0.01, 2),
    st.floats(0, 1),
    st.floats(0.2, 1),
    st.sampled_from([0.0, 0.1]),
)
def test_every_weight_of_the_pool_is_in_the_graph(n_columns, gaussian_weight, weight, prior_weight, exponent, share):
    """Three classes, one of two clusters; with three columns, two classes were added after training."""
    rng, clusters = np.random.default_rng(0), np.array([0, 1, 0, 2, 3])
    log_weights = np.log([0.4, 0.1, 0.3, 0.15, 0.05])
    squared, logits = rng.gamma(4, size=(6, 5)), rng.normal(size=(6, n_columns))
    probability = Probability(2.0, weight, exponent, 1.0, "sum", gaussian_weight, prior_weight, share)
    part = ClassProbabilities(log_weights, log_weights, clusters, n_columns, probability)
    said, _ = part(torch.from_numpy(squared), torch.from_numpy(logits))
    padded = np.pad(logits, ((0, 0), (0, 5 - n_columns)), constant_values=-np.inf)
    found = SimpleNamespace(
        squared_distances=squared,
        log_weights=log_weights,
        cluster_to_class=clusters,
        class_log_priors=class_logsumexp(log_weights[None], clusters)[0],
        log_softmax=class_logsumexp(log_softmax(padded, axis=1), clusters),
    )
    np.testing.assert_allclose(np.exp(said.numpy()), np.exp(probability.log_probabilities(found)), atol=1e-9)


@pytest.mark.parametrize(("rule", "expected"), [("sum", 0), ("max", 1)])
def test_the_class_of_the_network_by_either_rule(rule, expected):
    logits = torch.tensor([[1.0, 1.0, 1.2]], dtype=torch.float64)  # two clusters of class 0 against one of class 1
    assert NetworkClass(np.array([0, 0, 1]), rule)(logits).tolist() == [expected]
