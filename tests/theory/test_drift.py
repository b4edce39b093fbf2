"""What the tests for drift promise: false alarms at the nominal rate, with ties and few calibration images; and how
soon they see a drift.

Scores are normal, in-distribution ones standard normal; every draw has its own calibration set, as every user has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2_contingency, kstest

from maple.decisions.conformal import conformal_p_values
from maple.decisions.drift import StreamMonitor, beta_bets, compare_scores, grow, online_p_values
from maple.detectors.maple import MapleDetector
from maple.files import load_arrays
from maple.types import Outputs

pytestmark = pytest.mark.slow


def at_most(rate: float, n: int) -> float:
    """What a share of n draws exceeds once in a thousand times if the true rate is at most ``rate``."""
    return rate + 3.1 * np.sqrt(rate * (1 - rate) / n)


def in_distribution(rng, n, ties):
    return rng.integers(0, 40, size=n).astype(float) if ties else rng.normal(size=n)


# --- without drift


@pytest.mark.parametrize(
    ("n", "m", "ties"), [(200, 150, False), (40, 900, False), (1000, 25, False), (200, 150, True), (15, 400, True)]
)
def test_a_batch_is_rejected_at_the_nominal_rate(n, m, ties):
    rng = np.random.default_rng(n + m)
    draws = 1000
    found = [compare_scores(in_distribution(rng, m, ties), in_distribution(rng, n, ties)) for _ in range(draws)]
    for level in (0.01, 0.05, 0.2):
        for name in ("p_value", "ks_p_value", "share_p_value"):
            rate = np.mean([getattr(each, name) <= level for each in found])
            assert rate <= at_most(level, draws), name
    if not ties:  # with ties the tests are on the safe side
        assert np.mean([each.ks_p_value <= 0.2 for each in found]) > 0.14
        assert np.mean([each.n_flagged for each in found]) / m == pytest.approx(found[0].expected_share, abs=0.012)


def test_real_scores_are_rejected_at_the_nominal_rate():
    """Random halves of 800 CIFAR-10 test images, scored by the public ResNet-20."""
    arrays, _ = load_arrays(Path(__file__).parents[1] / "samples" / "resnet20_sample.safetensors")
    train, test = (Outputs(arrays[f"{name}.embeddings"], labels=arrays[f"{name}.labels"]) for name in ("train", "test"))
    scores = MapleDetector(norm_exponent=1.0, score_by="normalised").fit(train).score(test)
    rng = np.random.default_rng(5)
    p_values = np.array([compare_scores(*np.split(rng.permutation(scores), 2)).p_value for _ in range(500)])
    for level in (0.01, 0.05, 0.2):
        assert (p_values <= level).mean() <= at_most(level, 500)
    assert (p_values <= 0.2).mean() > 0.1  # and not much more rarely


def test_a_one_sample_test_of_p_values_rejects_without_drift():
    """Why the tests have two samples: 2,000 images find the accidents of 200 calibration images."""
    rng = np.random.default_rng(0)
    rejected = 0
    for _ in range(200):
        p_values = conformal_p_values(rng.normal(size=2000), rng.normal(size=200))
        rejected += kstest(p_values, "uniform").pvalue <= 0.01
    assert rejected / 200 > 0.5


@pytest.mark.parametrize("ties", [False, True])
def test_online_p_values_are_uniform_and_independent(ties):
    """Over calibration sets, which is what fails for p-values against a fixed set: there neighbours are correlated."""
    rng = np.random.default_rng(1)
    draws, steps = 4000, 6
    p_values = np.empty((draws, steps))
    for row in p_values:
        pool = np.sort(in_distribution(rng, 4, ties) // 8 if ties else in_distribution(rng, 4, ties))
        scores = in_distribution(rng, steps, ties) // 8 if ties else in_distribution(rng, steps, ties)
        row[:] = online_p_values(scores, pool, 1 - rng.random(steps))
    for column in p_values.T:
        assert kstest(column, "uniform").pvalue > 1e-3
    for a, b in ((0, 1), (1, 2), (0, 5), (4, 5)):
        table = np.histogram2d(p_values[:, a], p_values[:, b], bins=5, range=[[0, 1], [0, 1]])[0]
        assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(("n", "ties"), [(20, False), (300, False), (30, True)])
def test_a_stream_ever_raises_a_false_alarm_at_most_at_the_nominal_rate(n, ties):
    rng = np.random.default_rng(n)
    draws, steps = 200, 400
    highest = []
    for seed in range(draws):
        monitor = StreamMonitor(in_distribution(rng, n, ties), seed=seed)
        monitor.update(in_distribution(rng, steps, ties))
        highest.append(monitor.max_log_wealth_)
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(highest) >= -np.log(level)) <= at_most(level, draws)
    assert np.mean(np.array(highest) >= -np.log(0.5)) > 0.1  # it does bet


def test_betting_on_p_values_against_a_fixed_set_grows_without_drift():
    """Why p-values are online: the gambler learns the accidents of the calibration set."""
    rng = np.random.default_rng(2)
    alarms = 0
    for _ in range(15):
        pool, scores = np.sort(rng.normal(size=30)), rng.normal(size=1500)
        left, right = np.searchsorted(pool, scores), np.searchsorted(pool, scores, "right")
        u = 1 - rng.random(1500)
        fixed = np.clip((30 - right + u * (right - left + 1)) / 31, 1e-12, 1 - 1e-12)
        growth, _ = grow(StreamMonitor(pool).capital_, beta_bets(fixed), 0)
        alarms += np.cumsum(growth).max() >= np.log(100)
    assert alarms >= 10


# --- with drift


def drifted(kind, rng, n):
    scores = rng.normal(size=n)
    if kind == "unknown images":  # one in ten, far out
        return np.where(rng.random(n) < 0.1, scores + 4, scores)
    return {"higher": scores + 0.5, "much higher": scores + 4, "lower": scores - 0.5, "narrower": 0.5 * scores}[kind]


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("higher", 200), ("lower", 200), ("unknown images", 180), ("much higher", 10), ("narrower", 250)],
)
def test_a_batch_shows_drift(kind, needed):
    """With 500 calibration images at the level of 1 %, so many new images reveal nine of ten such drifts."""
    rng = np.random.default_rng(3)
    found = [compare_scores(drifted(kind, rng, needed), rng.normal(size=500)).drift for _ in range(100)]
    assert np.mean(found) >= 0.9


@pytest.mark.parametrize(
    ("kind", "needed"), [("higher", 160), ("lower", 160), ("unknown images", 140), ("much higher", 6), ("narrower", 75)]
)
@pytest.mark.parametrize("ordinary", [0, 1000])
def test_a_stream_shows_drift_soon(kind, needed, ordinary):
    """With 500 calibration images at the level of 1 %: the median number of images from the change to the alarm."""
    rng = np.random.default_rng(4)
    delays = []
    for seed in range(15):
        monitor = StreamMonitor(rng.normal(size=500), seed=seed)
        monitor.update(rng.normal(size=ordinary))
        monitor.update(drifted(kind, rng, 3 * needed))
        seen = monitor.alarm_at_ is not None and monitor.alarm_at_ >= ordinary  # a false alarm has seen nothing
        delays.append(monitor.alarm_at_ + 1 - ordinary if seen else np.inf)
    assert np.median(delays) <= needed
