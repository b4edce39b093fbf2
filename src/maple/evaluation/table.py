"""The summary of one or more evaluations: a table for the terminal, and as LaTeX, Markdown or CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from maple.errors import UsageError
from maple.evaluation.results import COLUMNS, Results, describe_results
from maple.evaluation.sheet import Sheet
from maple.files import to_csv, write_atomic
from maple.stats.metrics import add_floor, format_spread

GROUP_COLUMNS = {  # of near and far sets, in tables that are written
    "auroc": "AUROC ↑",
    "fpr95_ood_positive": "FPR95 at 95 % of unknown flagged ↓",
    "fpr95_ind_positive": "FPR95 at 95 % of known accepted ↓",
}
SUFFIXES = (".tex", ".md", ".csv")


def format_table(results: Results, *more: Results) -> Table:
    """The summary of a run; with several runs, each cell is mean ± deviation over them."""
    runs = [results, *more]
    columns = _columns(runs, ["auroc"])
    table = Table(caption=escape(describe_results(runs)), caption_justify="left")
    found = _rows(runs)
    cells = {key: [_cell(rows, key) for rows in found] for key in columns}
    table.add_column("method", no_wrap=True)
    for key, (heading, where) in columns.items():  # in a narrow terminal headings break, numbers and methods do not
        title = f"{heading}\n{escape(where)}" if where else heading
        width = max((len(part) for cell in cells[key] for part in cell.replace(" (", "\n(").splitlines()), default=0)
        table.add_column(title, justify="right", overflow="fold", min_width=width)
    for i, rows in enumerate(found):
        table.add_row(escape(rows[0]["method"]), *(column[i] for column in cells.values()))
    return table


def to_sheet(runs: Sequence[Results]) -> Sheet:
    """The same table to be written, with the FPR95 of near and far sets in both conventions."""
    columns, found = _columns(runs, list(GROUP_COLUMNS)), _rows(runs)
    headings = [
        "method",
        *(f"{heading[:-1]}{where} {heading[-1]}" if where else heading for heading, where in columns.values()),
    ]
    lines = [[rows[0]["method"], *(_cell(rows, key) for key in columns)] for rows in found]
    means = np.array([[np.mean([row.get(key, math.nan) for row in rows]) for key in columns] for rows in found])
    best = set()
    for place, (heading, _) in enumerate(columns.values()):
        values = means[:, place] if "↑" in heading else -means[:, place]
        if np.isfinite(values).any():
            best |= {(i, place + 1) for i in np.flatnonzero(values == np.nanmax(values)).tolist()}
    return Sheet("Evaluation", headings, lines, frozenset(best), note=describe_results(runs))


def to_long_csv(runs: Sequence[Results]) -> str:
    """One line per run, method and figure, unrounded."""
    lines = [
        {"run": i, "seed": run.provenance.get("seed"), "method": row["method"], "figure": key, "value": value}
        for i, run in enumerate(runs)
        for row in run.rows()
        for key, value in row.items()
        if isinstance(value, float) and not math.isnan(value)
    ]
    return to_csv(lines, ["run", "seed", "method", "figure", "value"], header=True)


def write_table(path: Path, runs: Sequence[Results]) -> None:
    """Write the table in the format that the name ends in."""
    check_table(path)
    if path.suffix == ".csv":
        write_atomic(path, to_long_csv(runs))
    else:
        sheet = to_sheet(runs)
        write_atomic(path, sheet.to_latex(f"tab:{path.stem}") if path.suffix == ".tex" else sheet.to_markdown())


def check_table(path: Path) -> None:
    """Refuse a name whose ending is no format."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--table '{path}': end the name in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def _columns(runs: Sequence[Results], of_groups: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Heading and set of each column, by its key in the rows."""
    first = runs[0]
    if any(list(run.methods) != list(first.methods) or run.ood_names != first.ood_names for run in runs[1:]):
        raise UsageError("these results have different methods or OOD sets: compare runs of the same evaluation")
    columns = {key: (heading, "") for key, heading in COLUMNS.items()}
    columns |= {f"auroc/{name}": (GROUP_COLUMNS["auroc"], name) for name in first.ood_names}
    for group in first.groups:
        columns |= {f"{group}_ood/{key}": (GROUP_COLUMNS[key], f"{group}-OOD mean") for key in of_groups}
    return columns


def _rows(runs: Sequence[Results]) -> list[tuple[dict[str, Any], ...]]:
    """The rows of all runs, by method."""
    return list(zip(*(run.rows() for run in runs), strict=True))


def _cell(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """The cell of a method, over all runs; that of the ECE has its floor in brackets."""
    floors = [row.get(f"{key}_floor", math.nan) for row in rows]
    return add_floor(format_cell([row.get(key, math.nan) for row in rows]), floors)


def format_cell(values: Sequence[float], digits: int = 3) -> str:
    """A number, mean ± deviation of several, or a dash where one is missing.

    >>> format_cell([0.5]), format_cell([0.5, 0.7], digits=2), format_cell([0.5, math.nan])
    ('0.500', '0.60 ± 0.14', '–')
    """
    return "–" if any(math.isnan(value) for value in values) else format_spread(values, digits=digits)
