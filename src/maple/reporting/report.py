"""One self-contained HTML file about a run: results, clusters, examples, training and provenance.

The report draws the content of the run folder and runs no model. It needs neither network nor scripts: styles and SVG
plots are inline, thumbnails are data URIs, and a content security policy forbids everything else. Names of classes and
files are escaped. Equal run folders give equal reports, byte for byte.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maple import __version__
from maple.files import RunFile, write_atomic
from maple.reporting.comparison import (
    detection_table,
    false_alarm_rate,
    method_name,
    quality_table,
    score_table,
)
from maple.reporting.page import render_page
from maple.reporting.predictions import PredictionSummary, prediction_section, read_predictions
from maple.reporting.record import RunRecord, read_run
from maple.reporting.sections import (
    calibration_section,
    confusion_section,
    coverage_section,
    draw_projections,
    gaussian_section,
    projection_note,
    training_section,
    unknown_sets,
)
from maple.reporting.summary import summarise
from maple.reporting.thumbnails import cluster_section, example_sections
from maple.text import number, plural


def write_report(run_folder: str | Path, out: str | Path | None = None, predictions: str | Path | None = None) -> Path:
    """Write the report of a run to ``out`` (default: ``report.html`` in the run folder) and return its path.

    ``predictions`` is a file written by ``maple predict`` (CSV, JSON lines or Parquet); it adds a section.
    """
    record = read_run(Path(run_folder))
    predicted = None if predictions is None else read_predictions(Path(predictions))
    path = record.folder / RunFile.REPORT if out is None else Path(out)
    write_atomic(path, render_report(record, predicted))
    return path


def render_report(record: RunRecord, predictions: PredictionSummary | None = None) -> str:
    """The report as HTML text."""
    context = {
        "title": f"MAPLE report: {record.name}",
        "subtitle": _subtitle(record),
        "evaluate_command": f"{shlex.join(['maple', 'evaluate', str(record.folder)])} --ood NAME=SOURCE",
        "summary": summarise(record, predictions),
        "predictions": prediction_section(predictions) if predictions else None,
        **_results_context(record),
        "clusters": cluster_section(record.gallery.clusters),
        "examples": example_sections(record.gallery.examples),
        "projections": draw_projections(record),
        "projection_note": projection_note(record),
        "training": training_section(record.history) if record.history else None,
        "classes": record.classes,
        "provenance": _provenance(record, predictions),
    }
    return render_page("report.html.j2", context)


def _results_context(record: RunRecord) -> dict[str, Any]:
    """The sections that need an evaluation; None without one."""
    results = record.results
    has_unknown = bool(results and results.n_ood)
    return {
        "baseline": method_name(results.baseline) if results and results.baseline else None,
        "quality": quality_table(results) if results else None,
        "detection": detection_table(results) if results and has_unknown else None,
        "unknown": unknown_sets(results) if results else [],
        "false_alarm": false_alarm_rate(results) if results else math.nan,
        "promise": record.provenance.get("promise"),
        "scores": score_table(results) if results and has_unknown and results.scores else None,
        "calibration": calibration_section(results) if results else None,
        "coverage": coverage_section(results) if results else None,
        "confusion": confusion_section(results) if results else None,
        "gaussian": gaussian_section(results) if results else None,
    }


def _subtitle(record: RunRecord) -> str:
    model = record.config.get("model", {})
    seed = f"seed {record.seed}" if record.seed is not None else None
    parts = (record.origin.get("source"), model.get("backbone"), model.get("recipe"), seed)
    return " · ".join(str(part) for part in parts if part)


@dataclass(frozen=True)
class Provenance:
    """How to make the run and its report again."""

    commands: list[str]
    facts: list[tuple[str, str]]
    config: str | None


def _provenance(record: RunRecord, predictions: PredictionSummary | None) -> Provenance:
    given = [record.origin.get("command"), record.provenance.get("command")]
    report = ["maple", "report", str(record.folder), *([str(predictions.path)] if predictions else [])]
    commands = [*dict.fromkeys(command for command in given if command), shlex.join(report)]
    return Provenance(commands, _facts(record), record.config_text)


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [("seed", str(record.seed))] if record.seed is not None else []
    results = record.results
    if results is None:
        return [*facts, ("version", f"maple {__version__}")]
    size = f"{plural(results.n_clusters, 'cluster')}, {plural(results.n_components, 'component')}"
    facts.append(("Gaussian model", size))
    if not math.isnan(results.latency_ms):
        facts.append(("time per image", f"{number(results.latency_ms, 2)} ms"))
    if hardware := record.provenance.get("hardware"):
        facts.append(("hardware", str(hardware)))
    versions = record.provenance.get("versions", {})
    facts.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    return facts
