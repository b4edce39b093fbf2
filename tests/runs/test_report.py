"""``maple report`` locks the run folder only if it writes there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from maple.errors import RunError
from maple.files import RunFile
from maple.runs.folder import RunFolder
from maple.runs.report import report_run

SAMPLE = Path(__file__).parents[1] / "samples" / "run_format2" / "maple.zip"


@pytest.fixture
def run(tmp_path):
    with zipfile.ZipFile(SAMPLE) as packed:
        packed.extractall(tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_is_being_written_is_reported_elsewhere_only(run, tmp_path):
    with RunFolder(run).lock("maple train digits"):
        with pytest.raises(RunError, match="maple train digits"):
            report_run(run)
        assert report_run(run, tmp_path / "r.html").exists()
    assert report_run(run) == run / RunFile.REPORT


def test_no_folder_is_made_where_there_is_no_run(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        report_run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
