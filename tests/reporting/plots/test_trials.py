"""The plot of a search."""

from __future__ import annotations

from maple.evaluation.trials import Choices, Span, Trial
from maple.reporting.plots.trials import plot_trials


def test_the_picture_shows_all_there_is():
    space = {"margin": Span(0.1, 1.5), "weight_decay": Span(1e-5, 1e-2, log=True)}
    space["cluster_method"] = Choices(("xmeans", "tmeans"))
    settings = {"margin": 0.5, "weight_decay": 1e-3, "cluster_method": "tmeans"}
    trials = [Trial(i, "finished", settings, {"nll": value}) for i, value in ((1, 0.5), (2, 0.4), (3, 0.45), (5, 99.0))]
    plot = plot_trials("nll", space, [*trials, Trial(4, "pruned", settings)], best=2)
    assert "trial 2 is the best" in plot.alt
    for text in ("margin", "weight_decay", "cluster_method", "tmeans", "stopped early", "best so far"):
        assert f">{text}<" in plot.svg
    assert "mathdefault" not in plot.svg
    alone = plot_trials("nll", space, trials[:1], best=1)
    assert "stopped early" not in alone.svg
