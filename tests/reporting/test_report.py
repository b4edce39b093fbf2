"""The report: complete, self-contained, well-formed, reproducible, and safe with hostile names."""

from __future__ import annotations

import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from maple.errors import RunError
from maple.evaluation.results import Results
from maple.files import RunFile
from maple.reporting.report import write_report
from run_folders import HOSTILE, Page, build_run, change_results, check_page, write_predictions


def test_full_report(run: Path, tmp_path: Path) -> None:
    path = write_report(run, tmp_path / "out.html", write_predictions(tmp_path / "predictions.csv"))
    assert path == tmp_path / "out.html"
    page = Page(path)
    check_page(page)
    assert "http://" not in page.source and "https://" not in page.source
    assert "predictions" in page.values("id")
    per_set, single, embeddings, training = 2, 3, 2, 3  # single: reliability, coverage, Q-Q
    assert len(page.all("svg")) == 2 * per_set + single + embeddings + training
    assert "absent" not in page.values("class")
    assert "matrix" in page.values("class") and "heat" not in page.values("class")
    assert path.stat().st_size < 2e6


@pytest.mark.usefixtures("no_plots")
def test_detection_by_class_is_shown_where_a_set_has_several(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html"))
    row = r'<th scope="row">(\w+)</th><td class="num">(\d+)</td><td><span class="bar"[^>]*></span> (\d+)\.0\s?%'
    of_unknown = page.source.partition('id="unknown"')[2].partition("</section>")[0]
    assert re.findall(row, of_unknown) == [("easy", "200", "75"), ("hard", "100", "25")]  # "far" has one class only


def test_report_goes_into_the_run_and_is_the_same_every_time(copied: Path) -> None:
    path = write_report(copied)
    assert path == copied / RunFile.REPORT
    first = path.read_bytes()
    write_report(copied)
    assert path.read_bytes() == first


def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = (
        HOSTILE,
        "a\"b'c&d",
        "$x^2$ \\frac",
        "]]>",
        "--><b>",
        "珪藻 🦠 naïve",
        "nul\x00 \x1b[0m \ufffe",
        "{{ 7 * 7 }}",
        "%s {0} #010101 url(#x)",
        "x" * 300,
    )
    folder = build_run(tmp_path / "run", names, ood_names=(HOSTILE, "$a$ & b"))
    predictions = write_predictions(tmp_path / "p.csv", file=f"{HOSTILE}.png", **{"class": names[1]})
    page = Page(write_report(folder, predictions=predictions))
    check_page(page)
    for name in names:
        shown = re.sub("[\x00-\x1f\ufffe]", "\ufffd", name)
        assert page.text.count(shown) >= 3, name
    assert HOSTILE in " ".join(drawing["aria-label"] for drawing in page.all("svg"))


@pytest.mark.usefixtures("no_plots")
def test_confusion_matrix_shows_its_counts_and_tints_errors(run: Path, tmp_path: Path) -> None:
    page = write_report(run, tmp_path / "r.html").read_text(encoding="utf-8")
    table = ElementTree.fromstring(page.replace("<!DOCTYPE html>", "")).find(".//table[@class='matrix']")
    assert table is not None
    cells = [row.findall("td") for row in table.findall("tbody/tr")]
    confusion = Results.from_json((run / RunFile.RESULTS).read_bytes()).confusion
    assert [[int(cell.text or 0) for cell in row] for row in cells] == confusion
    for i, row in enumerate(cells):
        tints = [re.findall(r"--tint[-a-z]*", cell.get("style", "")) for cell in row]
        assert tints == [["--tint" if i == j else "--tint-wrong"] if n else [] for j, n in enumerate(confusion[i])]
    assert cells[0][0].get("class") == "strong" and f"of {sum(confusion[0])} zero" in cells[0][0].get("title", "")


def test_many_classes_get_another_layout(tmp_path: Path) -> None:
    many = tuple(f"species {i:03d}" for i in range(121))
    page = Page(write_report(build_run(tmp_path / "run", many)))
    check_page(page)
    assert "matrix" not in page.values("class") and "heat" in page.values("class")
    assert "10 of 121 classes" in page.text
    assert len(page.source) < 4e6


# --- provenance


@pytest.mark.usefixtures("no_plots")
def test_commands_versions_and_configuration(run: Path, tmp_path: Path) -> None:
    text = Page(write_report(run, tmp_path / "r.html")).text
    for part in ("maple train digits --out run", "maple evaluate run", "numpy 2", 'backbone = "resnet9"', "0.31 ms"):
        assert part in text


@pytest.mark.usefixtures("no_plots")
def test_commands_are_quoted(copied: Path, tmp_path: Path) -> None:
    folder = copied.rename(tmp_path / "my run")
    predictions = write_predictions(tmp_path / "a b.csv")
    text = Page(write_report(folder, predictions=predictions)).text
    assert f"maple report '{folder}' '{predictions}'" in text


# --- runs that lack something


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("missing", "sections"),
    [
        (RunFile.RESULTS, {"results", "unknown", "calibration", "coverage", "confusion", "gaussian"}),
        (RunFile.HISTORY, {"history"}),
        (RunFile.CLASSES, {"skipped"}),
        (RunFile.CONFIG, {"reproduce"}),
        (RunFile.GALLERY, {"clusters", "images", "embeddings"}),
    ],
)
def test_sections_say_what_is_missing(missing: str, sections: set[str], copied: Path) -> None:
    path = copied / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(write_report(copied))
    check_page(page)
    parts = {part.partition('"')[0]: part for part in page.source.split('<section id="')[1:]}
    assert {name for name, part in parts.items() if 'class="absent"' in part} == sections


@pytest.mark.usefixtures("no_plots")
def test_configuration_alone_makes_a_report(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / RunFile.CONFIG, tmp_path / RunFile.CONFIG)
    check_page(Page(write_report(tmp_path)))


@pytest.mark.usefixtures("no_plots")
def test_without_unknown_images(copied: Path) -> None:
    results = change_results(copied)
    blind = {
        name: replace(m, detection={}, histogram=replace(m.histogram, ood={})) for name, m in results.methods.items()
    }
    change_results(copied, methods=blind, n_ood={})
    page = Page(write_report(copied))
    check_page(page)
    unknown = page.source.partition('id="unknown"')[2].partition("</section>")[0]
    assert "maple evaluate" in unknown and 'class="absent"' in unknown


@pytest.mark.usefixtures("no_plots")
def test_without_a_threshold_the_false_alarm_rate_is_assumed(copied: Path) -> None:
    change_results(copied, false_alarm=math.nan)
    page = Page(write_report(copied))
    check_page(page)
    assert "5 % false alarms" in page.text and "assumed" in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_network_of_another_recipe_is_compared_with_its_own_method(copied: Path) -> None:
    results = change_results(copied)
    change_results(copied, methods={"sngp" if n == "softmax" else n: m for n, m in results.methods.items()})
    page = Page(write_report(copied))
    check_page(page)
    assert "better than sngp" in page.text and "better than softmax" not in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_network_without_a_head_is_compared_with_nothing(copied: Path) -> None:
    results = change_results(copied)
    change_results(copied, methods={name: m for name, m in results.methods.items() if name.startswith("maple")})
    page = Page(write_report(copied))
    check_page(page)
    assert "compared with" not in page.text and "better than" not in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_single_epoch_without_triplet_loss(copied: Path) -> None:
    (copied / RunFile.HISTORY).write_text("epoch,cross_entropy,validation_accuracy\n1,0.5,0.9\n")
    page = Page(write_report(copied))
    check_page(page)
    assert "1 epoch in 0 s; no class was split." in page.text


@pytest.mark.usefixtures("no_plots")
def test_damaged_results_leave_no_report(copied: Path) -> None:
    (copied / RunFile.RESULTS).write_text("{")
    with pytest.raises(RunError, match=r"results\.json"):
        write_report(copied)
    assert not (copied / RunFile.REPORT).exists()
