"""Plots as inline SVG in the colours and font of the page, light and dark; one module per topic.

A plot is a function from plain numbers to a `Plot`. Equal numbers give equal text, so reports can be compared byte for
byte. `maple.reporting.plots.trials` draws the trials of a search and is imported on its own, because it needs Optuna's
search space.
"""

from maple.reporting.plots._figure import Plot, as_plot, standalone_svg
from maple.reporting.plots._style import BLUE, CLASS_COLOURS, GREEN, LIGHT, MUTED, ORANGE, PINK, Line
from maple.reporting.plots.drift import plot_drift
from maple.reporting.plots.evaluation import (
    Panel,
    plot_coverage,
    plot_quantiles,
    plot_reliability,
    plot_roc,
    plot_rows,
    plot_scores,
)
from maple.reporting.plots.latent import plot_contributions, plot_projection, shared_limits
from maple.reporting.plots.training import plot_accuracy, plot_clusters, plot_losses
