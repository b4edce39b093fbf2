"""Evaluation on Gaussian blobs: every number of the results against scikit-learn, SciPy or the arrays themselves."""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as oracle
from rich.console import Console
from scipy import stats
from scipy.special import softmax
from sklearn.metrics import roc_auc_score

from maple.decisions.probability import Probability
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.errors import DataError, NotFittedError, RunError, UsageError
from maple.evaluation.evaluate import ClassFlagged, Results, evaluate, format_table, measure_latency
from maple.options import DecisionOptions
from maple.prediction.predictor import Predictor
from maple.stats import metrics
from maple.types import Outputs

# Class 1 has two clusters, and its columns are not next to each other: clusters are not classes.
CLUSTER_TO_CLASS = np.array([0, 1, 2, 1])
CENTRES = 4.0 * np.array([[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]])
NAMES = ("ash", "birch", "cedar")


class NoNetwork:
    """A backbone that must not be touched."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"evaluation reached for the backbone's {name}")


def blobs(seed: int, n: int = 600) -> Outputs:
    """Images of four Gaussian clusters in three classes, with noisy logits."""
    rng = np.random.default_rng(seed)
    cluster_ids = rng.integers(0, 4, n)
    embeddings = CENTRES[cluster_ids] + rng.normal(size=(n, 6))
    logits = embeddings[:, :4] + rng.normal(0, 1.5, size=(n, 4))
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        CLUSTER_TO_CLASS[cluster_ids],
        cluster_ids,
        CLUSTER_TO_CLASS,
    )


def unknown(seed: int, shift: float, n: int = 300) -> Outputs:
    """Images of none of the clusters."""
    rng = np.random.default_rng(seed)
    embeddings = shift * np.array([0, 0, 0, 0, 1.0, 1.0]) + rng.normal(size=(n, 6))
    logits = embeddings[:, :4] + rng.normal(0, 1.5, size=(n, 4))
    return Outputs(embeddings.astype(np.float32), logits.astype(np.float32), cluster_to_class=CLUSTER_TO_CLASS)


def make_predictor(calibrated: bool = True) -> Predictor:
    detector = MapleDetector(norm_exponent=0.0, explained_variance=1.0).fit(blobs(0, 4000))
    options = DecisionOptions(false_alarm=0.1)
    predictor = Predictor(NoNetwork(), detector, NAMES, size=8, probability=Probability(1.3), options=options)
    return predictor.calibrate(blobs(1, 1000)) if calibrated else predictor


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor()


@pytest.fixture(scope="module")
def ind() -> Outputs:
    return blobs(2)


@pytest.fixture(scope="module")
def ood() -> dict[str, Outputs]:
    return {"near": unknown(3, 1.5), "far": unknown(4, 8.0)}


@pytest.fixture(scope="module")
def results(predictor, ind, ood) -> Results:
    return evaluate(predictor, ind, ood, latency_ms=1.5, seed=7, provenance={"command": "maple evaluate"})


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
    warm = Predictor(NoNetwork(), predictor.detector, NAMES, size=8, probability=probability)
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
    assert "flags" not in shown(format_table(outcome))


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
    assert "AUROC" not in shown(format_table(outcome))


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
    with pytest.raises(DataError, match="no labels"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, cluster_to_class=CLUSTER_TO_CLASS))


def test_unknown_labels_are_counted(predictor, ind):
    labels = ind.labels.copy()
    labels[:3] = (-1, 3, -1)
    with pytest.raises(DataError, match="3 of 600 in-distribution images"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, labels, cluster_to_class=CLUSTER_TO_CLASS))


def test_empty_sets_are_named(predictor, ind, ood):
    with pytest.raises(DataError, match="'svhn' has no images"):
        evaluate(predictor, ind, {"svhn": ood["near"][:0]})
    with pytest.raises(DataError, match="no in-distribution images"):
        evaluate(predictor, ind[:0])


def test_an_unknown_or_unfitted_detector_is_refused(predictor, ind):
    with pytest.raises(UsageError, match="energy"):
        evaluate(predictor, ind, detectors=["enregy"])
    with pytest.raises(NotFittedError):
        evaluate(predictor, ind, detectors=[MapleDetector()])


def test_logits_of_clusters_need_their_classes(predictor, ind):
    with pytest.raises(UsageError, match="cluster_to_class"):
        evaluate(predictor, Outputs(ind.embeddings, ind.logits, ind.labels), detectors=["softmax"])


# ---------------------------------------------------------------------------------------------------------------------
# Files and tables


def shown(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def strict(text: str):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_comes_back_the_same(results):
    text = results.to_json()
    again = Results.from_json(text)
    assert again.to_json() == text
    np.testing.assert_equal(again.rows(), results.rows())
    assert math.isnan(again.methods["energy"].detection["far"].flagged)
    assert again.class_names == list(NAMES)


def test_json_is_strict_and_readable(results):
    values = strict(results.to_json())
    assert values["methods"]["maple-paper"]["classification"]["brier"] is None
    assert values["methods"]["energy"]["classification"] is None
    assert len(results.to_json().splitlines()) < 600  # arrays of numbers stay on one line
    assert len(results.to_json()) < 300_000


def test_infinities_survive_the_file(results):
    odd = replace(results, gaussian_error=math.inf, class_names=["a [\n b", "c  d]", 'e "f"'])
    assert strict(odd.to_json())["gaussian_error"] == "inf"
    again = Results.from_json(odd.to_json())
    assert again.gaussian_error == math.inf
    assert again.class_names == odd.class_names


def test_provenance(results, predictor, ind):
    assert results.provenance["seed"] == 7
    assert results.provenance["command"] == "maple evaluate"
    assert {"python", "maple", "numpy", "torch"} <= set(results.provenance["versions"])
    given = {"config": {"folder": Path("runs/a"), "shares": (0.5, np.float32(0.5)), "n": np.int64(3), "x": np.nan}}
    kept = strict(evaluate(predictor, ind, provenance=given).to_json())["provenance"]["config"]
    assert kept == {"folder": "runs/a", "shares": [0.5, 0.5], "n": 3, "x": None}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"methods": {}}', b"\xff\xfe"])
def test_damaged_results_are_refused(text):
    with pytest.raises(RunError, match="evaluate the run again"):
        Results.from_json(text)


def test_results_of_a_newer_format_are_refused(results):
    text = results.to_json().replace('"format_version": 2', '"format_version": 3')
    with pytest.raises(RunError, match="newer"):
        Results.from_json(text)


def test_rows_hold_every_scalar(results):
    rows = {row["method"]: row for row in results.rows()}
    assert rows["maple"]["auroc/far"] == results.methods["maple"].detection["far"].auroc
    assert rows["maple"]["accuracy_above/0.9"] == results.methods["maple"].classification.accuracy_above["0.9"]
    assert "accuracy" not in rows["energy"]
    assert not any(isinstance(value, list) for row in rows.values() for value in row.values())


def test_table_shows_methods_sets_and_false_alarms(results):
    text = shown(format_table(results))
    for part in ("softmax", "energy", "maple-paper", "AUROC", "near", "far", "accuracy", "ECE", "NLL", "false alarms"):
        assert part in text
    assert f"{results.methods['maple'].detection['near'].auroc:.3f}" in text
    assert f"{100 * results.false_alarm:.1f} %" in text
    assert "1.500 ms" in text
    assert "nan" not in text


def test_table_of_several_runs_shows_the_spread(results, predictor, ood):
    other = evaluate(predictor, blobs(9), ood)
    text = shown(format_table(results, other))
    pair = [run.methods["softmax"].classification.accuracy for run in (results, other)]
    assert metrics.format_spread(pair) in text
    assert "over 2 runs" in text
    with pytest.raises(UsageError, match="different methods or OOD sets"):
        format_table(results, evaluate(predictor, blobs(9)))


def test_names_are_not_markup(predictor, ind, ood):
    assert "[red]moss[/]" in shown(format_table(evaluate(predictor, ind, {"[red]moss[/]": ood["near"]})))


# ---------------------------------------------------------------------------------------------------------------------
# Latency


def test_latency_is_per_image_and_warmed_up(monkeypatch):
    clock = iter([0.0, 0.010, 1.0, 1.020, 2.0, 2.030])  # 10, 20 and 30 ms
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls = []
    latency = measure_latency(lambda batch: calls.append(len(batch)), np.zeros((4, 3)), repeats=3)
    assert calls == [4] * 4
    assert latency.median_ms == pytest.approx(5.0)
    assert latency.spread_ms == pytest.approx(2.5)


def test_latency_of_nothing_is_refused():
    with pytest.raises(DataError, match="empty"):
        measure_latency(len, [])
    with pytest.raises(UsageError, match="repeats is 0"):
        measure_latency(len, [1], repeats=0)
