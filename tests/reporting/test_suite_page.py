"""The page of a suite: its table, the drawing it stands for, and our figures next to the paper's."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import open_browser
from drawings import check_plot, words
from maple.evaluation.paper.columns import floor_columns
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import Line
from maple.evaluation.paper.suites import SUITES, find_suite
from maple.evaluation.paper.tables import Provenance, SuiteResults, TableRow, table_cells
from maple.evaluation.results import Results
from maple.files import RunFile
from maple.reporting.plots import Plot
from maple.reporting.suite_page import Network, draw_suite, render_suite, split_table

PROFILE = PROFILES["tiny"]


def fill(name: str, command: str = "maple benchmark") -> SuiteResults:
    suite = find_suite(name)
    rows = [
        TableRow(row.title, {column: [0.5 + i / 100] for column in suite.columns}, suite.paper.get(row.paper, {}))
        for i, row in enumerate(suite.rows(PROFILE))
    ]
    made = Provenance(command, "abc1234", "0", "3", "two cores", {"1f": "maple on cifar10"})
    return SuiteResults(suite, PROFILE, (0,), rows, made)


@pytest.fixture(scope="module")
def network(run: Path) -> Network:
    results = Results.from_json((run / RunFile.RESULTS).read_bytes())
    ours = results.methods["maple"]
    return Network(run, replace(results, methods=dict.fromkeys(("pca-md", "maple-paper", *results.methods), ours)))


def draw(found: SuiteResults, network: Network) -> list[str]:
    networks = dict.fromkeys(found.suite.trainings(PROFILE), network)
    for _, plot, narrow in (drawn := draw_suite(found, networks)):
        check_plot(plot)
        assert narrow is None or words(check_plot(narrow))
    return [each.caption for each in drawn]


def test_a_table_has_a_plot_of_its_rows(network: Network) -> None:
    found = fill("clustering")
    ((_, plot, _),) = draw_suite(found, dict.fromkeys(found.suite.trainings(PROFILE), network))
    shown = words(check_plot(plot))
    assert {"K-Means", "T-Means", "accuracy", "AUROC svhn", "ours", "the paper"} <= set(shown)
    assert "clusters" not in shown  # neither way is better


def test_a_suite_beyond_the_paper_promises_no_rings(network: Network) -> None:
    found = fill("detectors")
    ((caption, plot, _),) = draw_suite(found, dict.fromkeys(found.suite.trainings(PROFILE), network))
    assert "Rings" not in caption and "rings" not in plot.alt and "the paper" not in words(check_plot(plot))
    assert "AUPR" not in render_suite(found, [])
    paper = fill("ablation")
    ((caption, plot, _),) = draw_suite(paper, dict.fromkeys(paper.suite.trainings(PROFILE), network))
    assert "Rings" in caption and "rings" in plot.alt and "AUPR" in render_suite(paper, [])


def test_the_page_says_that_images_are_simulated(network: Network) -> None:
    said = "Simulated images"
    found = fill("clustering")
    assert said in render_suite(found, []) and said not in render_suite(replace(found, profile=PROFILES["cpu"]), [])


def test_the_page_names_flags_of_the_suite_that_go_before_the_profile() -> None:
    found = replace(fill("clustering"), profile=PROFILES["cpu"])
    protocols = {
        name: replace(each, flags={"epochs": 2, "fit": "crop"}) for name, each in PROFILES["cpu"].protocols.items()
    }
    changed = replace(found, profile=replace(PROFILES["cpu"], protocols=protocols))
    assert "here with epochs 2)" in render_suite(changed, []) and "here with" not in render_suite(found, [])
    assert "epochs 3)" in render_suite(replace(changed, changes={"epochs": 3}), [])  # of the command line


def test_figures_are_drawn_from_the_run_folder(network: Network) -> None:
    assert draw(fill("clusters"), network) == [
        "MAPLE, X-Means: Before the first relabelling: 899 images on the two main axes of the latent space, by class",
        "MAPLE, X-Means: After training: 899 images on the two main axes of the latent space, by class",
    ]


@pytest.mark.parametrize(
    ("name", "titles"), [("calibration", ["one", "two"]), ("qq", ["one and two"]), ("", [])], ids=str
)
def test_figures_are_drawn_from_results_and_equal_ones_once(name: str, titles: list[str], network: Network) -> None:
    lines = (Line("one", method="maple"), Line("two", method="softmax"))
    suite = replace(find_suite("latent"), figure=name, lines=lines)
    captions = draw(replace(fill("latent"), suite=suite), network)
    assert [caption.split(",")[0] for caption in captions] == titles


def test_page_marks_the_best_figures_and_says_how_it_was_made(network: Network) -> None:
    found = fill("clustering", command="maple benchmark <b>")
    page = ElementTree.fromstring(render_suite(found, []).split("\n", 1)[1])
    text = " ".join("".join(page.itertext()).split())
    assert "Table 11 of the paper" in text and "maple benchmark <b>" in text and "abc1234" in text
    best = [cell.text for cell in page.iter("td") if "best" in cell.attrib["class"].split()]
    last = 0.5 + 0.01 * (len(found.rows) - 1)  # each row of ``fill`` is 0.01 above the one before
    assert best == ["0.500", f"{last:.4f}", *[f"{last:.3f}"] * 3]  # first the lowest ECE
    headings = [cell.attrib.get("class") for cell in page.iter("th") if "".join(cell.itertext()) == "paper"]
    assert headings == ["paper"] * 5
    assert not list(page.iter("figure"))


def test_the_stacked_drawing_has_the_panels_of_the_wide_one(network: Network) -> None:
    found = fill("clustering")
    networks = dict.fromkeys(found.suite.trainings(PROFILE), network)
    ((_, wide, narrow),) = draw_suite(found, networks)
    assert narrow is not None and sorted(_panels(narrow)) == sorted(_panels(wide)) and len(_panels(wide)) == 5
    ((_, _, single),) = draw_suite(replace(found, suite=replace(found.suite, columns=("accuracy",))), networks)
    assert single is None


def _panels(plot: Plot) -> list[str]:
    return [word for word in words(check_plot(plot)) if word in ("accuracy", "ECE") or word.startswith("AUROC")]


@pytest.mark.parametrize("name", [name for name in SUITES if find_suite(name).columns])
def test_parts_of_a_table_have_every_cell_once_and_published_figures_beside_ours(name: str) -> None:
    found = fill(name)
    headings, _ = table_cells(found)
    parts = split_table(found)
    assert [cell for part in parts for cell in part] == list(range(1, len(headings)))
    assert all(len(part) <= 4 and headings[part[0]] != found.suite.reference for part in parts)


WIDE = """() => [document.documentElement, ...document.querySelectorAll('.scroll, figure, svg')]
  .filter(box => box.scrollWidth > box.clientWidth + 1 || box.getBoundingClientRect().right > innerWidth)
  .map(box => box.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(network: Network) -> dict[str, str]:
    """Those with the most columns, the longest headings and the longest names of rows."""
    pages = {}
    for name in ("cifar100", "openood-cifar10", "ablation"):
        found = fill(name)
        for row in found.rows:
            row.floors.update((column, [0.012]) for column in floor_columns(found.suite.columns))
        pages[name] = render_suite(found, draw_suite(found, dict.fromkeys(found.suite.trainings(PROFILE), network)))
    return pages


@pytest.mark.parametrize("width", [420, 1400, 1920])
def test_no_figure_is_out_of_sight(width: int, browser: Any, pages: dict[str, str]) -> None:
    """Nothing is scrolled sideways, all cells are shown, and every drawing is there once."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    for name, text in pages.items():
        page.set_content(text)
        assert page.evaluate(WIDE) == [], name
        found = fill(name)
        assert page.locator("td:visible").count() == len(found.rows) * (len(table_cells(found)[0]) - 1), name
        assert page.locator("figure svg:visible").count() == page.locator("figure").count() == 1, name
    page.close()


def test_a_figure_without_columns_has_no_table() -> None:
    page = render_suite(fill("latent"), [])
    assert "<table" not in page and "Figure 1 of the paper" in page
