"""Tests for drift: counts, distributions and wealth against explicit loops, enumeration and SciPy.

That they reject at their nominal rate without drift, and soon with it, is in ``theory/test_drift.py``.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, betabinom, hypergeom

from maple.decisions.conformal import conformal_p_values, conformal_threshold, count_allowed
from maple.decisions.drift import (
    StreamMonitor,
    beta_bets,
    compare_scores,
    count_earlier,
    flagged_distribution,
    grow,
    kolmogorov_smirnov,
    online_p_values,
)
from maple.errors import DataError, RunError, UsageError
from maple.files import load_arrays, save_arrays

N_BETS = beta_bets(np.array([0.5])).shape[1]
few_values = st.lists(st.integers(0, 5), max_size=40)


# --- one batch


def distance(new, calibration) -> float:
    """The largest gap between two empirical distribution functions, place by place."""
    return max(abs(np.mean(new <= s) - np.mean(calibration <= s)) for s in np.concatenate([new, calibration]))


def test_kolmogorov_smirnov_equals_a_loop_with_ties(rng):
    new, calibration = rng.integers(0, 8, size=30).astype(float), rng.integers(1, 9, size=50).astype(float)
    assert kolmogorov_smirnov(new, calibration)[0] == pytest.approx(distance(new, calibration))


def test_kolmogorov_smirnov_p_value_counts_the_ways_to_deal_images_into_two_sets():
    pooled = np.arange(9.0)
    for chosen in ([0, 1, 2, 5], [5, 6, 7, 8], [1, 3, 5, 7]):
        observed = distance(pooled[chosen], np.delete(pooled, chosen))
        deals = [list(deal) for deal in combinations(range(9), 4)]
        as_far = [distance(pooled[deal], np.delete(pooled, deal)) >= observed - 1e-12 for deal in deals]
        assert kolmogorov_smirnov(pooled[chosen], np.delete(pooled, chosen))[1] == pytest.approx(np.mean(as_far))


def test_kolmogorov_smirnov_tells_the_direction(rng):
    calibration = rng.normal(size=300)
    assert kolmogorov_smirnov(rng.normal(1, size=200), calibration)[2]
    assert not kolmogorov_smirnov(rng.normal(-1, size=200), calibration)[2]


def test_kolmogorov_smirnov_of_many_images_is_silent(rng):
    """SciPy leaves the exact p-value at ten thousand images and warns where it cannot have it: warnings are errors."""
    for n_new, n_calibration in ((12_000, 9_999), (9_973, 9_967), (3, 9_999)):
        p_value = kolmogorov_smirnov(rng.normal(size=n_new), rng.normal(size=n_calibration))[1]
        assert 1e-4 < p_value <= 1


@given(n=st.integers(1, 300), false_alarm=st.floats(0.001, 0.999))
def test_allowed_images_are_those_above_the_threshold(n, false_alarm):
    scores = np.arange(n, dtype=float)
    above = int((scores > conformal_threshold(scores, false_alarm)).sum())
    allowed = count_allowed(n, false_alarm)
    assert above == max(allowed, 0)
    assert (conformal_threshold(scores, false_alarm) == np.inf) == (allowed == -1)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 0), (7, 20, 0), (60, 25, 3), (300, 500, 24), (40, 10, 9)])
def test_flagged_images_are_a_draw_without_replacement(m, n, k):
    """At least j new images exceed the (k + 1)-th largest calibration score exactly where the k + j highest of all
    n + m images hold at least j new ones: a hypergeometric tail."""
    chances = flagged_distribution(m, n, k)
    tails = np.cumsum(chances[::-1])[::-1]
    expected = [hypergeom.sf(j - 1, n + m, m, k + j) for j in range(m + 1)]
    np.testing.assert_allclose(tails, expected, rtol=1e-8)


@given(m=st.integers(0, 50), n=st.integers(0, 50), k=st.integers(-1, 49))
def test_numbers_of_flagged_images_have_a_distribution(m, n, k):
    """Its mean is m (k + 1) / (n + 1); none is flagged where even k = 0 would be too many."""
    k = min(k, n - 1)
    chances = flagged_distribution(m, n, k)
    assert chances.shape == (m + 1,) and chances.sum() == pytest.approx(1) and (chances >= 0).all()
    assert chances @ np.arange(m + 1) == pytest.approx(m * (k + 1) / (n + 1), abs=1e-9)


def test_flagged_images_by_enumeration():
    """Every order of two new images and four calibration images, the second highest of which is the threshold."""
    counts = np.zeros(3)
    for new in combinations(range(6), 2):
        threshold = sorted(set(range(6)) - set(new))[-2]
        counts[sum(place > threshold for place in new)] += 1
    np.testing.assert_allclose(flagged_distribution(2, 4, 1), counts / counts.sum())


def test_comparison_is_what_its_parts_say(rng):
    calibration, scores = rng.normal(size=200), rng.normal(0.3, size=150)
    found = compare_scores(scores, calibration, false_alarm=0.1, level=0.05)
    k = count_allowed(200, 0.1)
    law = betabinom(150, k + 1, 200 - k)
    assert (found.n_images, found.n_calibration) == (150, 200)
    assert found.n_flagged == (conformal_p_values(scores, calibration) <= 0.1).sum()
    assert found.share_flagged == found.n_flagged / 150
    assert found.expected_share == pytest.approx(law.mean() / 150)
    assert found.likely_shares == pytest.approx((law.ppf(0.025) / 150, law.ppf(0.975) / 150))
    assert found.share_p_value == pytest.approx(law.sf(found.n_flagged - 1))
    assert (found.ks_statistic, found.ks_p_value, found.scores_rose) == kolmogorov_smirnov(scores, calibration)
    assert found.p_value == 2 * min(found.share_p_value, found.ks_p_value)
    assert found.drift == (found.p_value <= 0.05)


def test_each_test_sees_what_the_other_misses(rng):
    calibration = rng.normal(size=1000)
    rare = compare_scores(np.concatenate([rng.normal(size=360), np.full(40, 9.0)]), calibration)
    assert rare.drift and rare.share_p_value < rare.ks_p_value
    lower = compare_scores(rng.normal(-0.5, size=400), calibration)
    assert lower.drift and lower.share_p_value > 0.5 and not lower.scores_rose


def test_equal_scores_are_no_drift():
    found = compare_scores(np.ones(50), np.ones(80))
    assert found.p_value == 1 and found.n_flagged == 0


def test_too_few_calibration_images_to_flag_anything(rng):
    found = compare_scores(rng.normal(size=30), rng.normal(size=10), false_alarm=0.05)
    assert found.threshold == np.inf and found.expected_share == 0
    assert found.likely_shares == (0, 0) and found.share_p_value == 1


@pytest.mark.parametrize("n", [1, 2, 19])
def test_few_images_work(rng, n):
    found = compare_scores(rng.normal(size=n), rng.normal(size=100))
    assert not found.drift and 0 < found.p_value <= 1
    assert compare_scores(np.full(5, 99.0), rng.normal(size=500)).drift


# --- streams


@given(values=few_values)
def test_earlier_values_are_counted(values):
    below, equal = count_earlier(np.array(values, dtype=float))
    assert below.tolist() == [sum(v < values[t] for v in values[:t]) for t in range(len(values))]
    assert equal.tolist() == [sum(v == values[t] for v in values[:t]) for t in range(len(values))]


@given(pool=few_values, values=few_values, seed=st.integers(0, 99))
def test_online_p_values_rank_each_image_among_all_before_it(pool, values, seed):
    u = 1 - np.random.default_rng(seed).random(len(values))
    expected = []
    for t, value in enumerate(values):
        before = [*pool, *values[:t]]
        above, equal = sum(v > value for v in before), 1 + sum(v == value for v in before)
        expected.append((above + u[t] * equal) / (len(before) + 1))
    found = online_p_values(np.array(values, float), np.sort(np.array(pool, float)), u)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert ((found > 0) & (found < 1)).all()


def test_bets_are_beta_densities_and_fair():
    p = np.array([1e-9, 0.03, 0.5, 0.8, 1 - 1e-9])
    shapes = [(a, b) for a in (0.5, 1, 2) for b in (0.5, 1, 2) if (a, b) != (1, 1)]
    densities = np.stack([beta.pdf(p, a, b) for a, b in shapes], axis=1)
    np.testing.assert_allclose(beta_bets(p)[:, 0], 1)
    np.testing.assert_allclose(beta_bets(p)[:, 1:9], densities, rtol=1e-6)
    np.testing.assert_allclose(beta_bets(p)[:, 9:], 0.75 + 0.25 * densities, rtol=1e-6)
    for column in range(N_BETS):
        mean, _ = quad(lambda x, column=column: beta_bets(np.array([x]))[0, column], 0, 1)
        assert mean == pytest.approx(1, abs=1e-6)


def test_wealth_is_the_product_of_jumps_and_bets(rng):
    """The same capital as a chain of matrices, without normalising on the way."""
    bets = beta_bets(rng.uniform(size=30))
    prior = np.concatenate([[0.5], np.full(N_BETS - 1, 0.5 / (N_BETS - 1))])
    capital, wealth = prior, []
    for t, bet in enumerate(bets, start=1):
        move = (1 - 1 / (t + 1)) * np.eye(N_BETS) + 1 / (t + 1) * np.outer(prior, np.ones(N_BETS))
        capital = np.diag(bet) @ move @ capital
        wealth.append(capital.sum())
    growth, shares = grow(prior, bets, 0)
    np.testing.assert_allclose(np.exp(np.cumsum(growth)), wealth)
    np.testing.assert_allclose(shares, capital / capital.sum())


@pytest.mark.parametrize("p", [2.0**-53, 0.01, 0.3, 0.5, 0.9, 1 - 2.0**-53])
def test_waiting_is_cheap_whatever_happens(p):
    p_values = np.concatenate([np.full(500, p), np.full(500, 0.5), np.full(500, 1 - p)])
    growth, _ = grow(StreamMonitor([0.0]).capital_, beta_bets(p_values), 0)
    assert (np.cumsum(growth) >= -np.log(2 * np.sqrt(np.arange(1500) + 2))).all()


@given(cuts=st.lists(st.integers(0, 120), max_size=5), seed=st.integers(0, 3))
def test_a_stream_may_be_cut_anywhere(cuts, seed):
    rng = np.random.default_rng(7)
    calibration, scores = rng.integers(0, 30, size=40).astype(float), rng.integers(15, 45, size=120).astype(float)
    whole = StreamMonitor(calibration, seed=seed)
    expected = whole.update(scores)
    parts = StreamMonitor(calibration, seed=seed)
    found = [parts.update(part) for part in np.split(scores, sorted(cuts))]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    np.testing.assert_array_equal(parts.log_wealth_, whole.log_wealth_)
    np.testing.assert_array_equal(parts.capital_, whole.capital_)
    assert parts.alarm_at_ == whole.alarm_at_ is not None


def test_a_stream_goes_on_from_a_file(tmp_path, rng):
    calibration, scores = rng.normal(size=200), rng.normal(0.3, size=600)
    whole = StreamMonitor(calibration, level=0.05, seed=3)
    whole.update(scores)
    first = StreamMonitor(calibration, level=0.05, seed=3)
    first.update(scores[:251])
    save_arrays(tmp_path / "state", first.to_arrays(), {})
    again = StreamMonitor.from_arrays(load_arrays(tmp_path / "state")[0])
    again.update(scores[251:])
    assert (again.level, again.seed, len(again)) == (0.05, 3, 600)
    for name, array in whole.to_arrays().items():
        np.testing.assert_array_equal(again.to_arrays()[name], array)


def test_alarm_is_the_first_crossing_and_stays(rng):
    monitor = StreamMonitor(rng.normal(size=300), level=0.05)
    assert monitor.alarm_at_ is None and monitor.max_log_wealth_ == 0
    monitor.update(np.full(30, 9.0))
    first = monitor.alarm_at_
    above = monitor.log_wealth_ >= np.log(20)
    assert first is not None and above[first] and not above[:first].any()
    monitor.update(rng.normal(size=3000))
    assert monitor.alarm_at_ == first
    assert monitor.max_log_wealth_ == monitor.log_wealth_.max() > monitor.log_wealth_[-1]


def test_seed_breaks_ties_only(rng):
    calibration, scores = rng.normal(size=100), rng.normal(size=50)
    a, b = (StreamMonitor(calibration, seed=seed).update(scores) for seed in (0, 1))
    assert (a != b).all()
    assert np.abs(a - b).max() <= 1 / 101  # one step of the rank


# --- bad input


def test_bad_scores_and_levels():
    with pytest.raises(DataError, match="calibration_scores"):
        compare_scores([1.0], [])
    with pytest.raises(DataError, match=r"^scores"):
        compare_scores([], [1.0])
    with pytest.raises(DataError, match="NaN"):
        StreamMonitor([1.0]).update([np.nan, 1.0])
    with pytest.raises(UsageError, match="shape"):
        compare_scores([[1.0]], [1.0])
    for level in (0, 1, -0.1, float("nan")):
        with pytest.raises(UsageError, match="level"):
            StreamMonitor([1.0], level=level)
        with pytest.raises(UsageError, match="level"):
            compare_scores([1.0], [1.0], level=level)
    with pytest.raises(UsageError, match="seed"):
        StreamMonitor([1.0], seed=-1)


def test_arrays_that_are_no_state():
    arrays = StreamMonitor([1.0, 2.0]).to_arrays()
    with pytest.raises(RunError, match="capital"):
        StreamMonitor.from_arrays({name: array for name, array in arrays.items() if name != "capital"})
    with pytest.raises(RunError, match="state"):
        StreamMonitor.from_arrays({**arrays, "scores": np.ones(3)})


def test_an_empty_update_changes_nothing(rng):
    monitor = StreamMonitor(rng.normal(size=20))
    monitor.update(rng.normal(size=5))
    before = monitor.to_arrays()
    assert len(monitor.update([])) == 0
    for name, array in monitor.to_arrays().items():
        np.testing.assert_array_equal(array, before[name])
