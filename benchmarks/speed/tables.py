"""The Markdown of ``make bench``, from its stored results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from speed.measure import Row, slope

TITLES = {
    "clustering": "X-Means",
    "fit": "Fit",
    "score": "Score",
    "training": "Training",
    "predict": "Predictions from files",
    "growth": "Relabelling and service",
    "profile": "Profile",
}


def write_page(results: Mapping[str, Any], picture: str, profile: str = "") -> str:
    """The page of all parts that are in the results; ``profile`` is text about targets that were missed."""
    parts = results["parts"]
    lines = [
        "# Speed",
        "",
        "*Written by `make bench` (`benchmarks/bench.py`); [figures](../results/speed.json). "
        "Each row is a ratio of two sides that took turns in the same run.*",
        "",
        "A ratio is the speed relative to the peer (2 is twice as fast) with a target of *at least*, the time relative "
        "to the peer with a target of *at most*: the median, and the range over the repeats.",
        "",
    ]
    missing = ", ".join(title for name, title in TITLES.items() if name not in parts)
    if missing:
        lines += [f"**Not measured yet**: {missing}. `make bench` measures what is missing.", ""]
    for name, title in TITLES.items():
        if name in parts and (parts[name]["rows"] or parts[name].get("facts")):
            lines += _part(title, parts[name])
    if profile:
        lines += [profile.strip(), ""]
    curves = [curve for part in parts.values() for curve in part.get("growth", ())]
    if curves:
        lines += ["## Growth", "", f"![Seconds over size, with theoretical slopes]({picture})", ""]
        lines += [*_growth_table(curves), ""]
    return "\n".join(lines)


def _part(title: str, part: Mapping[str, Any]) -> list[str]:
    rows = [Row.from_dict(values) for values in part["rows"]]
    lines = [f"## {title}", "", _machine(part["machine"], part["took"]), ""]
    if rows:
        lines += [*rows_table(rows), ""]
    notes = [f"- {row.work}, against {row.peer}: {row.note}." for row in rows if row.note]
    for name, fact in part.get("facts", {}).items():
        values = ", ".join(f"{key} {value}" for key, value in fact.items()) if isinstance(fact, dict) else str(fact)
        notes.append(f"- {name}: {values}.")
    return [*lines, *notes, ""] if notes else lines


def _machine(machine: Mapping[str, Any], took: float) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    special = ", ".join(machine["instructions"]) or "no vector extensions"
    return (
        f"{machine['processor']} ({special}), {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']} GiB, {machine['system']}; Python {machine['python']}, {versions}; commit "
        f"`{machine['commit']}`, load before {machine['load']}, {took:.0f} s."
    )


def rows_table(rows: Iterable[Row]) -> list[str]:
    """A table of ratios.

    >>> row = Row("fit", "product", 2.0, 1.0, 0.5, 0.4, 0.6, 3, target=0.6)
    >>> rows_table([row])[2]
    '| fit | product | 2 s | 1 s | 0.5 (0.4 to 0.6; 3) | at least 0.6 | **missed** |'
    """
    lines = [
        "| work | peer | seconds | of the peer | ratio (range; repeats) | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        target = "" if row.target is None else f"{row.bound} {row.target:g}"
        met = {None: "", True: "met", False: "**missed**"}[row.is_met]
        spread = f"{row.ratio:.3g} ({row.lowest:.3g} to {row.highest:.3g}; {row.repeats})"
        sides = f"{row.seconds:.3g} s | {row.peer_seconds:.3g} s"
        lines.append(f"| {row.work} | {row.peer} | {sides} | {spread} | {target} | {met} |")
    return lines


def _growth_table(curves: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = ["| work | over | sizes | seconds | slope of the last three | theory |", "|---|---|---|---|---|---|"]
    for curve in curves:
        sizes = ", ".join(f"{size:,}" for size in curve["sizes"])
        for name, costs in curve["seconds"].items():
            label = curve["work"] if name in ("MAPLE", curve["work"]) else f"{curve['work']} ({name})"
            seconds = ", ".join(f"{cost:.3g}" for cost in costs)
            found = slope(curve["sizes"], costs)
            lines.append(f"| {label} | {curve['over']} | {sizes} | {seconds} | {found:.2f} | {curve['theory']:g} |")
    return lines
