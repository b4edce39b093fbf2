"""Probable wrong labels in a report: listed with their images, and offered as the CSV that ``maple clean`` writes."""

from __future__ import annotations

import base64
import csv
from dataclasses import replace
from pathlib import Path

import pytest

from browser import open_browser
from maple.decisions.labels import labels_csv, read_labels
from maple.errors import RunError
from maple.files import RunFile
from maple.reporting.labels import MAX_LABELS
from maple.reporting.report import write_report
from run_folders import DIGITS, Page, build_run, check_page


@pytest.fixture(scope="module")
def mislabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a few labels that may be wrong."""
    return build_run(tmp_path_factory.mktemp("labels") / "run", DIGITS)


def linked_csv(page: Page) -> str:
    (address,) = (each for each in page.values("href") if each.startswith("data:text/csv"))
    return base64.b64decode(address.partition("base64,")[2]).decode()


def test_issues_are_listed_and_offered_as_csv(mislabelled: Path, tmp_path: Path) -> None:
    page = Page(write_report(mislabelled, tmp_path / "report.html"))
    check_page(page)
    issues = [each for each in read_labels(mislabelled / RunFile.LABELS) if each.is_label_issue]
    assert 5 < len(issues) < MAX_LABELS and f"{len(issues)} labels of 898 test images may be wrong" in page.text
    assert all(each.file in page.text for each in issues)
    assert linked_csv(page) == labels_csv(issues)
    first = next(csv.DictReader(linked_csv(page).splitlines()))
    assert first["file"] == issues[0].file and first["label"] != first["predicted_label"]
    assert any(image["alt"] == f"{issues[0].file}: labelled {issues[0].label}" for image in page.all("img"))


def test_a_run_without_issues_and_one_without_a_list(mislabelled: Path, tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", DIGITS)
    right = [replace(each, is_label_issue=False) for each in read_labels(folder / RunFile.LABELS)]
    (folder / RunFile.LABELS).write_text(labels_csv(right))
    page = Page(write_report(folder))
    assert "No label of 898 test images looks wrong" in page.text and "data:text/csv" not in page.source
    (folder / RunFile.LABELS).unlink()  # of an earlier version
    page = Page(write_report(folder))
    check_page(page)
    assert "The run holds no list of the labels" in page.text
    (folder / RunFile.LABELS).write_text("file,label\na,b\n")
    with pytest.raises(RunError, match=r"labels\.csv"):
        write_report(folder)


def test_the_browser_saves_the_file(mislabelled: Path, tmp_path: Path) -> None:
    report = write_report(mislabelled, tmp_path / "report.html")
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 420, "height": 900}, accept_downloads=True)
        page.goto(report.as_uri())
        with page.expect_download() as started:
            page.click("#labels a[download]")
        saved = tmp_path / started.value.suggested_filename
        started.value.save_as(saved)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert saved.name == "labels-that-may-be-wrong.csv"
    assert read_labels(saved) == [each for each in read_labels(mislabelled / RunFile.LABELS) if each.is_label_issue]
