"""Growth of cost as a picture: one panel per work, seconds over size, with its theoretical slope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from speed.measure import slope

_COLOURS = ("#2a6fbb", "#c8553d")


def draw_growth(curves: list[dict[str, Any]], path: Path) -> None:
    """Write an SVG with a panel per curve; a dashed line has the theoretical slope through the largest size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same file for the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    columns = 3
    n_rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(n_rows, columns, figsize=(10, 2.7 * n_rows), squeeze=False)
    for panel, curve in zip(panels.ravel(), curves):
        _draw_panel(panel, curve)
    for panel in panels.ravel()[len(curves) :]:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_panel(panel: Any, curve: dict[str, Any]) -> None:
    sizes = np.array(curve["sizes"], dtype=float)
    for (name, costs), colour in zip(curve["seconds"].items(), _COLOURS):
        panel.loglog(sizes, costs, "o-", color=colour, label=f"{name}: {slope(sizes, costs):.2f}", markersize=4)
    last = next(iter(curve["seconds"].values()))[-1]
    theory = last * (sizes / sizes[-1]) ** curve["theory"]
    panel.loglog(sizes, theory, "--", color="grey", label=f"theory: {curve['theory']:g}", linewidth=1)
    panel.set_title(f"{curve['work']} over {curve['over']}", fontsize=10)
    panel.set_ylabel("seconds", fontsize=8)
    panel.minorticks_off()
    panel.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    panel.tick_params(labelsize=7)
    if panel.get_ylim()[1] < 10 * panel.get_ylim()[0]:  # room for a whole power of ten on each side
        low, high = np.log10(panel.get_ylim())
        panel.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
    panel.legend(fontsize=7, frameon=False)
