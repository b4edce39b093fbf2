"""The graph against NumPy on the same outputs, for every score, covariance, calibration and head."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from maple.decisions.calibration import Calibration
from maple.decisions.probability import Probability
from maple.deploy.graph import OUTPUTS, DescriptionGraph
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import SCORES
from maple.networks import create_backbone
from maple.prediction.predictor import Predictor
from maple.types import Outputs, Prediction

CLUSTERS = np.array([0, 0, 1, 2, 3, 3, 3])  # the class of each
DIM, RESPONSES = 24, 10


def simulated(n: int, seed: int = 0, mapping: np.ndarray = CLUSTERS) -> Outputs:
    rng = np.random.default_rng(seed)
    ids = np.arange(n) % len(mapping)
    centres = np.random.default_rng(9).normal(size=(len(mapping), DIM)) * 2
    embeddings = centres[ids] + rng.normal(size=(n, DIM)) * np.linspace(2, 0.2, DIM) + 1
    logits = 4 * np.eye(len(mapping))[ids] + rng.normal(size=(n, len(mapping)))
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        labels=mapping[ids],
        cluster_ids=ids,
        cluster_to_class=mapping,
        shallow=rng.normal(size=(n, RESPONSES)).astype(np.float32),
    )


def unusual(n: int = 40) -> Outputs:
    """Known images, images amid all, images far out, and an embedding of zeros."""
    known, rng = simulated(n, seed=5), np.random.default_rng(6)
    scales = np.repeat([1.0, 0.01, 30.0, 1.0], n // 4)[:, None]
    embeddings = (known.embeddings * scales).astype(np.float32)
    embeddings[-1] = 0
    return dataclasses.replace(
        known, embeddings=embeddings, logits=(known.logits * rng.uniform(0, 3, (n, 1))).astype(np.float32)
    )


def exact(detector: MapleDetector) -> MapleDetector:
    """With products in float64, so that NumPy and torch agree to more digits."""
    densities = detector.learned_.densities
    given = {densities.exponent: densities.gaussians}
    if densities.exponent != 0 and 0.0 in densities.moments.by_exponent:
        given[0.0] = densities.plain_gaussians
    given = {exponent: dataclasses.replace(gaussians, float32=False) for exponent, gaussians in given.items()}
    densities = dataclasses.replace(densities, given=given)
    detector._learned = dataclasses.replace(detector.learned_, densities=densities)
    return detector


def predictor_of(detector: MapleDetector, calibrate: Outputs | None = None, **numbers) -> Predictor:
    backbone = create_backbone("resnet9", 2)  # which nobody asks
    predictor = Predictor(backbone, exact(detector), size=8, probability=Probability(temperature=2.5, **numbers))
    return predictor if calibrate is None else predictor.calibrate(calibrate, false_alarm=0.1)


def compare(predictor: Predictor, outputs: Outputs) -> None:
    """Every output of the graph, with what NumPy says."""
    wide = dataclasses.replace(outputs, embeddings=outputs.embeddings.astype(np.float64))
    found = predictor.detector.describe(wide)
    expected = dataclasses.replace(predictor.predict_described(found), position=found.position)
    logits = None if outputs.logits is None else torch.from_numpy(outputs.logits)
    said = DescriptionGraph(predictor)(torch.from_numpy(wide.embeddings), logits, torch.from_numpy(outputs.shallow))
    for name, output in zip(OUTPUTS, said, strict=True):
        wanted = getattr(expected, name)
        assert output.shape == wanted.shape and output.numpy().dtype == wanted.dtype, name
        tight = {"rtol": 1e-7, "atol": 1e-9}
        np.testing.assert_allclose(output.numpy(), wanted, **tight, err_msg=name)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_every_score(score, exponent):
    detector = MapleDetector(score_by=score, norm_exponent=exponent).fit(simulated(600), simulated(200, 1))
    predictor = predictor_of(detector, simulated(150, 2), network_weight=0.7, odds_exponent=0.6)
    compare(predictor, unusual())
    assert predictor.predict_outputs(unusual()).is_ood.any()


@pytest.mark.parametrize("score", ["normalised", "fused", "relative"])
@pytest.mark.parametrize(
    "options", [{"covariance": "full"}, {"covariance": "global"}, {"distance": "euclidean"}, {"pca": False}]
)
def test_every_kind_of_gaussian(options, score):
    detector = MapleDetector(score_by=score, **options).fit(simulated(600), simulated(200, 1))
    compare(predictor_of(detector, simulated(150, 2)), unusual())


def test_a_single_component_and_a_single_class():
    outputs = simulated(200, mapping=np.zeros(1, dtype=int))
    flat = dataclasses.replace(outputs, embeddings=outputs.embeddings[:, :1])
    detector = MapleDetector(norm_exponent=0, score_by="distance", pca=False).fit(flat)
    predictor = predictor_of(detector)
    assert predictor.detector.gaussians_.n_components == 1  # the tail is erfc alone
    compare(predictor, flat[:20])


@pytest.mark.parametrize("score", ["fused", "energy", "normalised"])
@pytest.mark.parametrize(("weight", "exponent"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.4)])
def test_a_class_that_the_head_does_not_know(score, weight, exponent):
    detector = MapleDetector(score_by=score).fit(simulated(600), simulated(200, 1))
    new = simulated(100, 3)
    detector.extend(dataclasses.replace(new, embeddings=-new.embeddings, labels=np.full(100, 4)))
    assert detector.learned_.appended == 1
    predictor = predictor_of(detector, network_weight=weight, odds_exponent=exponent)
    outputs = unusual()
    beside = dataclasses.replace(outputs, embeddings=np.where(np.arange(40)[:, None] < 8, -1, 1) * outputs.embeddings)
    assert (predictor.predict_outputs(beside).class_id == 4).any()
    compare(predictor, beside)


def test_the_rule_of_the_paper_and_no_head():
    detector = MapleDetector(score_by="normalised").fit(simulated(600))
    compare(predictor_of(detector, class_rule="max"), unusual())
    compare(predictor_of(detector), dataclasses.replace(unusual(), logits=None))


def test_without_calibration_nothing_is_flagged():
    predictor = predictor_of(MapleDetector(score_by="normalised").fit(simulated(600)))
    compare(predictor, unusual())
    outputs = unusual()
    said = dict(
        zip(OUTPUTS, DescriptionGraph(predictor)(*map(torch.from_numpy, (outputs.embeddings, outputs.logits)), None))
    )
    assert said["p_value"].isnan().all() and not said["is_ood"].any()


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_decisions(per_class, confidence, rng):
    """Many calibration scores, ties among them; classes with thresholds of their own and classes without."""
    predictor = predictor_of(MapleDetector(score_by="normalised").fit(simulated(600)))
    scores = predictor.predict_outputs(simulated(400, 3)).score
    ties = np.repeat(scores, 5)
    class_ids = rng.choice(4, size=len(ties), p=[0.5, 0.3, 0.19, 0.01])
    predictor.calibration = Calibration(ties, class_ids, 4)
    predictor.decide(false_alarm=0.2, confidence=confidence, per_class=per_class)
    assert len(predictor.decision.group_scores) == (4 if per_class else 1)
    compare(predictor, simulated(400, 3))  # scores that are those of the calibration
    compare(predictor, unusual())


def test_the_outputs_are_fixed():
    """They are a format: programs of users read them by name, or by place from a .pt2 file."""
    assert OUTPUTS == (
        "class_id", "probabilities", "probability", "typicality", "uncertainty", "score", "p_value", "is_ood",
        "cluster", "md_class_id", "softmax_class_id", "log_probabilities", "squared_distance", "position",
    )  # fmt: skip
    assert set(OUTPUTS) == {field.name for field in dataclasses.fields(Prediction)} - {"class_names"} | {
        "probabilities"
    }
