"""Every metric against an oracle: scikit-learn, SciPy, or a loop that spells the definition out."""

from __future__ import annotations

import math
from inspect import signature

import numpy as np
import pytest
import sklearn.metrics as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from maple.errors import DataError, UsageError
from maple.networks._torchvision import import_torchvision
from maple.stats import metrics

DETECTION = [
    metrics.auroc,
    metrics.aupr_out,
    metrics.aupr_in,
    metrics.fpr95_ood_positive,
    metrics.fpr95_ind_positive,
]

FUNCTIONS_WITH_BINS = [metrics.reliability_curve, metrics.expected_calibration_error, metrics.calibration_floor]

# Small integers make ties likely; the exact arithmetic of integers keeps transforms monotone.
scores = st.lists(st.integers(-20, 20), min_size=1, max_size=60).map(lambda values: np.array(values, dtype=float))


@pytest.fixture
def answers(rng):
    """Probabilities (N, C), labels, and what follows from them."""
    labels = rng.integers(0, 4, 500)
    logits = rng.normal(size=(500, 4)) + 1.5 * np.eye(4)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    confidence, predicted = probabilities.max(axis=1), probabilities.argmax(axis=1)
    return probabilities, labels, predicted, confidence, predicted == labels


def pooled(ind, ood):
    """The binary problem as scikit-learn sees it, OOD positive."""
    return np.r_[np.zeros(len(ind)), np.ones(len(ood))], np.r_[ind, ood]


# ---------------------------------------------------------------------------------------------------------------------
# Classification


def test_accuracy_and_confusion_matrix(answers):
    _, labels, predicted, _, correct = answers
    assert metrics.accuracy(predicted, labels) == pytest.approx(oracle.accuracy_score(labels, predicted))
    matrix = metrics.confusion_matrix(labels, predicted, 4)
    np.testing.assert_array_equal(matrix, oracle.confusion_matrix(labels, predicted))
    assert matrix.sum() == 500
    assert np.trace(matrix) == correct.sum()
    np.testing.assert_allclose(metrics.per_class_accuracy(matrix), oracle.recall_score(labels, predicted, average=None))


def test_confusion_matrix_keeps_absent_classes():
    matrix = metrics.confusion_matrix([0, 2], [0, 0], 4)
    assert matrix.shape == (4, 4)
    np.testing.assert_array_equal(metrics.per_class_accuracy(matrix), [1.0, np.nan, 0.0, np.nan])


def loop_ece(confidence, correct, bins):
    """The definition, one bin after the other: (b / B, (b + 1) / B], the first with 0."""
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [i for i, c in enumerate(confidence) if low < c <= high or (b == 0 and c == 0)]
        if inside:
            accuracy = sum(bool(correct[i]) for i in inside) / len(inside)
            mean = sum(confidence[i] for i in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(accuracy - mean)
    return total


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 100])
def test_ece_equals_the_loop(answers, bins):
    _, _, _, confidence, correct = answers
    assert metrics.expected_calibration_error(confidence, correct, bins) == pytest.approx(
        loop_ece(confidence, correct, bins)
    )


def test_ece_equals_torchmetrics(answers):
    torch = pytest.importorskip("torch")
    import_torchvision()  # which torchmetrics imports
    functional = pytest.importorskip("torchmetrics.functional.classification")
    probabilities, labels, _, confidence, correct = answers
    theirs = functional.multiclass_calibration_error(
        torch.tensor(probabilities), torch.tensor(labels), num_classes=4, n_bins=15
    )
    assert metrics.expected_calibration_error(confidence, correct) == pytest.approx(float(theirs), abs=1e-6)


def test_ece_has_exactly_as_many_bins_as_asked_for():
    # One image in the middle of each of 15 bins: with 14 bins (linspace(num=bins)) two would share one.
    curve = metrics.reliability_curve((np.arange(15) + 0.5) / 15, np.ones(15), bins=15)
    np.testing.assert_array_equal(curve.count, np.ones(15))
    np.testing.assert_allclose(curve.confidence, (np.arange(15) + 0.5) / 15)
    assert len(curve.edges) == 16


def test_bins_are_right_closed_at_their_own_edges():
    for bins in (1, 2, 3, 7, 10, 15, 49):
        edges = np.linspace(0, 1, bins + 1)
        curve = metrics.reliability_curve(edges, np.ones(bins + 1), bins)
        np.testing.assert_array_equal(curve.count, [2] + [1] * (bins - 1))  # 0 joins the first bin


def test_empty_bins_are_nan_and_do_not_count():
    curve = metrics.reliability_curve([0.95, 0.99], [1, 0], bins=10)
    assert np.isnan(curve.accuracy[:9]).all()
    assert np.isnan(curve.confidence[:9]).all()
    assert metrics.expected_calibration_error([0.95, 0.99], [1, 0], bins=10) == pytest.approx(0.47)


def test_ece_of_uniform_p_values_cannot_be_small(rng):
    # A p-value is uniform when all is well: read as a confidence for always-right classes its ECE is one half.
    assert metrics.expected_calibration_error(rng.random(50_000), np.ones(50_000)) == pytest.approx(0.5, abs=0.01)


def test_calibrated_confidence_has_small_ece(rng):
    confidence = rng.random(100_000)
    correct = rng.random(100_000) < confidence
    assert metrics.expected_calibration_error(confidence, correct) < 0.01


@pytest.mark.parametrize("n", [50, 400, 3000])
@pytest.mark.parametrize("p", [0.3, 0.8, 0.97])
def test_calibration_floor_of_one_bin_is_the_mean_deviation_of_a_binomial(n, p):
    floor = metrics.calibration_floor(np.full(n, p), draws=3000)
    right = np.arange(n + 1)
    exact = float(stats.binom.pmf(right, n, p) @ np.abs(right / n - p))
    # One draw deviates by at most as much as a binomial does; the floor is a mean of 3000.
    assert floor == pytest.approx(exact, abs=4 * math.sqrt(p * (1 - p) / n / 3000))
    if n * p * (1 - p) > 10:
        assert exact == pytest.approx(math.sqrt(2 * p * (1 - p) / (math.pi * n)), rel=0.01)


@pytest.mark.parametrize("bins", [5, 15])
def test_calibration_floor_equals_a_simulation(rng, bins):
    confidence = rng.beta(3, 1, 120)
    simulated = [loop_ece(confidence, rng.random(120) < confidence, bins) for _ in range(600)]
    error = np.std(simulated) * math.sqrt(1 / 600 + 1 / 2000)
    assert metrics.calibration_floor(confidence, bins, draws=2000) == pytest.approx(np.mean(simulated), abs=4 * error)


def test_calibration_floor_knows_no_order_and_falls_with_the_root_of_the_images(rng):
    confidence = rng.beta(3, 1, 500)
    floor = metrics.calibration_floor(confidence, draws=500)
    assert metrics.calibration_floor(rng.permutation(confidence), draws=500) == floor
    assert metrics.calibration_floor(np.tile(confidence, 4), draws=500) == pytest.approx(floor / 2, rel=0.1)
    assert metrics.calibration_floor([1.0, 1.0, 0.0]) == 0.0  # certainty leaves nothing to chance


def test_calibration_error_and_its_floor_have_the_same_bins():
    bins = [signature(each).parameters["bins"].default for each in FUNCTIONS_WITH_BINS]
    assert bins == [15] * len(bins)  # as most publications


def test_confidence_a_rounding_error_above_one_is_clipped_and_a_logit_refused():
    assert metrics.expected_calibration_error([1.0000001], [1]) == pytest.approx(0)
    with pytest.raises(DataError, match="confidence"):
        metrics.expected_calibration_error([0.3, 1.2, -4.0], [1, 0, 1])


def test_likelihood_and_brier_equal_sklearn(answers):
    probabilities, labels, *_ = answers
    expected = oracle.log_loss(labels, probabilities)
    assert metrics.negative_log_likelihood(probabilities, labels) == pytest.approx(expected)
    assert metrics.negative_log_likelihood(np.log(probabilities), labels, log=True) == pytest.approx(expected)
    one_hot = np.eye(4)[labels]
    assert metrics.brier_score(probabilities, labels) == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean())
    assert metrics.brier_score(probabilities, labels) == pytest.approx(
        oracle.brier_score_loss(labels, probabilities, scale_by_half=False, labels=range(4))
    )


def test_binary_brier_is_twice_the_one_column_score(rng):
    p, labels = rng.random(200), rng.integers(0, 2, 200)
    table = np.stack([1 - p, p], axis=1)
    assert metrics.brier_score(table, labels) == pytest.approx(2 * oracle.brier_score_loss(labels, p))


def test_likelihood_of_tails_stays_finite_far_away():
    # The chi-square tail itself underflows; its logarithm does not, and rows need not be normalised.
    log_tails = np.array([[-5000.0, -0.3], [-0.1, -90_000.0]])
    assert metrics.negative_log_likelihood(log_tails, [0, 0], log=True) == pytest.approx(2500.05)
    assert metrics.negative_log_likelihood(np.exp(log_tails), [0, 0]) == math.inf


def test_likelihood_of_certainty_is_plain_zero():
    assert str(metrics.negative_log_likelihood([[1.0, 0.0]], [0])) == "0.0"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("labels", [[0], [0, 1, 1]])
def test_likelihood_takes_one_label_per_row(log, labels):
    table = np.full((2, 2), 0.5)
    with pytest.raises(UsageError, match="labels"):
        metrics.negative_log_likelihood(np.log(table) if log else table, labels, log=log)


def test_likelihood_refuses_logits_for_log_probabilities():
    with pytest.raises(DataError, match="log-probabilities"):
        metrics.negative_log_likelihood([[3.0, -1.0], [-1.0, -2.0]], [0, 0], log=True)


def test_accuracy_above_is_strict_and_says_how_much_is_kept():
    confidence, correct = [0.5, 0.6, 0.9, 0.95], [0, 1, 0, 1]
    assert metrics.accuracy_above(confidence, correct, 0.5) == (pytest.approx(2 / 3), 0.75)
    assert metrics.accuracy_above(confidence, correct, 0.9) == (1.0, 0.25)
    accuracy, share = metrics.accuracy_above(confidence, correct, 0.99)
    assert math.isnan(accuracy)
    assert share == 0.0


def test_aurc_equals_the_loop(answers):
    *_, confidence, correct = answers
    order = np.argsort(-confidence)
    risks = [1 - correct[order[:k]].mean() for k in range(1, len(order) + 1)]
    assert metrics.aurc(confidence, correct) == pytest.approx(np.mean(risks))


def test_aurc_of_ties_is_the_mean_over_orders(rng):
    confidence, correct = np.array([0.9, 0.5, 0.5, 0.5, 0.2]), np.array([1, 0, 1, 1, 0])
    values = []
    for _ in range(4000):
        order = np.lexsort((rng.random(5), -confidence))
        values.append(np.mean(np.cumsum(1 - correct[order]) / np.arange(1, 6)))
    assert metrics.aurc(confidence, correct) == pytest.approx(np.mean(values), abs=0.005)


def test_aurc_of_constant_confidence_is_the_error_rate():
    assert metrics.aurc(np.full(8, 0.3), [1, 1, 0, 1, 1, 1, 0, 1]) == pytest.approx(0.25)


def test_a_better_ranking_has_a_smaller_aurc(answers):
    *_, confidence, correct = answers
    best, worst = metrics.aurc(correct, correct), metrics.aurc(~correct, correct)
    assert best < metrics.aurc(confidence, correct) < worst


@given(st.lists(st.tuples(st.integers(0, 10), st.booleans()), min_size=1, max_size=40), st.randoms())
def test_order_of_images_never_matters(pairs, random):
    shuffled = list(pairs)
    random.shuffle(shuffled)

    def values(rows):
        confidence, correct = np.array([c / 10 for c, _ in rows]), np.array([r for _, r in rows])
        return metrics.aurc(confidence, correct), metrics.expected_calibration_error(confidence, correct)

    assert values(pairs) == pytest.approx(values(shuffled))


# ---------------------------------------------------------------------------------------------------------------------
# Detection


@given(scores, scores)
def test_detection_equals_sklearn(ind, ood):
    truth, pool = pooled(ind, ood)
    assert metrics.auroc(ind, ood) == pytest.approx(oracle.roc_auc_score(truth, pool))
    assert metrics.aupr_out(ind, ood) == pytest.approx(oracle.average_precision_score(truth, pool))
    assert metrics.aupr_in(ind, ood) == pytest.approx(oracle.average_precision_score(1 - truth, -pool))


@given(scores, scores)
def test_auroc_equals_the_double_loop(ind, ood):
    wins = sum((o > i) + 0.5 * (o == i) for o in ood for i in ind)
    assert metrics.auroc(ind, ood) == pytest.approx(wins / (len(ind) * len(ood)))


@given(scores, scores)
def test_roc_curve_equals_sklearn(ind, ood):
    truth, pool = pooled(ind, ood)
    expected = oracle.roc_curve(truth, pool, drop_intermediate=False)
    for ours, theirs in zip(metrics.roc_curve(ind, ood), expected, strict=True):
        np.testing.assert_allclose(ours, theirs)


@given(scores, scores)
def test_area_under_the_roc_points_is_the_auroc(ind, ood):
    false_positive, true_positive, _ = metrics.roc_curve(ind, ood)
    assert np.trapezoid(true_positive, false_positive) == pytest.approx(metrics.auroc(ind, ood))


@given(scores, scores)
def test_fpr95_equals_its_definition_over_all_thresholds(ind, ood):
    false_positive, true_positive, _ = oracle.roc_curve(*pooled(ind, ood), drop_intermediate=False)
    expected = false_positive[true_positive >= 0.95 - 1e-12].min()
    assert metrics.fpr95_ood_positive(ind, ood) == pytest.approx(expected)
    accepted = [t for t in ind if (ind <= t).mean() >= 0.95 - 1e-12]
    assert metrics.fpr95_ind_positive(ind, ood) == pytest.approx((ood <= min(accepted)).mean())


def test_the_two_fpr95_conventions_differ_and_are_not_swapped():
    ind = np.arange(100.0)  # 0..99
    ood = np.r_[np.full(10, 5.0), np.full(90, 200.0)]  # a tenth of OOD hides among IND
    # 95 % of OOD is caught only from 5 upwards, which flags 95 of 100 IND images.
    assert metrics.fpr95_ood_positive(ind, ood) == 0.95
    # 95 % of IND is accepted up to 94, and with it the hidden tenth of OOD.
    assert metrics.fpr95_ind_positive(ind, ood) == 0.10


@pytest.mark.parametrize("n", [20, 40, 60, 100, 180, 220, 1000, 10_000])
def test_fpr95_takes_no_image_too_many(n):
    # The threshold leaves out exactly 5 % of OOD (scores 1..n), so IND just below it stays unflagged.
    ood = np.arange(1.0, n + 1)
    left_out = n // 20
    assert metrics.fpr95_ood_positive([left_out + 0.5], ood) == 0.0
    assert metrics.fpr95_ood_positive([left_out + 1.0], ood) == 1.0


def test_other_levels_take_no_image_too_many_either():
    # 0.55 * 100 is 55.00000000000001 in floating point; 55 of 100 are enough all the same.
    assert metrics.fpr95_ood_positive([45.5], np.arange(1.0, 101.0), level=0.55) == 0.0
    assert metrics.fpr95_ind_positive(np.arange(1.0, 101.0), [55.5], level=0.55) == 0.0


@pytest.mark.parametrize("metric", DETECTION)
@settings(max_examples=40)
@given(scores, scores)
def test_monotone_transforms_change_nothing(metric, ind, ood):
    for transform in (lambda x: 3 * x + 7, lambda x: x**3, lambda x: np.exp(x / 4)):
        assert metric(transform(ind), transform(ood)) == pytest.approx(metric(ind, ood))


@given(scores, scores)
def test_swapping_the_sets(ind, ood):
    assert metrics.auroc(ind, ood) + metrics.auroc(ood, ind) == pytest.approx(1)
    assert metrics.auroc(-ood, -ind) == pytest.approx(metrics.auroc(ind, ood))
    assert metrics.aupr_in(ind, ood) == pytest.approx(metrics.aupr_out(-ood, -ind))
    assert metrics.fpr95_ind_positive(ind, ood) == pytest.approx(metrics.fpr95_ood_positive(-ood, -ind))


def test_all_tied_means_chance():
    ind, ood = np.ones(30), np.ones(10)
    assert metrics.auroc(ind, ood) == 0.5
    assert metrics.aupr_out(ind, ood) == pytest.approx(0.25)  # the share of OOD
    assert metrics.aupr_in(ind, ood) == pytest.approx(0.75)
    assert metrics.fpr95_ood_positive(ind, ood) == 1.0
    assert metrics.fpr95_ind_positive(ind, ood) == 1.0


def test_perfect_and_reversed_separation():
    assert [metric([0, 1], [2, 3]) for metric in DETECTION] == [1, 1, 1, 0, 0]
    assert metrics.auroc([2, 3], [0, 1]) == 0


def test_underflowed_tails_lose_what_squared_distances_keep(rng):
    # Why scores are distances: 1 - cdf is exactly 0 for every far image, so that near-OOD and far IND tie.
    ind, ood = rng.uniform(200, 300, 500), rng.uniform(280, 400, 500)
    tails = [1 - stats.chi2.cdf(d2, 11) for d2 in (ind, ood)]
    assert metrics.auroc(-tails[0], -tails[1]) == pytest.approx(0.5, abs=0.06)
    assert metrics.auroc(ind, ood) > 0.95
    logs = [stats.chi2.logsf(d2, 11) for d2 in (ind, ood)]
    assert metrics.auroc(-logs[0], -logs[1]) == pytest.approx(metrics.auroc(ind, ood))


def test_infinite_scores_rank_last():
    assert metrics.auroc([0.0, 1.0], [np.inf, np.inf]) == 1.0
    assert metrics.auroc([0.0, np.inf], [np.inf, 1.0]) == pytest.approx(0.625)


def test_a_million_scores(rng):
    """Comparing all pairs would need 10^12 operations and as many bytes."""
    ind, ood = rng.normal(size=1_000_000), rng.normal(1, 1, size=1_000_000)
    assert metrics.auroc(ind, ood) == pytest.approx(stats.norm.cdf(1 / np.sqrt(2)), abs=0.002)


# ---------------------------------------------------------------------------------------------------------------------
# Several runs, input


def test_mean_and_deviation_over_runs():
    values = [0.91, 0.93, 0.95, 0.90]
    assert metrics.mean_and_deviation(values) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    mean, deviation = metrics.mean_and_deviation([0.5])
    assert mean == 0.5
    assert math.isnan(deviation)


CALLS = {
    "accuracy": lambda v: metrics.accuracy(v, v),
    "confusion_matrix": lambda v: metrics.confusion_matrix(v, v, 3),
    "ece": lambda v: metrics.expected_calibration_error(v, v),
    "nll": lambda v: metrics.negative_log_likelihood(np.atleast_2d(v), [0] * len(np.atleast_2d(v))),
    "brier": lambda v: metrics.brier_score(np.atleast_2d(v), [0] * len(np.atleast_2d(v))),
    "accuracy_above": lambda v: metrics.accuracy_above(v, v, 0.5),
    "aurc": lambda v: metrics.aurc(v, v),
    "auroc": lambda v: metrics.auroc(v, v),
    "roc_curve": lambda v: metrics.roc_curve(v, v),
    "aupr_out": lambda v: metrics.aupr_out(v, v),
    "aupr_in": lambda v: metrics.aupr_in(v, v),
    "fpr95_ood_positive": lambda v: metrics.fpr95_ood_positive(v, v),
    "fpr95_ind_positive": lambda v: metrics.fpr95_ind_positive(v, v),
    "mean_and_deviation": lambda v: metrics.mean_and_deviation(v),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_empty_input_is_refused(call):
    with pytest.raises(DataError, match="empty"):
        call(np.array([]))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nan_is_refused_with_its_count(call):
    with pytest.raises(DataError, match="2 NaN"):
        call(np.array([1.0, np.nan, np.nan]))


def test_one_sided_emptiness_names_the_side():
    with pytest.raises(DataError, match="ood_scores"):
        metrics.auroc([1.0], [])


def test_lengths_and_ids_are_checked():
    with pytest.raises(UsageError, match="predicted 2, labels 3"):
        metrics.accuracy([0, 1], [0, 1, 2])
    with pytest.raises(DataError, match="labels"):
        metrics.brier_score([[0.5, 0.5]] * 3, [-1, 0, 2])
    with pytest.raises(DataError, match="predicted"):
        metrics.accuracy([0.5], [0])
    with pytest.raises(DataError, match="correct"):
        metrics.expected_calibration_error([0.5, 0.5], [0, 2])
    with pytest.raises(UsageError, match="bins"):
        metrics.expected_calibration_error([0.5], [1], bins=0)
    with pytest.raises(UsageError, match="ind_scores"):
        metrics.auroc([[0.0, 1.0]], [1.0])
    with pytest.raises(UsageError, match="level"):
        metrics.fpr95_ood_positive([1.0], [1.0], level=95)


def test_tensors_are_accepted(rng):
    torch = pytest.importorskip("torch")
    ind, ood = rng.normal(size=50), rng.normal(1, size=40)
    expected = metrics.auroc(ind, ood)
    tensors = torch.tensor(ind, requires_grad=True), torch.tensor(ood)
    assert metrics.auroc(*tensors) == expected
    assert metrics.auroc(tensors[0].bfloat16(), tensors[1].bfloat16()) == pytest.approx(expected, abs=0.02)
    assert metrics.accuracy(torch.tensor([0, 1]), torch.tensor([0, 0])) == 0.5
    assert metrics.aurc(torch.tensor([0.2, 0.4]), torch.tensor([True, False])) == 0.75


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (3, 10), (10, 10), (77, 400)])
def test_wilson_interval_equals_scipy(successes, n):
    low, high = metrics.wilson_interval(successes / n, n, z=stats.norm.ppf(0.975))
    expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high))


def test_one_bin_and_the_ends_of_the_levels():
    """In one bin the error is that of the mean confidence; to catch all, or hardly any, are levels like others."""
    confidence, correct = [0.2, 0.5, 0.9, 1.0], [0, 1, 1, 0]
    assert metrics.expected_calibration_error(confidence, correct, bins=1) == pytest.approx(0.15)
    with pytest.raises(UsageError, match="bins"):
        metrics.reliability_curve(confidence, correct, bins=0)
    ind, ood = [0.0, 1.0, 2.0, 3.0], [0.5, 2.5, 4.0]
    assert metrics.fpr95_ood_positive(ind, ood, level=1.0) == 0.75
    assert metrics.fpr95_ood_positive(ind, ood, level=1e-12) == 0.0
    assert metrics.fpr95_ind_positive(ood, ind, level=1e-12) == 0.25
    assert metrics.coverage_at([0.5, 1.0], [1.0, 0.0], error=1.0) == 1.0
    for level in (0.0, 1.01):
        with pytest.raises(UsageError, match="level"):
            metrics.fpr95_ood_positive(ind, ood, level=level)


def test_spaced_rows_have_both_ends():
    assert metrics.spaced_rows(5, 5).tolist() == [0, 1, 2, 3, 4] == metrics.spaced_rows(5, 100).tolist()
    assert metrics.spaced_rows(101, 5).tolist() == [0, 25, 50, 75, 100]
    assert metrics.spaced_rows(1, 4).tolist() == [0]


def test_coverage_at_an_error_rate():
    share, accuracy = np.array([0.25, 0.5, 0.75, 1.0]), np.array([1.0, 0.9, 0.95, 0.8])
    found = [metrics.coverage_at(share, accuracy, error) for error in (0.01, 0.05, 0.1, 0.2)]
    assert found == [0.25, 0.75, 0.75, 1.0]
    assert metrics.coverage_at(share, accuracy - 0.5, 0.1) == 0
    with pytest.raises(UsageError, match="error"):
        metrics.coverage_at(share, accuracy, 1.5)


def test_spread_over_runs_as_text():
    assert metrics.format_spread([0.1, 0.3], digits=2) == "0.20 ± 0.14"
    assert metrics.format_spread([0.1234]) == "0.123"
