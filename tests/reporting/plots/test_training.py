"""The training history, with and without events, and of a single epoch."""

from __future__ import annotations

import numpy as np
import pytest

from drawings import check_plot
from maple.reporting.plots import plot_accuracy, plot_clusters, plot_losses


@pytest.fixture
def history() -> dict[str, np.ndarray]:
    columns = ("epoch", "cross_entropy", "triplet", "validation_loss", "validation_accuracy", "clusters")
    return {name: np.arange(1.0, 5.0) for name in columns}


@pytest.mark.parametrize("draw", [plot_losses, plot_accuracy, plot_clusters])
def test_history_marks_events(draw, history: dict[str, np.ndarray]) -> None:
    without, marked = draw(history, []), draw(history, [2, 3])
    check_plot(without)
    check_plot(marked)
    assert without.svg.count("var(--pink)") == 0 and marked.svg.count("var(--pink)") == 2


@pytest.mark.parametrize("draw", [plot_losses, plot_accuracy, plot_clusters])
def test_history_of_one_epoch_and_of_nothing_known(draw, history: dict[str, np.ndarray]) -> None:
    check_plot(draw({name: values[:1] for name, values in history.items()}, []))
    check_plot(draw({name: values * (1 if name == "epoch" else np.nan) for name, values in history.items()}, [1]))
