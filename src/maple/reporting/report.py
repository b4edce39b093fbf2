"""One self-contained HTML file about a run: results, clusters, examples, training and provenance.

The report draws the content of the run folder and runs no model. It needs neither network nor scripts: styles and SVG
plots are inline, thumbnails are data URIs, and a content security policy forbids everything else. Names of classes and
files are escaped. Equal run folders give equal reports, byte for byte.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from maple import __version__
from maple.decisions.attention import REASONS
from maple.evaluation.results import Results
from maple.files import RunFile, write_atomic
from maple.reporting import comparison, sections
from maple.reporting.labels import label_section
from maple.reporting.page import render_page
from maple.reporting.predictions import PredictionSummary, describe_sets, read_predictions, read_previews
from maple.reporting.record import RunRecord, read_run
from maple.reporting.summary import summarise
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
        "predictions": predictions,
        "reasons": REASONS,
        "prediction_sets": describe_sets(predictions.set_sizes) if predictions else "",
        "previews": read_previews(predictions) if predictions else {},
        **_results_context(record.results),
        "labels": label_section(record),
        "clean_command": shlex.join(["maple", "clean", str(record.folder)]),
        "clusters": sections.cluster_section(record.gallery.clusters),
        "examples": sections.example_sections(record.gallery.examples),
        "projections": sections.draw_projections(record),
        "projection_note": sections.projection_note(record),
        "history": record.history,
        "training_plots": sections.draw_training(record.history) if record.history else [],
        "classes": record.classes,
        "commands": _commands(record, predictions),
        "facts": _facts(record),
        "config": record.config_text,
    }
    return render_page("report.html.j2", context)


def _results_context(results: Results | None) -> dict[str, Any]:
    """The sections that need an evaluation; without one, only the fact that there is none."""
    if results is None:
        return {"results": None, "baseline": None}
    has_unknown = bool(results.n_ood)
    return {
        "results": results,
        "baseline": comparison.method_name(results.baseline) if results.baseline else None,
        "quality": comparison.quality_table(results),
        "detection": comparison.detection_table(results) if has_unknown else None,
        "unknown": sections.unknown_sets(results),
        "false_alarm": comparison.false_alarm_rate(results),
        "promise": results.provenance.get("promise"),
        "scores": comparison.score_table(results) if has_unknown and results.scores else None,
        "calibration": sections.calibration_section(results),
        "coverage": sections.coverage_section(results),
        "error_rates": sections.ERROR_RATES,
        "confusion": sections.confusion_section(results),
        "gaussian": sections.gaussian_plot(results),
    }


def _subtitle(record: RunRecord) -> str:
    model = record.config.get("model", {})
    seed = f"seed {record.seed}" if record.seed is not None else None
    parts = (record.origin.get("source"), model.get("backbone"), model.get("recipe"), seed)
    return " · ".join(str(part) for part in parts if part)


def _commands(record: RunRecord, predictions: PredictionSummary | None) -> list[str]:
    """The commands that make the run and its report again."""
    given = [record.origin.get("command"), record.provenance.get("command")]
    report = ["maple", "report", str(record.folder), *([str(predictions.path)] if predictions else [])]
    return [*dict.fromkeys(command for command in given if command), shlex.join(report)]


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
