"""The report in a browser at three widths, with long class names: nothing that matters is cut or out of sight."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browser import open_browser
from maple.evaluation.results import Results
from maple.files import RunFile, to_csv
from maple.reporting.report import write_report
from run_folders import DIGITS, build_run, write_predictions

NAMES = tuple(f"appendicularian_siphonophores_{name:_<5}_{i:04}" for i, name in enumerate(DIGITS))  # alike at first
SETS = ("simulated-diatoms/near?n=60&size=24", "siphonophores_of_the_cruise_2019/unknown")
WIDTHS = (420, 1400, 1920)

WIDE = """() => [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => box.closest('section').id)"""
HIDDEN = """selector => [...document.querySelectorAll(selector)].filter(cell => {
  const box = cell.getBoundingClientRect();
  return box.width === 0 || box.left < 0 || box.right > innerWidth || cell.scrollWidth > cell.clientWidth + 1;
}).length"""
LABELS = """() => [...document.querySelectorAll('#embeddings svg')].map(drawing =>
  [...drawing.querySelectorAll('.label text')].map(label => {
    const { left, right, top, bottom } = label.getBoundingClientRect();
    return { text: label.textContent, left, right, top: top + 3, bottom: bottom - 3 };
  }))"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert {len(name) for name in NAMES} == {40}
    folder = build_run(tmp_path_factory.mktemp("long") / "run", NAMES, SETS)
    results = Results.load(folder / RunFile.RESULTS)
    grouped = replace(results, groups={"near": [SETS[0]], "far": [SETS[1]]})  # with two columns of means
    (folder / RunFile.RESULTS).write_text(grouped.to_json())
    predictions = write_predictions(folder / "p.csv", rows=60)
    with predictions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        likely = [NAMES[(i + k) % 10] for k in range(5)]
        row |= {"class": likely[0], "file": f"slides/station_17_haul_{i:04}.png", "prediction_set": " | ".join(likely)}
        row |= {"probability": 0.4} if i % 7 == 0 else {}
        row |= {"is_ood": i != 12} if i % 10 == 2 else {}  # five of six: a long bar beside 83.3 %
    (folder / "slides").mkdir()
    for row in rows[:20]:  # with previews, a column more
        row["score"] = 123.45
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / row["file"])
    predictions.write_text(to_csv(rows, list(rows[0]), header=True))
    return write_report(folder, folder / "report.html", predictions)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    page.goto(report.as_uri())
    page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
    yield page
    page.close()


def test_nothing_that_matters_is_out_of_sight(page: Any) -> None:
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(WIDE) == []
    assert page.locator(".predictions .decision").count() == 60
    for cell in ("class", "sure", "decision"):
        assert page.evaluate(HIDDEN, f".predictions .{'name' if cell == 'class' else cell}") == 0, cell


def test_brackets_are_explained(page: Any) -> None:
    """Below the measures, or above the table where there is no room for that."""
    below, above = (page.locator(each).filter(has_text="by chance") for each in (".measures small", "#results .narrow"))
    assert below.count() == above.count() == 1 and below.is_visible() != above.is_visible()


def test_class_names_are_whole(page: Any) -> None:
    for table in ("#predictions table", ".matrix", "#confusion table:not(.matrix)"):
        shown = page.locator(table).all_inner_texts()
        assert all(any(name in text.replace("\n", "") for text in shown) for name in NAMES), table
    assert page.evaluate(HIDDEN, "#predictions tbody th, #confusion table:not(.matrix) tbody th") == 0


BROKEN = """selector => [...document.querySelectorAll(selector)].flatMap(cell => {
  const lines = new Map();  // top -> text
  for (const node of cell.childNodes) {
    for (let i = 0; i < (node.data?.length ?? 0); i++) {
      const range = document.createRange();
      range.setStart(node, i); range.setEnd(node, i + 1);
      const top = Math.round(range.getBoundingClientRect().top);
      lines.set(top, (lines.get(top) ?? '') + node.data[i]);
    }
  }
  const texts = [...lines.values()];
  return texts.filter((line, i) => (i < texts.length - 1 && !/[_\\s/?-]$/.test(line)) || line.startsWith('%'));
})"""


def test_class_names_break_between_words(page: Any) -> None:
    for cells in (".predictions td.name", "#confusion td.name", ".matrix tbody th", "#summary p", "#summary li"):
        assert page.locator(cells).count()
        assert page.evaluate(BROKEN, cells) == [], cells


def test_short_names_of_sets_are_not_broken(browser: Any, tmp_path: Path) -> None:
    """Not even beside the descriptions of all scores, which take what room there is."""
    run = build_run(tmp_path / "run", NAMES, ("unknown", "far"))
    results = Results.load(run / RunFile.RESULTS)
    scores = {name: {"unknown": 0.9, "far": 0.8} for name in ("distance", "shallow", "fused")}
    (run / RunFile.RESULTS).write_text(replace(results, scores=scores).to_json())
    page = browser.new_page(viewport={"width": 420, "height": 900})
    page.goto(write_report(run, run / "report.html").as_uri())
    assert page.locator("#unknown th.set").first.inner_text().startswith("unknown")
    assert page.evaluate(BROKEN, "th.set") == []
    page.close()


def test_a_table_without_pictures_has_no_column_for_them(page: Any) -> None:
    tables = page.locator("table.predictions").evaluate_all(
        "all => all.map(each => [each.querySelectorAll('.preview').length, each.querySelectorAll('img').length])"
    )
    assert all((cells > 0) == (images > 0) for cells, images in tables)


def test_labels_of_the_embeddings_do_not_cover_each_other(page: Any) -> None:
    drawings = page.evaluate(LABELS)
    assert len(drawings) == 2
    for labels in drawings:
        assert len({label["text"] for label in labels}) == len(labels) == 10
        for i, a in enumerate(labels):
            for b in labels[:i]:
                apart = a["right"] <= b["left"] or b["right"] <= a["left"]
                assert apart or a["bottom"] <= b["top"] or b["bottom"] <= a["top"], (a, b)


@pytest.mark.parametrize("width", [620, 800, 1200])
def test_predictions_fit_between_these_widths(width: int, browser: Any, report: Path) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    assert not {"predictions", "labels"} & set(page.evaluate(WIDE))
    page.close()
