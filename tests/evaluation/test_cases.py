"""Evaluation on Gaussian blobs: every number of the results against scikit-learn, SciPy or the arrays themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics as oracle
from scipy import stats
from scipy.special import softmax
from sklearn.metrics import roc_auc_score

from blobs import CLUSTER_TO_CLASS, blobs, make_predictor, unknown
from maple.data.splits import load_splits
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.errors import DataError, NotFittedError, UsageError
from maple.evaluation.cases import evaluate
from maple.evaluation.results import ClassFlagged, Results
from maple.networks import create_backbone, embed
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.stats import metrics
from maple.types import Outputs
from torch_sets import NamedPictures, Pictures


def pooled(ind_scores, ood_scores):
    return np.r_[np.zeros(len(ind_scores)), np.ones(len(ood_scores))], np.r_[ind_scores, ood_scores]


def check_detection(detection, ind_scores, ood_scores):
    truth, scores = pooled(ind_scores, ood_scores)
    assert detection.auroc == pytest.approx(oracle.roc_auc_score(truth, scores))
    assert detection.aupr_out == pytest.approx(oracle.average_precision_score(truth, scores))
    assert detection.aupr_in == pytest.approx(oracle.average_precision_score(1 - truth, -scores))
    assert detection.fpr95_ood_positive == metrics.fpr95_ood_positive(ind_scores, ood_scores)
    assert detection.fpr95_ind_positive == metrics.fpr95_ind_positive(ind_scores, ood_scores)


def check_probabilities(classification, probabilities, labels):
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    assert classification.accuracy == pytest.approx(oracle.accuracy_score(labels, predicted))
    assert classification.nll == pytest.approx(oracle.log_loss(labels, probabilities), rel=1e-6)
    assert classification.brier == pytest.approx(((probabilities - np.eye(3)[labels]) ** 2).sum(1).mean(), rel=1e-6)
    assert classification.ece == pytest.approx(
        metrics.expected_calibration_error(confidence, predicted == labels, 15), abs=1e-6
    )
    for level in (0.5, 0.8, 0.9):
        kept = confidence > level
        assert classification.share_above[str(level)] == pytest.approx(kept.mean())
        assert classification.accuracy_above[str(level)] == pytest.approx((predicted == labels)[kept].mean())

    order = np.argsort(-confidence)
    for share, accuracy in zip(classification.kept[::20], classification.accuracy_kept[::20]):
        most_confident = order[: round(share * len(order))]
        assert accuracy == pytest.approx((predicted == labels)[most_confident].mean())


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


def test_methods_in_order(results):
    assert list(results.methods) == ["softmax", "energy", "softmax-scaled", "maple", "maple-paper"]


def test_softmax_is_summed_over_the_clusters_of_a_class(results, ind):
    by_cluster = softmax(ind.logits.astype(float), axis=1)
    summed = np.stack([by_cluster[:, c == CLUSTER_TO_CLASS].sum(axis=1) for c in range(3)], axis=1)
    check_probabilities(results.methods["softmax"].classification, summed, ind.labels)
    # Comparing cluster ids with class labels, as the published code does, would give another accuracy.
    confused = (by_cluster.argmax(axis=1) == ind.labels).mean()
    assert confused < results.methods["softmax"].classification.accuracy - 0.1


def test_maple_is_the_posterior_and_the_score(results, predictor, ind, ood):
    said = predictor.predict_outputs(ind)
    check_probabilities(results.methods["maple"].classification, said.probabilities, ind.labels)
    for name, outputs in ood.items():
        check_detection(results.methods["maple"].detection[name], said.score, predictor.predict_outputs(outputs).score)


def test_the_papers_reading_of_the_same_gaussians(results, predictor, ind, ood):
    paper = results.methods["maple-paper"]
    distances = predictor.detector.squared_distances(ind)  # (N, M)
    nearest = distances.min(axis=1)
    predicted = CLUSTER_TO_CLASS[distances.argmin(axis=1)]
    assert paper.classification.accuracy == results.md_accuracy == pytest.approx((predicted == ind.labels).mean())
    tails = stats.chi2.sf(nearest, results.n_components)
    assert paper.classification.ece == pytest.approx(
        metrics.expected_calibration_error(tails, predicted == ind.labels, 15), abs=1e-6
    )
    own = np.array([distances[i, label == CLUSTER_TO_CLASS].min() for i, label in enumerate(ind.labels)])
    assert paper.classification.nll == pytest.approx(-stats.chi2.logsf(own, results.n_components).mean())
    assert math.isnan(paper.classification.brier)  # tails do not sum to one
    for name, outputs in ood.items():
        check_detection(paper.detection[name], nearest, predictor.detector.squared_distances(outputs).min(axis=1))


def test_energy_only_detects(results, ind, ood):
    energy = create_detector("energy").fit(ind)
    assert results.methods["energy"].classification is None
    for name, outputs in ood.items():
        check_detection(results.methods["energy"].detection[name], energy.score(ind), energy.score(outputs))


def test_softmax_detection(results, ind, ood):
    detector = create_detector("softmax").fit(ind)
    for name, outputs in ood.items():
        check_detection(results.methods["softmax"].detection[name], detector.score(ind), detector.score(outputs))


def test_far_images_do_not_tie_in_the_papers_ranking(predictor, ind):
    # All of these have uncertainty exactly 1; the further ones must still rank higher.
    known = Outputs(ind.embeddings + 100, ind.logits, ind.labels, cluster_to_class=CLUSTER_TO_CLASS)
    further = Outputs(ind.embeddings + 200, ind.logits, cluster_to_class=CLUSTER_TO_CLASS)
    assert (predictor.predict_outputs(known).uncertainty == 1).all()
    outcome = evaluate(predictor, known, {"further": further})
    paper = outcome.methods["maple-paper"]
    assert paper.detection["further"].auroc == 1.0
    assert math.isfinite(paper.classification.nll)
    assert paper.classification.nll > 1000
    assert math.isfinite(outcome.methods["maple"].classification.nll)


def test_every_score_is_judged(results, predictor, ind, ood):
    assert set(results.scores) == set(predictor.detector.describe(ind).available_scores) >= {"distance", "energy"}
    for score, by_set in results.scores.items():
        for name, outputs in ood.items():
            known, unknown = (predictor.detector.describe(part).score_named(score) for part in (ind, outputs))
            truth = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
            assert by_set[name] == pytest.approx(roc_auc_score(truth, np.r_[known, unknown]))


def test_scaled_softmax_is_softmax_at_temperature_one(results, predictor, ind, ood):
    assert predictor.probability.softmax_temperature == 1
    plain, scaled = (results.methods[name] for name in ("softmax", "softmax-scaled"))
    assert scaled.classification.nll == pytest.approx(plain.classification.nll)
    assert scaled.detection["near"].auroc == pytest.approx(plain.detection["near"].auroc)
    probability = replace(predictor.probability, softmax_temperature=3.0)
    warm = Predictor(predictor.backbone, predictor.detector, predictor.class_names, size=8, probability=probability)
    warmed = evaluate(warm, ind, ood).methods["softmax-scaled"].classification
    assert warmed.accuracy == plain.classification.accuracy and warmed.nll != pytest.approx(plain.classification.nll)


def test_the_threshold(results, predictor, ind, ood):
    assert results.false_alarm == predictor.predict_outputs(ind).is_ood.mean()
    assert results.false_alarm == pytest.approx(0.1, abs=0.04)
    assert results.threshold == predictor.threshold
    assert results.false_alarm == (predictor.predict_outputs(ind).score > results.threshold).mean()
    for name, outputs in ood.items():
        assert results.methods["maple"].detection[name].flagged == predictor.predict_outputs(outputs).is_ood.mean()
        assert math.isnan(results.methods["energy"].detection[name].flagged)
    assert results.methods["maple"].detection["far"].flagged > 0.99


def test_unknown_images_are_counted_by_their_classes(predictor, ind, ood):
    labels = np.arange(len(ood["far"])) % 3 - 1  # some have no label
    labelled = replace(ood["far"], labels=labels)
    flagged = predictor.predict_outputs(ood["far"]).is_ood
    found = evaluate(predictor, ind, {"far": labelled}, ood_classes={"far": ("cup", "pen", "never seen")})
    assert found.unknown_classes == {
        "far": {
            "cup": ClassFlagged(int((labels == 0).sum()), float(flagged[labels == 0].mean())),
            "pen": ClassFlagged(int((labels == 1).sum()), float(flagged[labels == 1].mean())),
        }
    }
    assert Results.from_json(found.to_json()).unknown_classes == found.unknown_classes
    assert evaluate(make_predictor(calibrated=False), ind, ood, ood_classes={"far": ("cup",)}).unknown_classes == {}


def test_without_calibration_there_is_no_false_alarm_rate(ind, ood):
    outcome = evaluate(make_predictor(calibrated=False), ind, ood)
    assert math.isnan(outcome.false_alarm)
    assert math.isnan(outcome.threshold)
    assert math.isnan(outcome.methods["maple"].detection["far"].flagged)


def test_gaussian_test_and_counts(results, predictor, ind):
    nearest = np.sort(predictor.detector.squared_distances(ind).min(axis=1))
    quantiles = stats.chi2.ppf((np.arange(len(ind)) + 0.5) / len(ind), 6)
    assert results.n_components == 6
    assert results.n_clusters == 4
    assert results.gaussian_error == pytest.approx(np.abs(nearest - quantiles).mean())
    assert results.gaussian_error < 1
    assert len(results.qq_theoretical) == len(results.qq_observed) <= 200
    assert results.n_ind == 600
    assert results.n_ood == {"near": 300, "far": 300}
    assert results.ood_names == ["near", "far"]


def test_confusion_matrix(results, predictor, ind):
    said = predictor.predict_outputs(ind)
    np.testing.assert_array_equal(results.confusion, oracle.confusion_matrix(ind.labels, said.class_id))
    np.testing.assert_allclose(results.per_class_accuracy, oracle.recall_score(ind.labels, said.class_id, average=None))


def test_curves_are_thin_and_true(predictor):
    large = evaluate(predictor, blobs(5, 3000), {"near": unknown(6, 1.5, 2000)})
    for method in large.methods.values():
        detection = method.detection["near"]
        assert 100 < len(detection.roc_ind) == len(detection.roc_ood) <= 200
        assert (detection.roc_ind[0], detection.roc_ood[0]) == (0, 0)
        assert (detection.roc_ind[-1], detection.roc_ood[-1]) == (1, 1)
        assert np.trapezoid(detection.roc_ood, detection.roc_ind) == pytest.approx(detection.auroc, abs=0.01)
        histogram = method.histogram
        assert len(histogram.edges) == len(histogram.ind) + 1 == 51
        assert sum(histogram.ind) == 3000  # none falls outside, however extreme
        assert sum(histogram.ood["near"]) == 2000
        assert (np.diff(histogram.edges) > 0).all()
    for name in ("softmax", "maple", "maple-paper"):
        curve = large.methods[name].classification.reliability
        assert len(curve.count) == len(curve.accuracy) == len(curve.confidence) == len(curve.edges) - 1 == 15
        assert sum(curve.count) == 3000


def test_one_extreme_score_does_not_squeeze_the_histogram(predictor, ind):
    embeddings = ind.embeddings.copy()
    embeddings[0] *= 1e4
    extreme = Outputs(embeddings, ind.logits, ind.labels, cluster_to_class=CLUSTER_TO_CLASS)
    histogram = evaluate(predictor, extreme).methods["maple"].histogram
    assert sum(histogram.ind) == 600
    assert np.count_nonzero(histogram.ind) > 20


def test_order_of_images_does_not_matter(results, predictor, ind, ood, rng):
    order = rng.permutation(len(ind))
    shuffled = evaluate(predictor, ind[order], ood)
    for before, after in zip(results.rows(), shuffled.rows(), strict=True):
        assert after == pytest.approx(before, nan_ok=True)


def test_no_ood_set(predictor, ind):
    outcome = evaluate(predictor, ind)
    assert outcome.n_ood == {}
    assert outcome.methods["maple"].detection == {}


def test_a_fitted_detector_is_a_method_of_its_own(predictor, ind, ood):
    energy = create_detector("energy").fit(ind)
    learned = energy.cluster_to_class_
    assert list(evaluate(predictor, ind, ood, detectors=[energy]).methods) == ["energy", "maple", "maple-paper"]
    assert energy.cluster_to_class_ is learned  # judged as it is, not fitted again


def test_baselines_without_logits_are_left_out(predictor, ind, ood):
    def bare(outputs: Outputs) -> Outputs:
        return Outputs(outputs.embeddings, labels=outputs.labels)

    outcome = evaluate(predictor, bare(ind), {name: bare(outputs) for name, outputs in ood.items()})
    assert list(outcome.methods) == ["maple", "maple-paper"]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_labels_are_needed(predictor, ind):
    with pytest.raises(DataError, match="labels"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, cluster_to_class=CLUSTER_TO_CLASS))


def test_unknown_labels_are_counted(predictor, ind):
    labels = ind.labels.copy()
    labels[:3] = (-1, 3, -1)
    with pytest.raises(DataError, match="3 of 600"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, labels, cluster_to_class=CLUSTER_TO_CLASS))


def test_empty_sets_are_named(predictor, ind, ood):
    with pytest.raises(DataError, match="svhn"):
        evaluate(predictor, ind, {"svhn": ood["near"][:0]})
    with pytest.raises(DataError):
        evaluate(predictor, ind[:0])


def test_an_unknown_or_unfitted_detector_is_refused(predictor, ind):
    with pytest.raises(UsageError, match="energy"):
        evaluate(predictor, ind, detectors=["enregy"])
    with pytest.raises(NotFittedError):
        evaluate(predictor, ind, detectors=[MapleDetector()])


def test_logits_of_clusters_need_their_classes(predictor, ind):
    with pytest.raises(UsageError, match="cluster_to_class"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, ind.labels), detectors=["softmax"])


def test_images_and_torch_data_are_evaluated_like_their_outputs():
    splits = load_splits("digits")
    backbone = create_backbone("resnet9", 10)
    predictor = fit_predictor(backbone, splits.train, splits.validation, splits.calibration)
    ind, ood = splits.test, splits.validation.subset(np.arange(40))
    outputs = evaluate(predictor, embed(backbone, ind), {"some": embed(backbone, ood)})
    for given in (ind, ood), (NamedPictures(ind), Pictures(ood)):
        assert repr(evaluate(predictor, given[0], {"some": given[1]}).methods) == repr(outputs.methods)  # NaN included
