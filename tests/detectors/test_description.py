"""Descriptions: every quantity from one computation of distances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import chi2

from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import SCORES
from maple.types import Outputs
from split_classes import CLUSTER_TO_CLASS


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_every_quantity_follows_from_the_distances(split, exponent):
    detector = MapleDetector(norm_exponent=exponent).fit(split)
    d2 = detector.squared_distances(split)
    k = detector.gaussians_.n_components
    assert d2.shape == (400, 5)
    np.testing.assert_allclose(detector.score(split), d2.min(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(detector.cluster(split), d2.argmin(axis=1))
    np.testing.assert_array_equal(detector.md_class(split), CLUSTER_TO_CLASS[d2.argmin(axis=1)])
    np.testing.assert_allclose(detector.log_typicality(split), chi2.logsf(d2.min(axis=1), k), rtol=1e-9)
    nearest = np.stack([d2[:, c == CLUSTER_TO_CLASS].min(axis=1) for c in range(3)], axis=1)
    np.testing.assert_allclose(detector.typicality_per_class(split), chi2.sf(nearest, k), rtol=1e-7)
    np.testing.assert_allclose(detector.log_typicality_per_class(split), chi2.logsf(nearest, k), rtol=1e-7)
    shares = np.bincount(split.cluster_ids) / 400
    joint = softmax(np.log(shares) - d2 / 6, axis=1)
    posterior = np.stack([joint[:, c == CLUSTER_TO_CLASS].sum(axis=1) for c in range(3)], axis=1)
    np.testing.assert_allclose(detector.posterior(split, temperature=3.0), posterior, rtol=1e-7)
    np.testing.assert_allclose(detector.log_posterior(split, temperature=3.0), np.log(posterior), rtol=1e-7, atol=1e-14)


def test_description_computes_distances_once(split, monkeypatch):
    detector = MapleDetector().fit(split)
    described = detector.describe(split)
    assert isinstance(described, Description) and len(described) == 400
    assert described.squared_distances.shape == (400, 5)
    for name in ("squared_distances", "nearest"):
        monkeypatch.setattr(type(detector.gaussians_), name, None)  # any further call fails
    assert described.cluster_to_class[described.cluster].tolist() == described.md_class_id.tolist()
    np.testing.assert_allclose(described.typicality, np.exp(described.log_typicality))
    np.testing.assert_allclose(described.uncertainty, 1 - described.typicality, atol=1e-15)
    np.testing.assert_allclose(described.posterior(2.0).sum(axis=1), 1)
    assert described.log_typicality_per_class.max(axis=1) == pytest.approx(described.log_typicality)


def test_far_images_do_not_tie(plain):
    detector = MapleDetector(norm_exponent=0).fit(plain)
    far = Outputs(plain.embeddings[:1] * np.geomspace(10, 1e6, 50)[:, None])
    assert (np.diff(detector.score(far)) > 0).all()
    assert (np.diff(detector.log_typicality(far)) < 0).all()


def test_every_score_has_a_name(split):
    logits = np.zeros((len(split), 5), dtype=np.float32)
    outputs = replace(split, logits=logits, shallow=np.abs(split.embeddings))
    found = MapleDetector().fit(outputs, outputs).describe(outputs)
    assert set(found.available_scores) == set(SCORES)
    for name in SCORES:
        np.testing.assert_array_equal(found.score_named(name), getattr(found, name))
