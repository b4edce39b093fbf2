"""The summary of one or more evaluations as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from maple.errors import UsageError
from maple.evaluation.results import COLUMNS, Results, describe_results
from maple.stats.metrics import format_spread


def format_table(results: Results, *more: Results) -> Table:
    """The summary of a run; with several runs, each cell is mean ± deviation over them."""
    runs = [results, *more]
    if any(list(run.methods) != list(results.methods) or run.ood_names != results.ood_names for run in more):
        raise UsageError("these results have different methods or OOD sets: compare runs of the same evaluation")
    columns = COLUMNS | {f"auroc/{name}": f"AUROC ↑\n{escape(name)}" for name in results.ood_names}
    table = Table(caption=escape(describe_results(runs)), caption_justify="left")
    table.add_column("method")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for rows in zip(*(run.rows() for run in runs), strict=True):
        table.add_row(
            escape(rows[0]["method"]), *(format_cell([row.get(key, math.nan) for row in rows]) for key in columns)
        )
    return table


def format_cell(values: Sequence[float], digits: int = 3) -> str:
    """A number, mean ± deviation of several, or a dash where one is missing.

    >>> format_cell([0.5]), format_cell([0.5, 0.7], digits=2), format_cell([0.5, math.nan])
    ('0.500', '0.60 ± 0.14', '–')
    """
    return "–" if any(math.isnan(value) for value in values) else format_spread(values, digits=digits)
