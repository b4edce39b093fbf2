"""The promises of calibration, by simulation: over many calibration sets, each holds to within Monte-Carlo error.

Scores are chi-square distributed, so that the false-alarm rate of a threshold is known and need not be counted.
Tolerances are four standard errors, of which one test in 16,000 would fall foul by chance; seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, betabinom, chi2, chisquare, kstest

from maple.decisions.calibration import Calibration
from maple.decisions.conformal import benjamini_hochberg, conformal_p_values, conformal_threshold
from maple.decisions.sets import prediction_sets, true_class_scores

pytestmark = pytest.mark.slow

DEGREES = 5


def thresholds(n: int, draws: int, false_alarm: float, confidence: float | None = None, seed: int = 0) -> np.ndarray:
    """The thresholds of so many calibration sets of n images (draws,)."""
    scores = np.random.default_rng(seed).chisquare(DEGREES, size=(draws, n))
    return np.array([conformal_threshold(row, false_alarm, confidence) for row in scores])


def within_error(values: np.ndarray, expected: float) -> bool:
    """Whether the mean of independent values is what it should be, up to four standard errors."""
    return bool(abs(np.mean(values) - expected) <= 4 * np.std(values) / np.sqrt(len(values)))


# ------------------------------------------------------------------------------------------------------ false alarms


@pytest.mark.parametrize("false_alarm", [0.01, 0.05, 0.1])
def test_mean_rate_is_nominal_and_its_distribution_beta(false_alarm):
    n = 399  # (n + 1) false_alarm is a whole number: no rate is given away
    rates = chi2.sf(thresholds(n, 4000, false_alarm), DEGREES)
    k = round(400 * false_alarm) - 1
    assert within_error(rates, false_alarm)
    assert kstest(rates, beta(k + 1, n - k).cdf).pvalue > 0.01
    assert (rates > false_alarm).mean() > 0.4  # why there is a confidence


@pytest.mark.parametrize("false_alarm", [0.01, 0.05, 0.1])
def test_number_of_false_alarms_among_new_images_is_beta_binomial(false_alarm):
    n, m, draws = 199, 100, 4000
    rng = np.random.default_rng(1)
    new = rng.chisquare(DEGREES, size=(draws, m))
    counts = (new > thresholds(n, draws, false_alarm)[:, None]).sum(axis=1)
    k = round(200 * false_alarm) - 1
    expected = draws * betabinom(m, k + 1, n - k).pmf(np.arange(m + 1))
    last = int(np.flatnonzero(expected >= 10)[-1])  # bins of at least ten; all beyond is the last one
    observed = np.bincount(np.minimum(counts, last), minlength=last + 1)
    assert chisquare(observed, np.r_[expected[:last], expected[last:].sum()]).pvalue > 0.01


@pytest.mark.parametrize("false_alarm", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_confidence_is_the_share_of_calibration_sets_that_keep_the_level(false_alarm, confidence):
    n, draws = 600, 4000
    found = thresholds(n, draws, false_alarm, confidence, seed=2)
    kept = chi2.sf(found, DEGREES) <= false_alarm
    k = n - 1 - int(conformal_threshold(np.arange(n), false_alarm, confidence))
    assert beta(k + 1, n - k).cdf(false_alarm) >= confidence
    assert within_error(kept, beta(k + 1, n - k).cdf(false_alarm))
    assert beta(k + 2, n - k - 1).cdf(false_alarm) < confidence  # one more would not do


@pytest.mark.parametrize("false_alarm", [0.01, 0.05, 0.1])
def test_p_values_are_valid_and_uniform_on_their_grid(false_alarm):
    rng = np.random.default_rng(3)
    n, draws = 99, 20_000
    scores = rng.chisquare(DEGREES, size=(draws, n + 1))
    p = np.array([conformal_p_values(row[-1:], row[:-1])[0] for row in scores])
    assert within_error(p <= false_alarm, false_alarm)
    assert chisquare(np.bincount(np.round(p * (n + 1)).astype(int), minlength=n + 2)[1:]).pvalue > 0.01


@pytest.mark.parametrize("values", [2, 7, 40])
def test_promises_survive_ties(values):
    """Scores of a few values: the rates may be smaller than promised, never larger."""
    rng = np.random.default_rng(4)
    probabilities = rng.dirichlet(np.ones(values))
    tail = np.r_[1.0, 1 - np.cumsum(probabilities)]  # P(score > v - 1) at v = 0, 1, ...
    rates: dict[float | None, list[float]] = {None: [], 0.9: []}
    for row in rng.choice(values, p=probabilities, size=(3000, 150)):
        for confidence, found in rates.items():
            found.append(tail[int(conformal_threshold(row, 0.1, confidence)) + 1])
    error = np.std(rates[None]) / np.sqrt(3000)
    assert np.mean(rates[None]) <= 0.1 + 4 * error
    assert np.mean(np.array(rates[0.9]) > 0.1) <= 0.1 + 4 * np.sqrt(0.1 * 0.9 / 3000)


# -------------------------------------------------------------------------------------------------------- per class

SHARES = np.array([0.4, 0.3, 0.2, 0.05, 0.05])  # of predicted classes; the last two are too rare to stand alone
SCALES = np.array([1.0, 2.0, 3.0, 4.0, 4.0])  # of their scores


def class_rates(confidence: float | None, per_class: bool, draws: int = 1500, n: int = 900) -> np.ndarray:
    """The false-alarm rate at 5 % of each predicted class, for so many calibration sets (draws, C)."""
    rng = np.random.default_rng(5)
    rates = []
    for _ in range(draws):
        class_ids = rng.choice(len(SHARES), p=SHARES, size=n)
        scores = SCALES[class_ids] * rng.chisquare(DEGREES, size=n)
        decision = Calibration(scores, class_ids, len(SHARES)).decide(0.05, confidence, per_class)
        assert decision.n_own_thresholds == (3 if per_class else 0)
        rates.append(chi2.sf(decision.thresholds / SCALES, DEGREES))
    return np.array(rates)


def test_rates_hold_for_each_predicted_class():
    rates = class_rates(None, per_class=True)
    for c in range(3):
        assert rates[:, c].mean() <= 0.05 + 4 * rates[:, c].std() / np.sqrt(len(rates))
        assert rates[:, c].mean() >= 0.05 - 1 / 100  # at most 1 / (n + 1) is given away, n > 100
    together = rates[:, 3:].mean(axis=1)  # both as frequent
    assert 0.04 <= together.mean() <= 0.05 + 4 * together.std() / np.sqrt(len(rates))


def test_one_threshold_for_all_does_not_hold_for_each_class():
    """Guards the test above: without thresholds per class the classes of large scores pay for the others."""
    rates = class_rates(None, per_class=False, draws=300)
    assert rates[:, 0].mean() < 0.01
    assert rates[:, 4].mean() > 0.2
    assert within_error(rates @ SHARES, np.floor(0.05 * 901) / 901)


def test_confidence_holds_for_each_predicted_class():
    exceeded = class_rates(0.9, per_class=True) > 0.05
    assert (exceeded[:, :3].mean(axis=0) <= 0.1 + 4 * np.sqrt(0.1 * 0.9 / len(exceeded))).all()
    assert exceeded[:, :3].any()


# ----------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("ind_share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("shift", [3.0, 8.0])
def test_false_discovery_rate_is_its_level_times_the_in_distribution_share(ind_share, shift):
    """An equality where fdr (n + 1) / m is a whole number and scores do not tie, however well OOD images are told."""
    n, m, fdr, draws = 999, 100, 0.1, 3000
    rng = np.random.default_rng(6)
    n_ind = round(m * ind_share)
    false_shares = []
    for _ in range(draws):
        scores = rng.normal(size=m)
        scores[n_ind:] += shift
        flagged = benjamini_hochberg(conformal_p_values(scores, rng.normal(size=n)), fdr)
        false_shares.append(flagged[:n_ind].sum() / max(flagged.sum(), 1))
    assert within_error(np.array(false_shares), fdr * ind_share)


@pytest.mark.parametrize("n", [60, 150, 2_500])
def test_false_discovery_rate_is_kept_by_any_calibration_set(n):
    m, fdr, draws = 80, 0.2, 2000
    rng = np.random.default_rng(7)
    false_shares = []
    for _ in range(draws):
        scores = np.round(rng.normal(size=m), 1)  # ties
        scores[60:] += 2.5
        flagged = benjamini_hochberg(conformal_p_values(scores, np.round(rng.normal(size=n), 1)), fdr)
        false_shares.append(flagged[:60].sum() / max(flagged.sum(), 1))
    assert np.mean(false_shares) <= fdr * 60 / 80 + 4 * np.std(false_shares) / np.sqrt(draws)


# --------------------------------------------------------------------------------------------------- prediction sets


def labelled_images(rng: np.random.Generator, n: int, n_classes: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities (n, C) that are far too sure of themselves, and the true classes (n,)."""
    logits = rng.normal(size=(n, n_classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    sharp = 3 * logits
    return sharp - np.log(np.exp(sharp).sum(axis=1, keepdims=True)), labels


@pytest.mark.parametrize("coverage", [0.9, 0.95])
@pytest.mark.parametrize("n", [150, 999])
def test_sets_cover_as_promised_and_hardly_more(n, coverage):
    rng = np.random.default_rng(8)
    covered, tops_added, draws, m = [], 0, 800, 200
    for _ in range(draws):
        logs, labels = labelled_images(rng, n + m)
        learned = true_class_scores(logs[:n], labels[:n])
        sets = prediction_sets(logs[n:], learned, coverage)
        covered.append(sets[np.arange(m), labels[n:]].mean())
        tops_added += int((-logs[n:].max(axis=1) > np.quantile(learned, coverage, method="lower")).sum())
    assert tops_added == 0  # so that the upper end holds too
    error = 4 * np.std(covered) / np.sqrt(draws)
    assert coverage - error <= np.mean(covered) <= coverage + 1 / (n + 1) + error


def test_the_top_class_only_raises_coverage():
    """Where true classes are nearly always the most probable ones, sets would be empty at times without it."""
    rng = np.random.default_rng(9)
    covered, empty = [], 0
    for _ in range(400):
        logits = 6 * rng.normal(size=(500, 4))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        learned = true_class_scores(logs[:300], labels[:300])
        sets = prediction_sets(logs[300:], learned, 0.8)
        assert sets.any(axis=1).all()
        covered.append(sets[np.arange(200), labels[300:]].mean())
        empty += int((-logs[300:].max(axis=1) > np.sort(learned)[int(np.ceil(301 * 0.8)) - 1]).sum())
    assert empty > 0
    assert np.mean(covered) >= 0.8
