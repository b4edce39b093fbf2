"""``maple report``: the report of a run as one HTML file, in the run folder unless another place is named."""

from __future__ import annotations

from pathlib import Path

from maple.prediction.manifest import check_digests
from maple.reporting.report import write_report
from maple.runs.folder import RunFolder


def report_run(
    run: Path, out: Path | None = None, predictions: Path | None = None, command: str = "maple report"
) -> Path:
    """Write the report and return its path; the run folder is locked only if the report goes there.

    The report draws what was measured with the weights and the detector of the run: others are an error.
    """
    check_digests(run)
    if out is not None or not run.is_dir():
        return write_report(run, out=out, predictions=predictions)
    with RunFolder(run).lock(command):
        return write_report(run, predictions=predictions)
