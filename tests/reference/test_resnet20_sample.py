"""Real outputs of the public ResNet-20, a sample kept with the tests: figures must not drift unnoticed.

Made by ``python benchmarks/resnet20.py --shared ../shared --write-sample tests/data/resnet20_sample.safetensors``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.files import load_arrays
from maple.stats.metrics import accuracy, auroc, expected_calibration_error
from maple.types import Outputs

SAMPLE = Path(__file__).parents[1] / "samples" / "resnet20_sample.safetensors"


@pytest.fixture(scope="module")
def outputs() -> dict[str, Outputs]:
    arrays, _ = load_arrays(SAMPLE)
    sets = {name.split(".")[0] for name in arrays}
    return {
        name: Outputs(
            arrays[f"{name}.embeddings"].astype(np.float32),
            arrays[f"{name}.logits"].astype(np.float32),
            arrays[f"{name}.labels"].astype(np.int64),
        )
        for name in sets
    }


def test_sample_is_small():
    assert SAMPLE.stat().st_size < 500_000


def plain_mahalanobis(train: np.ndarray, labels: np.ndarray, points: np.ndarray, covariance: str) -> np.ndarray:
    """The paper written out: standardise, PCA to 95 %, class means, shared covariance."""
    mean, deviation = train.mean(0), train.std(0)
    z = (train - mean) / deviation
    values, axes = np.linalg.eigh(np.cov(z.T, bias=True))
    order = np.argsort(values)[::-1]
    kept = order[: int(np.searchsorted(np.cumsum(values[order]) / values.sum(), 0.95)) + 1]
    z, p = z @ axes[:, kept], (points - mean) / deviation @ axes[:, kept]
    means = np.stack([z[labels == c].mean(0) for c in range(10)])
    centred = z - (means[labels] if covariance == "tied" else z.mean(0))
    inverse = np.linalg.inv(centred.T @ centred / len(z))
    return np.stack([np.einsum("nk,kj,nj->n", p - m, inverse, p - m) for m in means], axis=1)


@pytest.mark.parametrize("covariance", ["tied", "global"])
def test_distances_equal_the_paper_written_out(outputs, covariance):
    train, test = outputs["train"], outputs["test"]
    detector = MapleDetector(covariance=covariance, norm_exponent=0.0).fit(train)
    expected = plain_mahalanobis(
        train.embeddings.astype(float), train.labels, test.embeddings.astype(float), covariance
    )
    np.testing.assert_allclose(detector.squared_distances(test), expected, rtol=2e-3)


@pytest.mark.parametrize("name", ["cifar100", "svhn"])
def test_auroc_equals_scikit_learn(outputs, name):
    detector = MapleDetector().fit(outputs["train"])
    ind, ood = detector.score(outputs["test"]), detector.score(outputs[name])
    truth = np.r_[np.zeros(len(ind)), np.ones(len(ood))]
    assert auroc(ind, ood) == pytest.approx(roc_auc_score(truth, np.r_[ind, ood]))


@pytest.mark.parametrize(("name", "figures"), [("softmax", (0.8586, 0.8961)), ("energy", (0.8795, 0.8846))])
def test_logit_scores_do_not_drift(outputs, name, figures):
    detector = create_detector(name).fit(outputs["test"])
    found = [auroc(detector.score(outputs["test"]), detector.score(outputs[ood])) for ood in ("cifar100", "svhn")]
    assert found == pytest.approx(figures, abs=2e-4)


@pytest.mark.parametrize(
    ("options", "aurocs", "md_accuracy", "tail_ece", "posterior_ece", "components"),
    [
        ({"norm_exponent": 0.0}, (0.7243, 0.9138), 0.9087, 0.4191, 0.0709, 22),
        ({"norm_exponent": 0.0, "covariance": "global"}, (0.6396, 0.9207), 0.9087, 0.1759, 0.0257, 22),
        ({}, (0.8497, 0.9841), 0.9163, 0.4314, 0.0724, 23),
    ],
)
def test_gaussians_do_not_drift(outputs, options, aurocs, md_accuracy, tail_ece, posterior_ece, components):
    detector = MapleDetector(**options).fit(outputs["train"])
    test, labels = outputs["test"], outputs["test"].labels
    found, posterior = detector.describe(test), detector.posterior(test)
    scores = [auroc(found.squared_distance, detector.score(outputs[ood])) for ood in ("cifar100", "svhn")]
    right = found.md_class_id == labels
    assert scores == pytest.approx(aurocs, abs=2e-4)
    assert accuracy(found.md_class_id, labels) == pytest.approx(md_accuracy, abs=2e-3)
    assert expected_calibration_error(found.typicality, right) == pytest.approx(tail_ece, abs=2e-3)
    assert expected_calibration_error(posterior.max(1), posterior.argmax(1) == labels) == pytest.approx(
        posterior_ece, abs=2e-3
    )
    assert found.degrees_of_freedom == components
