"""The plot of a drift test: threshold, alarm, few images and many."""

from __future__ import annotations

import numpy as np
import pytest

from drawings import check_plot, words
from maple.reporting.plots import plot_drift


def test_drift_shows_shares_threshold_and_alarm(rng: np.random.Generator) -> None:
    log_martingale = np.concatenate([np.zeros(40), np.linspace(0, 20, 60)])
    alarm = int(np.argmax(log_martingale >= np.log(100))) + 1
    plot = plot_drift(rng.normal(size=200), np.repeat([0.0, 9.0], 50), 2.0, 0.05, log_martingale, 0.01)
    shown = words(check_plot(plot))
    assert "50 % of the new images flagged, 5 % expected" in shown
    assert {"calibration images", "new images", "threshold", "martingale", "alarm at 100", f"image {alarm}"} <= set(
        shown
    )
    assert f"alarm at image {alarm} of the stream" in shown
    quiet = words(check_plot(plot_drift(rng.normal(size=20), rng.normal(size=9), np.inf, 0.0, np.zeros(9), 0.01)))
    assert "threshold" not in quiet and "no alarm so far" in quiet


def test_a_batch_has_no_martingale(rng: np.random.Generator) -> None:
    plot = plot_drift(rng.normal(size=200), rng.normal(size=50), 2.0, 0.05, None, 0.01)
    assert "martingale" not in words(check_plot(plot)) and "martingale" not in plot.alt


@pytest.mark.parametrize("scores", [np.ones(1), np.ones(7), np.array([-3.0, 1e6])])
def test_drift_of_few_and_of_equal_scores(scores: np.ndarray) -> None:
    for martingale in (np.full(len(scores), -2.0), np.full(len(scores), 2000.0)):
        check_plot(plot_drift(np.ones(5), scores, 1.0, 0.05, martingale, 0.05))


def test_drift_of_many_images_is_a_small_drawing(rng: np.random.Generator) -> None:
    plot = plot_drift(rng.normal(size=5000), rng.normal(size=50_000), 2.0, 0.05, rng.normal(size=50_000), 0.01)
    check_plot(plot)
    assert len(plot.svg) < 200_000
